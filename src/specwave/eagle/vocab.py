"""The draft vocabulary: the target tokens a drafter may name.

Draft id i stands for target id `i + d2t[i]`; `t2d[v]` says whether target id v has a draft id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specwave.artifacts import UserError


def count_tokens(samples: Iterable[tuple[Sequence[int], Sequence[bool]]], vocab: int) -> Tensor:
    """How often each token stands in answer text, int64 [V]; samples are pairs (ids, answer mask)."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for ids, answer in samples:
        kept = torch.tensor(ids, dtype=torch.int64)[torch.tensor(answer, dtype=torch.bool)]
        counts += torch.bincount(kept, minlength=vocab)
    return counts


def build_vocab_map(counts: Tensor | Sequence[int], size: int) -> tuple[Tensor, Tensor]:
    """The `size` most frequent tokens, ties to the lower id, in ascending order.

    Args:
        counts: occurrences per target token, [V].
        size: V_d, 1 to V.
    Returns:
        d2t int64 [V_d] and t2d bool [V].
    """
    counts = torch.as_tensor(counts)
    if counts.dim() != 1:
        raise ValueError(f"counts must be [V], got {list(counts.shape)}")
    vocab = counts.numel()
    if not 1 <= size <= vocab:
        raise UserError("drafter.draft_vocab_size", size, f"must be 1 to {vocab}, the target's vocabulary")
    order = torch.argsort(counts, descending=True, stable=True)  # stable: equal counts stay in order of id
    chosen = order[:size].sort().values
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(size), t2d


def draft_ids(d2t: Tensor) -> Tensor:
    """Target ids of the draft ids, [V_d]."""
    return torch.arange(d2t.numel(), device=d2t.device) + d2t


def check_vocab_map(d2t: Tensor, t2d: Tensor, vocab: int, key: str = "checkpoint") -> None:
    """Refuses a map that names tokens outside 0…V−1, twice or out of order, or whose halves disagree."""

    def refuse(remedy: str) -> None:
        raise UserError(key, "vocabulary map", f"{remedy}; the file is damaged or of another target: export it again")

    if d2t.dim() != 1 or t2d.dim() != 1 or d2t.is_floating_point():
        refuse("d2t must be whole numbers [V_d] and t2d truth values [V]")
    if t2d.numel() != vocab:
        refuse(f"t2d has {t2d.numel()} entries, the target's vocabulary {vocab}")
    if not 1 <= d2t.numel() <= vocab:
        refuse(f"d2t has {d2t.numel()} entries, it must have 1 to {vocab}")
    ids = draft_ids(d2t.to(torch.int64))
    if bool((ids < 0).any()) or bool((ids >= vocab).any()):
        refuse(f"d2t points outside the target's {vocab} tokens")
    if bool((ids[1:] <= ids[:-1]).any()):
        refuse("d2t must name each token once, in ascending order")
    marked = t2d.nonzero().flatten()
    if marked.numel() != ids.numel() or not torch.equal(marked, ids.to(marked.device)):
        refuse("t2d marks other tokens than d2t names")
