"""Stage 1 of KnapSpec: kept sets of every cost, by dynamic programming over hidden states.

Letters: J branches (states of the programme that are alive), T tokens of the window, D hidden size, N blocks.
Source: KnapSpec (arXiv 2602.20217); methods.md §4. Knows nothing about targets: sub-layers are run by the caller.

Cell (i, j) of the programme holds, after the first i sub-layers with weight j of them skipped, the hidden state that is
most like the target's own at that depth (mean cosine over the window), and which sub-layers made it. Sub-layer i of
weight w leads from there to two cells:

    run   (i, j) → (i + 1, j)        with a new hidden state: all branches of one depth run as one batch
    skip  (i, j) → (i + 1, j + w)    with the same hidden state, now held against the target's next one

Where two paths meet in a cell, the likelier state stays; with equal cosines the one that runs. A cell below `prune` is
given up. This is a heuristic of the paper's: the state of one cell need not lead to the best states behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Run = Callable[[int, Tensor], Tensor]  # (sub-layer, hidden [J, T, D]) → hidden [J, T, D]


@dataclass(frozen=True)
class Survivor:
    """A kept set of the last depth: the weight it skips, and the mean cosine of its final state to the target's."""

    saved: int
    kept: tuple[bool, ...]
    cosine: float


def forced_ends(num_layers: int) -> list[bool]:
    """Which sub-layers always run: those of the first and the last block."""
    flags = [False] * (2 * num_layers)
    flags[:2] = flags[-2:] = [True, True]
    return flags


def mean_cosine(hidden_JTD: Tensor, target_TD: Tensor) -> Tensor:
    """Mean over the window of the cosine between each branch and the target: float32 [J]."""
    return F.cosine_similarity(hidden_JTD.float(), target_TD.float()[None], dim=-1).mean(-1)


def search(
    run: Run,
    target: Sequence[Tensor],
    weights: Sequence[int],
    limit: int,
    forced: Sequence[bool],
    prune: float = 0.5,
) -> tuple[list[Survivor], Tensor]:
    """The best kept set for every skipped weight up to `limit`.

    Args:
        run: runs one sub-layer, residual included, for all branches.
        target: the target's own states [T, D] at depth 0 (the embeddings), 1, …, 2N.
        weights: positive whole numbers, one per sub-layer.
        limit: largest skipped weight.
        forced: sub-layers that always run.
        prune: branches of a smaller cosine are dropped. The full set never is.

    Returns:
        the survivors by skipped weight, the full set first, and their final states [J, T, D].
    """
    hidden_JTD = target[0][None]
    saved: list[int] = [0]
    kept: list[tuple[bool, ...]] = [()]
    cosine = torch.ones(1)
    for i, weight in enumerate(weights):
        ran_JTD = run(i, hidden_JTD)
        ran = mean_cosine(ran_JTD, target[i + 1])
        if forced[i]:
            paths = [(j, branch, True) for branch, j in enumerate(saved)]
            hidden_JTD, cosine = ran_JTD, ran
            kept = [(*flags, True) for flags in kept]
        else:
            skipped = mean_cosine(hidden_JTD, target[i + 1])
            paths = _meet(saved, ran.tolist(), skipped.tolist(), weight, limit)
            index = torch.tensor([branch + (0 if runs else len(saved)) for _, branch, runs in paths]).to(ran.device)
            hidden_JTD = torch.cat([ran_JTD, hidden_JTD])[index]
            cosine = torch.cat([ran, skipped])[index]
            kept = [(*kept[branch], runs) for _, branch, runs in paths]
        saved = [j for j, _, _ in paths]
        alive = [place for place, value in enumerate(cosine.tolist()) if saved[place] == 0 or value >= prune]
        if len(alive) < len(saved):
            hidden_JTD, cosine = hidden_JTD[alive], cosine[alive]
            saved, kept = [saved[place] for place in alive], [kept[place] for place in alive]
    survivors = [Survivor(*one) for one in zip(saved, kept, cosine.tolist(), strict=True)]
    return survivors, hidden_JTD


def _meet(
    saved: Sequence[int], ran: Sequence[float], skipped: Sequence[float], weight: int, limit: int
) -> list[tuple[int, int, bool]]:
    """The better path into every cell of the next depth: (its skipped weight, the branch it comes from, runs?)."""
    best: dict[int, tuple[float, int, bool]] = {}
    for branch, j in enumerate(saved):
        best[j] = (ran[branch], branch, True)
    for branch, j in enumerate(saved):
        if j + weight <= limit and (j + weight not in best or skipped[branch] > best[j + weight][0]):
            best[j + weight] = (skipped[branch], branch, False)
    return [(j, *best[j][1:]) for j in sorted(best)]


def largest_batches(weights: Sequence[int], limit: int, forced: Sequence[bool]) -> list[int]:
    """How many branches run at each sub-layer when none is pruned: what a search costs at most."""
    cells, counts = {0}, []
    for weight, always in zip(weights, forced, strict=True):
        counts.append(len(cells))
        if not always:
            cells |= {j + weight for j in cells if j + weight <= limit}
    return counts
