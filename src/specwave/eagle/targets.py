"""What a batch is held against: the target's states and distributions, read once for all drafters of a run.

B rows, T positions, D width of the target, V its vocabulary, V_d draft vocabulary, P positions with a target, n rows of
one chunk. Knows nothing about drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def ahead(x_BT: Tensor, by: int) -> Tensor:
    """x_{t+by} at t; zeros where that runs past T."""
    shifted = torch.zeros_like(x_BT)
    if by < x_BT.shape[1]:
        shifted[:, : x_BT.shape[1] - by] = x_BT[:, by:]
    return shifted


@dataclass
class TargetBatch:
    """What the target says about a batch, computed once for all drafters with one draft vocabulary."""

    ids: Tensor  # [B, T]
    answer: Tensor  # ℓ, bool [B, T]
    embedding: Tensor  # the target's, of ids, [B, T, H]
    states: Mapping[int, Tensor]  # block outputs, each [B, T, H_t]
    in_vocab: Tensor  # bool [B, T]: argmax y_t in the draft vocabulary; False where no step needs y_t
    row: Tensor  # [B, T]: where y_t stands in `target`; 0 where it is not needed
    target: Tensor  # float32 [P, V_d]: y restricted to the draft vocabulary


@torch.no_grad()
def read_target(
    ids_BT: Tensor,
    answer_BT: Tensor,
    states: Mapping[int, Tensor],
    last_BTD: Tensor,
    embedding: Tensor,
    logits: Callable[[Tensor], Tensor],
    draft_ids: Tensor,
    t2d: Tensor,
    chunk: int = 256,
) -> TargetBatch:
    """A `TargetBatch`; the head runs only at the positions some step is held against, `chunk` at a time.

    Args:
        states: block outputs of every layer the drafters read.
        last_BTD: output of block N−1, before the final norm.
        embedding: the target's table [V, H].
        logits: last_BTD rows [n, D] → [n, V], float32.
        draft_ids, t2d: the vocabulary map, ids [V_d] and marks [V].
    """
    needed = answer_BT & ahead(answer_BT, 1)  # x_p and x_{p+1} are answer text wherever slot t counts, p = t + 1 + s
    needed[:, 0] = False  # p ≥ 1
    rows, marks, targets = torch.zeros_like(ids_BT), torch.zeros_like(answer_BT), []
    picked = last_BTD[needed]
    inside = torch.zeros(picked.shape[0], dtype=torch.bool, device=ids_BT.device)
    for start in range(0, picked.shape[0], chunk):
        scores_nV = logits(picked[start : start + chunk])
        inside[start : start + chunk] = t2d[scores_nV.argmax(-1)]
        targets.append(torch.softmax(scores_nV[:, draft_ids], -1))
    rows[needed] = torch.arange(picked.shape[0], device=ids_BT.device)
    marks[needed] = inside
    empty = torch.zeros(1, draft_ids.numel(), device=ids_BT.device)
    return TargetBatch(
        ids_BT, answer_BT, embedding[ids_BT], states, marks, rows, torch.cat(targets) if targets else empty
    )
