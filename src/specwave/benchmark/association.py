"""How an outcome follows what was foretold of it: slopes and rank correlations over groups of layers, with intervals.

Shapes: G groups, Q questions, B resamples. Pure numbers; knows nothing of layers or files.

The unit is the group. An interval must say what other groups would have given, and other questions:

- Every resample draws groups with replacement, as many of each size as there are, and, in the same breath, questions,
  the same ones for all groups. Drawing both at once counts what is peculiar to one group on one question more than
  once (Owen 2007, "The pigeonhole bootstrap"), so it errs to the wide side.
- Percentiles of few groups are too narrow: n draws with replacement spread as (n − 1)/n of what they stand for, and
  their tails are those of the normal distribution. The interval's ends are therefore taken farther out, where
  √(n/f) · t_f is in the normal distribution, f degrees of freedom (Hesterberg 2015, "What teachers should know about
  the bootstrap": the expanded percentile interval, there of a mean). tests/benchmark/test_association.py counts how
  often such intervals hold the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specwave.benchmark.bootstrap import RESAMPLES, Floats, draws, quotient, student

FEWEST = 5  # groups beyond those that the means take up; of fewer nothing is said
_SEED = 1  # of the groups drawn; `draws` has the questions'


@dataclass(frozen=True)
class Measured:
    """An outcome of every group, as the sums it is a ratio of: [G, Q] each."""

    above: Floats
    below: Floats

    @classmethod
    def of(cls, values: ArrayLike) -> Measured:
        """Of figures [G] whose parts are not known: only groups are then drawn anew."""
        column = np.asarray(values, float)[:, None]
        return cls(column, np.ones_like(column))

    @property
    def values(self) -> Floats:
        """[G]."""
        return np.asarray(self.above.sum(1) / self.below.sum(1))

    def resampled(self) -> Floats:
        """[B, G], every row of other questions."""
        counts = draws(self.above.shape[1])
        return quotient(counts @ self.above.T, counts @ self.below.T)

    def at(self, places: NDArray[np.intp]) -> Measured:
        return Measured(self.above[places], self.below[places])


@dataclass(frozen=True)
class Found:
    """A figure and its interval; None where too little is known."""

    value: float
    interval: list[float] | None

    @property
    def sign(self) -> int:
        """+1 or −1 where the interval lies on one side of 0, else 0."""
        if self.interval is None:
            return 0
        low, high = self.interval
        return int(low > 0) - int(high < 0)


@dataclass(frozen=True)
class Association:
    """Of an outcome with a predictor. `slope`: outcome per unit of the predictor."""

    groups: int
    slope: Found
    spearman: Found
    pearson: Found


def associate(predictor: ArrayLike, outcome: Measured, sizes: Sequence[int], within: bool) -> Association | None:
    """
    Args:
        predictor: [G], a figure for each group.
        sizes: [G], whose groups of one value are drawn among themselves: how many there are of each was chosen.
        within: groups of one size are compared with each other only (each size has its own mean, all share the slope;
            ranks are those within a size, as shares of it); else all with all.

    Returns:
        None for fewer than FEWEST groups beyond the means, or a predictor without any difference.
    """
    x = np.asarray(predictor, float)
    order = np.argsort(sizes, kind="stable")  # groups of one size side by side
    x, outcome, kinds = x[order], outcome.at(order), np.asarray(sizes)[order]
    blocks = [np.flatnonzero(kinds == size) for size in np.unique(kinds)]
    compared = blocks if within else [np.arange(len(x))]
    freedom = len(x) - len(blocks) - 1
    if freedom < FEWEST - 1 or _varies_not(x, compared):
        return None
    picked = _picked(blocks)
    drawn_x, drawn_y = x[picked], np.take_along_axis(outcome.resampled(), picked, 1)
    y = outcome.values

    def found(statistic: Callable[[Floats, Floats], Floats], ranked: bool = False) -> Found:
        pairs = [(x[None], y[None]), (drawn_x, drawn_y)]
        if ranked:
            pairs = [(_ranks(one, compared), _ranks(other, compared)) for one, other in pairs]
        value, spread = (statistic(_centred(one, compared), _centred(other, compared)) for one, other in pairs)
        return Found(float(value[0]), _expanded(spread, len(x), freedom))

    return Association(len(x), found(_slope), found(_correlation, ranked=True), found(_correlation))


def _varies_not(x: Floats, compared: Sequence[NDArray[np.intp]]) -> bool:
    return all(len(np.unique(x[block])) < 2 for block in compared)


def _picked(blocks: Sequence[NDArray[np.intp]]) -> NDArray[np.intp]:
    """[B, G] places: each block drawn from itself, in its own place."""
    draw = np.random.default_rng(_SEED)
    return np.concatenate([block[draw.integers(0, len(block), (RESAMPLES, len(block)))] for block in blocks], 1)


def _centred(values: Floats, compared: Sequence[NDArray[np.intp]]) -> Floats:
    """[B, G] less the mean of each block."""
    centred = np.empty_like(values)
    for block in compared:
        centred[:, block] = values[:, block] - values[:, block].mean(1, keepdims=True)
    return centred


def _ranks(values: Floats, compared: Sequence[NDArray[np.intp]]) -> Floats:
    """[B, G] ranks within each block as shares of it; ties share the mean of theirs."""
    ranks = np.empty_like(values)
    for block in compared:
        own = values[:, block]
        lower = (own[:, None, :] < own[:, :, None]).sum(2)
        equal = (own[:, None, :] == own[:, :, None]).sum(2)
        ranks[:, block] = (lower + (equal - 1) / 2) / len(block)
    return ranks


def _slope(x: Floats, y: Floats) -> Floats:
    """Least squares of centred rows [B, G] → [B]."""
    return quotient((x * y).sum(1), _positive((x * x).sum(1)))


def _correlation(x: Floats, y: Floats) -> Floats:
    """Pearson's of centred rows [B, G] → [B]."""
    return quotient((x * y).sum(1), _positive(np.sqrt((x * x).sum(1) * (y * y).sum(1))))


def _positive(values: Floats) -> Floats:
    """NaN where nothing varies, rounding apart."""
    return np.where(values > 1e-24, values, np.nan)


def _expanded(values: Floats, groups: int, freedom: int) -> list[float] | None:
    """The interval of the module's docstring; None where half of the resamples could not be said."""
    finite = values[np.isfinite(values)]
    if len(finite) < len(values) / 2:
        return None
    tail = NormalDist().cdf(-math.sqrt(groups / freedom) * student(freedom))
    low, high = np.quantile(finite, [tail, 1 - tail])
    return [float(low), float(high)]
