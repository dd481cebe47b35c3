"""Is an output the target's own greedy output? The float32 equality contract.

Matrix shapes change the order of sums, so logits computed in another shape differ by a *noise*, and where two tokens
score within it either may win. The contract: no divergence where the scores differ by more than 10 times the measured
noise; each other one is listed as a near-tie and decoding is compared again from the reference's token on:

    reference   a b c d e f          k = 2 is a near-tie: c and x score alike
    candidate   a b x p q r
    again       prompt a b c →  d e f    compared with the reference's rest, and so on

Knows nothing about proposals, text or questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specwave.target import Target

TOLERANCE = 10.0  # methods.md: near-ties are judged at 10 times the measured noise


@dataclass(frozen=True)
class Divergence:
    """Where a candidate left the reference.

    Attributes:
        position: index among the new tokens.
        reference, candidate: the tokens; None where one of the outputs had already ended.
        top2_gap: the two largest logits' difference, at this position.
        gap: the largest logit less the lower of the two tokens' logits (≥ top2_gap): how far from the top the worse of
            them is. None where one output had ended.
        noise: the largest difference between one-shot and incremental logits over the whole reference; None where it
            was not measured.
        near_tie: gap ≤ 10 × noise.
    """

    position: int
    reference: int | None
    candidate: int | None
    top2_gap: float
    gap: float | None
    noise: float | None
    near_tie: bool


@dataclass(frozen=True)
class Comparison:
    """`divergences` in order; all but a last true one are near-ties."""

    divergences: list[Divergence] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Equal, near-ties excused."""
        return all(divergence.near_tie for divergence in self.divergences)

    @property
    def near_ties(self) -> list[Divergence]:
        return [divergence for divergence in self.divergences if divergence.near_tie]


class Scorer(Protocol):
    """Logits of the reference model for a whole sequence."""

    def one_shot(self, ids: Sequence[int], start: int) -> Tensor:
        """float32 [len(ids) − start, V]: logits after positions start … of `ids`, from one forward."""

    def incremental(self, ids: Sequence[int], start: int) -> Tensor:
        """The same logits, token by token with a cache, as plain decoding computes them."""


def first_divergence(reference: Sequence[int], candidate: Sequence[int]) -> int | None:
    """The first index where the two differ, the shorter's length where it is a prefix, None where they are equal."""
    for index, (expected, found) in enumerate(zip(reference, candidate, strict=False)):
        if expected != found:
            return index
    return None if len(reference) == len(candidate) else min(len(reference), len(candidate))


def judge(
    scores_V: Tensor, position: int, reference: int | None, candidate: int | None, noise: float | None
) -> Divergence:
    """A near-tie or a true divergence, by the logits [V] at that position.

    A candidate that stopped early, or went on after the reference's end, is never a near-tie: both obey one limit and
    one set of end tokens. A token far below two tying leaders is none either.
    """
    top = scores_V.topk(2).values
    gap = None
    if reference is not None and candidate is not None:
        gap = float(top[0] - torch.minimum(scores_V[reference], scores_V[candidate]))
    near = gap is not None and noise is not None and gap <= TOLERANCE * noise
    return Divergence(position, reference, candidate, float(top[0] - top[1]), gap, noise, near)


def compare(
    prompt: Sequence[int],
    reference: Sequence[int],
    candidate: Sequence[int],
    *,
    scorer: Scorer,
    again: Callable[[list[int], int], Sequence[int]] | None,
    max_new_tokens: int,
) -> Comparison:
    """Compares two greedy outputs of one prompt under the contract.

    Args:
        prompt: the prompt's ids.
        reference: the target's own output.
        candidate: the output to judge.
        scorer: gives the reference model's logits; called only where the outputs differ.
        again: decodes with the candidate's method: (ids, max_new_tokens) → new tokens. None: no noise is measured and
            nothing excused (dtypes below float32), the first divergence is described.
        max_new_tokens: the limit under which both were made.
    """
    divergences: list[Divergence] = []
    scores_TV, noise = None, None  # row k: the reference's logits for new token k
    done = 0  # reference tokens behind us
    while True:
        index = first_divergence(reference[done:], candidate)
        if index is None:
            return Comparison(divergences)
        if scores_TV is None:
            ids, start = [*prompt, *reference], len(prompt) - 1
            scores_TV = scorer.one_shot(ids, start)
            if again is not None:
                noise = float((scores_TV - scorer.incremental(ids, start)).abs().max())
        position = done + index
        expected = reference[position] if position < len(reference) else None
        found = candidate[index] if index < len(candidate) else None
        divergences.append(judge(scores_TV[position], position, expected, found, noise))
        done = position + 1
        if again is None or not divergences[-1].near_tie or done == len(reference):
            return Comparison(divergences)
        candidate = again([*prompt, *reference[:done]], max_new_tokens - done)


class TargetScorer:
    """Our own target as reference."""

    def __init__(self, target: Target):
        self.target = target

    def one_shot(self, ids: Sequence[int], start: int) -> Tensor:
        last = self.target.num_layers - 1
        ids_BT = torch.tensor([list(ids)], device=self.target.device)
        return self.target.logits(self.target.states(ids_BT, [last])[last][0, start:])

    def incremental(self, ids: Sequence[int], start: int) -> Tensor:
        session = self.target.session(1, len(ids))
        ids_BT = torch.tensor([list(ids)], device=self.target.device)
        if start:
            session.forward(ids_BT[:, :start], logits=None)
            session.advance([start])
        rows = []
        for position in range(start, len(ids)):
            rows.append(session.forward(ids_BT[:, position : position + 1]).logits[0])
            session.advance([1])
        return torch.cat(rows)
