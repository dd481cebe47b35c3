"""How sure a figure is: percentile intervals from questions drawn anew with replacement.

A question is drawn with everything that belongs to it (both methods' rounds and seconds, all repetitions), so ratios
are paired: what makes a question easy or slow makes it so for both. Pure numbers; knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 0.95

Floats = NDArray[np.float64]


@lru_cache(maxsize=64)
def draws(questions: int) -> Floats:
    """[RESAMPLES, questions]: how often each question is in a resample of as many. The same for every call."""
    picked = np.random.default_rng(0).integers(0, questions, (RESAMPLES, questions))
    places = picked + questions * np.arange(RESAMPLES)[:, None]
    counted = np.bincount(places.ravel(), minlength=RESAMPLES * questions)
    return counted.reshape(RESAMPLES, questions).astype(np.float64)


def resampled(above: Sequence[float] | Floats, below: Sequence[float] | Floats) -> Floats:
    """Σ above / Σ below over every resample, [RESAMPLES]; nan where the sum below is 0."""
    counts = draws(len(above))
    numerator, denominator = counts @ np.asarray(above, float), counts @ np.asarray(below, float)
    return quotient(numerator, np.where(denominator > 0, denominator, np.nan))


def quotient(above: Floats, below: Floats) -> Floats:
    """Elementwise; infinite or nan where it cannot be said, which `interval` leaves out."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return above / below


def interval(values: Floats) -> list[float] | None:
    """The middle LEVEL of a resampled figure, [low, high]; None where it cannot be said."""
    finite = values[np.isfinite(values)]
    if len(finite) < len(values) / 2:
        return None
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return [float(low), float(high)]


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> list[float] | None:
    """Of Σ above / Σ below; None for fewer than two questions."""
    return interval(resampled(above, below)) if len(above) > 1 else None


def mean_interval(values: Sequence[float]) -> list[float] | None:
    """Of the mean of repeated measurements, by Student's t at LEVEL; None for fewer than two."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    half = student(count - 1) * spread / math.sqrt(count)
    return [mean - half, mean + half]


@lru_cache(maxsize=256)
def student(freedom: float, level: float = LEVEL) -> float:
    """Student's t with `level` of its distribution between −t and t, for any degrees of freedom ≥ 1.

    With T = √f·tan θ the density of θ is proportional to cos^{f−1} θ, smooth on a finite range: Simpson's rule on 512
    parts, then bisection for the angle.
    """
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    low, high = 0.0, math.pi / 2
    for _ in range(52):
        angle = (low + high) / 2
        at = np.cos(np.linspace(0, angle, 513)) ** (freedom - 1)
        inside = 2 * angle / 512 / 3 * float(at[0] + at[-1] + 4 * at[1::2].sum() + 2 * at[2:-1:2].sum())
        low, high = (low, angle) if inside > level * whole else (angle, high)
    return math.sqrt(freedom) * math.tan(low)
