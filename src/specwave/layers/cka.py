"""Linear CKA on Gram matrices: how alike two layers see the same rows, alone or given layers already chosen.

Shapes: N layers, R rows. Everything is float64.

Both estimators are one inner product of Grams after a *linear* map that removes the mean, so that for concatenated
layers, whose Grams add, everything follows from one table `T[i, j] = <c(K_i), c(K_j)>`:

    biased     c(K) = HKH, H = I − 11ᵀ/R
    unbiased   c(K) = U-centring: zero diagonal, rows sum to zero (Székely & Rizzo 2014);
               <c(K), c(L)> / (R(R−3)) is HSIC₁ of Song et al. 2012, and the factor cancels in the ratio
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A centred Gram this far below the Gram itself is rounding: the layer is constant over the rows.
_CONSTANT = 1e-12


def centred(gram: Tensor, unbiased: bool = False) -> Tensor:
    """The linear map c of the module's docstring: [..., R, R] → float64 [..., R, R]; zero for constant rows.

    Raises:
        ValueError: the unbiased estimator is undefined below four rows.
    """
    gram = gram.double()
    rows = gram.shape[-1]
    if not unbiased:
        mean = gram.mean(-1, keepdim=True)
        result = gram - mean - mean.transpose(-1, -2) + mean.mean(-2, keepdim=True)
    else:
        if rows < 4:
            raise ValueError(f"the unbiased estimator needs at least 4 rows, got {rows}")
        diagonal = torch.eye(rows, dtype=torch.bool, device=gram.device)
        hollow = gram.masked_fill(diagonal, 0)
        part = hollow.sum(-1, keepdim=True) / (rows - 2)
        whole = part.sum(-2, keepdim=True) / (rows - 1)
        result = (hollow - part - part.transpose(-1, -2) + whole).masked_fill(diagonal, 0)
    floor = _CONSTANT * torch.linalg.matrix_norm(gram)
    return torch.where((torch.linalg.matrix_norm(result) > floor)[..., None, None], result, 0.0)


def linear_cka(gram_x: Tensor, gram_y: Tensor, unbiased: bool = False) -> Tensor:
    """Linear CKA of two Grams [..., R, R] → [...]; 0 where a side is constant over the rows.

    The biased value lies in [0, 1] and is near 1 for anything when R ≪ D; the unbiased one may be negative.
    Source: Kornblith et al. 2019, equation 1 and section 3; unbiased: Nguyen et al. 2021.
    """
    x, y = centred(gram_x, unbiased), centred(gram_y, unbiased)
    inner = (x * y).sum((-1, -2))
    norm = torch.linalg.matrix_norm(x) * torch.linalg.matrix_norm(y)
    return inner / torch.where(norm > 0, norm, 1.0)


def inner_products(grams: Tensor, unbiased: bool = False) -> Tensor:
    """The table T [N, N] of the module's docstring from Grams [N, R, R]."""
    flat = centred(grams, unbiased).flatten(1)
    return flat @ flat.T


def _ratio(table: Tensor) -> Tensor:
    norm = table.diagonal().clamp_min(0).sqrt()
    norm = torch.outer(norm, norm)
    return table / torch.where(norm > 0, norm, 1.0)


def cka_matrix(grams: Tensor, unbiased: bool = False) -> Tensor:
    """CKA of every pair of layers: Grams [N, R, R] → [N, N]."""
    return _ratio(inner_products(grams, unbiased))


def condition(table: Tensor, group: Sequence[int]) -> Tensor:
    """Conditional CKA from the table T [N, N] alone, O(N²): entry (i, j) is CKA of L ∪ {i} and L ∪ {j}.

    With s = Σ_{l∈L} c(K_l) and e_i = 0 where i ∈ L (the layer is in already), else 1:
    <s + e_i c_i, s + e_j c_j> = <s, s> + e_i <s, c_i> + e_j <s, c_j> + e_i e_j <c_i, c_j>.
    """
    chosen = sorted(set(group))
    free = torch.ones(len(table), dtype=table.dtype, device=table.device)
    free[chosen] = 0
    with_group = table[chosen].sum(0) * free
    own = table[chosen][:, chosen].sum()
    return _ratio(own + with_group[:, None] + with_group[None, :] + free[:, None] * free[None, :] * table)


def conditional_cka(grams: Tensor, group: Sequence[int], unbiased: bool = False) -> Tensor:
    """`M_L(i, j) = CKA(Z_{L∪{i}}, Z_{L∪{j}})`: Grams [N, R, R] → [N, N]; a layer of L stands for L itself.

    Source: "Surfing the Activation Wave", conditional CKA.
    """
    return condition(inner_products(grams, unbiased), group)


def transitions(cka: Tensor) -> Tensor:
    """`δ_l = ‖M[l+1] − M[l]‖²`: how much the view of the whole stack changes from layer l to l+1; [N, N] → [N−1]."""
    return (cka[1:] - cka[:-1]).square().sum(-1)


def borders(delta: Tensor) -> list[int]:
    """The peaks of the transitions: l is a border between layers l and l+1.

    Our rule (the source has none): no neighbour is larger, and δ_l is more than twice the mean.
    """
    values = delta.tolist()
    if len(values) < 2:
        return []
    floor = 2 * float(delta.mean())
    padded = [float("-inf"), *values, float("-inf")]
    return [
        index
        for index, value in enumerate(values)
        if value > floor and value > padded[index] and value >= padded[index + 2]
    ]
