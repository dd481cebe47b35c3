"""Which of K arms to pull next, when each pull shows its own reward only: UCB for rewards that are drawn, EXP3 for
rewards that anyone may choose. Rewards lie in [0, 1].

Both hold nothing but sums that are linear in the rewards, so a change of the rewards' unit is a factor on them
(`rescale`): `Rated` divides rates by the best one so far and, when a better one comes, the sums of all before it too.

Sources: Auer, Cesa-Bianchi, Fischer 2002 (UCB1); Auer, Cesa-Bianchi, Freund, Schapire 2002 (EXP3). Knows nothing about
decoding.
"""

from __future__ import annotations

import math
import random
from typing import Protocol


class Policy(Protocol):
    def choose(self) -> int:
        """The arm to pull."""

    def update(self, arm: int, reward: float) -> None:
        """What pulling it brought."""

    def rescale(self, factor: float) -> None:
        """Every reward so far is this many times what it was said to be."""


class Ucb:
    """The arm of largest `mean + sqrt(c ln t / n)` after t pulls, n of them the arm's own; each arm once at first.

    With c = 2 the expected regret after T pulls is at most Σ 8 ln T / Δ + (1 + π²/3) Σ Δ over the arms that are Δ worse
    than the best (theorem 1). A smaller c explores less.
    """

    def __init__(self, arms: int, c: float):
        self.c, self.pulls, self.sums = c, [0] * arms, [0.0] * arms

    def choose(self) -> int:
        if 0 in self.pulls:
            return self.pulls.index(0)
        total = math.log(sum(self.pulls))
        bounds = [
            gained / pulls + math.sqrt(self.c * total / pulls)
            for gained, pulls in zip(self.sums, self.pulls, strict=True)
        ]
        return bounds.index(max(bounds))

    def update(self, arm: int, reward: float) -> None:
        self.pulls[arm] += 1
        self.sums[arm] += reward

    def rescale(self, factor: float) -> None:
        self.sums = [gained * factor for gained in self.sums]


class Exp3:
    """Draws arm a with probability `(1 − γ) w_a / Σw + γ / K`, where a pull multiplies its `w` by `exp(γ r / (K p))`.

    With γ = min(1, sqrt(K ln K / ((e − 1) T))) the expected regret after T pulls, against the arm that was best in
    hindsight, is at most 2 sqrt((e − 1) T K ln K), whatever the rewards (corollary 3.2).
    """

    def __init__(self, arms: int, gamma: float, seed: int | str = 0):
        self.gamma, self.logs, self.random = gamma, [0.0] * arms, random.Random(seed)
        self.drawn = [1.0] * arms  # the probability with which each was drawn last

    def probabilities(self) -> list[float]:
        top = max(self.logs)
        weights = [math.exp(log - top) for log in self.logs]
        total, arms = sum(weights), len(weights)
        return [(1 - self.gamma) * weight / total + self.gamma / arms for weight in weights]

    def choose(self) -> int:
        weights = self.probabilities()
        arm = self.random.choices(range(len(weights)), weights)[0]
        self.drawn[arm] = weights[arm]
        return arm

    def update(self, arm: int, reward: float) -> None:
        self.logs[arm] += self.gamma * reward / (len(self.logs) * self.drawn[arm])

    def rescale(self, factor: float) -> None:
        self.logs = [log * factor for log in self.logs]


class Rated:
    """A policy whose rewards come as rates without a bound: they are divided by the largest one so far."""

    def __init__(self, policy: Policy):
        self.policy, self.best = policy, 0.0

    def choose(self) -> int:
        return self.policy.choose()

    def update(self, arm: int, rate: float) -> None:
        if rate > self.best:
            self.policy.rescale(self.best / rate)
            self.best = rate
        self.policy.update(arm, rate / self.best if self.best else 0.0)
