"""Tokens per time: what a draft is worth, once its acceptance and both costs are known. Pure arithmetic.

Source: KnapSpec (arXiv 2602.20217), its objective. α is the chance that a drafted token is accepted when all before it
were, γ how many are drafted per round. A round commits 1 + α + α² + … + α^γ tokens in expectation (the target's own one
included), and costs γ draft steps and one verification of γ + 1 tokens. Worked, with t_draft = 1 and t_target = 4:

    α      γ = 0   1           2             4
    0.5    1/4     1.5/5       1.75/6        1.9375/8
    1      1/4     2/5         3/6           5/8          γ + 1 on top: the limit of (1 − α^(γ+1))/(1 − α)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def tokens_per_time(alpha: float, gamma: int, t_draft: float, t_target: float) -> float:
    """(1 − α^{γ+1})/(1 − α) / (γ·t_draft + t_target), and γ + 1 on top where α = 1.

    Args:
        alpha: acceptance of one token, 0 to 1.
        gamma: tokens drafted per round; 0 is plain decoding, whose rate is 1/t_target.
        t_draft: seconds of one draft step.
        t_target: seconds of verifying γ + 1 tokens: T(γ + 1), not T(1).

    Returns:
        tokens per second.

    Raises:
        ValueError: an α outside 0 … 1, a γ that is no whole number ≥ 0, times that are no cost.
    """
    if gamma < 0 or gamma != int(gamma):
        raise ValueError(f"gamma must be a whole number of at least 0, got {gamma}")
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must be in 0 to 1, got {alpha}")
    seconds = gamma * t_draft + t_target
    if not (t_draft >= 0 and t_target >= 0 and 0 < seconds < float("inf")):
        raise ValueError(f"a round must cost time, got t_draft={t_draft}, t_target={t_target}")
    tokens = sum(alpha**i for i in range(int(gamma) + 1))  # the closed form divides by 0 near α = 1
    return tokens / seconds


def tokens_per_layer(alpha: float, gamma: int, kept: Sequence[bool]) -> float:
    """Σ α^i / (γ·|S|/2 + N): DEL's criterion, tokens per block that is run, for a kept set of the 2N sub-layers.

    It takes every sub-layer for half a block, attention at any context for an MLP, and verifying γ + 1 tokens for
    running each block once: what TPT does not.
    """
    blocks = len(kept) / 2
    return tokens_per_time(alpha, gamma, sum(kept) / 2, blocks)


@dataclass(frozen=True)
class Fastest:
    """The choice of stage 2: which option (None: decode plainly), how many drafts, expected tokens per second."""

    option: int | None
    gamma: int
    rate: float


def fastest(
    alphas: Sequence[float], t_drafts: Sequence[float], t_target: Callable[[int], float], gammas: Sequence[int]
) -> Fastest:
    """Stage 2: (S, γ) of largest TPT over all options and γ, plain decoding among them.

    Drafting with the *full* set is always accepted and never pays: γ tokens cost γ·T(1), and then a verification. What
    the full set stands for is γ = 0, plain decoding, which here competes like any other option.

    Args:
        alphas: acceptance of each option, 0 to 1.
        t_drafts: seconds of one draft step of each.
        t_target: T(k), seconds of verifying k tokens.
        gammas: candidates ≥ 1.

    Returns:
        of equal rates the earlier option with the smaller γ, plain decoding first of all.
    """
    best = Fastest(None, 0, tokens_per_time(0.0, 0, 0.0, t_target(1)))
    verify = {gamma: t_target(gamma + 1) for gamma in sorted(set(gammas))}
    for option, (alpha, t_draft) in enumerate(zip(alphas, t_drafts, strict=True)):
        for gamma, seconds in verify.items():
            rate = tokens_per_time(alpha, gamma, t_draft, seconds)
            if rate > best.rate:
                best = Fastest(option, gamma, rate)
    return best
