"""More plots of the report: speedup against τ, acceptance by draft position, where a token's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specwave.benchmark.figures import INK, SERIES, STYLE, Plot, inline, legend, lines_of, mark_of

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
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2 + lines_of(points)), layout="constrained")
        axes = figure.subplots()
        for index, (label, point) in enumerate(points.items()):
            mark = mark_of(index)
            axes.errorbar(
                point.tau, point.speedup, xerr=_whiskers(point.tau, point.tau_range),
                yerr=_whiskers(point.speedup, point.speedup_range), ls="", markersize=7, markeredgewidth=0, lw=1,
                label=label, zorder=3, ecolor=mark["color"], **mark,
            )  # fmt: skip
        known = [value for point in points.values() for value in (point.tau, point.speedup)]
        low, high = min([1.0, *known]), max([1.0, *known])
        axes.plot([low, high], [low, high], color=INK, lw=1, ls=(0, (2, 2)), zorder=1)
        axes.axhline(1.0, color=INK, lw=0.8, zorder=1)
        axes.set_xlabel("τ, tokens per verification (dashed: drafts and wider verifications for free)")
        axes.set_ylabel("speedup (line: plain decoding)")
        axes.grid(lw=0.6, zorder=0)
        axes.tick_params(length=0)
        legend(axes, min(3, len(points)))
    said = "; ".join(f"{label} τ {point.tau:.2f}, speedup {point.speedup:.2f}" for label, point in points.items())
    alt = f"{title}: {said}."
    return Plot(title, inline(figure, "scatter", alt), alt)


def _whiskers(value: float, ends: Range) -> list[list[float]] | None:
    """What errorbar wants; a percentile interval may lie beside its value."""
    return None if ends is None else [[max(0.0, value - ends[0])], [max(0.0, ends[1] - value)]]


def positions(title: str, lines: Mapping[str, Sequence[float]]) -> Plot:
    """The share of accepted drafts at each position whose earlier ones were accepted."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.2 + lines_of(lines)), layout="constrained")
        axes = figure.subplots()
        for index, (label, values) in enumerate(lines.items()):
            axes.plot(range(1, len(values) + 1), values, lw=1.6, markersize=6, label=label, **mark_of(index))
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("accepted, earlier ones given")
        axes.grid(axis="y", lw=0.6, zorder=0)
        axes.tick_params(length=0)
        legend(axes, min(3, len(lines)))
    said = "; ".join(f"{label} {', '.join(f'{value:.2f}' for value in values)}" for label, values in lines.items())
    alt = f"{title}, first to last: {said}."
    return Plot(title, inline(figure, "positions", alt), alt)


def stacks(title: str, unit: str, rows: Mapping[str, Mapping[str, float]]) -> Plot:
    """A bar per method, cut into its parts."""
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.2 + 0.34 * len(rows)), layout="constrained")
        axes = figure.subplots()
        places = list(range(len(rows)))
        left = [0.0] * len(rows)
        for index, part in enumerate(parts):
            widths = [row.get(part, 0.0) for row in rows.values()]
            axes.barh(places, widths, left=left, height=0.62, color=SERIES[index % len(SERIES)], label=part, zorder=3)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(places, list(rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(unit)
        axes.grid(axis="x", lw=0.6, zorder=0)
        axes.tick_params(length=0)
        axes.spines["left"].set_visible(False)
        legend(axes, len(parts))
    said = "; ".join(
        f"{label} " + ", ".join(f"{part} {value:.2g}" for part, value in row.items()) for label, row in rows.items()
    )
    alt = f"{title}, {unit}: {said}."
    return Plot(title, inline(figure, "stacks", alt), alt)
