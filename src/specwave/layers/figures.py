"""Pictures of the geometry, as PNG (200 dpi) and SVG: entropy over depth with its spread, CKA with its transitions.

Colours are Okabe & Ito's and cividis, which colour-blind readers tell apart; marks differ in shape too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from specwave.artifacts import FIGURE_STYLE, write_figure
from specwave.layers.cka import borders, transitions

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6B6B6B"
STYLE: dict[Any, Any] = FIGURE_STYLE
ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3, "borderaxespad": 0.1}


def depth_axis(axes: Axes, num_layers: int) -> None:
    axes.set_xlim(-0.5, num_layers - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.set_xlabel("layer (output of the block)")


def entropy_figure(
    path: Path,
    layer_entropy: Tensor,
    spread: Tensor,
    chosen: Sequence[int],
    title: str,
    tokens: int,
    cuts: Sequence[dict[str, Any]] = (),
) -> list[Path]:
    """Entropy [N] over depth with the chosen layers marked; below, its spread over prompts (figure 4 of the paper).

    Args:
        spread: [3, P, N] of filtered, unfiltered and random token states, `tokens` of each; drawn if P ≥ 2.
        cuts: rows of `analysis.variance_cuts`, written under the spread.
    """
    num_layers, spread_out = len(layer_entropy), spread.shape[1] >= 2
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 5.6 if spread_out else 3.2), layout="constrained")
        panels = figure.subplots(2 if spread_out else 1, 1, sharex=True, squeeze=False)[:, 0]
        values = layer_entropy.tolist()
        panels[0].plot(values, color=BLUE, marker=".", label="one layer")
        panels[0].plot(
            list(chosen), [values[layer] for layer in chosen], "D", color=ORANGE, markersize=7, label="chosen", zorder=3
        )
        for layer in chosen:
            panels[0].annotate(str(layer), (layer, values[layer]), (0, 7), textcoords="offset points", ha="center")
        figure.suptitle(title)
        panels[0].set_ylabel("entropy (nats),\nblock means")
        panels[0].margins(y=0.12)
        panels[0].legend(**ABOVE)
        if spread_out:
            _spread_panel(panels[1], spread, tokens, cuts)
        for panel in panels:
            for layer in chosen:
                panel.axvline(layer, color=ORANGE, lw=0.8, ls=":", zorder=0)
        depth_axis(panels[-1], num_layers)
        return write_figure(path, figure)


def _spread_panel(axes: Axes, spread: Tensor, tokens: int, cuts: Sequence[dict[str, Any]]) -> None:
    places = range(spread.shape[-1])
    names = ("filtered", "unfiltered", "random")
    for kind, colour, dash, name in zip(spread, (BLUE, GREY, GREEN), ("-", "--", ":"), names, strict=True):
        low, middle, high = (kind.quantile(q, dim=0).tolist() for q in (0.1, 0.5, 0.9))
        if name != "random":  # a third band would hide the other two
            axes.fill_between(places, low, high, color=colour, alpha=0.18, lw=0)
        axes.plot(places, middle, color=colour, ls=dash, label=name)
    axes.set_ylabel(f"entropy (nats), {tokens} tokens\nof a prompt: median, 10–90 %")
    axes.legend(title=f"{spread.shape[1]} prompts", alignment="left", **ABOVE)
    for cut in cuts:
        first, last = cut["layers"]
        text = f"{cut['part']}\n{-cut['cut']:+.0%} ({-cut['cut_random']:+.0%})"
        axes.text((first + last) / 2, 0.02, text, transform=axes.get_xaxis_transform(), ha="center", color=GREY, size=8)
        if first:
            axes.axvline(first - 0.5, color=GREY, lw=0.5)
    if cuts:
        note = "below: variance over prompts, filtered\n(random) against unfiltered"
        axes.text(1.0, 1.02, note, transform=axes.transAxes, ha="right", va="bottom", color=GREY, size=8)
        low, high = axes.get_ylim()
        axes.set_ylim(low - 0.22 * (high - low), high)


def cka_figure(path: Path, matrices: dict[str, Tensor], title: str) -> list[Path]:
    """CKA [N, N] of each named estimator with its transitions [N−1] under it (figures 5 and 6); peaks marked."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.0 * len(matrices), 6.2), layout="constrained")
        figure.suptitle(title)
        columns = figure.subplots(2, len(matrices), height_ratios=(3.4, 1), sharex=True, squeeze=False)
        for (name, cka), (top, bottom) in zip(matrices.items(), columns.T, strict=True):
            _cka_column(figure, top, bottom, name, cka)
        return write_figure(path, figure)


def _cka_column(figure: Figure, top: Axes, bottom: Axes, name: str, cka: Tensor) -> None:
    num_layers, delta = len(cka), transitions(cka)
    peaks = borders(delta)
    image = top.imshow(cka.numpy(), cmap="cividis", vmax=1, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=top, label="linear CKA", fraction=0.05)
    top.set(title=name, ylabel="layer")
    top.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    # δ_l belongs between l and l+1, so it is drawn there.
    places = [index + 0.5 for index in range(num_layers - 1)]
    values = delta.tolist()
    bottom.plot(places, values, color=BLUE, marker=".")
    bottom.plot([places[peak] for peak in peaks], [values[peak] for peak in peaks], "v", color=ORANGE, markersize=8)
    bottom.set(ylabel="transition δ", ylim=(0, 1.15 * max(values, default=1.0) or 1.0))
    for peak in peaks:
        for colour, dash in (("black", "-"), ("white", "--")):  # seen on dark and on bright cells
            top.axvline(places[peak], color=colour, lw=1, ls=dash)
            top.axhline(places[peak], color=colour, lw=1, ls=dash)
        bottom.axvline(places[peak], color=ORANGE, lw=0.8, ls=":", zorder=0)
        bottom.annotate(
            f"{peak}|{peak + 1}", (places[peak], values[peak]), (7, 0), textcoords="offset points", color=GREY
        )
    depth_axis(bottom, num_layers)
