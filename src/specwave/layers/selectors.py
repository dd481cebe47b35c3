"""The choices of `conf/selector`: settings that turn Grams into ranked groups of layers.

Every selector has `name`, `check(num_layers)`, called before anything costly runs, and
`select(grams [N, R, R])` → groups, best first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specwave.artifacts import UserError, check_layers
from specwave.layers import search
from specwave.layers.search import Group

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


def _positive(key: str, value: int) -> None:
    if value < 1:
        raise UserError(key, value, "must be ≥ 1")


def _check_alpha(alpha: float) -> None:
    if not alpha > 0:
        raise UserError("selector.alpha", alpha, "must be > 0 (1 is the Shannon entropy)")


@dataclass
class Elsi:
    """Beam search for the set of layers of largest entropy (`search.elsi`)."""

    name: ClassVar[str] = "elsi"
    m: int = 3
    k_beam: int = 10
    k_expand: int = 10
    alpha: float = 1.0

    def __post_init__(self) -> None:
        for key in ("m", "k_beam", "k_expand"):
            _positive(f"selector.{key}", getattr(self, key))
        _check_alpha(self.alpha)

    def check(self, num_layers: int) -> None:
        if self.m > num_layers:
            raise UserError(
                "selector.m",
                self.m,
                f"selector.m must be ≤ {num_layers} (the model has {num_layers} layers), got {self.m}",
            )

    def select(self, grams: Tensor) -> list[Group]:
        self.check(len(grams))
        return search.elsi(grams, self.m, self.k_beam, self.k_expand, self.alpha)


@dataclass
class Fixed:
    """Layers named beforehand: by a rule, or one by one, in which case the rule is not read."""

    name: ClassVar[str] = "fixed"
    rule: str = "eagle3"
    layers: list[int] | None = None
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            fixed_rule(self.rule, 0)
        _check_alpha(self.alpha)

    def check(self, num_layers: int) -> tuple[int, ...]:
        """The layers in a model of `num_layers` blocks."""
        if self.layers is not None:
            return check_layers(self.layers, num_layers, "selector.layers")
        return fixed_rule(self.rule, num_layers)

    def select(self, grams: Tensor) -> list[Group]:
        return search.score(grams.double(), [self.check(len(grams))], self.alpha)
