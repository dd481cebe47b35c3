"""Method against method over the same questions: differences with paired bootstrap intervals.

Both were asked the same questions, so a resample draws a question for both. The speed of methods is compared by their
speedups, each over plain decoding of its own run: so runs of different days can be compared, but not those of another
dtype or kind of machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specwave.benchmark.bootstrap import Floats, interval, quotient, resampled
from specwave.benchmark.results import Result
from specwave.benchmark.tables import setting

ALL_PAIRS = 8  # methods; of more, each is compared with the one of largest τ only
COLUMNS = ("accepted", "rounds", "tokens", "seconds", "plain_tokens", "plain_seconds")
TIMED = ("dtype", "device", "device_name", "threads", "devices", "batch_invariant")  # settings that must not differ
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
            groups.setdefault(repr(asked(result)), []).append((label, result))
    found = []
    for group in groups.values():
        sums = {one: Sums.of(result.content["per_question"]) for one, result in group}
        for (one, first), (other, second) in _pairs(group):
            contrast = compare(one, sums[one], other, sums[other], alike(first, second))
            if contrast is not None:
                found.append(contrast)
    return found


def alike(first: Result, second: Result) -> bool:
    """Whether their speedups can be compared: as far as is known, both were timed in the same way."""
    pairs = ((setting(first, name), setting(second, name)) for name in TIMED)
    return all(one == other or None in (one, other) for one, other in pairs)


def asked(result: Result) -> list[Any]:
    """What two results must have in common to be compared: target, limit, sampling, questions."""
    settings, benchmark = result.settings, result.settings.get("benchmark")
    questions = benchmark.get("fingerprint") if isinstance(benchmark, dict) else None
    return [settings.get("fingerprint"), settings.get("max_new_tokens"), drawn(settings.get("sampling")), questions]


def drawn(sampling: Any) -> Any:
    """The sampling of a result's settings without a seed that nothing is drawn with."""
    if not isinstance(sampling, dict) or sampling.get("temperature"):
        return sampling
    return {key: value for key, value in sampling.items() if key != "seed"}


def _pairs(group: Sequence[tuple[str, Result]]) -> list[tuple[tuple[str, Result], tuple[str, Result]]]:
    if len(group) <= ALL_PAIRS:
        return [(one, other) for place, one in enumerate(group) for other in group[place + 1 :]]
    best = max(group, key=lambda entry: entry[1].content["overall"]["tau"] or 0.0)
    return [(one, best) for one in group if one is not best]


@dataclass(frozen=True)
class Sums:
    """A method's `per_question` records as columns. What a record does not tell is 0."""

    places: dict[tuple[str, str], int]  # question id and category → row
    columns: dict[str, Floats]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Sums:
        columns = {name: np.array([record.get(name) or 0 for record in records], float) for name in COLUMNS}
        named = ((str(record["question_id"]), str(record.get("category"))) for record in records)
        return cls({name: place for place, name in enumerate(named)}, columns)

    def at(self, places: Sequence[int] | NDArray[np.intp]) -> dict[str, Floats]:
        return {name: column[places] for name, column in self.columns.items()}


def compare(first: str, ours: Sums, second: str, theirs: Sums, speeds_too: bool = True) -> Contrast | None:
    """Two methods over the questions that both answered; None where they share no question with a round."""
    shared = [(place, theirs.places[name]) for name, place in ours.places.items() if name in theirs.places]
    pairs = np.array(shared, np.intp).reshape(-1, 2)
    pairs = pairs[(ours.columns["rounds"][pairs[:, 0]] != 0) & (theirs.columns["rounds"][pairs[:, 1]] != 0)]
    if not len(pairs):
        return None
    one, other = ours.at(pairs[:, 0]), theirs.at(pairs[:, 1])
    tau, spread = _ratio(one, "accepted", "rounds") - _ratio(other, "accepted", "rounds"), None
    if len(pairs) > 1:
        spread = interval(_ratios(one, "accepted", "rounds") - _ratios(other, "accepted", "rounds"))
    timed = pairs[_timed(one) & _timed(other)] if speeds_too else pairs[:0]
    speed, speeds = None, None
    if len(timed):
        fast, slow = ours.at(timed[:, 0]), theirs.at(timed[:, 1])
        speed = _speedup(fast) / _speedup(slow)
        if len(timed) > 1:
            speeds = interval(quotient(_speedups(fast), _speedups(slow)))
    return Contrast(first, second, len(pairs), tau, spread, speed, speeds)


def _ratio(columns: Mapping[str, Floats], above: str, below: str) -> float:
    return float(columns[above].sum() / columns[below].sum())


def _ratios(columns: Mapping[str, Floats], above: str, below: str) -> Floats:
    return resampled(columns[above], columns[below])


def _timed(columns: Mapping[str, Floats]) -> NDArray[np.bool_]:
    return np.all([columns[name] != 0 for name in COLUMNS[2:]], axis=0)


def _speedup(columns: Mapping[str, Floats]) -> float:
    return _ratio(columns, "tokens", "seconds") / _ratio(columns, "plain_tokens", "plain_seconds")


def _speedups(columns: Mapping[str, Floats]) -> Floats:
    return quotient(_ratios(columns, "tokens", "seconds"), _ratios(columns, "plain_tokens", "plain_seconds"))
