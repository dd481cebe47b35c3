"""Which threshold decodes fastest, reckoned on answers that are known: SwitchSD played through without a model.

A round behind n tokens either copies, when the last token stood before and its probability reaches the threshold, or
drafts as the neural proposer does, of which only means are known. With V(n) the seconds from n on to the end T:

    copy      V(n) = t_copy(n)  + V(n + accepted + 1)
    neural    V(n) = t_neural   + (1 − f) V(n + ⌊τ⌋) + f V(n + ⌊τ⌋ + 1),   f = τ − ⌊τ⌋

so one pass from the end answers all thresholds at once. The copy's length is a setting of its own, tuned apart from the
neural draft's. Knows nothing about models; times are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specwave.artifacts import UserError
from specwave.copying.answers import Answer
from specwave.copying.match import LastN, continuation

GRID = tuple(place / 100 for place in range(5, 100, 5))  # thresholds tried
LONGEST = 8  # last tokens looked up, as decoding=switchsd does by default
LENGTHS = (2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48)  # of copies, that are compared


@dataclass
class Rounds:
    """`probe.rounds`: what rounds bring and cost where the threshold is chosen by simulated throughput.

    `length`: tokens copied. Of a neural round: `neural_tokens` committed, its τ as evaluate.py measures it;
    `neural_drafts` verified; `neural_seconds` spent on drafting them.
    """

    length: int = 10
    neural_tokens: float = 2.0
    neural_drafts: int = 2
    neural_seconds: float = 0.0

    def __post_init__(self) -> None:
        for key, floor in (("length", 1), ("neural_tokens", 1), ("neural_drafts", 0), ("neural_seconds", 0)):
            if not floor <= getattr(self, key) < math.inf:
                raise UserError(f"probe.rounds.{key}", getattr(self, key), f"must be a number ≥ {floor}")


@dataclass(frozen=True)
class Copies:
    """Of one answer, by token it goes on behind: how many drafts a copy has and how many of them are accepted; 0 drafts
    where the last token did not stand before."""

    drafted: list[int]
    accepted: list[int]


def copies(answer: Answer, length: int, longest: int = LONGEST) -> Copies:
    """What copying would do behind every token of the answer but the last."""
    index, found = LastN(longest, 1, "recent"), Copies([], [])
    index.extend(answer.ids[: answer.start])
    for end in range(answer.start + 1, len(answer.ids)):
        index.extend(answer.ids[end - 1 : end])
        match, future = index.find(), answer.ids[end:]
        room = min(length, len(future) - 1)  # the round's last token is the target's own
        drafts = list[int]()
        if match is not None and room > 0:
            drafts = continuation(answer.ids[:end], match.start, room, overlap=True)
        right = 0
        while right < len(drafts) and drafts[right] == future[right]:
            right += 1
        found.drafted.append(len(drafts))
        found.accepted.append(right)
    return found


def seconds(
    probabilities: Tensor, copied: Copies, thresholds: Tensor, rounds: Rounds, forward: Callable[[int], float]
) -> Tensor:
    """Seconds [K] that the answer takes under each threshold.

    Args:
        probabilities: [A] of the answer's tokens.
        forward: T(k), seconds of a forward over k tokens.
    """
    count = len(probabilities)
    whole = int(rounds.neural_tokens)
    part, neural = rounds.neural_tokens - whole, forward(1 + rounds.neural_drafts) + rounds.neural_seconds
    times = [forward(1 + drafts) for drafts in range(rounds.length + 1)]
    # rest[n]: seconds from n committed tokens of the answer on; beyond the end nothing is left to do
    rest = [torch.zeros(len(thresholds), dtype=torch.float64)] * (count + whole + 2)
    for done in range(count - 1, -1, -1):
        value = neural + (1 - part) * rest[done + whole] + part * rest[done + whole + 1]
        if done and copied.drafted[done - 1]:  # behind the prompt no token of the answer has been seen yet
            drafted, accepted = copied.drafted[done - 1], copied.accepted[done - 1]
            copy = times[drafted] + rest[done + accepted + 1]
            value = torch.where(probabilities[done - 1].double() >= thresholds, copy, value)
        rest[done] = value
    return rest[0]


def best_threshold(
    probabilities_N: Tensor, answers: Sequence[Answer], rounds: Rounds, forward: Callable[[int], float]
) -> tuple[float, Tensor]:
    """(the threshold of GRID under which all answers together take least, tokens per second [K] of each)."""
    thresholds, total = torch.tensor(GRID, dtype=torch.float64), torch.zeros(len(GRID), dtype=torch.float64)
    parts = probabilities_N.split([one.tokens for one in answers])
    for own, one in zip(parts, answers, strict=True):
        total += seconds(own, copies(one, rounds.length), thresholds, rounds, forward)
    return GRID[int(total.argmin())], sum(one.tokens for one in answers) / total


# ---------------------------------------------------------------- how much to copy


def copy_lengths(probabilities_N: Tensor, answers: Sequence[Answer], threshold: float) -> list[dict[str, Any]]:
    """What copies of every length in LENGTHS bring when the answers are played through with them; [] where none is
    triggered. Means over all places that trigger one would be of the inner places of long copies above all, where no
    round begins.

    Returns:
        by `length`: `copies`, rounds that copy; tokens `drafted` and `accepted` in them, means; `others`, the rounds
        that do not, each of one token.
    """
    each = [
        (copies(one, LENGTHS[-1]), (own >= threshold).tolist())
        for own, one in zip(probabilities_N.split([one.tokens for one in answers]), answers, strict=True)
    ]
    rows = []
    for length in LENGTHS:
        rounds = others = drafted = accepted = 0
        for found, triggers in each:
            done = 0
            while done < len(triggers):
                drafts = min(found.drafted[done - 1], length) if done and triggers[done - 1] else 0
                right = min(found.accepted[done - 1], length) if drafts else 0
                rounds, others = rounds + (drafts > 0), others + (drafts == 0)
                drafted, accepted, done = drafted + drafts, accepted + right, done + right + 1
        if not rounds:
            return []
        means = {"drafted": drafted / rounds, "accepted": accepted / rounds}
        rows.append({"length": length, "copies": rounds, **means, "others": others})
    return rows


def best_length(rows: Sequence[Mapping[str, Any]], forward: Callable[[int], float]) -> int:
    """The length under which all rounds together take least, the others being plain ones; of equal ones the shortest.

    Args:
        rows: of `copy_lengths`, at least one.
        forward: T(k), seconds of a forward over k tokens.
    """
    times = [row["copies"] * forward(1 + math.ceil(row["drafted"])) + row["others"] * forward(1) for row in rows]
    return int(rows[times.index(min(times))]["length"])
