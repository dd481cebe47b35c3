"""More plots of the report: speedup against τ, acceptance by draft position, where a token's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specwave.benchmark.figures import LEFT, RIGHT, Plot, keys_of
from specwave.benchmark.svg import Canvas, axis, bottom_axis, fixed_axis, left_axis

Range = Sequence[float] | None


@dataclass(frozen=True)
class Point:
    """A method's τ and speedup with their intervals."""

    tau: float
    speedup: float
    tau_range: Range = None
    speedup_range: Range = None


def scatter(title: str, points: Mapping[str, Point]) -> Plot:
    """Speedup against τ. On the dashed diagonal a verification would cost what a plain token costs and drafts nothing;
    what lies below it is the price of both."""
    top, bottom = 8.0, 318.0
    canvas = Canvas(bottom + 42)
    shown = points.values()
    across = axis([1.0, *(end for point in shown for end in (point.tau, *(point.tau_range or ())))], LEFT, RIGHT)
    up = axis([1.0, *(end for point in shown for end in (point.speedup, *(point.speedup_range or ())))], bottom, top)
    left_axis(canvas, up, LEFT, RIGHT, "speedup (line: plain decoding)")
    under = "τ, tokens per verification (dashed: drafts and wider verifications for free)"
    bottom_axis(canvas, across, top, bottom, under)
    canvas.line(LEFT, up(1.0), RIGHT, up(1.0), "axis")
    low, high = max(across.low, up.low), min(across.high, up.high)  # the part of the diagonal that is in sight
    canvas.line(across(low), up(low), across(high), up(high), "reference")
    for series, point in enumerate(points.values()):
        x, y = across(point.tau), up(point.speedup)
        if point.tau_range is not None:
            canvas.whisker(across(point.tau_range[0]), y, across(point.tau_range[1]), y, series)
        if point.speedup_range is not None:
            canvas.whisker(x, up(point.speedup_range[0]), x, up(point.speedup_range[1]), series)
    said = [f"{label} τ {point.tau:.2f}, speedup {point.speedup:.2f}" for label, point in points.items()]
    for series, (point, words) in enumerate(zip(points.values(), said, strict=True)):
        canvas.mark(across(point.tau), up(point.speedup), series, words)
    alt = f"{title}: {'; '.join(said)}."
    return Plot(title, canvas.element(alt), alt, keys_of(list(points)))


def positions(title: str, lines: Mapping[str, Sequence[float]]) -> Plot:
    """The share of accepted drafts at each position whose earlier ones were accepted."""
    top, bottom = 8.0, 238.0
    canvas = Canvas(bottom + 42)
    deepest = max(map(len, lines.values()))
    across = fixed_axis(0.7, max(deepest, 2) + 0.3, LEFT, RIGHT, count=10, whole=True)
    up = fixed_axis(0.0, 1.02, bottom, top)
    left_axis(canvas, up, LEFT, RIGHT, "accepted, earlier ones given")
    bottom_axis(canvas, across, top, bottom, "position in the draft", grid=False)
    for series, (label, values) in enumerate(lines.items()):
        points = [(across(place), up(value)) for place, value in enumerate(values, start=1)]
        canvas.curve(points, series)
        for place, (x, y) in enumerate(points):
            canvas.mark(x, y, series, f"{label}, position {place + 1}: {values[place]:.2f}")
    said = "; ".join(f"{label} {', '.join(f'{value:.2f}' for value in values)}" for label, values in lines.items())
    alt = f"{title}, first to last: {said}."
    return Plot(title, canvas.element(alt), alt, keys_of(list(lines)))


def stacks(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> Plot:
    """A bar per method, cut into its parts; the method stands above its bar, what the parts add up to behind it."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    left, top, pitch, thick = 14.0, 4.0, 46.0, 17.0
    bottom = top + pitch * len(rows)
    canvas = Canvas(bottom + 42)
    sums = {label: sum(row.values()) for label, row in rows.items()}
    across = fixed_axis(0.0, max(sums.values()) or 1.0, left, RIGHT - 52)  # room for the last sum
    bottom_axis(canvas, across, top, bottom, unit)
    for place, (label, row) in enumerate(rows.items()):
        start, y = 0.0, top + pitch * place + 19
        canvas.text(left, y - 5, label)
        for series, part in enumerate(parts):
            if row.get(part):
                width = across(row[part]) - left
                canvas.bar(across(start), y, width, thick, series, f"{label}, {part}: {row[part]:.3g} {unit}")
                start += row[part]
        canvas.text(across(start) + 6, y + thick - 4, f"{sums[label]:.3g}")
    said = "; ".join(
        f"{label} " + ", ".join(f"{part} {value:.2g}" for part, value in row.items()) for label, row in rows.items()
    )
    alt = f"{title}, {unit}: {said}."
    return Plot(title, canvas.element(alt), alt, keys_of(parts, square=True))
