"""How well a criterion tells fast plans from slow ones: correlations with what was measured, and their intervals.

Pure, standard library only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Statistic = Callable[[Sequence[float], Sequence[float]], float]


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """The linear correlation coefficient; NaN where one of both does not vary."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} values beside {len(y)}")
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    both = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    spread = math.fsum((a - mean_x) ** 2 for a in x) * math.fsum((b - mean_y) ** 2 for b in y)
    return both / math.sqrt(spread) if spread > 0 else math.nan


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's of the ranks, ties sharing the mean of theirs."""
    return pearson(_ranks(x), _ranks(y))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda place: values[place])
    ranks, start = [0.0] * len(values), 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            ranks[place] = (start + end) / 2
        start = end + 1
    return ranks


@dataclass(frozen=True)
class Interval:
    """A statistic of all pairs, and the range of the middle share of its bootstrap replicates."""

    value: float
    low: float
    high: float


def bootstrap(
    statistic: Statistic,
    x: Sequence[float],
    y: Sequence[float],
    replicates: int = 2000,
    share: float = 0.95,
    seed: int = 0,
) -> Interval:
    """A percentile interval over pairs drawn with replacement; replicates without a value (all pairs alike) are left
    out."""
    draw, found = random.Random(seed), []
    for _ in range(replicates):
        places = draw.choices(range(len(x)), k=len(x))
        one = statistic([x[place] for place in places], [y[place] for place in places])
        if not math.isnan(one):
            found.append(one)
    value = statistic(x, y)
    if not found:
        return Interval(value, math.nan, math.nan)
    found.sort()
    edge = (1 - share) / 2 * (len(found) - 1)
    return Interval(value, found[round(edge)], found[round(len(found) - 1 - edge)])
