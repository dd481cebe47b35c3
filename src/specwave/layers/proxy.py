"""The selector that looks ahead: every set of layers by how well it foretells the target's next step (`foresight.py`).

All sets are compared roughly, on a shortlist of tokens and some steps; the best of them, the fixed rules and a few sets
drawn at random are then scored on every step and the whole vocabulary. The random ones tell how far the rough
comparison can be trusted.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import UserError, check_seed
from specwave.layers.analysis import spearman
from specwave.layers.foresight import Foresight, resampled
from specwave.layers.groups import Group, Layers, all_sets, score
from specwave.layers.selectors import Outcome, Sized, fixed_rules, positive, refuse_many
from specwave.layers.steps import Sampling, Steps

RESAMPLES = 1000  # of the conversations, behind an interval
AUDITED = 24  # sets drawn at random


@dataclass
class Foretold:
    """What the proxy found: rough scores of all sets, exact ones of some."""

    foresight: Foresight
    sets: Tensor  # [C, m]
    rough: Tensor  # agreement on the shortlist
    explained: Tensor  # share of the shortlist's logits
    rules: dict[str, Layers]
    audited: list[Layers]
    shortlist: int
    seed: int
    seconds: float = 0.0
    _hits: dict[Layers, Tensor] = field(default_factory=dict)

    def hits(self, layers: Layers) -> Tensor:
        if layers not in self._hits:
            self._hits[layers] = self.foresight.hits(layers)
        return self._hits[layers]

    def agreement(self, layers: Layers) -> float:
        """The share of all steps that the set foretells."""
        return self.hits(layers).double().mean().item()

    def known(self) -> list[Layers]:
        """The sets of the searched size with an exact score, best first; ties to the lexicographically smallest."""
        size = self.sets.shape[1]
        return sorted((one for one in self._hits if len(one) == size), key=lambda one: (-self.agreement(one), one))

    def difference(self, first: Layers, second: Layers) -> list[float]:
        """Agreement of the first less that of the second, conversations resampled: 2.5 %, median, 97.5 %."""
        values = self.hits(first).double() - self.hits(second).double()
        return list(resampled(values, self.foresight.steps.conversations, RESAMPLES, self.seed))

    def fidelity(self) -> float:
        """Spearman's correlation of rough and exact agreement over the audited sets."""
        place = {layers: number for number, layers in enumerate(map(tuple, self.sets.tolist()))}
        rough = torch.stack([self.rough[place[layers]] for layers in self.audited])
        return spearman(rough, torch.tensor([self.agreement(layers) for layers in self.audited]))

    def facts(self, chosen: Layers) -> dict[str, Any]:
        """The `proxy` block of selection.json."""
        steps, fidelity = self.foresight.steps, self.fidelity()
        return {
            "kind": "ridge",
            "agreement": self.agreement(chosen),
            "interval": list(
                resampled(self.hits(chosen), steps.conversations, RESAMPLES, self.seed)[::2]
            ),
            "token_alone": self.agreement(()),
            "rules": {
                name: {
                    "layers": list(layers),
                    "agreement": self.agreement(layers),
                    "chosen_less_rule": self.difference(chosen, layers),
                }
                for name, layers in self.rules.items()
            },
            "steps": len(steps.tokens),
            "steps_seen": steps.seen,
            "conversations": len(steps.conversations.unique()),
            "unknowns": len(steps.columns(chosen)),
            "vocabulary": len(steps.vocabulary),
            "outside_vocabulary": (steps.tokens < 0).double().mean().item(),
            "search": {
                "sets": len(self.sets),
                "shortlist": min(self.shortlist, len(steps.vocabulary)),
                "exact": len(self.known()),
                "audited": len(self.audited),
                "spearman": None if math.isnan(fidelity) else fidelity,
                "seconds": round(self.seconds, 1),
            },
        }  # fmt: skip


@dataclass
class Proxy(Sized):
    """Every set by ridge regression on the target's next step."""

    name: ClassVar[str] = "proxy"
    reads_cka: ClassVar[bool] = False
    searched: ClassVar[bool] = False
    width: int = 64
    token_width: int = 64
    ridge: float = 0.01
    parts: int = 4
    positions: int = 8192
    vocabulary: int = 4096
    shortlist: int = 256
    exact: int = 64
    top: int = 10
    max_sets: int = 50_000
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("width", "token_width", "vocabulary", "shortlist", "exact", "top", "max_sets"):
            positive(f"selector.{key}", getattr(self, key))
        if not 0 < self.ridge < math.inf:
            raise UserError("selector.ridge", self.ridge, "must be > 0 and finite: a share of the data's own size")
        for key in ("parts", "positions"):
            if getattr(self, key) < 2:
                raise UserError(f"selector.{key}", getattr(self, key), "must be ≥ 2: one part is foretold from others")
        if self.top > self.exact:
            raise UserError("selector.top", self.top, f"must be ≤ selector.exact={self.exact}: the rest has no score")
        check_seed("selector.seed", self.seed)

    def sampling(self) -> Sampling:
        return Sampling(self.positions, self.width, self.token_width, self.vocabulary, self.seed)

    def check(self, num_layers: int) -> None:
        super().check(num_layers)
        refuse_many(self.m, num_layers, self.max_sets)

    def select(self, grams: Tensor, steps: Steps) -> Outcome:
        """Groups with their agreement as `score`, and what else was found.

        Raises:
            UserError: too few rows for the regression, or too few conversations for the parts.
        """
        self.check(len(grams))
        if steps.num_layers != len(grams):
            raise ValueError(f"the steps are of {steps.num_layers} layers, the Grams of {len(grams)}")
        began = time.perf_counter()
        foresight = Foresight(steps, self.parts, self.ridge)
        sets = all_sets(len(grams), self.m)
        foresight.refuse_few_rows(tuple(sets[0].tolist()))
        rough, explained = foresight.search(sets, self.shortlist)
        every = [tuple(layers) for layers in sets.tolist()]
        chance = random.Random(self.seed).sample(every, min(AUDITED, len(every)))
        rules = {name: one for name, one in fixed_rules(len(grams)).items() if foresight.enough_rows(one)}
        found = Foretold(foresight, sets, rough, explained, rules, chance, self.shortlist, self.seed)
        order = sorted(range(len(every)), key=lambda place: (-rough[place].item(), -explained[place].item(), place))
        wanted = [every[place] for place in order[: self.exact]]
        whole = dict.fromkeys([*wanted, *chance, *rules.values(), ()])
        for layers in tqdm(whole, desc="the best of them", unit="set", disable=None):
            found.hits(layers)
        found.seconds = time.perf_counter() - began
        best = found.known()[: self.top]
        scored = zip(score(grams, best, self.alpha), best, strict=True)
        groups = [Group(group.layers, group.entropy, found.agreement(layers)) for group, layers in scored]
        return Outcome(groups, foretold=found)
