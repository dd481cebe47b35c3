"""Method against method over the same questions: differences with paired bootstrap intervals.

Both were asked the same questions, so a resample draws a question for both. The speed of methods is compared by their
speedups, each over plain decoding of its own run: so runs of different days can be compared, as far as their machine is
the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specwave.benchmark.bootstrap import Floats, interval, quotient, resampled
from specwave.benchmark.results import Result

ALL_PAIRS = 8  # methods; of more, each is compared with the one of largest τ only
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Contrast:
    """`tau`: the first's less the second's. `speed`: the first's speedup / the second's; None where one has none.
    Intervals are None for fewer than two questions."""

    first: str
    second: str
    questions: int
    tau: float
    tau_interval: list[float] | None
    speed: float | None
    speed_interval: list[float] | None


def contrasts(results: Sequence[Result], labels: Sequence[str]) -> list[Contrast]:
    """Of all methods but plain decoding that were asked the same under the same target, limits and sampling."""
    groups: dict[str, list[tuple[str, Result]]] = {}
    for label, result in zip(labels, results, strict=True):
        if result.content["method"] != "autoregressive" and result.content.get("per_question"):
            groups.setdefault(repr(_asked(result)), []).append((label, result))
    found = []
    for group in groups.values():
        for (one, first), (other, second) in _pairs(group):
            contrast = compare(one, first.content["per_question"], other, second.content["per_question"])
            if contrast is not None:
                found.append(contrast)
    return found


def _asked(result: Result) -> list[Any]:
    settings, benchmark = result.settings, result.settings.get("benchmark")
    asked = benchmark.get("fingerprint") if isinstance(benchmark, dict) else None
    return [settings.get("fingerprint"), settings.get("max_new_tokens"), settings.get("sampling"), asked]


def _pairs(group: Sequence[tuple[str, Result]]) -> list[tuple[tuple[str, Result], tuple[str, Result]]]:
    if len(group) <= ALL_PAIRS:
        return [(one, other) for place, one in enumerate(group) for other in group[place + 1 :]]
    best = max(group, key=lambda entry: entry[1].content["overall"]["tau"] or 0.0)
    return [(one, best) for one in group if one is not best]


def compare(first: str, ours: Sequence[Record], second: str, theirs: Sequence[Record]) -> Contrast | None:
    """Two methods' `per_question` records; None where they share no question with a round."""
    by_id = {str(record["question_id"]): record for record in theirs}
    shared = [(record, by_id[str(record["question_id"])]) for record in ours if str(record["question_id"]) in by_id]
    pairs = [(a, b) for a, b in shared if a["rounds"] and b["rounds"]]
    if not pairs:
        return None
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    tau = _sum(ours, "accepted") / _sum(ours, "rounds") - _sum(theirs, "accepted") / _sum(theirs, "rounds")
    spread = None
    if len(pairs) > 1:
        spread = interval(_ratios(ours, "accepted", "rounds") - _ratios(theirs, "accepted", "rounds"))
    timed = [(a, b) for a, b in pairs if _timed(a) and _timed(b)]
    speed, speeds = None, None
    if timed:
        fast, slow = [a for a, _ in timed], [b for _, b in timed]
        speed = _speedup(fast) / _speedup(slow)
        if len(timed) > 1:
            speeds = interval(quotient(_speedups(fast), _speedups(slow)))
    return Contrast(first, second, len(pairs), tau, spread, speed, speeds)


def _sum(records: Sequence[Record], name: str) -> float:
    return sum(record[name] for record in records)


def _ratios(records: Sequence[Record], above: str, below: str) -> Floats:
    return resampled([record[above] for record in records], [record[below] for record in records])


def _timed(record: Record) -> bool:
    return all(record.get(name) for name in ("tokens", "seconds", "plain_tokens", "plain_seconds"))


def _speedup(records: Sequence[Record]) -> float:
    ours = _sum(records, "tokens") / _sum(records, "seconds")
    return ours / (_sum(records, "plain_tokens") / _sum(records, "plain_seconds"))


def _speedups(records: Sequence[Record]) -> Floats:
    return quotient(_ratios(records, "tokens", "seconds"), _ratios(records, "plain_tokens", "plain_seconds"))
