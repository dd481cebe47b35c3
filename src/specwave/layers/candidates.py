"""Candidates from several selectors and fixed rules: what is trained together where training is to decide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from specwave.artifacts import UserError
from specwave.layers.groups import Group, score
from specwave.layers.selectors import Outcome, fixed_rule, positive
from specwave.layers.steps import Sampling, Steps


@dataclass
class Union:
    """The best sets of every member and every rule, taken in turns."""

    name: ClassVar[str] = "union"
    reads_cka: ClassVar[bool] = False
    searched: ClassVar[bool] = False
    of: dict[str, Any]  # searches by name; None leaves one out
    m: int = 3
    top: int = 8
    rules: list[str] = field(default_factory=lambda: ["eagle3", "eagle3_release"])
    alpha: float = 1.0

    def __post_init__(self) -> None:
        positive("selector.top", self.top)
        sources = len(self.rules) + len(self._members())
        if not sources:
            raise UserError("selector.of", "{}", "name a search, or a rule in selector.rules")
        if self.top < sources:
            remedy = f"there are {sources} searches and rules, and each has a set to offer: use at least {sources}"
            raise UserError("selector.top", self.top, remedy)
        wanting = [name for name, member in self._members().items() if member.sampling()]
        if len(wanting) > 1:
            raise UserError("selector.of", ", ".join(wanting), "one proxy is enough: a pass serves one of them")

    def _members(self) -> dict[str, Any]:
        return {name: member for name, member in self.of.items() if member is not None}

    def sampling(self) -> Sampling | None:
        return next((wanted for member in self._members().values() if (wanted := member.sampling())), None)

    def m_of(self, num_layers: int) -> int:
        return self.m

    def check(self, num_layers: int) -> None:
        for name, member in self._members().items():
            with _keys_of(name):
                member.check(num_layers)
        for rule in self.rules:
            fixed_rule(rule, num_layers, "selector.rules")

    def select(self, grams: Tensor, steps: Steps | None = None) -> Outcome:
        self.check(len(grams))
        found: dict[str, Outcome] = {}
        for name, member in self._members().items():
            with _keys_of(name):
                found[name] = member.select(grams, steps) if member.sampling() else member.select(grams)
        offers: dict[str, Sequence[Group]] = {name: outcome.groups for name, outcome in found.items()}
        for rule in self.rules:
            offers[rule] = score(grams, [fixed_rule(rule, len(grams))], self.alpha)
        foretold = next((outcome.foretold for outcome in found.values() if outcome.foretold), None)
        groups = in_turns(offers, self.top)
        if foretold is not None:
            enough = foretold.foresight.enough_rows
            groups = [
                replace(group, score=foretold.agreement(group.layers)) if enough(group.layers) else group
                for group in groups
            ]
        return Outcome(groups, foretold=foretold)


@contextlib.contextmanager
def _keys_of(name: str) -> Iterator[None]:
    """A member names its keys as those of `selector`; here they are those of `selector.of.<name>`."""
    try:
        yield
    except UserError as error:
        key = f"selector.of.{name}.{error.key.removeprefix('selector.')}"
        raise UserError(key if error.key.startswith("selector.") else error.key, error.value, error.remedy) from None


def in_turns(offers: dict[str, Sequence[Group]], count: int) -> list[Group]:
    """Up to `count` different sets: the best of each source, then their second ones, and so on; a source whose next set
    is there already has had its turn. `origin` names all sources among whose offers a set is."""
    taken: dict[tuple[int, ...], Group] = {}
    for rank in range(max(map(len, offers.values()))):
        for groups in offers.values():
            if rank < len(groups) and len(taken) < count:
                taken.setdefault(groups[rank].layers, groups[rank])
    by_source = {name: {group.layers for group in groups} for name, groups in offers.items()}
    return [
        replace(group, origin=tuple(name for name, sets in by_source.items() if layers in sets))
        for layers, group in taken.items()
    ]
