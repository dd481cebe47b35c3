"""The picture of a sweep of two keys: a grid, a value of the first key for each row and of the second for each column.

Every measure is a panel of its own. Values stand in their cells, so that a print without colours loses nothing; cividis
grows lighter all the way, in grey and to colour-blind readers too. A job without a result is a hatched cell and a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from specwave.app.collate import Row, facts_of, first_number, is_number, short, swept_of
from specwave.artifacts import FIGURE_STYLE, write_figure
from specwave.layers.figures import GREY, ORANGE

STYLE: dict[Any, Any] = {**FIGURE_STYLE, "axes.spines.left": False, "axes.spines.bottom": False}
MEASURES = {  # what an evaluation notes, the deciding one first
    "speedup": "speedup over plain decoding",
    "tau": "τ (tokens per verification)",
    "tokens_per_second": "tokens/s",
}
LARGEST_GRID = 40  # rows or columns; beyond, values would not fit their cells
BESIDE = 8  # panels with more columns stand one below the other
CELL_INCHES = (0.62, 0.3)
LETTER_INCHES = 0.075


@dataclass(frozen=True)
class Grid:
    """Two swept keys, their values in the order of the jobs, and the job of each pair that has one."""

    keys: tuple[str, str]
    rows: list[str | None]
    columns: list[str | None]
    cells: Mapping[tuple[str | None, str | None], Row]


def as_grid(table: Sequence[Row]) -> Grid | None:
    """The table of a sweep as a grid; None where it is none: other than two swept keys, a pair that several jobs have,
    fewer jobs than half of the pairs, or more values than a picture holds. A job whose record cannot be read has no
    place in it."""
    keys = swept_of(table)
    if len(keys) != 2:
        return None
    placed = [row for row in table if row["status"] != "unreadable"]
    cells = {(row[keys[0]], row[keys[1]]): row for row in placed}
    rows, columns = (list(dict.fromkeys(row[key] for row in placed)) for key in keys)
    several = min(len(rows), len(columns)) > 1 and max(len(rows), len(columns)) <= LARGEST_GRID
    if not several or len(cells) < len(placed) or 2 * len(cells) < len(rows) * len(columns):
        return None
    return Grid((keys[0], keys[1]), rows, columns, cells)


def measures(table: Sequence[Row]) -> dict[str, str]:
    """Fact → the title of its panel: an evaluation's measures, else the first number that a job noted."""
    noted = [name for name in facts_of(table) if any(is_number(row[name]) for row in table)]
    found = {name: title for name, title in MEASURES.items() if name in noted}
    return found or {(name := first_number(table)): name}


def grid_figure(path: Path, grid: Grid, panels: Mapping[str, str], title: str) -> list[Path]:
    """`path` without suffix → path.png and path.svg, a panel for each of `panels` (fact → title)."""
    count, beside = len(panels), len(grid.columns) <= BESIDE
    labels = [max(len(short(value)) for value in values) * LETTER_INCHES for values in (grid.rows, grid.columns)]
    width = max(2.6, CELL_INCHES[0] * len(grid.columns)) + 0.9
    height = CELL_INCHES[1] * len(grid.rows) + labels[1] + 0.9
    shape = (1, count) if beside else (count, 1)
    size = (labels[0] + 0.4 + width * shape[1], 0.4 + height * shape[0])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title)
        every = figure.subplots(*shape, sharey=True, squeeze=False).flatten()
        for axes, (name, heading) in zip(every, panels.items(), strict=True):
            _panel(figure, axes, grid, name, heading)
        for axes in every[:1] if beside else every:
            axes.set_ylabel(grid.keys[0])
        return write_figure(path, figure)


def _panel(figure: Figure, axes: Axes, grid: Grid, name: str, heading: str) -> None:
    """One measure: colours, the numbers they stand for, and a word where there is none."""
    values: list[list[float]] = [[_value(grid, row, column, name) for column in grid.columns] for row in grid.rows]
    known = [value for line in values for value in line if is_number(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    scale = Normalize(low, high if high > low else low + 1e-9 + abs(low) * 1e-6)
    image = axes.imshow(values, cmap="cividis", norm=scale, aspect="auto", interpolation="nearest")
    if high > low:
        figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            if is_number(value):
                ink = "white" if scale(value) < 0.5 else "black"
                best = "bold" if value == high and high > low else "normal"
                axes.text(x, y, _digits(value), ha="center", va="center", color=ink, fontsize=8, fontweight=best)
            else:
                _blank(axes, x, y, grid.cells.get((grid.rows[y], grid.columns[x])))
    for border in range(1, len(grid.rows)):
        axes.axhline(border - 0.5, color="white", lw=1.5)
    for border in range(1, len(grid.columns)):
        axes.axvline(border - 0.5, color="white", lw=1.5)
    axes.set_title(heading)
    axes.set_xlabel(grid.keys[1])
    axes.set_xticks(range(len(grid.columns)), [short(value) for value in grid.columns], fontsize=8)
    axes.tick_params(length=0)
    if max(len(short(value)) for value in grid.columns) * LETTER_INCHES > CELL_INCHES[0]:
        axes.tick_params(axis="x", rotation=90)
    axes.set_yticks(range(len(grid.rows)), [short(value) for value in grid.rows], fontsize=8)


def _value(grid: Grid, row: str | None, column: str | None, name: str) -> float:
    """A finished job's number; nan where there is none, whatever a failed one had noted of a part."""
    job = grid.cells.get((row, column))
    value = job.get(name) if job is not None and job["status"] == "finished" else None
    return float(value) if value is not None and is_number(value) else float("nan")


def _digits(value: float) -> str:
    """Three digits, as many as a cell holds: 0.900, 30.0, 1250."""
    return f"{value:.0f}" if 99.95 <= abs(value) < 1e5 else f"{value:#.3g}"


def _blank(axes: Axes, x: int, y: int, job: Row | None) -> None:
    """A cell without a number: how its job ended, in a hatch that no value has; – where there is no such job."""
    if job is None or job["status"] == "finished":
        axes.text(x, y, "–", ha="center", va="center", color=GREY, fontsize=8)
        return
    corner = (x - 0.5, y - 0.5)
    axes.add_patch(Rectangle(corner, 1, 1, facecolor="white", edgecolor=ORANGE, hatch="////", lw=0, alpha=0.5))
    word = axes.text(x, y, f"✕ {job['status']}", ha="center", va="center", color=ORANGE, fontsize=7)
    word.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
