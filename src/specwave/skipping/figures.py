"""Pictures of costs and plans, as PNG and SVG: the latency model's fit, what plans skip as contexts grow.

Colours are Okabe & Ito's, which colour-blind readers tell apart; marks differ in shape too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

from specwave.artifacts import FIGURE_STYLE, write_figure
from specwave.skipping.latency import Latency

BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#6B6B6B"
WIDE = 8  # contexts that differ by such a factor stand on a logarithmic axis
STYLE: dict[Any, Any] = {**FIGURE_STYLE, "axes.grid": True, "grid.alpha": 0.25}


def latency_figure(path: Path, costs: Latency, title: str) -> list[Path]:
    """`path` without suffix → path.png and path.svg. Left: sub-layers, medians as marks and the fit as a line; right:
    T(k, n), a line per number of tokens."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.6), layout="constrained")
        figure.suptitle(title, fontsize=10)
        parts, forwards = figure.subplots(1, 2)
        rows = (("attention", costs.attention, costs.attention_fit, BLUE, "o", "-"),
                ("MLP", costs.mlp, costs.mlp_fit, ORANGE, "s", "--"))  # fmt: skip
        for name, seconds, fit, colour, mark, line in rows:
            label = f"{name}, fit within {fit.error:.1%}"
            parts.plot(costs.contexts, [1e3 * one for one in seconds], mark, color=colour, label=label)
            parts.plot(costs.contexts, [1e3 * fit(one) for one in costs.contexts], line, color=colour, linewidth=1)
        parts.plot(costs.contexts, [1e3 * one for one in costs.rest], "^:", color=GREY, label="$t_0$: all the rest")
        parts.set_title("one sub-layer, one token" + ("" if costs.poor is None else " (fit not used)"))
        for size, column in zip(costs.sizes, zip(*costs.forward, strict=True), strict=True):
            shade = 0.25 + 0.75 * costs.sizes.index(size) / max(1, len(costs.sizes) - 1)
            forwards.plot(
                costs.contexts,
                [1e3 * one for one in column],
                marker="D",
                markersize=3,
                color=GREEN,
                alpha=shade,
                label=f"k = {size}",
            )
        forwards.set_title("T(k, n): a forward over k tokens")
        for axes in (parts, forwards):
            axes.set_xlabel("cached tokens n")
            axes.set_ylabel("ms")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xticks(costs.contexts, [f"{context:,}" for context in costs.contexts])
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        parts.legend(fontsize=7)
        forwards.legend(fontsize=7, reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5))  # as the lines lie
        return write_figure(path, figure)


def skipped_figure(path: Path, plans: Sequence[Mapping[str, Any]], title: str) -> list[Path]:
    """What plans skip over the context they were made at: how many attentions and MLPs, and attention's share of them.

    Args:
        plans: rows of plans.jsonl; those that skip nothing count as plain decoding and have no share.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        figure.suptitle(title, fontsize=10)
        counts, shares = figure.subplots(1, 2, sharex=True)
        for name, first, colour, mark in (("attention", 0, BLUE, "o"), ("MLP", 1, ORANGE, "s")):
            skipped = [sum(1 - flag for flag in row["kept"][first::2]) for row in plans]
            counts.plot([row["context"] for row in plans], skipped, mark, color=colour, alpha=0.6, label=name)
        counts.set_ylabel("skipped sub-layers")
        counts.legend()
        some = [row for row in plans if row["skipped_attention_share"] is not None]
        places = [row["context"] for row in some]
        shares.plot(places, [row["skipped_attention_share"] for row in some], "D", color=PINK, alpha=0.6)
        shares.axhline(0.5, color=GREY, linewidth=0.8, linestyle=":")
        shares.set_ylim(-0.03, 1.03)
        shares.set_ylabel("attention's share of them")
        contexts = [row["context"] for row in plans]
        for axes in (counts, shares):
            axes.set_xlabel("tokens of context")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            if max(contexts) >= WIDE * min(contexts):
                axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        counts.yaxis.set_major_locator(MaxNLocator(integer=True))
        return write_figure(path, figure)
