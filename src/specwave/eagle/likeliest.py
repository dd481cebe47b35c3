"""A distribution kept as its k likeliest tokens and the rest's mass (`states.targets=top_k`; see offline.py)."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(scores_nV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, k] of the k likeliest tokens and their ids [n, k]; the argmax is one of them.

    Of equals, any are the k likeliest; which of them is the argmax decides whether a slot counts.
    """
    values, ids = scores_nV.topk(k, -1)
    best = scores_nV.argmax(-1, keepdim=True)
    ids[:, :1] = torch.where((ids == best).any(-1, keepdim=True), ids[:, :1], best)
    return values - scores_nV.logsumexp(-1, keepdim=True), ids


def completed(top_n2k: Tensor, vocab_size: int) -> Tensor:
    """Log-probabilities [n, V] from those of k tokens and their ids, side by side; others share the rest equally."""
    logs, ids = top_n2k.chunk(2, -1)
    rest = 1 - logs.double().exp().sum(-1, keepdim=True)
    share = rest / max(vocab_size - logs.shape[-1], 1)
    # Never quite zero: a draft vocabulary that has none of the k must still get a distribution.
    floor = share.clamp(min=torch.finfo(torch.float32).tiny).log().to(logs.dtype)
    return floor.expand(-1, vocab_size).scatter(-1, ids.long(), logs)
