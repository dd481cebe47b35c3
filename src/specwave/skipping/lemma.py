"""Why cosines may stand for acceptance: how near a draft's hidden state must be to the target's for the same argmax.

Letters: D hidden size, V vocabulary; "..." is any shape. Source: KnapSpec (arXiv 2602.20217), lemma 4.1, in the form of
methods.md §4. Logits are W·(gain ∘ u) = W'u with u = RMSNorm without gain, of norm √D. For two states u and û, both on
that sphere, ‖u − û‖² = 2D(1 − cos). Token j overtakes the target's first token only if (w'_1 − w'_j)·(u − û) ≥ Δ_j,
the lead that the first token has at u; by Cauchy-Schwarz it cannot while ‖u − û‖ < Δ_j/‖w'_1 − w'_j‖ for every j.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def on_sphere(hidden: Tensor) -> Tensor:
    """States [..., D] at norm √D, in float64: RMSNorm without its gain and its ε, which turn no direction."""
    wide = hidden.double()
    return wide * (wide.shape[-1] ** 0.5) / wide.norm(dim=-1, keepdim=True)


def least_cosine(target: Tensor, head_VD: Tensor, gain_D: Tensor) -> Tensor:
    """The bound of lemma 4.1 for the target's states [..., D] before the final norm: float64 [...].

    Any state whose cosine to the target's is larger than this has the same argmax. Where the target's first two tokens
    tie, the bound is 1 and nothing satisfies it.

    Args:
        head_VD: the output head.
        gain_D: the final norm's gain.
    """
    if head_VD.shape[0] < 2:
        raise ValueError("a vocabulary of at least two tokens is needed")
    u, size = on_sphere(target), target.shape[-1]
    weights_VD = head_VD.double() * gain_D.double()
    logits = u @ weights_VD.T
    first = logits.argmax(-1, keepdim=True)
    lead = logits.gather(-1, first) - logits  # Δ, 0 at the first token itself
    norm = weights_VD.square().sum(-1)
    w1 = weights_VD[first[..., 0]]
    # ‖w'_1 − w'_j‖² without a [..., V, D] tensor; rounding must not make it negative.
    apart = (norm[first] - 2 * (w1 @ weights_VD.T) + norm).clamp(min=0)
    bound = 1 - lead.square() / (2 * size * apart)
    bound = bound.masked_fill(apart == 0, -torch.inf)  # equal rows never change order
    return bound.scatter(-1, first, -torch.inf).amax(-1)


def violations(target: Tensor, draft: Tensor, head_VD: Tensor, gain_D: Tensor) -> Tensor:
    """bool [...]: states whose cosine is above the bound and whose argmax differs all the same. The lemma: none."""
    cosine = F.cosine_similarity(target.double(), draft.double(), dim=-1)
    weights_VD = head_VD.double() * gain_D.double()
    same = (on_sphere(target) @ weights_VD.T).argmax(-1) == (on_sphere(draft) @ weights_VD.T).argmax(-1)
    return (cosine > least_cosine(target, head_VD, gain_D)) & ~same
