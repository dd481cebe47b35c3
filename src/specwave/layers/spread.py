"""Sets of layers for a study of what foretells acceptance: spread over the whole range of entropies, and what is known
of each before it is trained.

For every size some sets of the largest and of the smallest entropy, which stretch the range; the fixed rules; the rest
drawn at random, each set of a size as likely as another, so that they speak for all sets.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import ClassVar

from torch import Tensor

from specwave.artifacts import UserError, check_seed
from specwave.layers.blocks import prepare_grams
from specwave.layers.cka import cka_matrix
from specwave.layers.foresight import Foresight
from specwave.layers.groups import Group, Layers, score
from specwave.layers.ranking import Ranking
from specwave.layers.selectors import Outcome, check_alpha, fixed_rule, positive
from specwave.layers.steps import Sampling, Steps

# Every way of scale × centre in which a set's entropy can be taken; the first is the paper's.
NORMALISATIONS: dict[str, tuple[str, bool]] = {
    "entropy": ("none", False),
    "entropy_frobenius": ("frobenius", False),
    "entropy_centred": ("none", True),
    "entropy_centred_frobenius": ("frobenius", True),
}
REDUNDANCY, AGREEMENT = "cka", "ridge"


@dataclass
class Spread:
    """`count` sets, in turns from the rules and from the largest, the smallest and the random ones of every size."""

    name: ClassVar[str] = "spread"
    reads_cka: ClassVar[bool] = False
    searched: ClassVar[bool] = False
    sizes: list[int] = field(default_factory=lambda: [1, 2, 3])
    count: int = 28
    extremes: int = 2
    rules: list[str] = field(default_factory=lambda: ["eagle2", "eagle3", "eagle3_release", "low_entropy"])
    max_sets: int = 50_000
    width: int = 64
    token_width: int = 64
    ridge: float = 0.01
    parts: int = 4
    positions: int = 8192
    vocabulary: int = 4096
    seed: int = 0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if not self.sizes or len(set(self.sizes)) < len(self.sizes):
            raise UserError("selector.sizes", self.sizes, "name sizes of sets, each once, as in [1,2,3]")
        for size in self.sizes:
            positive("selector.sizes", size)
        for key in ("count", "max_sets", "width", "token_width", "vocabulary"):
            positive(f"selector.{key}", getattr(self, key))
        for key, least in (("extremes", 0), ("parts", 2), ("positions", 2)):
            if getattr(self, key) < least:
                raise UserError(f"selector.{key}", getattr(self, key), f"must be ≥ {least}")
        if not 0 < self.ridge < math.inf:
            raise UserError("selector.ridge", self.ridge, "must be > 0 and finite: a share of the data's own size")
        check_alpha(self.alpha)
        check_seed("selector.seed", self.seed)

    def sampling(self) -> Sampling:
        return Sampling(self.positions, self.width, self.token_width, self.vocabulary, self.seed)

    def m_of(self, num_layers: int) -> int:
        return max(self.sizes)

    def check(self, num_layers: int) -> None:
        for size in self.sizes:
            if size > num_layers:
                raise UserError("selector.sizes", size, f"must be ≤ {num_layers}, the number of the model's layers")
            if (sets := math.comb(num_layers, size)) > self.max_sets:
                rule = f"{sets:,} sets of {size} of {num_layers} layers are more than selector.max_sets={self.max_sets}"
                raise UserError("selector.sizes", size, f"{rule}: raise it, or leave this size out")
        for rule in self.rules:
            fixed_rule(rule, num_layers, "selector.rules")

    def select(self, grams: Tensor, steps: Steps) -> Outcome:
        """Groups with `origin` and `predictors`, in the order in which they were taken.

        Args:
            grams: [N, R, R] as measured, neither scaled nor centred.

        Raises:
            UserError: there are fewer sets than `count`; too few rows for the regression.
        """
        self.check(len(grams))
        chosen = self._chosen(grams)
        if len(chosen) < self.count:
            remedy = f"there are {len(chosen)} sets of these sizes and rules: ask for at most that many"
            raise UserError("selector.count", self.count, remedy)
        foresight = Foresight(steps, self.parts, self.ridge)
        told = predictors(grams, [group.layers for group in chosen], foresight, self.alpha)
        return Outcome([replace(group, predictors=own) for group, own in zip(chosen, told, strict=True)])

    def _chosen(self, grams: Tensor) -> list[Group]:
        draw = random.Random(self.seed)
        offers: list[tuple[str, Sequence[Layers]]] = [(rule, [fixed_rule(rule, len(grams))]) for rule in self.rules]
        for size in sorted(self.sizes, reverse=True):  # large ones first: of those several seeds are trained
            ranking = Ranking(grams, size, self.alpha, say=print)
            falling = [tuple(ranking.sets[place].tolist()) for place in ranking.order().tolist()]
            offers += [
                ("random", draw.sample(sorted(falling), min(self.count, len(falling)))),
                ("top", apart(falling, self.extremes)),
                ("bottom", apart(falling[::-1], self.extremes)),
            ]
        origins = dealt(offers, self.count)
        return [replace(score(grams, [layers], self.alpha)[0], origin=tuple(own)) for layers, own in origins.items()]


def dealt(offers: Sequence[tuple[str, Sequence[Layers]]], count: int) -> dict[Layers, list[str]]:
    """Up to `count` different sets with who offered them, one from each list in turn.

    A set is `random` only where a draw had its turn, so that these are the first draws of each size and nothing else,
    whatever else they are.
    """
    taken: dict[Layers, list[str]] = {}
    for rank in range(max((len(sets) for _, sets in offers), default=0)):
        for name, sets in offers:
            if rank < len(sets) and len(taken) < count:
                taken.setdefault(sets[rank], []).append(name)
    return taken


def apart(ordered: Sequence[Layers], count: int) -> list[Layers]:
    """The first `count` sets of which no two share more than half of their layers: neighbours in a ranking are often
    one set with a layer exchanged, and twice the same evidence."""
    taken: list[Layers] = []
    for layers in ordered:
        if len(taken) == count:
            break
        if all(len(set(layers) & set(other)) <= len(layers) // 2 for other in taken):
            taken.append(layers)
    return taken


def predictors(
    grams: Tensor, sets: Sequence[Layers], foresight: Foresight, alpha: float = 1.0
) -> list[dict[str, float | None]]:
    """What is known of each set without training: entropies in nats, of order `alpha`, under every normalisation, the
    mean CKA between its layers (None for one layer), the agreement of the ridge regression.

    Raises:
        UserError: too few rows for the regression of the largest set.
    """
    foresight.refuse_few_rows(max(sets, key=len))
    prepared = {name: prepare_grams(grams, *how) for name, how in NORMALISATIONS.items()}
    alike = cka_matrix(grams)
    found = []
    for layers in sets:
        own: dict[str, float | None] = {
            name: score(each, [layers], alpha)[0].entropy for name, each in prepared.items()
        }
        pairs = [alike[one, other].item() for one, other in itertools.combinations(layers, 2)]
        own[REDUNDANCY] = fmean(pairs) if pairs else None
        own[AGREEMENT] = foresight.hits(layers).double().mean().item()
        found.append(own)
    return found
