"""Figures of a set of answers: per question, by draft position, where the time went, how long one waits.

Pure: rows of `answers.jsonl` that did not fail in, plain numbers out. What a file does not tell is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specwave.benchmark.bootstrap import mean_interval
from specwave.benchmark.rows import repetitions

Row = Mapping[str, Any]
POSITIONS = 64  # drafts of one round at most
PERCENTILES = (50, 90, 99)
PHASES = ("prefill", "draft", "verify", "accept", "other")
TALLIED = ("rounds", "hits", "drafted", "accepted", "draft_seconds", "seconds")  # of every source of drafts


def sums(row: Row) -> tuple[int, int, int, float]:
    """(new tokens, rounds, accepted, seconds) of a question, all repetitions together."""
    choices = row["choices"]
    return (
        int(sum(sum(choice["new_tokens"]) for choice in choices)),
        sum(len(choice["accept_lengths"]) for choice in choices),
        int(sum(sum(choice["accept_lengths"]) for choice in choices)),
        float(sum(sum(choice["wall_time"]) for choice in choices)),
    )


def per_question(rows: Sequence[Row], plain: Mapping[Any, Row]) -> list[dict[str, Any]]:
    """One record a question, with plain decoding's sums on it where it was measured."""
    found = []
    for row in rows:
        tokens, rounds, accepted, seconds = sums(row)
        base = sums(plain[row["question_id"]]) if row["question_id"] in plain else None
        found.append(
            {
                "question_id": row["question_id"],
                "category": row["category"],
                "tau": accepted / rounds if rounds else None,
                "tokens": tokens,
                "rounds": rounds,
                "accepted": accepted,
                "seconds": seconds,
                "draft_seconds": _drafting(row),
                "plain_tokens": None if base is None else base[0],
                "plain_seconds": None if base is None else base[3],
            }
        )
    return found


def _drafting(row: Row) -> float | None:
    """Seconds of proposing and observing, all repetitions together; None where they were not noted."""
    noted = [own.get("draft_seconds") for _, own in repetitions(row)]
    known = [sum(own) for own in noted if own is not None]
    return float(sum(known)) if len(known) == len(noted) else None


# ---------------------------------------------------------------- acceptance by position


def acceptance(rows: Sequence[Row]) -> dict[str, Any] | None:
    """How often the draft at each position was accepted; None where drafts were not noted, or nothing was drafted."""
    reached, accepted, drafts, levels_in_all = [0] * POSITIONS, [0] * POSITIONS, 0, 0
    for row in rows:
        for choice, noted in repetitions(row):
            if "draft_levels" not in noted:
                return None
            for levels, length in zip(noted["draft_levels"], choice["accept_lengths"], strict=True):
                kept = min(int(length) - 1, levels)  # the round's last token is the target's own
                drafts += levels > 0
                levels_in_all += levels
                for place in range(min(levels, kept + 1, POSITIONS)):
                    reached[place] += 1
                    accepted[place] += place < kept
    if not drafts:
        return None
    deepest = max(place for place in range(POSITIONS) if reached[place]) + 1
    return {
        "conditional": [accepted[place] / reached[place] for place in range(deepest)],
        "vllm": [accepted[place] / drafts for place in range(deepest)],
        "reached": reached[:deepest],
        "drafts": drafts,
        "rate": sum(accepted) / levels_in_all,
    }


# ---------------------------------------------------------------- time


def time_split(rows: Sequence[Row]) -> dict[str, float] | None:
    """Seconds of each phase, summed; they add up to the wall time. None where they were not noted."""
    totals = dict.fromkeys(PHASES, 0.0)
    for row in rows:
        for choice, noted in repetitions(row):
            if not {"prefill_seconds", "draft_seconds", "verify_seconds"} <= noted.keys():
                return None
            wall, accept = sum(choice["wall_time"]), sum(noted.get("accept_seconds", [0.0]))
            spent = {
                "prefill": sum(noted["prefill_seconds"]),
                "draft": sum(noted["draft_seconds"]),
                "verify": max(0.0, sum(noted["verify_seconds"]) - accept),
                "accept": accept,
            }
            spent["other"] = max(0.0, wall - sum(spent.values()))
            for name, seconds in spent.items():
                totals[name] += seconds
    return totals if any(totals.values()) else None


