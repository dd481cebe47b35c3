"""What a batch is held against: the target's states and distributions, read once for all drafters of a run.

B rows, T positions, D width of the target, V its vocabulary, V_d draft vocabulary, P positions with a target, n rows of
one chunk. Knows nothing about drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specwave.eagle.slots import targets_needed


@dataclass
class TargetBatch:
    """What the target says about a batch, computed once for all drafters with one draft vocabulary."""

    ids: Tensor  # [B, T]
    answer: Tensor  # ℓ, bool [B, T]
    embedding: Tensor  # the target's, of ids, [B, T, H]
    states: Mapping[int, Tensor]  # block outputs, each [B, T, H_t]
    in_vocab: Tensor  # bool [B, T]: argmax y_t in the draft vocabulary; False where no step needs y_t
    row: Tensor  # [B, T]: where y_t stands in `target`; 0 where it is not needed
    target: Tensor  # float32 [P, V_d]: y restricted to the draft vocabulary, summing to one
    mass: Tensor | None = None  # float32 [P]: y's share that the draft vocabulary has; the loss `lk` asks for it
    documents: Tensor | None = None  # int64 [B, T]: which of its row's documents a token is of (slots.py)


class Source(Protocol):
    """Where the target's side of a batch comes from."""

    def read(self, batch: dict[str, Any]) -> tuple[Mapping[int, Tensor], Tensor, Callable[[Tensor], Tensor]]:
        """Block outputs by layer, each [B, T, H_t]; a row of numbers for every position, [B, T, X]; and the function
        that makes logits [n, V], float32, of such rows [n, X]."""


class Online:
    """The target itself, run up to block N−1 at every step."""

    def __init__(self, target: Any, layers: Iterable[int]):
        self.target, self.last = target, target.num_layers - 1
        self.wanted = sorted({self.last, *layers})

    def read(self, batch: dict[str, Any]) -> tuple[Mapping[int, Tensor], Tensor, Callable[[Tensor], Tensor]]:
        states = self.target.states(batch["ids"], self.wanted, batch.get("documents"))
        return states, states[self.last], self.target.logits


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
    *,
    count_from: str = "ours",
    with_mass: bool = False,
    documents_BT: Tensor | None = None,
) -> TargetBatch:
    """A `TargetBatch`; the head runs only at the positions some step is held against, `chunk` at a time.

    Args:
        states: block outputs of every layer the drafters read.
        last_BTD: output of block N−1, before the final norm, or whatever `logits` takes.
        embedding: the target's table [V, H].
        logits: last_BTD rows [n, D] → [n, V], float32.
        draft_ids, t2d: the vocabulary map, ids [V_d] and marks [V].
        count_from, documents_BT: which slots will count (slots.py).
    """
    needed = targets_needed(answer_BT, count_from, documents_BT)
    rows, marks, targets, masses = torch.zeros_like(ids_BT), torch.zeros_like(answer_BT), [], []
    picked = last_BTD[needed]
    inside = torch.zeros(picked.shape[0], dtype=torch.bool, device=ids_BT.device)
    for start in range(0, picked.shape[0], chunk):
        scores_nV = logits(picked[start : start + chunk])
        inside[start : start + chunk] = t2d[scores_nV.argmax(-1)]
        targets.append(torch.softmax(scores_nV[:, draft_ids], -1))
        if with_mass:
            masses.append((scores_nV[:, draft_ids].logsumexp(-1) - scores_nV.logsumexp(-1)).exp())
    rows[needed] = torch.arange(picked.shape[0], device=ids_BT.device)
    marks[needed] = inside
    empty = torch.zeros(1, draft_ids.numel(), device=ids_BT.device)
    return TargetBatch(
        ids_BT,
        answer_BT,
        embedding[ids_BT],
        states,
        marks,
        rows,
        torch.cat(targets) if targets else empty,
        torch.cat(masses) if masses else None,
        documents_BT,
    )
