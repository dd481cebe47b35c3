"""Pictures of a sweep over its keys: a line for one, parallel coordinates for three and more.

What is drawn is the first of OUTCOMES that the jobs noted, else their first number. Jobs without it stay out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from specwave.app.collate import Row, facts_of, is_number, swept_of
from specwave.app.sweep_tables import SEED
from specwave.artifacts import write_figure
from specwave.benchmark.bootstrap import mean_interval
from specwave.layers.figures import BLUE, GREY, ORANGE, STYLE

OUTCOMES = ("tau", "tau_hat", "entropy")


def keys_figure(path: Path, table: Sequence[Row], title: str) -> list[Path]:
    """`path` without suffix → path.png and path.svg; [] where neither picture fits: two keys, or nothing to draw."""
    keys = [key for key in swept_of(table) if key != SEED]
    done = [row for row in table if row["status"] == "finished"]
    name = outcome(done)
    rows = [row for row in done if name is not None and all(row[key] is not None for key in keys)]
    if name is None or len(rows) < 2:
        return []
    with matplotlib.rc_context(STYLE):
        if len(keys) == 1 and all(_as_number(row[keys[0]]) is not None for row in rows):
            figure = _line(rows, keys[0], name)
        elif len(keys) > 2:
            figure = _parallel(rows, keys, name)
        else:
            return []
        figure.suptitle(title)
        return write_figure(path, figure)


def outcome(done: Sequence[Row]) -> str | None:
    """The fact to draw: a number in every finished job."""
    shared = [name for name in facts_of(done) if all(is_number(row[name]) for row in done)]
    return next((name for name in (*OUTCOMES, *shared) if name in shared), None)


def _as_number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _line(rows: Sequence[Row], key: str, name: str) -> Figure:
    """Outcome over the key: every job a dot, the means joined, their intervals over seeds as bars."""
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(float(row[key]), []).append(row[name])
    places = sorted(found)
    means = [sum(found[place]) / len(found[place]) for place in places]
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(places, means, color=BLUE, marker="o", markersize=4.5, zorder=3)
    for place in places:
        axes.plot([place] * len(found[place]), found[place], ".", color=GREY, zorder=2)
        ends = mean_interval(found[place])
        if ends is not None:
            axes.plot([place, place], ends, color=BLUE, lw=1)
    axes.set(xlabel=key, ylabel=name)
    return figure


def _parallel(rows: Sequence[Row], keys: Sequence[str], name: str) -> Figure:
    """An axis for every key and one for the outcome, a line for every job; the best one stands out."""
    scales = [sorted({row[key] for row in rows}, key=_order) for key in keys]
    values = [row[name] for row in rows]
    low, high = min(values), max(values)
    best = values.index(high)
    shades = matplotlib.colormaps["cividis"]
    figure = Figure(figsize=(1.7 * (len(keys) + 1) + 0.8, 3.8), layout="constrained")
    axes = figure.subplots()
    for number, row in sorted(enumerate(rows), key=lambda entry: values[entry[0]]):
        heights = [_height(scale.index(row[key]), len(scale)) for key, scale in zip(keys, scales, strict=True)]
        share = (values[number] - low) / (high - low) if high > low else 0.5
        heights.append(share)
        colour, width = (ORANGE, 2.4) if number == best else (shades(share), 1.1)
        axes.plot(range(len(heights)), heights, color=colour, lw=width, alpha=0.9, zorder=4 if number == best else 2)
    for place, scale in enumerate(scales):
        axes.axvline(place, color=GREY, lw=0.8, zorder=1)
        for number, value in enumerate(scale):
            label = axes.text(place, _height(number, len(scale)), value, fontsize=8, ha="center", va="center", zorder=5)
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85})
    axes.axvline(len(keys), color=GREY, lw=0.8, zorder=1)
    for height, value in ((0.0, low), (1.0, high)):
        axes.text(len(keys) + 0.06, height, f"{value:.4g}", fontsize=8, va="center")
    axes.set_xticks(range(len(keys) + 1), [*keys, name], fontsize=8, rotation=12)
    axes.set(yticks=[], xlim=(-0.4, len(keys) + 0.5), ylim=(-0.08, 1.08))
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _order(value: str) -> tuple[bool, float, str]:
    """Numbers by size before names."""
    number = _as_number(value)
    return number is None, number or 0.0, value


def _height(place: int, count: int) -> float:
    return 0.5 if count == 1 else place / (count - 1)
