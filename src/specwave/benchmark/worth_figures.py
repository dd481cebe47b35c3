"""The picture of a study of acceptance: τ against every predictor, a panel each; in the last one the same sets under
another seed, which is what no predictor can foretell.

Sizes of sets differ in colour and mark, so it can be read in print without colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specwave.artifacts import write_figure
from specwave.benchmark.worth import ONE_SIZE, OUTCOMES, PREDICTORS, Estimate, Predictor, Study
from specwave.benchmark.worth_text import signed
from specwave.layers.figures import BLUE, GREEN, GREY, ORANGE, STYLE

LOOKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), ("#CC79A7", "D"), ("#E69F00", "v"))  # by rank of the size
NAMED = ("eagle3", "eagle2")  # rules whose points are named


def worth_figure(path: Path, study: Study, found: Sequence[Estimate], outcome: str, title: str) -> list[Path]:
    """`path` without suffix → path.png and path.svg."""
    shown = [one for one in PREDICTORS if study.predictor(one.name)]
    own = {one.predictor.name: one for one in found if one.outcome == outcome and one.scope == ONE_SIZE}
    columns = min(4, len(shown) + 1)
    rows = -(-(len(shown) + 1) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2.45 * columns, 2.55 * rows + 0.5), layout="constrained")
        figure.suptitle(f"{title}\nSpearman's ρ among sets of one size (95 %); bars: standard deviation between seeds")
        panels = figure.subplots(rows, columns, squeeze=False)
        flat = list(panels.flat)
        for axes, predictor in zip(flat, shown, strict=False):
            _panel(axes, study, predictor, outcome, own.get(predictor.name))
            axes.sharey(flat[0])
            axes.tick_params(labelleft=axes in panels[:, 0])
        for axes in panels[:, 0]:
            axes.set_ylabel(OUTCOMES[outcome])
        _seeds(flat[len(shown)], study, outcome)
        for axes in flat[len(shown) + 1 :]:
            axes.axis("off")
        handles, labels = flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        return write_figure(path, figure)


def _looks(study: Study, size: int) -> tuple[str, str]:
    return LOOKS[sorted(set(study.sizes)).index(size) % len(LOOKS)]


def _panel(axes: Axes, study: Study, predictor: Predictor, outcome: str, own: Estimate | None) -> None:
    """Points with the standard deviation between seeds as bars; the common slope through each size's mean."""
    told, figures = study.predictor(predictor.name), study.outcomes[outcome].values
    noise = study.noise(outcome)
    for size in sorted(set(study.sizes)):
        places = [place for place in told if study.sizes[place] == size]
        if not places:
            continue
        colour, mark = _looks(study, size)
        x, y = np.array([told[place] for place in places]), figures[places]
        bars = None if noise is None else noise.deviation
        axes.errorbar(
            x, y, bars, fmt=mark, color=colour, markersize=4.5, markeredgecolor="white", markeredgewidth=0.5,
            elinewidth=0.8, label=f"m = {size}",
        )  # fmt: skip
        if own is not None and len(places) > 1:
            ends = np.array([x.min(), x.max()])
            line = y.mean() + own.found.slope.value * (ends - x.mean())
            axes.plot(ends, line, color=colour, lw=1.2, alpha=0.8)
    for place in told:
        name = next((rule for rule in NAMED if rule in study.sets[place].origin), None)
        if name is not None:
            axes.annotate(
                name, (told[place], figures[place]), xytext=(4, 4), textcoords="offset points", fontsize=6.5, color=GREY
            )
    axes.set_xlabel(predictor.label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    if own is not None and own.found.spearman.interval is not None:
        low, high = (signed(end, 2) for end in own.found.spearman.interval)
        axes.set_title(f"ρ {signed(own.found.spearman.value, 2)}  ({low} to {high})", fontsize=8.5)


def _seeds(axes: Axes, study: Study, outcome: str) -> None:
    """The sets that were trained with several seeds, against the first one."""
    noise = study.noise(outcome)
    if noise is None:
        axes.axis("off")
        return
    table = np.array(study.by_seed(outcome))
    for number in range(1, table.shape[1]):
        for row, place in zip(table, study.repeated, strict=True):
            colour, mark = _looks(study, study.sizes[place])
            axes.plot(row[0], row[number], mark, color=colour, markersize=4.5, markeredgecolor="white")
    ends = [table.min(), table.max()]
    axes.plot(ends, ends, color=GREY, lw=0.8, ls="--")
    axes.set_xlabel(f"{OUTCOMES[outcome]}, seed {study.first}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.set_ylabel(f"seed {', '.join(map(str, study.seeds[1:]))}")
    axes.set_title(f"the same sets again: ±{noise.deviation:.3f}", fontsize=8.5)
