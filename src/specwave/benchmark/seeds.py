"""What another seed of the training would have given: the noise between seeds, and two methods compared over several.

Shapes: G groups of layers, S seeds, Q questions. Pure numbers; knows nothing of files.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np
from numpy.typing import ArrayLike

from specwave.benchmark.bootstrap import Floats, interval, resampled, student


@dataclass(frozen=True)
class SeedNoise:
    """How far drafters of one group lie apart by chance.

    `deviation`: standard deviation of one drafter around its group, what a seed moves in all groups alike left out:
    drafters of one seed saw the same text in the same order, and are compared with each other. `shift`: that common
    part, each seed's mean less the first one's.
    """

    groups: int
    seeds: int
    deviation: float
    shift: list[float]

    @property
    def apart(self) -> float:
        """The difference between two drafters of one seed that chance alone exceeds in 5 of 100 pairs."""
        return student((self.groups - 1) * (self.seeds - 1)) * math.sqrt(2) * self.deviation

    def told_apart(self, values: Sequence[float]) -> tuple[int, int]:
        """(pairs that lie farther apart than that, all pairs) of drafters of one seed."""
        gaps = [abs(one - other) for one, other in itertools.combinations(values, 2)]
        return sum(gap > self.apart for gap in gaps), len(gaps)

    def reliability(self, spread: float) -> float:
        """The share of a variance between groups that is not chance. A predictor that knew the groups perfectly would
        correlate with drafters of one seed by its square root."""
        return max(0.0, 1 - self.deviation**2 / spread) if spread > 0 else 0.0


def seed_noise(values: ArrayLike) -> SeedNoise | None:
    """Of figures [G, S], two groups and two seeds at least (else None): the residual of groups plus seeds."""
    table = np.asarray(values, float)
    if table.ndim != 2 or min(table.shape) < 2:
        return None
    groups, seeds = table.shape
    left = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    deviation = math.sqrt((left**2).sum() / ((groups - 1) * (seeds - 1)))
    means = table.mean(0)
    return SeedNoise(groups, seeds, deviation, (means - means[0]).tolist())


@dataclass(frozen=True)
class SeedContrast:
    """One method's τ less another's, trained with the same seeds and asked the same questions.

    `each`: of every seed. `questions`: the interval over other questions, these drafters. `interval`: over other
    questions and other seeds; None for one seed.
    """

    tau: float
    each: list[float]
    questions: list[float] | None
    interval: list[float] | None


def over_seeds(accepted: tuple[Floats, Floats], rounds: tuple[Floats, Floats]) -> SeedContrast:
    """The mean over seeds of the difference in τ, paired by seed and by question.

    Args:
        accepted, rounds: of the first and the second method, [S, Q] each; at least one round in each.

    The interval's half-widths over seeds (Student's t of the differences: with three seeds two degrees of freedom,
    4.3 standard errors) and over questions are added as independent errors are, by squares. What both hold, a seed's
    peculiarity on a question, is counted twice: to the wide side.
    """
    seeds, questions = accepted[0].shape
    taus = [above.sum(1) / below.sum(1) for above, below in zip(accepted, rounds, strict=True)]
    each = (taus[0] - taus[1]).tolist()
    drawn = np.mean(
        [
            resampled(accepted[0][seed], rounds[0][seed]) - resampled(accepted[1][seed], rounds[1][seed])
            for seed in range(seeds)
        ],
        axis=0,
    )
    tau, among = fmean(each), interval(drawn) if questions > 1 else None
    if seeds < 2 or among is None:
        return SeedContrast(tau, each, among, None)
    by_seed, by_question = variance(each) / seeds, float(np.nanvar(drawn)) * questions / (questions - 1)
    half = math.hypot(student(seeds - 1) * math.sqrt(by_seed), student(questions - 1) * math.sqrt(by_question))
    return SeedContrast(tau, each, among, [tau - half, tau + half])
