"""What drafters cost and give by how many layers they read: a table and a plot, where they read different numbers.

Fewer layers are a narrower first projection and nothing else: the rest of a drafter is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specwave.benchmark.bootstrap import ratio_interval
from specwave.benchmark.figures import LEFT, RIGHT, Plot, keys_of
from specwave.benchmark.results import Result
from specwave.benchmark.svg import Canvas, axis, bottom_axis, fixed_axis, left_axis
from specwave.benchmark.tables import Cell, Table, ranged


@dataclass(frozen=True)
class Figure:
    """A value with its interval over questions; None what is not known."""

    value: float | None
    interval: Sequence[float] | None = None

    @property
    def ends(self) -> Sequence[float]:
        return [] if self.value is None else [self.value, *(self.interval or ())]


@dataclass(frozen=True)
class Sized:
    """A drafter that reads `count` layers. Seconds of drafting are proposing and observing, without the prompt's."""

    label: str
    count: int
    parameters: int | None
    megabytes: Figure
    round_ms: Figure  # of drafting, per verification
    token_ms: Figure  # of drafting, per token committed
    tau: Figure
    rate: Figure  # tokens per second

    @classmethod
    def of(cls, label: str, result: Result) -> Sized:
        content, overall = result.content, result.content["overall"]
        size, known = content.get("drafter") or {}, overall.get("intervals") or {}
        records = content.get("per_question", [])
        return cls(
            label,
            len(content["layers"]),
            size.get("parameters"),
            Figure(size["bytes"] / 1e6 if size else None),
            _drafting(records, "rounds"),
            _drafting(records, "tokens"),
            Figure(overall["tau"], known.get("tau")),
            Figure(overall["tokens_per_second"], known.get("tokens_per_second")),
        )


def _drafting(records: Sequence[Mapping[str, Any]], per: str) -> Figure:
    """Milliseconds of drafting; unknown where one question does not tell them."""
    seconds, below = [record.get("draft_seconds") for record in records], [record[per] for record in records]
    told = [1000 * value for value in seconds if value is not None]
    if not told or len(told) < len(records) or not sum(below):
        return Figure(None)
    return Figure(sum(told) / sum(below), ratio_interval(told, below))


def by_layers(results: Sequence[Result], labels: Sequence[str]) -> list[Sized]:
    """Fewest layers first; [] where all drafters read as many."""
    found = [
        Sized.of(label, result) for label, result in zip(labels, results, strict=True) if result.content.get("layers")
    ]
    found.sort(key=lambda one: one.count)
    return found if len({one.count for one in found}) > 1 else []


def table(results: Sequence[Result], labels: Sequence[str]) -> list[Table]:
    header = ["layers", "drafter", "parameters, M", "MB", "draft ms/round", "draft ms/token", "τ", "tokens/s"]
    rows: list[list[Cell]] = []
    for one in by_layers(results, labels):
        parameters = None if one.parameters is None else one.parameters / 1e6
        timed = [_shown(figure, digits) for figure, digits in
                 ((one.round_ms, 2), (one.token_ms, 2), (one.tau, 2), (one.rate, 1))]  # fmt: skip
        rows.append([one.count, one.label, parameters, one.megabytes.value, *timed])
    title = "Drafters by how many layers they read (95 % intervals over questions)"
    return [Table(title, header, rows, [0, 0, 2, 2, 0, 0, 0, 0])] if rows else []


def _shown(figure: Figure, digits: int) -> str | None:
    return ranged(figure.value, figure.interval, digits)


PANELS: tuple[tuple[str, str, Callable[[Sized], Figure]], ...] = (  # axis, unit in words, what is drawn
    ("drafter, MB", "MB", lambda one: one.megabytes),
    ("draft ms per token", "ms of drafting per token", lambda one: one.token_ms),
    ("τ", "τ", lambda one: one.tau),
    ("tokens/s", "tokens per second", lambda one: one.rate),
)


def plot(results: Sequence[Result], labels: Sequence[str]) -> list[Plot]:
    """A panel for each figure, with whiskers for intervals; drafters of as many layers stand side by side."""
    drafters = by_layers(results, labels)
    panels = [panel for panel in PANELS if any(panel[2](one).ends for one in drafters)]
    if not panels:
        return []
    inside, gap, top, title = 110.0, 22.0, 8.0, "Cost and gain by number of layers"
    canvas = Canvas(top + len(panels) * (inside + gap) - gap + 42)
    fewest, most = drafters[0].count, drafters[-1].count
    across = fixed_axis(fewest - 0.5, most + 0.5, LEFT, RIGHT, whole=True)
    for place, (unit, words, figure_of) in enumerate(panels):
        ceiling = top + place * (inside + gap)
        floor = ceiling + inside
        up = axis([end for one in drafters for end in figure_of(one).ends], floor, ceiling, count=4)
        left_axis(canvas, up, LEFT, RIGHT, unit)
        if place == len(panels) - 1:
            bottom_axis(canvas, across, top, floor, "layers read", grid=False)
        else:
            canvas.line(LEFT, floor, RIGHT, floor, "axis")
        for series, one in enumerate(drafters):
            figure, x = figure_of(one), across(one.count + _aside(drafters, one))
            if figure.value is None:
                continue
            if figure.interval is not None:
                canvas.whisker(x, up(figure.interval[0]), x, up(figure.interval[1]), series)
            canvas.mark(x, up(figure.value), series, f"{one.label}: {figure.value:.3g} {words}")
    said = "; ".join(
        f"{one.label}, {one.count} layers: "
        + ", ".join(f"{value:.3g} {words}" for _, words, of in panels if (value := of(one).value) is not None)
        for one in drafters
    )
    alt = f"{title}. {said}."
    return [Plot(title, canvas.element(alt), alt, keys_of([one.label for one in drafters]))]


def _aside(drafters: Sequence[Sized], one: Sized) -> float:
    """−0.3 … 0.3 of a layer."""
    alike = [other for other in drafters if other.count == one.count]
    return 0.6 * ((alike.index(one) + 0.5) / len(alike) - 0.5)
