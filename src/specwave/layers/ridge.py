"""Ridge regression from any set of columns by one table of sums, which is made once.

Shapes: S rows, F columns in all, k of them chosen, D outputs.

The identity that makes it cheap: to regress Y on the columns c of X takes (XᵀX)[c, c] and (XᵀY)[c] and the means, all
blocks of the same sums over all columns. Each set of layers is a set of columns, so it costs one k × k system whatever
the number of rows. Sums add over rows too: a fit that leaves some rows out reads a difference. And a linear map of the
outputs commutes with the fit, so logits need no sums of their own where states have them.

Knows nothing about layers, models or tokens.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Sums over rows, float64: of the columns (x [F]), the outputs (y [D]), their products (xx [F, F], xy [F, D])."""

    count: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor

    @classmethod
    def of(cls, x_SF: Tensor, y_SD: Tensor) -> Sums:
        x, y = x_SF.double(), y_SD.double()
        return cls(len(x), x.sum(0), y.sum(0), x.T @ x, x.T @ y)

    def __add__(self, other: Sums) -> Sums:
        parts = (getattr(self, name) + getattr(other, name) for name in ("x", "y", "xx", "xy"))
        return Sums(self.count + other.count, *parts)

    def __sub__(self, other: Sums) -> Sums:
        """The sums over the rows that are not `other`'s."""
        parts = (getattr(self, name) - getattr(other, name) for name in ("x", "y", "xx", "xy"))
        return Sums(self.count - other.count, *parts)


class Ridge:
    """The fits of one set of rows: y ≈ ȳ + (x − x̄)ᵀW, with Σ‖y − ŷ‖² + λ‖W‖² least; the mean itself is not damped.

    Args:
        sums: of the rows to fit, two or more.
        damping: λ as a share of the chosen columns' mean sum of squares, so that neither their scale nor the number of
            rows matters; > 0.
    """

    def __init__(self, sums: Sums, damping: float):
        self.damping, self.count = damping, sums.count
        self.mean_F, self.mean_D = sums.x / sums.count, sums.y / sums.count
        self.gram_FF = sums.xx - torch.outer(sums.x, self.mean_F)
        self.cross_FD = sums.xy - torch.outer(sums.x, self.mean_D)

    def mapped(self, map_VD: Tensor) -> Ridge:
        """The fits of the outputs `map · y`: [V, D] → V outputs, from the same table."""
        twin, turned = copy(self), map_VD.double().T
        twin.mean_D, twin.cross_FD = self.mean_D @ turned, self.cross_FD @ turned
        return twin

    def weights(self, columns_k: Tensor) -> Tensor:
        """W: float64 [k, D]; without a column [0, D], which foretells the mean."""
        gram = self.gram_FF[columns_k[:, None], columns_k]
        if not len(columns_k):
            return self.cross_FD[columns_k]
        level = gram.diagonal().mean() * self.damping
        level = torch.where(level > 0, level, 1.0)  # columns that never change: any λ gives W = 0
        factor = torch.linalg.cholesky(gram + level * torch.eye(len(gram), dtype=gram.dtype))
        return torch.cholesky_solve(self.cross_FD[columns_k], factor)

    def foretell(self, x_SF: Tensor, columns_k: Tensor) -> Tensor:
        """ŷ [S, D] of rows with all columns, in their precision."""
        return affine(x_SF[:, columns_k], self.mean_F[columns_k], self.weights(columns_k), self.mean_D)


def affine(x_Sk: Tensor, mean_k: Tensor, weights_kD: Tensor, mean_D: Tensor) -> Tensor:
    """`mean_D + (x − mean_k) W` in the precision of x, with the constant part summed in that of W."""
    return torch.addmm((mean_D - mean_k @ weights_kD).to(x_Sk), x_Sk, weights_kD.to(x_Sk))
