"""The report's plots as SVG elements that live inside the page and follow its light or dark colours.

Matplotlib draws with stand-in colours; these become CSS variables, so the page's style decides. Nothing refers to the
network: metadata, doctype and namespace of the file are dropped (HTML needs none of them).
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, FAINT = "#010203", "#040506"  # stand-ins: axes and text, grid
SERIES = [f"#1{i:x}2{i:x}3{i:x}" for i in range(8)]
MARKERS = "osD^vP*X"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "svg.fonttype": "none",  # text stays text: the page's font, selectable
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Plot:
    """An `<svg>` element, its heading and what it shows in words."""

    title: str
    svg: str
    alt: str


def inline(figure: Figure, name: str, alt: str) -> str:
    """The figure as an element; `name` begins its ids, `alt` is what a screen reader says."""
    stream, engine = io.StringIO(), figure.get_layout_engine()
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_visible(False)  # the page is what one sees through it
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):  # ids differ from plot to plot, not from run to run
        figure.set_dpi(72)  # as the writer has it
        if engine is not None:
            engine.execute(figure)
            figure.set_layout_engine("none")
        # `savefig` would draw everything once before, for the sake of what was just laid out.
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"\s*font-family: [^;\"]*;", "", svg)  # the page's font
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)  # it would reach the whole page
    svg = re.sub(r'\sid="([^"]+)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r'="#([^"]+)"', rf'="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    for colour, variable in [(INK, "ink"), (FAINT, "faint"), *((c, f"series-{i}") for i, c in enumerate(SERIES))]:
        svg = svg.replace(colour, f"var(--{variable})")
    words = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    opening = rf'<svg viewBox="\1" role="img" aria-label="{words}">'
    return re.sub(r'<svg[^>]*?viewBox="([^"]+)"[^>]*>', opening, svg, count=1).strip()


def mark_of(index: int) -> dict[str, Any]:
    return {"color": SERIES[index % len(SERIES)], "marker": MARKERS[(index + index // len(SERIES)) % len(MARKERS)]}


def lines_of(entries: Sized) -> float:
    """Inches that the rows of a legend of three columns take beyond the first."""
    return 0.22 * ((len(entries) - 1) // 3)


def legend(axes: Axes, columns: int) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.4, handletextpad=0.4)


def dots(
    name: str, title: str, unit: str, labels: Sequence[str], values: Mapping[str, Sequence[float | None]], one: str
) -> Plot:
    """One mark per method and row: `values` maps a method to a value per label; the last row sums up the others.

    `one` says what the value 1 means, which is drawn as a line; "" where it means nothing.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.1 + 0.29 * len(labels) + lines_of(values)), layout="constrained")
        axes = figure.subplots()
        places = list(range(len(labels)))
        known = [value for row in values.values() for value in row if value is not None]
        if one:
            axes.axvline(1.0, color=INK, lw=1, ls=(0, (2, 2)), zorder=1)
            known.append(1.0)
        for index, (label, row) in enumerate(values.items()):
            aside = min(0.16, 0.8 / len(values)) * (index - (len(values) - 1) / 2)  # equal values stay apart
            shown = [(value, place) for value, place in zip(row, places, strict=True) if value is not None]
            axes.plot(
                [value for value, _ in shown], [place + aside for _, place in shown], ls="", markersize=7, zorder=3,
                markeredgewidth=0, label=label, **mark_of(index),
            )  # fmt: skip
        axes.set_yticks(places, labels)
        if len(labels) > 1:  # the last row sums the others up
            axes.axhline(places[-1] - 0.5, color=INK, lw=0.8, zorder=1)
            axes.get_yticklabels()[-1].set_fontweight("bold")
        axes.set_ylim(len(labels) - 0.4, -0.6)
        low, high = min(known, default=0.0), max(known, default=1.0)
        room = 0.06 * (high - low) or 0.1 * high or 1.0
        axes.set_xlim(low - room, high + room)
        axes.set_xlabel(f"{unit} (dashed: {one})" if one else unit)
        axes.grid(axis="y", lw=0.6, zorder=0)
        axes.tick_params(length=0)
        axes.spines["left"].set_visible(False)
        legend(axes, min(3, len(values)))
    said = "; ".join(f"{label} {_range(row)}" for label, row in values.items())
    alt = f"{title}. {unit} per row: {said}. The numbers are in the table below."
    return Plot(title, inline(figure, name, alt), alt)


def _range(row: Sequence[float | None]) -> str:
    known = [value for value in row if value is not None]
    return f"{min(known):.2f} to {max(known):.2f}" if known else "no value"


def curves(
    name: str, title: str, panels: Sequence[tuple[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]]
) -> Plot:
    """Lines over training steps: per panel its axis label and, by method, (steps, values)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 2.6 * len(panels) + 0.4), layout="constrained")
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        methods = list(dict.fromkeys(label for _, lines in panels for label in lines))
        for axes, (unit, lines) in zip(grid, panels, strict=True):
            for label, (steps, values) in lines.items():
                mark = mark_of(methods.index(label))
                few = len(steps) <= 40
                axes.plot(
                    steps, values, lw=1.6, label=label, markersize=4, **(mark if few else {"color": mark["color"]})
                )
            axes.set_ylabel(unit)
            axes.grid(axis="y", lw=0.6, zorder=0)
            axes.tick_params(length=0)
        grid[-1].set_xlabel("optimiser step")
        grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(grid[0], min(3, len(methods)))
    ends = "; ".join(
        f"{label} ends at {unit} {values[-1]:.3g}" for unit, lines in panels for label, (_, values) in lines.items()
    )
    alt = f"{title}: {ends}."
    return Plot(title, inline(figure, name, alt), alt)
