"""The two pictures of a selection, as PNG (200 dpi) and SVG: entropy over depth, CKA with its transitions.

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

from specwave.artifacts import write_figure

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#6B6B6B"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "figure.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "specwave",  # the same picture gives the same file
}
ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2, "borderaxespad": 0.1}


def _depth_axis(axes: Axes, num_layers: int) -> None:
    axes.set_xlim(-0.5, num_layers - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axes.set_xlabel("layer (output of the block)")


def entropy_figure(
    path: Path, layer_entropy: Tensor, prompt_entropy: Tensor, chosen: Sequence[int], title: str, tokens: int
) -> list[Path]:
    """Entropy [N] over depth with the chosen layers marked; below, its spread over prompts [P, N] (if P ≥ 2)."""
    num_layers, spread = len(layer_entropy), len(prompt_entropy) >= 2
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 5.0 if spread else 3.2), layout="constrained")
        panels = figure.subplots(2 if spread else 1, 1, sharex=True, squeeze=False)[:, 0]
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
        if spread:
            low, middle, high = (prompt_entropy.quantile(q, dim=0).tolist() for q in (0.1, 0.5, 0.9))
            panels[1].fill_between(
                range(num_layers),
                low,
                high,
                color=BLUE,
                alpha=0.2,
                lw=0,
                label=f"10–90 % of {len(prompt_entropy)} prompts",
            )
            panels[1].plot(middle, color=BLUE, label="median")
            panels[1].set_ylabel(f"entropy (nats),\n{tokens} tokens of a prompt")
            panels[1].legend(**ABOVE)
        for panel in panels:
            for layer in chosen:
                panel.axvline(layer, color=ORANGE, lw=0.8, ls=":", zorder=0)
        _depth_axis(panels[-1], num_layers)
        return write_figure(path, figure)


def cka_figure(path: Path, cka: Tensor, delta: Tensor, peaks: Sequence[int], title: str) -> list[Path]:
    """CKA [N, N] with the transitions [N−1] under it on the same axis; borders (peaks) marked in both."""
    num_layers = len(cka)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 6.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, height_ratios=(3.4, 1), sharex=True)
        image = top.imshow(cka.numpy(), cmap="cividis", vmax=1, aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=top, label="linear CKA", fraction=0.05)
        top.set(title=title, ylabel="layer")
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
        _depth_axis(bottom, num_layers)
        return write_figure(path, figure)
