"""What a set of answers is worth. Pure: rows of `answers.jsonl` in, plain numbers out; `definitions` says what each is.

Rates are micro-averaged: sums over questions are divided. Where the questions' own rates are averaged, the name ends in
`_per_question`. A question that failed counts nowhere but in `failed`. What cannot be said is None (null), never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specwave.benchmark.bootstrap import interval, quotient, ratio_interval, resampled
from specwave.benchmark.measures import acceptance, latency, per_question, repeated, sources, time_split
from specwave.benchmark.questions import CATEGORIES, SUBTASKS
from specwave.benchmark.rows import failed


@dataclass(frozen=True)
class Verdict:
    """Is one question's output the target's own? `near_ties`: excused divergences (float32), None where none can be."""

    exact: bool
    near_ties: int | None


def block(
    rows: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    verdicts: Mapping[Any, Verdict] | None,
) -> dict[str, Any]:
    """The figures of one set of rows against the baseline's rows of the same questions.

    Args:
        rows: the method's rows.
        baseline: rows of plain decoding, in any order, of any questions.
        verdicts: by question id; None when nothing can be compared (sampling).
    """
    finished = [row for row in rows if not failed(row)]
    plain = {row["question_id"]: row for row in baseline if not failed(row)}
    each = per_question(finished, plain)
    shared = [one for one in each if one["plain_tokens"] is not None]
    tokens, rounds, seconds = (sum(one[name] for one in each) for name in ("tokens", "rounds", "seconds"))
    rate = _quotient(tokens, seconds)
    ours, theirs = _rate(shared, ""), _rate(shared, "plain_")
    timed = [one for one in shared if one["seconds"] > 0 and one["plain_seconds"] > 0]  # the same for both means
    own_mean, plain_mean = _mean_rate(timed, ""), _mean_rate(timed, "plain_")
    peaks = [row["specwave"].get("peak_memory_bytes") for row in finished if "specwave" in row]
    judged = [verdicts[one["question_id"]] for one in each if one["question_id"] in verdicts] if verdicts else []
    ties = [verdict.near_ties for verdict in judged if verdict.near_ties is not None]
    return {
        "questions": len(each),
        "failed": len(rows) - len(finished),
        "tau": sum(one["accepted"] for one in each) / rounds if rounds else None,
        "tau_per_question": _mean([one["tau"] for one in each]),
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_second": rate,
        "tokens_per_second_per_question": _mean_rate(each, ""),
        "seconds_per_token": _quotient(1, rate),
        "speedup": _quotient(ours, theirs),
        "speedup_per_question": _quotient(own_mean, plain_mean),
        "peak_memory_bytes": max((peak for peak in peaks if peak is not None), default=None),
        "exact_match_rate": sum(verdict.exact for verdict in judged) / len(judged) if judged else None,
        "near_ties": sum(ties) if ties else None,
        "intervals": intervals(each, shared),
        "acceptance": acceptance(finished),
        "sources": sources(finished),
        "time": time_split(finished),
        "latency": latency(finished),
        "repetitions": repeated(finished, plain),
    }


def intervals(each: Sequence[Mapping[str, Any]], shared: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """[low, high] of τ, tokens per second and speedup, questions drawn anew; `shared` have plain decoding's sums."""

    def column(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
        return [record[name] for record in records]

    speedup = None
    if len(shared) > 1:
        ours = resampled(column(shared, "tokens"), column(shared, "seconds"))
        theirs = resampled(column(shared, "plain_tokens"), column(shared, "plain_seconds"))
        speedup = interval(quotient(ours, theirs))
    return {
        "tau": ratio_interval(column(each, "accepted"), column(each, "rounds")),
        "tokens_per_second": ratio_interval(column(each, "tokens"), column(each, "seconds")),
        "speedup": speedup,
    }


def _quotient(above: float | None, below: float | None) -> float | None:
    """None where either is missing or zero, or where nearly no time gives no finite rate."""
    found = above / below if above and below else None
    return found if found is not None and math.isfinite(found) else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rate(records: Sequence[Mapping[str, Any]], prefix: str) -> float | None:
    sums = (sum(one[f"{prefix}{name}"] for one in records) for name in ("tokens", "seconds"))
    return _quotient(*sums)


def _mean_rate(records: Sequence[Mapping[str, Any]], prefix: str) -> float | None:
    """A question without a token has a rate, 0, as in Spec-Bench's `speed.py`; one without time has none."""
    pairs = ((one[f"{prefix}tokens"], one[f"{prefix}seconds"]) for one in records)
    return _mean(_quotient(tokens, seconds) if tokens else 0.0 for tokens, seconds in pairs if seconds > 0)


def blocks(
    rows: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    verdicts: Mapping[Any, Verdict] | None,
) -> dict[str, Any]:
    """`overall`, the 6 `subtasks` and the 13 `categories` (all of them, empty ones with 0 questions).

    A category outside Spec-Bench's 13 gets a block of its own after them; it counts overall and in no subtask.
    """

    def of(categories: Iterable[str]) -> dict[str, Any]:
        wanted = set(categories)
        return block([row for row in rows if row["category"] in wanted], baseline, verdicts)

    others = dict.fromkeys(row["category"] for row in rows if row["category"] not in CATEGORIES)
    return {
        "overall": block(rows, baseline, verdicts),
        "subtasks": {name: of(categories) for name, categories in SUBTASKS.items()},
        "categories": {name: of([name]) for name in (*CATEGORIES, *others)},
    }
