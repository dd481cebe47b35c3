"""Pictures of a search and its answer: beam frontier, partners, ranking of all sets, stability. PNG and SVG.

The style is that of `figures.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from specwave.artifacts import write_figure
from specwave.layers.analysis import Standing
from specwave.layers.figures import ABOVE, BLUE, GREEN, GREY, ORANGE, STYLE, depth_axis
from specwave.layers.groups import Group
from specwave.layers.ranking import Ranking
from specwave.layers.search import Beams
from specwave.layers.stability import Stability


def braces(layers: Sequence[int]) -> str:
    return "{" + ",".join(map(str, layers)) + "}"


def frontier_figure(
    path: Path, steps: Beams, rules: Sequence[Standing], optimum: Group | None, title: str
) -> list[Path]:
    """The beam at every size, each set tied to its best parent; the winner's ancestry stands out (figure 7)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        for size, (before, after) in enumerate(itertools.pairwise(steps), start=1):
            for group in after:
                parent = _parent(group, before)
                if parent is not None:
                    axes.plot([size, size + 1], [parent.entropy, group.entropy], color=GREY, lw=0.6, alpha=0.6)
        for size, beam in enumerate(steps, start=1):
            axes.plot([size] * len(beam), [group.entropy for group in beam], ".", color=BLUE)
        winner, line = steps[-1][0], []
        for size in range(len(steps), 0, -1):
            line.append((size, winner))
            parent = _parent(winner, steps[size - 2]) if size > 1 else None
            if parent is None:
                break
            winner = parent
        axes.plot([size for size, _ in line], [group.entropy for _, group in line], "D-", color=ORANGE, label="chosen")
        for size, group in line:
            axes.annotate(braces(group.layers), (size, group.entropy), (6, 6), textcoords="offset points")
        last, path_sets = len(steps), {group.layers for _, group in line}
        for standing in rules:
            own = standing.group
            if own.layers in path_sets or len(own.layers) > last:
                continue  # marked already, or beyond the axis
            axes.plot(len(own.layers), own.entropy, "x", color=GREEN)
            text = f"{standing.name} {braces(own.layers)}"
            axes.annotate(
                text, (len(own.layers), own.entropy), (7, -3), color=GREEN, textcoords="offset points", size=8
            )
        if optimum is not None:
            axes.axhline(
                optimum.entropy, color=GREY, lw=0.8, ls=":", label=f"best of all sets {braces(optimum.layers)}"
            )
        axes.set(xlabel="layers in the set", ylabel="entropy (nats)", xlim=(0.8, last + 0.9))
        axes.set_title(title, pad=18)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(y=0.1)
        axes.legend(**ABOVE)
        return write_figure(path, figure)


def _parent(group: Group, beam: Sequence[Group]) -> Group | None:
    """The best set of the beam that the group widens."""
    return next((parent for parent in beam if set(parent.layers) < set(group.layers)), None)


def partners_figure(path: Path, gains: Tensor, partners: Sequence[int], title: str) -> list[Path]:
    """Gain [N, N] of adding a layer to a seed layer; each seed's best partner marked (figure 3)."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 4.8), layout="constrained")
        axes = figure.subplots()
        edge = gains.abs().max().item() or 1.0
        image = axes.imshow(gains.numpy(), cmap="PuOr", vmin=-edge, vmax=edge, interpolation="nearest")
        figure.colorbar(image, ax=axes, label="entropy gained (nats)", fraction=0.05)
        axes.plot(partners, range(len(partners)), "o", markerfacecolor="white", markeredgecolor="black", markersize=5,
                  label="best partner")  # fmt: skip
        depth_axis(axes, len(gains))
        axes.set(title=title, xlabel="layer added", ylabel="seed layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.1)
        axes.set_title(title, pad=20)
        return write_figure(path, figure)


def ranking_figure(path: Path, ranking: Ranking, named: Sequence[Standing], title: str) -> list[Path]:
    """The entropies of all sets as a histogram, and where named sets stand in it."""
    marks = ("D", "s", "^", "v", "o", "P", "X")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.hist(ranking.entropy.numpy(), bins=60, color=BLUE, alpha=0.35)
        shown = [standing for standing in named if standing.rank is not None]
        for place, standing in enumerate(shown):
            colour = ORANGE if place == 0 else GREY
            height = 0.92 - 0.09 * place
            axes.axvline(standing.group.entropy, 0, height, color=colour, lw=1)
            label = f"{standing.name} {braces(standing.group.layers)}: {standing.rank:,} of {len(ranking):,}"
            axes.plot(standing.group.entropy, height, marks[place % len(marks)], color=colour, label=label,
                      transform=axes.get_xaxis_transform())  # fmt: skip
        axes.set(title=title, xlabel="entropy (nats)", ylabel="sets")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.06), borderaxespad=0.1)
        axes.set_title(title, pad=18 + 14 * len(shown))
        return write_figure(path, figure)


def stability_figure(path: Path, found: Sequence[Stability], title: str) -> list[Path]:
    """How often each layer is chosen under resampling, and the interval of the gap to the fixed set."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 4.4), layout="constrained")
        top, bottom = figure.subplots(2, 1, height_ratios=(3, 1))
        width = 0.8 / len(found)
        for place, (own, colour) in enumerate(zip(found, (BLUE, ORANGE), strict=False)):
            shift = (place - (len(found) - 1) / 2) * width
            label = f"{own.units} {own.over}: {braces(own.chosen)} in {own.share:.0%}"
            hatch = None if place == 0 else "////"
            places = [layer + shift for layer in range(len(own.layer_share))]
            top.bar(places, own.layer_share, width, color=colour, alpha=0.75, hatch=hatch, label=label)
            low, middle, high = own.gap
            bottom.plot([low, high], [place, place], color=colour, lw=2)
            bottom.plot(middle, place, "D", color=colour)
        for layer in found[0].chosen:
            top.axvline(layer, color=GREY, lw=0.8, ls=":", zorder=0)
        top.yaxis.set_major_formatter(PercentFormatter(1))
        top.set(ylabel="resamples that\nchoose the layer", ylim=(0, 1.02))
        depth_axis(top, len(found[0].layer_share))
        top.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.1)
        figure.suptitle(title)
        bottom.axvline(0, color=GREY, lw=0.8)
        bottom.set_yticks(range(len(found)), [own.over for own in found])
        bottom.set_ylim(len(found) - 0.5, -0.5)
        bottom.set_xlabel(f"entropy gap to {found[0].against_name} {braces(found[0].against)} (nats), median and 95 %")
        return write_figure(path, figure)
