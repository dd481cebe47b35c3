"""The picture of a sweep: a row for each job, with the layers it chose and their entropy, else with an evaluation's
measures or the first number it noted. Of two swept keys without layers it is a grid, a cell a job (`sweep_grid`).

Colours are Okabe & Ito's, which colour-blind readers tell apart; a job without a result is a cross and a word.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specwave.app.collate import Row, is_number, short, swept_of
from specwave.app.sweep_grid import as_grid, grid_figure, measures
from specwave.artifacts import write_figure
from specwave.layers import figures
from specwave.layers.figures import BLUE, GREY, ORANGE

STYLE = {**figures.STYLE, "axes.spines.left": False}
ROW_INCHES, TALLEST = 0.21, 60.0  # PNG at 200 dpi has room for 2^16 dots; past the tallest, labels are thinned out
NO_BREAK = "\u00a0"  # a space that SVG viewers do not merge with its neighbours


def sweep_figure(path: Path, table: Sequence[Row], title: str) -> list[Path]:
    """`path` without suffix → path.png and path.svg. `table`: what `collate.rows` returns, one row at least."""
    chosen = [row for row in table if _drawable(row)]
    if not chosen and (grid := as_grid(table)):
        return grid_figure(path, grid, measures(table), title)
    head, labels = _labels(table)
    spread = [name for name in ("entropy",) if any(is_number(row.get(name)) for row in chosen)]
    found = {} if chosen else measures(table)
    height = min(TALLEST, 1.25 + ROW_INCHES * (len(table) + 1))
    with matplotlib.rc_context(STYLE):
        width = 4.2 + 2.4 * max(len(found) - 1, bool(chosen)) + 0.07 * len(head)
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title)
        if chosen:
            panels = figure.subplots(
                1, 1 + len(spread), sharey=True, squeeze=False, width_ratios=(2.4, 1)[: 1 + len(spread)]
            )[0]
            _layers(panels[0], table)
            for name, axes in zip(spread, panels[1:], strict=True):
                _dots(axes, table, name, "entropy (nats)")
        else:
            panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
            for (name, label), axes in zip(found.items(), panels, strict=True):
                _dots(axes, table, name, label)
        _job_axis(panels[0], head, labels)
        _crosses(panels[0], table)
        for axes in panels:
            for border in _borders(table):
                axes.axhline(border - 0.5, color=GREY, lw=0.5)
        return write_figure(path, figure)


def _drawable(row: Row) -> bool:
    return row["status"] == "finished" and isinstance(row.get("layers"), list) and is_number(row.get("num_layers"))


# ---------------------------------------------------------------- jobs as rows


def _labels(table: Sequence[Row]) -> tuple[str, list[str]]:
    """(head, one label per job) in columns for a monospaced font: last parts of the swept keys, their values."""
    keys = swept_of(table) or ["job"]
    heads = [key.rpartition(".")[2].rpartition("/")[2] for key in keys]
    if len(set(heads)) < len(heads):
        heads = keys
    lines = [heads, *([short(row[key]) for key in keys] for row in table)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(keys))]
    head, *labels = ["  ".join(map(str.rjust, line, widths)).replace(" ", NO_BREAK) for line in lines]
    return head, labels


def _borders(table: Sequence[Row]) -> list[int]:
    """Rows at which the first of several swept keys takes another value."""
    keys = swept_of(table)
    if len(keys) < 2:
        return []
    return [place for place in range(1, len(table)) if table[place][keys[0]] != table[place - 1][keys[0]]]


def _job_axis(axes: Axes, head: str, labels: Sequence[str]) -> None:
    """First job on top, the names of the swept keys above it."""
    step = math.ceil(len(labels) * ROW_INCHES / TALLEST)
    places = range(0, len(labels), step)
    axes.set_ylim(len(labels) - 0.4, -1.6)
    axes.set_yticks([-1, *places], [head, *(labels[place] for place in places)], fontfamily="monospace", fontsize=8)
    axes.tick_params(axis="y", length=0)


def _crosses(axes: Axes, table: Sequence[Row]) -> None:
    """A cross and a word for every job that has no result to show."""
    across = axes.get_yaxis_transform()  # x as a share of the axis, y in rows
    for place, row in enumerate(table):
        if row["status"] != "finished":
            axes.plot(0.02, place, "X", color=ORANGE, markersize=7, markeredgecolor="white", transform=across, zorder=4)
            word = axes.text(0.045, place, row["status"], color=ORANGE, fontsize=8, va="center", transform=across)
            word.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # no line through it


# ---------------------------------------------------------------- panels


def _layers(axes: Axes, table: Sequence[Row]) -> None:
    """A line over the depth of every job's model, a dot on each chosen layer."""
    for place, row in enumerate(table):
        if _drawable(row):
            axes.plot([0, row["num_layers"] - 1], [place, place], color=GREY, lw=0.6, alpha=0.6, zorder=1)
            axes.plot(row["layers"], [place] * len(row["layers"]), "o", color=BLUE, markersize=5.5, zorder=3)
    deepest = max(row["num_layers"] for row in table if _drawable(row))
    axes.set_xlim(-0.7, deepest - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.grid(axis="x", color=GREY, alpha=0.25, lw=0.5)
    axes.set_xlabel("layer (output of the block)")


def _dots(axes: Axes, table: Sequence[Row], name: str, label: str) -> None:
    """The value of every finished job that has one."""
    done = [(row.get(name), place) for place, row in enumerate(table) if row["status"] == "finished"]
    found = [(value, place) for value, place in done if is_number(value)]
    values: list[Any] = [value for value, _ in found]
    axes.plot(values, [place for _, place in found], "D", color=BLUE, markersize=4.5, zorder=3)
    for place in range(len(table)):
        axes.axhline(place, color=GREY, alpha=0.25, lw=0.5, zorder=1)
    axes.tick_params(axis="y", length=0)
    if not found:
        axes.set(xticks=[], xlabel="no job has finished")
        return
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.grid(axis="x", color=GREY, alpha=0.25, lw=0.5)
    axes.set_xlabel(label)


def candidates_figure(path: Path, beam: Sequence[Row], title: str) -> list[Path]:
    """Sets trained together (`layers`, `tau_hat`, `entropy`, `origin`), best first: their layers, τ̂ and entropy."""
    height = 1.25 + ROW_INCHES * 1.6 * (len(beam) + 1)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        figure.suptitle(title)
        left, right = figure.subplots(1, 2, sharey=True)
        for place, entry in enumerate(beam):
            for axes in (left, right):
                axes.axhline(place, color=GREY, alpha=0.25, lw=0.5, zorder=1)
            left.plot(entry["tau_hat"], place, "D", color=ORANGE if place == 0 else BLUE, markersize=5, zorder=3)
            right.plot(entry["entropy"], place, "o", color=ORANGE if place == 0 else BLUE, markersize=5, zorder=3)
        labels = [f"{','.join(map(str, entry['layers']))} ({', '.join(entry['origin'])})" for entry in beam]
        left.set_yticks(range(len(beam)), labels, fontsize=8)
        left.set_ylim(len(beam) - 0.4, -0.6)
        for axes, label in ((left, "τ̂ on held-out prompts"), (right, "entropy (nats)")):
            axes.tick_params(axis="y", length=0)
            axes.margins(x=0.12)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
            axes.ticklabel_format(axis="x", useOffset=False)
            axes.grid(axis="x", color=GREY, alpha=0.25, lw=0.5)
            axes.set_xlabel(label)
        return write_figure(path, figure)
