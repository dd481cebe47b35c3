"""Pictures of probes, as PNG and SVG: AUC over depth at both sites, calibration of the chosen one.

Colours are Okabe & Ito's, which colour-blind readers tell apart; marks and lines differ too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specwave.artifacts import FIGURE_STYLE, write_figure
from specwave.copying.judge import Calibration

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6B6B6B"
STYLE: dict[Any, Any] = {**FIGURE_STYLE, "axes.grid": True, "grid.alpha": 0.25}
_SITES = (("attention", "after attention", BLUE, "o", "-"), ("block", "block output", ORANGE, "s", "--"))


def depth_figure(path: Path, rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any], title: str) -> list[Path]:
    """`path` without suffix → path.png and path.svg. AUC on test prompts over layers, with intervals where there are
    some; the chosen probe is marked."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title)
        for site, name, colour, mark, line in _SITES:
            own = [row for row in rows if row["site"] == site]
            layers = [row["layer"] for row in own]
            axes.plot(layers, _numbers(own, "auc"), line, marker=mark, markersize=4, color=colour, label=name)
            ends = _numbers(own, "auc_low"), _numbers(own, "auc_high")
            band = axes.fill_between(layers, *ends, color=colour, alpha=0.15, linewidth=0)
            if not all(map(math.isnan, ends[0])):
                band.set_label(f"{name}, 95 % over templates")
        if chosen["auc"] is not None:
            axes.plot(chosen["layer"], chosen["auc"], "D", color=GREEN, markersize=8, zorder=3, label="chosen")
        axes.set_xlabel("layer")
        axes.set_ylabel("AUC, copied against other tokens")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
        figure.legend(loc="outside lower center", ncols=2)
        return write_figure(path, figure)


def calibration_figure(path: Path, curves: Mapping[str, Calibration], threshold: float, title: str) -> list[Path]:
    """How often tokens of a probability were copied, a line per set of tokens; below, how many there are.

    The classes weigh alike in training, so a probe says more than comes where copies are rare.
    """
    marks = ((BLUE, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", ":"))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.8, 5.0), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        upper.set_title(title)
        upper.plot([0, 1], [0, 1], ":", color=GREY, linewidth=0.8)
        for (name, curve), (colour, mark, line) in zip(curves.items(), marks, strict=False):
            label = f"{name}, error {curve.error:.3f}"
            upper.plot(curve.said, curve.came, line, marker=mark, markersize=4, color=colour, label=label)
            edges = [place / len(curve.counts) for place in range(len(curve.counts) + 1)]
            lower.stairs(curve.counts, edges, linestyle=line, color=colour)
        for axes in (upper, lower):
            axes.axvline(threshold, color=GREY, linewidth=0.8, linestyle="--")
        upper.set_ylabel("share that is copied")
        upper.set_ylim(-0.03, 1.03)
        lower.set_ylabel("tokens")
        lower.set_yscale("symlog")
        lower.set_ylim(0, 2 * max(float(curve.counts.max()) for curve in curves.values()))
        lower.set_xlabel("probability (dashed: threshold)")
        figure.legend(loc="outside lower center")
        return write_figure(path, figure)


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [math.nan if row[name] is None else row[name] for row in rows]
