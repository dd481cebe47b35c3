"""The picture of a training run: loss, a_0 and τ̂ over the tokens seen, one line per drafter.

Colours are Okabe & Ito's, which colour-blind readers tell apart; line styles and marks differ too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from specwave.artifacts import FIGURE_STYLE, write_figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKS, LINES = "osD^vPX", ("-", "--", "-.", ":")
PANELS = {"loss": "loss, nats", "a_0": "$a_0$: first draft right", "tau_hat": r"$\hat\tau$: tokens per round"}
STYLE: dict[Any, Any] = {**FIGURE_STYLE, "axes.grid": True, "grid.alpha": 0.25}


def training_figure(path: Path, rows: Sequence[Mapping[str, float]], drafters: Sequence[str], title: str) -> list[Path]:
    """`path` without suffix → path.png and path.svg. Thin: training batches; thick with marks: held-out prompts."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        figure.suptitle(title, fontsize=10)
        for axes, (key, label) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
            for index, name in enumerate(drafters):
                colour, line = COLOURS[index % len(COLOURS)], LINES[index % len(LINES)]
                points = [(row["tokens"], row[f"{name}/{key}"]) for row in rows if f"{name}/{key}" in row]
                held = [(row["tokens"], row[f"{name}/val_{key}"]) for row in rows if f"{name}/val_{key}" in row]
                if points:
                    axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, alpha=0.55, linestyle=line)
                if held:
                    mark = MARKS[index % len(MARKS)]
                    axes.plot(
                        *zip(*held, strict=True), color=colour, marker=mark, markersize=4, linestyle=line, label=name
                    )
            axes.set_title(label)
            axes.set_xlabel("tokens")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        figure.axes[0].legend(title="held-out (thin: training)", title_fontsize=8)
        return write_figure(path, figure)
