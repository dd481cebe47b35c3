"""Two entropies: of a set of hidden states (from its Gram matrix) and of a next-token distribution (from logits).

Shapes: R rows, V vocabulary. Both are in nats and neither is divided by its maximum.
Knows nothing about layers, models or tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def matrix_entropy(gram: Tensor, alpha: float = 1.0) -> Tensor:
    """Rényi entropy of the spectrum of a Gram matrix: `ln(Σ pᵢ^α) / (1−α)`, `pᵢ = λᵢ / Σλ`; Shannon at α = 1.

    Depends on X [R, D] only through `K = X Xᵀ`, so turning or scaling X changes nothing. Orthonormal rows give ln R,
    rank one gives 0, and so does a zero matrix, which holds no direction at all.

    Args:
        gram: [..., R, R], symmetric, positive semi-definite up to rounding.
        alpha: order, > 0 (infinity gives −ln of the largest share).

    Returns:
        float64 [...], nats.

    Source: "Surfing the Activation Wave", matrix-based entropy.
    """
    return gram_entropy(gram.double(), alpha)


def gram_entropy(gram: Tensor, alpha: float = 1.0) -> Tensor:
    """`matrix_entropy` with eigenvalues in the Gram's own precision, for screening: [..., R, R] → float64 [...]."""
    if not alpha > 0:
        raise ValueError(f"alpha must be > 0, got {alpha}")
    values = torch.linalg.eigvalsh(gram).double()
    # What lies this far below the largest eigenvalue is rounding of eigvalsh, and an order α < 1 would magnify it.
    noise = values[..., -1:].clamp_min(0) * (gram.shape[-1] * torch.finfo(gram.dtype).eps)
    values = torch.where(values > noise, values, 0.0)
    total = values.sum(-1, keepdim=True)
    share = values / torch.where(total > 0, total, 1.0)
    if math.isinf(alpha):
        entropy = -share.amax(-1).log()
    elif abs(alpha - 1) < 1e-9:  # closer than this, (1−α) cancels every digit
        entropy = torch.special.entr(share).sum(-1)
    else:
        entropy = torch.logsumexp(alpha * share.log(), -1) / (1 - alpha)
    return torch.where(total[..., 0] > 0, entropy, 0.0).clamp_min(0)


def predictive_entropy(logits: Tensor) -> Tensor:
    """`H = −Σ_v p(v) ln p(v)` of the next-token distribution: logits [..., V] → float32 [...], nats."""
    rows = logits.reshape(-1, logits.shape[-1])
    parts = []
    for part in rows.split(16) if rows.device.type == "cpu" else (rows,):  # a few rows stay in the cache: 4× faster
        log_p = torch.log_softmax(part.float(), -1).clamp_(min=-1e4)  # exp(−1e4) is 0, and 0·(−∞) would be NaN
        parts.append(-torch.linalg.vecdot(log_p.exp(), log_p))
    return torch.cat(parts).view(logits.shape[:-1])
