"""The report's plots: a figure by category, and curves over training. More are in `diagrams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specwave.benchmark.svg import (
    WIDTH,
    Canvas,
    axis,
    bottom_axis,
    fixed_axis,
    left_axis,
    shortened,
    width_of,
)

RIGHT = WIDTH - 24.0
LEFT = 62.0  # of a plot with numbers at its left
FEW, MANY = 40, 320  # points of a line: so few are marked one by one, no more are drawn


@dataclass(frozen=True)
class Key:
    """An entry of a legend: which colour and shape stands for what. `square`: the colour of a part of bars."""

    label: str
    series: int
    square: bool = False


@dataclass(frozen=True)
class Plot:
    """An `<svg>` element, its heading, what it shows in words, and its legend."""

    title: str
    svg: str
    alt: str
    legend: tuple[Key, ...]


def keys_of(labels: Sequence[str], square: bool = False) -> tuple[Key, ...]:
    return tuple(Key(label, place, square) for place, label in enumerate(labels))


def dots(title: str, unit: str, rows: Sequence[str], values: Mapping[str, Sequence[float | None]], one: str) -> Plot:
    """One mark per method and row: `values` maps a method to a value per row; the last row sums up the others.

    `one` says what the value 1 means, which is drawn as a line; "" where it means nothing.
    """
    left, top = 14 + width_of(rows), 8.0
    height = 26.0 + 4 * min(10, max(0, len(values) - 4))  # of a row: many methods need more
    bottom = top + height * len(rows)
    canvas = Canvas(bottom + 42)
    known = [value for column in values.values() for value in column if value is not None]
    across = axis([*known, *([1.0] if one else [])], left, RIGHT)
    for place, name in enumerate(rows):
        middle = top + height * (place + 0.5)
        canvas.line(left, middle, RIGHT, middle, "grid")
        canvas.text(left - 9, middle + 4, shortened(name), "end", "strong" if place == len(rows) - 1 else "")
    if len(rows) > 1:  # the last row sums the others up
        canvas.line(left, bottom - height, RIGHT, bottom - height, "axis")
    if one:
        canvas.line(across(1.0), top, across(1.0), bottom, "reference")
    bottom_axis(canvas, across, top, bottom, f"{unit} (dashed: {one})" if one else unit, grid=False)
    for series, (label, column) in enumerate(values.items()):
        aside = min(4.2, 0.8 * height / len(values)) * (series - (len(values) - 1) / 2)  # equal values stay apart
        for place, value in enumerate(column):
            if value is not None:
                canvas.mark(
                    across(value), top + height * (place + 0.5) + aside, series, f"{label}, {rows[place]}: {value:.2f}"
                )
    said = "; ".join(f"{label} {_range(column)}" for label, column in values.items())
    alt = f"{title}. {unit} per row: {said}. The numbers are in a table below."
    return Plot(title, canvas.element(alt), alt, keys_of(list(values)))


def _range(column: Sequence[float | None]) -> str:
    known = [value for value in column if value is not None]
    return f"{min(known):.2f} to {max(known):.2f}" if known else "no value"


Line = tuple[Sequence[float], Sequence[float]]  # steps, values


def curves(title: str, panels: Sequence[tuple[str, Mapping[str, Line]]]) -> Plot:
    """Lines over training steps: per panel its axis label and, by method, (steps, values)."""
    methods = list(dict.fromkeys(label for _, lines in panels for label in lines))
    steps = [step for _, lines in panels for at, _ in lines.values() for step in at]
    inside, gap, top = 150.0, 22.0, 8.0
    canvas = Canvas(top + len(panels) * (inside + gap) - gap + 42)
    across = fixed_axis(min(steps), max(max(steps), min(steps) + 1), LEFT, RIGHT, whole=True)
    for place, (unit, lines) in enumerate(panels):
        ceiling = top + place * (inside + gap)
        floor = ceiling + inside
        up = axis([value for _, values in lines.values() for value in values], floor, ceiling, count=4)
        left_axis(canvas, up, LEFT, RIGHT, unit)
        if place == len(panels) - 1:
            bottom_axis(canvas, across, top, floor, "optimiser step", grid=False)
        else:
            canvas.line(LEFT, floor, RIGHT, floor, "axis")
        for label, (at, values) in lines.items():
            at, values = thinned(at), thinned(values)
            series, points = methods.index(label), [(across(x), up(y)) for x, y in zip(at, values, strict=True)]
            canvas.curve(points, series)
            for (x, y), step, value in zip(points, at, values, strict=True) if len(points) <= FEW else ():
                canvas.mark(x, y, series, f"{label}, step {step:g}: {value:.3g}")
    ends = "; ".join(
        f"{label} ends at {unit} {values[-1]:.3g}" for unit, lines in panels for label, (_, values) in lines.items()
    )
    alt = f"{title}: {ends}."
    return Plot(title, canvas.element(alt), alt, keys_of(methods))


def thinned(values: Sequence[float]) -> Sequence[float]:
    """Every n-th, counted from the last, so that at most MANY are left: a picture has no room for more."""
    return values[:: -max(1, -(-len(values) // MANY))][::-1]