def latency(rows: Sequence[Row]) -> dict[str, dict[str, float] | None]:
    """Percentiles over turns, in seconds: of the whole turn, of its prefill, of its mean round and its mean token."""
    turns: dict[str, list[float]] = {"turn": [], "prefill": [], "round": [], "token": []}
    for row in rows:
        for choice, noted in repetitions(row):
            prefills = noted.get("prefill_seconds") or [None] * len(choice["wall_time"])
            steps = choice.get("decoding_steps") or [None] * len(choice["wall_time"])
            for wall, tokens, prefill, rounds in zip(
                choice["wall_time"], choice["new_tokens"], prefills, steps, strict=False
            ):
                turns["turn"].append(wall)
                if tokens:
                    turns["token"].append(wall / tokens)
                if prefill is not None:
                    turns["prefill"].append(prefill)
                    if rounds:
                        turns["round"].append(max(0.0, wall - prefill) / rounds)
    return {name: _percentiles(values) for name, values in turns.items()}


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = np.percentile(np.asarray(values, float), PERCENTILES)
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found, strict=True)}


# ---------------------------------------------------------------- sources of drafts


def sources(rows: Sequence[Row]) -> dict[str, dict[str, float]] | None:
    """By source of drafts its tallies, summed; its `share` of all rounds; of its own rounds the share `in_vain`, with
    nothing accepted, and the mean of what was drafted and accepted. None where no row has an account (`Turn.sources`).
    Sources that drafted for no round are left out."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        for _, noted in repetitions(row):
            for tallies in noted.get("sources") or []:
                for source, tally in tallies.items():
                    own = found.setdefault(source, dict.fromkeys(TALLIED, 0))
                    for name in TALLIED:
                        own[name] += tally[name]
    rounds = sum(own["rounds"] for own in found.values())
    return {
        source: own
        | {"share": own["rounds"] / rounds, "in_vain": 1 - own["hits"] / own["rounds"]}
        | {f"{name}_a_round": own[name] / own["rounds"] for name in ("drafted", "accepted")}
        for source, own in found.items()
        if own["rounds"]
    } or None


# ---------------------------------------------------------------- repetitions


def repeated(rows: Sequence[Row], plain: Mapping[Any, Row]) -> dict[str, Any] | None:
    """Tokens per second and speedup of every repetition by itself, with intervals; None for fewer than two."""
    count = min((len(row["choices"]) for row in rows), default=0)
    if count < 2:
        return None
    rates = [_rate(rows, place) for place in range(count)]
    shared = [row for row in rows if row["question_id"] in plain]
    base = [plain[row["question_id"]] for row in shared]
    speedups = []
    if shared and all(len(row["choices"]) >= count for row in base):
        pairs = [(_rate(shared, place), _rate(base, place)) for place in range(count)]
        speedups = [ours / theirs for ours, theirs in pairs if ours and theirs]
    known = [rate for rate in rates if rate is not None]
    return {
        "count": count,
        "tokens_per_second": rates,
        "tokens_per_second_interval": mean_interval(known) if len(known) == count else None,
        "speedup": speedups if len(speedups) == count else None,
        "speedup_interval": mean_interval(speedups) if len(speedups) == count else None,
    }


def _rate(rows: Sequence[Row], place: int) -> float | None:
    """Tokens per second of repetition `place` alone."""
    tokens = sum(sum(row["choices"][place]["new_tokens"]) for row in rows)
    seconds = sum(sum(row["choices"][place]["wall_time"]) for row in rows)
    return tokens / seconds if tokens and seconds > 0 else None
