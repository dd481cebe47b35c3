"""What the paper's figures show, as data: spread and its cut, gains of pairs, the place of fixed rules.

Shapes: N layers, P prompts. Knows nothing about models or pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specwave.artifacts import UserError, check_seed
from specwave.layers.calibrate import KINDS
from specwave.layers.groups import Group, all_sets, entropies, score
from specwave.layers.ranking import Ranking
from specwave.layers.selectors import RULES, fixed_rules


@dataclass
class Analysis:
    """`conf/analysis`: what is looked into beside the choice itself."""

    ranking: Literal["auto", "always", "never"] = "auto"
    max_sets: int = 100_000
    resamples: int = 0
    against: str = "eagle3"
    sensitivity: bool = False
    figures: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.resamples < 0:
            raise UserError("analysis.resamples", self.resamples, "must be ≥ 0 (0: no bootstrap)")
        if self.against not in RULES:
            raise UserError("analysis.against", self.against, f"there is no such rule: use {', '.join(RULES)}")
        check_seed("analysis.seed", self.seed)

    def check(self, num_layers: int, m: int) -> None:
        """Refuses a ranking of more sets than can be meant."""
        count = math.comb(num_layers, m)
        if self.ranking == "always" and count > self.max_sets:
            raise UserError(
                "analysis.ranking", "always", f"{count:,} sets of {m} of {num_layers} layers are more than "
                f"analysis.max_sets={self.max_sets}: raise it, or use analysis.ranking=auto"
            )  # fmt: skip

    def ranks(self, num_layers: int, m: int) -> bool:
        """Whether the sensitivity table ranks the fixed rules."""
        return self.ranking != "never" and math.comb(num_layers, m) <= self.max_sets


THIRDS = ("early", "middle", "late")


def thirds(num_layers: int) -> dict[str, range]:
    """Early, middle and late layers in the proportions of the paper's 0–6, 7–28, 29–35 of 36."""
    first, last = round(num_layers * 7 / 36), num_layers - round(num_layers * 7 / 36)
    return {name: part for name, part in zip(THIRDS, (range(first), range(first, last), range(last, num_layers)),
                                             strict=True) if len(part)}  # fmt: skip


def variance_cuts(spread: Tensor) -> list[dict[str, Any]]:
    """How much less the entropy varies over prompts when positions are filtered: rows for early, middle, late layers.

    Each kind has the same number of token states, so the cut is not one of sample size; the random ones tell how much
    of a difference is chance.

    Args:
        spread: [3, P, N] entropies of `KINDS`, P ≥ 2.

    Returns:
        per part: `variance` over prompts, averaged over its layers, of each kind, and `cut`, the share by which the
        filter lowers it (`1 − filtered/unfiltered`), beside the same for the random control.
    """
    variance = dict(zip(KINDS, spread.var(1), strict=True))
    rows = []
    for name, part in thirds(spread.shape[-1]).items():
        means = {kind: values[list(part)].mean().item() for kind, values in variance.items()}
        base = means["unfiltered"]
        rows.append(
            {
                "part": name,
                "layers": [part[0], part[-1]],
                "variance": means,
                "cut": 1 - means["filtered"] / base if base else 0.0,
                "cut_random": 1 - means["random"] / base if base else 0.0,
            }
        )
    return rows


def pair_gains(grams: Tensor, alpha: float = 1.0) -> Tensor:
    """Gain [N, N] in nats: entry (i, j) is S of {i, j} less S of {i}; the diagonal is 0."""
    num_layers = len(grams)
    alone = entropies(grams.double(), torch.arange(num_layers)[:, None], alpha)
    gains = torch.zeros(num_layers, num_layers, dtype=torch.float64)
    if num_layers > 1:
        pairs = all_sets(num_layers, 2)
        values = entropies(grams.double(), pairs, alpha)
        first, second = pairs.long().unbind(1)
        gains[first, second] = values - alone[first]
        gains[second, first] = values - alone[second]
    return gains


def best_partners(gains: Tensor) -> list[int]:
    """For each seed layer, the partner it gains most from (ties to the lower layer)."""
    own = torch.eye(len(gains), dtype=torch.bool)
    return gains.masked_fill(own, -math.inf).round(decimals=12).max(1).indices.tolist()


def spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation of two lists [n]; ties share the mean of their ranks. NaN where one is constant."""

    def ranks(values: Tensor) -> Tensor:
        _, place, times = values.double().unique(return_inverse=True, return_counts=True)
        return (times.cumsum(0) - (times - 1) / 2)[place]

    return torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1].item()


@dataclass
class Standing:
    """A named set among all sets of its size."""

    name: str
    group: Group
    rank: int | None  # 1 is the best; None when the ranking of this size was not computed


def standings(grams: Tensor, named: dict[str, Sequence[int]], ranking: Ranking | None, alpha: float) -> list[Standing]:
    """Entropy and rank of each named set; a rank only where it has the size that was ranked."""
    found = []
    for name, layers in named.items():
        (group,) = score(grams, [tuple(layers)], alpha)
        ranked = ranking is not None and ranking.sets.shape[1] == len(group.layers)
        found.append(Standing(name, group, ranking.rank(group.layers) if ranked and ranking is not None else None))
    return found


def rule_standings(grams: Tensor, ranking: Ranking | None, alpha: float) -> list[Standing]:
    """`standings` of the fixed rules that this model is large enough for."""
    return standings(grams, dict(fixed_rules(len(grams))), ranking, alpha)
