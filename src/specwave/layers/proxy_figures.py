"""The picture of the proxy: all sets by what they foretell, beside their entropy; some scored whole, beside chance.

The style is that of `figures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from specwave.artifacts import write_figure
from specwave.layers.analysis import spearman
from specwave.layers.figures import ABOVE, BLUE, GREEN, GREY, ORANGE, STYLE
from specwave.layers.foresight import resampled
from specwave.layers.groups import Layers
from specwave.layers.proxy import RESAMPLES, Foretold
from specwave.layers.ranking import Ranking
from specwave.layers.search_figures import braces

MARKS = ("D", "s", "^", "v", "o", "P", "X")


def proxy_figure(
    path: Path, found: Foretold, ranking: Ranking | None, named: Mapping[str, Layers], title: str
) -> list[Path]:
    """Left: rough agreement of all sets over their entropy (a histogram where those of this size were not ranked).
    Right: agreement of named sets on all steps with the interval over conversations, and the next token's alone."""
    size = found.sets.shape[1]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.8), layout="constrained")
        figure.suptitle(title)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        if ranking is not None and ranking.sets.shape[1] == size:
            _clouds(left, found, ranking, named)
        else:
            left.hist(found.rough.numpy(), bins=60, color=BLUE, alpha=0.35)
            left.set(xlabel="rough agreement", ylabel="sets")
            left.xaxis.set_major_formatter(PercentFormatter(1))
        _scored(right, found, named)
        return write_figure(path, figure)


def _clouds(axes: Axes, found: Foretold, ranking: Ranking, named: Mapping[str, Layers]) -> None:
    cloud: dict[str, Any] = {"color": BLUE, "alpha": 0.35, "markeredgewidth": 0, "rasterized": True}
    axes.plot(ranking.entropy.numpy(), found.rough.numpy(), ".", markersize=3, **cloud)
    place = {layers: number for number, layers in enumerate(map(tuple, found.sets.tolist()))}
    for number, (name, layers) in enumerate(named.items()):
        if layers in place:
            at = place[layers]
            axes.plot(ranking.entropy[at].item(), found.rough[at].item(), MARKS[number % len(MARKS)],
                      color=ORANGE if number == 0 else GREEN, label=f"{name} {braces(layers)}")  # fmt: skip
    rank = spearman(ranking.entropy, found.rough)
    axes.set(xlabel="entropy (nats)", ylabel=f"agreement on {found.shortlist} tokens")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_title(f"all {len(found.sets):,} sets: Spearman's {rank:+.2f}", pad=36)
    axes.legend(**ABOVE | {"ncols": 2})


def _scored(axes: Axes, found: Foretold, named: Mapping[str, Layers]) -> None:
    conversation_S = found.foresight.steps.conversations
    rows = {f"{name}\n{braces(layers)}": layers for name, layers in named.items()} | {"next token alone": ()}
    for place, layers in enumerate(rows.values()):
        low, _, high = resampled(found.hits(layers), conversation_S, RESAMPLES, found.seed)
        colour = ORANGE if place == 0 else GREY if not layers else GREEN
        axes.plot([low, high], [place, place], color=colour, lw=2)
        axes.plot(found.agreement(layers), place, MARKS[place % len(MARKS)], color=colour)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("agreement on all steps, 95 %\nover conversations")
