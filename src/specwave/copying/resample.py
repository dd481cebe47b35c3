"""How sure an AUC is: percentile intervals from prompts drawn anew with replacement.

Tokens of one answer are alike, and so are those of prompts that one template made: these are drawn together, and what
is called a prompt below is all of them. An AUC counts pairs of a copied token and another, so it is enough to count
once, for every two prompts, how many pairs between them are in order: with c_q how often prompt q was drawn, p_q and
n_r how many copied and other tokens there are,

    AUC = Σ_{q,r} c_q c_r won_{q,r} / (Σ_q c_q p_q · Σ_r c_r n_r)

Letters: P probes, N tokens, Q prompts, S resamples.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESAMPLES = 1000
LEVEL = 0.95


def draws(prompts: int, resamples: int, seed: int) -> Tensor:
    """float64 [S, Q]: how often each prompt is in a resample of as many."""
    chosen = torch.randint(0, prompts, (resamples, prompts), generator=torch.Generator().manual_seed(seed))
    return torch.zeros(resamples, prompts, dtype=torch.float64).scatter_add_(
        1, chosen, torch.ones(chosen.shape).double()
    )


def auc_intervals(
    scores_PN: Tensor, labels_N: Tensor, prompt_N: Tensor, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(lower, upper) ends [P] of the interval of every probe's AUC, all of them under the same resamples.

    Args:
        prompt_N: the number of the prompt, or of the template, that each token belongs to.

    Returns:
        float64; NaN where less than half of the resamples have tokens of both classes.
    """
    prompts = int(prompt_N.max()) + 1
    counts_SQ = draws(prompts, resamples, seed)
    labels = labels_N.bool()
    each_Q2 = torch.stack([torch.bincount(prompt_N[kind], minlength=prompts) for kind in (labels, ~labels)], 1).double()
    pairs_S = (counts_SQ @ each_Q2).prod(1)
    tails = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    ends = []
    for scores_N in scores_PN:
        won_S = ((counts_SQ @ won(scores_N, labels, prompt_N, prompts)) * counts_SQ).sum(1)
        areas = (won_S / pairs_S)[pairs_S > 0]
        enough = 2 * len(areas) >= resamples
        ends.append(areas.quantile(tails) if enough else tails.new_full((2,), torch.nan))
    low, high = torch.stack(ends, 1)
    return low, high


def won(scores_N: Tensor, labels_N: Tensor, prompt_N: Tensor, prompts: int) -> Tensor:
    """float64 [Q, Q]: how often a copied token of prompt q scores higher than another token of prompt r, ties half."""
    held_n, owner_n = scores_N[labels_N], prompt_N[labels_N]
    found = torch.zeros(prompts, prompts, dtype=torch.float64)
    for other in range(prompts):
        below, _ = scores_N[~labels_N & (prompt_N == other)].sort()
        count_n = torch.searchsorted(below, held_n, right=False) + torch.searchsorted(below, held_n, right=True)
        found[:, other].index_add_(0, owner_n, count_n.double() / 2)
    return found
