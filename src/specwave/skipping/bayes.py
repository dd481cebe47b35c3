"""Bayesian optimisation over sets: a Gaussian process on masks, and the candidate that may be the best. Pure torch.

Letters: n sets tried, m candidates, S members that a set may have. A mask is 0 or 1 for each member.

The process has mean 0 and variance 1 after the values are standardised, and a Matérn kernel of ν = 5/2 in the distance
of masks, which is the root of how many members they differ in: with r = distance / length,

    k(r) = (1 + √5·r + 5/3·r²)·e^(−√5·r)

Source of the choice: SWIFT (arXiv 2410.06916), whose code searches layer sets with such a process and the upper
confidence bound mean + 2.5·deviation. Here candidates are listed, not found by descent: a set is no point in a cube.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOISE = 0.01  # variance of a standardised value: it was measured on a few dozen tokens
KAPPA = 2.5  # deviations that hope is worth


def matern(x_nS: Tensor, y_mS: Tensor, length: float) -> Tensor:
    """The kernel between masks: [n, m], 1 where they are equal."""
    r = torch.cdist(x_nS, y_mS, compute_mode="donot_use_mm_for_euclid_dist") / length * 5**0.5
    return (1 + r + r**2 / 3) * (-r).exp()


def posterior(x_nS: Tensor, value_n: Tensor, candidate_mS: Tensor, length: float) -> tuple[Tensor, Tensor]:
    """What the process makes of candidates: mean and deviation [m], in units of the values, float64.

    One value, or values that are all the same, have no spread: it then counts as 1.
    """
    x, candidate, value = x_nS.double(), candidate_mS.double(), value_n.double()
    centre = value.mean()
    spread = float(value.std(correction=0)) or 1.0
    kernel_nn = matern(x, x, length) + NOISE * torch.eye(len(x), dtype=x.dtype, device=x.device)
    factor = torch.linalg.cholesky(kernel_nn)
    kernel_nm = matern(x, candidate, length)
    weight = torch.cholesky_solve(((value - centre) / spread)[:, None], factor)[:, 0]
    reduced_nm = torch.linalg.solve_triangular(factor, kernel_nm, upper=False)
    variance = (1 - (reduced_nm**2).sum(0)).clamp(min=0)
    return centre + spread * (kernel_nm.T @ weight), spread * variance.sqrt()


def most_hopeful(x_nS: Tensor, value_n: Tensor, candidate_mS: Tensor) -> int:
    """The candidate of the largest upper confidence bound; of equal ones the first.

    The length of the kernel is the middle distance between sets tried and candidates, so that they inform each other
    whatever S is.
    """
    apart = torch.cdist(x_nS.double(), candidate_mS.double(), compute_mode="donot_use_mm_for_euclid_dist")
    length = float(apart.median()) or 1.0
    mean, deviation = posterior(x_nS, value_n, candidate_mS, length)
    return int((mean + KAPPA * deviation).argmax())
