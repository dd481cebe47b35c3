"""The choices of `conf/selector`: settings that turn Grams into ranked groups of layers.

Every selector has `name`, `m_of(num_layers)`, `check(num_layers)`, called before anything costly runs, `sampling()`,
what it wants to see of drafting steps, and `select(grams [N, R, R])` → `Outcome`, to which those steps are handed too
where it wants any. `searched` says whether resampled Grams tell how sure its choice is.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from specwave.artifacts import UserError, check_layers, check_seed
from specwave.layers import search
from specwave.layers.groups import Group, score
from specwave.layers.ranking import Ranking
from specwave.layers.search import Beams

if TYPE_CHECKING:
    from specwave.layers.proxy import Foretold
    from specwave.layers.steps import Sampling


@dataclass
class Outcome:
    """What a selector found."""

    groups: list[Group]  # best first
    steps: Beams = field(default_factory=list)  # the beam after every step, where there was one
    ranking: Ranking | None = None  # of all sets of this size, where it was computed
    foretold: Foretold | None = None  # what the proxy found, where there was one


# N → layers. eagle3_release is what EAGLE's released code reads: block *inputs* 2, N//2, N−3, one lower as outputs.
RULES: dict[str, Callable[[int], list[int]]] = {
    "eagle2": lambda n: [n - 1],
    "eagle3": lambda n: [2, n // 2, n - 3],
    "eagle3_release": lambda n: [1, n // 2 - 1, n - 4],
    "low_entropy": lambda n: [0, 1, n - 1],
}


def fixed_rule(name: str, num_layers: int, key: str = "selector.rule") -> tuple[int, ...]:
    """The layers a named rule takes in a model of `num_layers` blocks, ascending.

    Raises:
        UserError: no such rule, or the model is so small that the rule names a layer twice; `key` is to blame.
    """
    if name not in RULES:
        raise UserError(key, name, f"there is no such rule: use {', '.join(RULES)}")
    layers = RULES[name](num_layers)
    rising = all(low < high for low, high in itertools.pairwise(layers))
    if not rising or layers[0] < 0:  # 5 layers: eagle3 gives [2, 2, 2]
        raise UserError(
            key, name, f"in a model of {num_layers} layers the rule {name} gives {layers}, which repeats a layer: "
            "use eagle2, or list layers yourself"
        )  # fmt: skip
    return tuple(layers)


def fixed_rules(num_layers: int) -> dict[str, tuple[int, ...]]:
    """The rules that a model of `num_layers` blocks is large enough for."""
    found = {}
    for name in RULES:
        try:
            found[name] = fixed_rule(name, num_layers)
        except UserError:
            continue
    return found


def positive(key: str, value: int) -> None:
    if value < 1:
        raise UserError(key, value, "must be ≥ 1")


def refuse_many(m: int, num_layers: int, max_sets: int) -> None:
    """Raises UserError where all sets of `m` layers are more than are looked at one by one."""
    if (count := math.comb(num_layers, m)) > max_sets:
        raise UserError(
            "selector.m", m, f"{count:,} sets of {m} of {num_layers} layers are more than "
            f"selector.max_sets={max_sets}: raise it, lower m, or use selector=elsi"
        )  # fmt: skip


def check_alpha(alpha: float) -> None:
    if not 0 < alpha < math.inf:
        raise UserError("selector.alpha", alpha, "must be > 0 and finite (1 is the Shannon entropy)")


def _check_m(m: int, num_layers: int) -> None:
    if m > num_layers:
        rule = f"selector.m must be ≤ {num_layers} (the model has {num_layers} layers), got {m}"
        raise UserError("selector.m", m, rule)


@dataclass
class Sized:
    """What the searches share: the size of the set and the order of the entropy."""

    searched: ClassVar[bool] = True
    m: int = 3
    alpha: float = 1.0

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if key == "m" or key.startswith("k_"):
                positive(f"selector.{key}", value)
        check_alpha(self.alpha)

    def sampling(self) -> Sampling | None:
        return None

    def m_of(self, num_layers: int) -> int:
        return self.m

    def check(self, num_layers: int) -> None:
        _check_m(self.m, num_layers)


@dataclass
class Elsi(Sized):
    """Beam search for the set of layers of largest entropy (`search.elsi`)."""

    name: ClassVar[str] = "elsi"
    reads_cka: ClassVar[bool] = False
    k_beam: int = 10
    k_expand: int = 10

    def select(self, grams: Tensor) -> Outcome:
        self.check(len(grams))
        steps: Beams = []
        return Outcome(search.elsi(grams, self.m, self.k_beam, self.k_expand, self.alpha, steps), steps)


@dataclass
class ElsiC(Sized):
    """The beam with candidates where conditional CKA changes most (`search.elsi_c`)."""

    name: ClassVar[str] = "elsi_c"
    reads_cka: ClassVar[bool] = True
    k_beam: int = 10
    k_pool: int = 10
    right_neighbour: bool = False
    unbiased: bool = False

    def select(self, grams: Tensor) -> Outcome:
        self.check(len(grams))
        if self.unbiased and grams.shape[-1] < 4:
            raise UserError("selector.unbiased", "true", f"needs at least 4 rows, there are {grams.shape[-1]}")
        steps: Beams = []
        found = search.elsi_c(
            grams, self.m, self.k_beam, self.k_pool, self.alpha, self.right_neighbour, self.unbiased, steps
        )
        return Outcome(found, steps)


@dataclass
class Exhaustive(Sized):
    """Every set there is (`ranking.Ranking`)."""

    name: ClassVar[str] = "exhaustive"
    reads_cka: ClassVar[bool] = False
    top: int = 10
    max_sets: int = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("selector.top", self.top)

    def check(self, num_layers: int) -> None:
        super().check(num_layers)
        refuse_many(self.m, num_layers, self.max_sets)

    def select(self, grams: Tensor) -> Outcome:
        self.check(len(grams))
        ranking = Ranking(grams, self.m, self.alpha, say=print)
        return Outcome(ranking.top(self.top), ranking=ranking)


@dataclass
class Fixed:
    """Layers named beforehand: one by one, by a rule, or drawn at random; `layers` goes before `rule`."""

    name: ClassVar[str] = "fixed"
    reads_cka: ClassVar[bool] = False
    searched: ClassVar[bool] = False
    rule: str = "eagle3"
    layers: list[int] | None = None
    paper_ids_are: Literal["output", "input"] = "output"
    m: int = 3
    seed: int = 0
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.rule not in (*RULES, "random"):
            raise UserError(
                "selector.rule", self.rule, f"there is no such rule: use {', '.join(RULES)}, or random"
            )  # fmt: skip
        positive("selector.m", self.m)
        check_alpha(self.alpha)
        check_seed("selector.seed", self.seed)

    def sampling(self) -> Sampling | None:
        return None

    def m_of(self, num_layers: int) -> int:
        return len(self.check(num_layers))

    def check(self, num_layers: int) -> tuple[int, ...]:
        """The layers in a model of `num_layers` blocks."""
        shift = int(self.paper_ids_are == "input")
        if self.layers is not None:
            if shift and 0 in self.layers:
                rule = "input 0 is the embedding, which is no block's output: leave it out, or paper_ids_are=output"
                raise UserError("selector.layers", self.layers, rule)
            return check_layers([layer - shift for layer in self.layers], num_layers, "selector.layers")
        if self.rule == "random":
            _check_m(self.m, num_layers)
            return tuple(sorted(random.Random(self.seed).sample(range(num_layers), self.m)))
        return fixed_rule("eagle3_release" if shift and self.rule == "eagle3" else self.rule, num_layers)

    def select(self, grams: Tensor) -> Outcome:
        return Outcome(score(grams, [self.check(len(grams))], self.alpha))
