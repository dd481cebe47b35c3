"""What the settings of every method have in common that drafts with a part of the target's own sub-layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

from specwave.artifacts import UserError
from specwave.decoding.loop import ROOM
from specwave.skipping.proposer import SelfSpeculation, Source
from specwave.skipping.stops import Rule, stop_rule
from specwave.target import Target


@dataclass(frozen=True)
class SelfDecoding:
    """Settings of a method that composes a source of plans, which a subclass makes, with any stop rule.

    `gamma`: the most drafts per round. `stop`: see `stops.py`; null is the method's `own` rule, where it has one that a
    probability cannot say. `batch_invariant` is the loop's.
    """

    gamma: int = 8
    stop: Any = 0.7
    batch_invariant: bool = False

    needs_checkpoint: ClassVar[bool] = False
    label: ClassVar[str]
    own: ClassVar[Rule | None] = None

    def __post_init__(self) -> None:
        if not 1 <= self.gamma <= ROOM:
            self.refuse("gamma", f"must be 1 to {ROOM}, the drafts that one round can verify")
        self.rule()

    def refuse(self, name: str, rule: str) -> NoReturn:
        """The user's mistake in one of the keys."""
        raise UserError(f"decoding.{name}", getattr(self, name), rule)

    def rule(self) -> Rule:
        return self.own if self.stop is None and self.own is not None else stop_rule(self.stop)

    def compose(self, target: Target, source: Source) -> SelfSpeculation:
        """Plan source × stop rule. Results name the rule that null stands for."""
        rule = self.rule()
        used = self if self.stop is not None else replace(self, stop=rule)
        return SelfSpeculation(target, used, source, rule.start())
