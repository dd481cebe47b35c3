"""The copying methods' settings, as YAML has them, and how each is put together (methods.md §3).

What drafts where nothing is copied arrives as settings of another room's method: this room does not know it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, Literal

from specwave.artifacts import UserError
from specwave.copying.automaton import SuffixAutomaton
from specwave.copying.bandit import Exp3, Policy, Ucb
from specwave.copying.banditspec import BanditSpec
from specwave.copying.composite import FirstOf
from specwave.copying.lookup import Lookup
from specwave.copying.match import LastN, Match
from specwave.decoding import Proposer
from specwave.decoding.loop import ROOM
from specwave.target import Target
from specwave.target.clock import clock

LONGEST = 64  # tokens of a run that is looked up: the index holds an entry for every length


@dataclass(frozen=True)
class PldDecoding:
    """`decoding=pld`: prompt lookup. The run of the last `n` tokens, else of fewer, and what followed it before: up to
    `length` tokens, no more than the text still holds. `occurrence`: which earlier one, `first` or the most `recent`.
    `batch_invariant` is the loop's."""

    n: int = 3
    length: int = 10
    occurrence: Literal["first", "recent"] = "first"
    batch_invariant: bool = False

    needs_checkpoint = False
    label = "pld"

    def __post_init__(self) -> None:
        check_run(self.n)
        check_length(self.length)

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> FirstOf:
        return FirstOf({"copy": Lookup(partial(LastN, self.n, 1, self.occurrence), lambda _: self.length)})


@dataclass(frozen=True)
class SuffixDecoding:
    """`decoding=suffix`: the longest run of last tokens that stood before, of any length from `least` on. The longer it
    is, the more is copied: `factor` tokens for each of its own, `length` at most; a copy that comes to the end of the
    text goes on with itself."""

    least: int = 1
    factor: float = 2.0
    length: int = 16
    occurrence: Literal["first", "recent"] = "recent"
    batch_invariant: bool = False

    needs_checkpoint = False
    label = "suffix"

    def __post_init__(self) -> None:
        if self.least < 1:
            raise UserError("decoding.least", self.least, "a run has at least 1 token")
        if not 0 < self.factor < math.inf:
            raise UserError("decoding.factor", self.factor, "must be a positive number of tokens")
        check_length(self.length)

    def drafts(self, match: Match) -> int:
        """How many tokens to copy behind a match."""
        return min(self.length, math.ceil(self.factor * match.length)) if match.length >= self.least else 0

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> FirstOf:
        return FirstOf({"copy": Lookup(partial(SuffixAutomaton, self.occurrence), self.drafts, overlap=True)})


@dataclass(frozen=True)
class CopySpecDecoding:
    """`decoding=copyspec`: where the last `n` tokens stood before, the `length` tokens that followed; elsewhere what
    `neural` drafts, a decoding method with the drafter in `checkpoint`; without one, plain decoding."""

    neural: Any
    n: int = 5
    length: int = 10
    occurrence: Literal["first", "recent"] = "first"
    batch_invariant: bool = False

    needs_checkpoint = False
    label = "copyspec"

    def __post_init__(self) -> None:
        check_method("decoding.neural", self.neural)
        check_run(self.n)
        check_length(self.length)

    @property
    def takes_checkpoint(self) -> bool:
        return takes_checkpoint(self.neural)

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> FirstOf:
        children: dict[str, Proposer] = {
            "copy": Lookup(partial(LastN, self.n, self.n, self.occurrence), lambda _: self.length)
        }
        neural = built(self.neural, target, checkpoint, allow_other_target, self.batch_invariant)
        if neural is not None:
            children["neural"] = neural
        return FirstOf(children, replace(self, neural=None if neural is None else used(self.neural, neural)))


@dataclass(frozen=True)
class BanditSpecDecoding:
    """`decoding=banditspec`: every round one of the `arms`, decoding methods by a name of yours. Those that need a
    drafter take the one in `checkpoint` and are left out without; null leaves one out too.

    `policy`: `ucb` with its `c`, or `exp3` with its `gamma` and `seed`. `reward`: tokens per second of a round by the
    clock (`measured`), or tokens / T(k), which repeats exactly (`modelled`). `scope`: what was learned belongs to a
    `sequence`, or is kept along the `stream` of all of them.
    """

    arms: dict[str, Any]
    policy: Literal["ucb", "exp3"] = "ucb"
    c: float = 0.1
    gamma: float = 0.2
    seed: int = 0
    reward: Literal["measured", "modelled"] = "measured"
    scope: Literal["sequence", "stream"] = "sequence"
    batch_invariant: bool = False

    needs_checkpoint = False
    label = "banditspec"

    def __post_init__(self) -> None:
        for name, arm in self.arms.items():
            check_method(f"decoding.arms.{name}", arm)
        check_arms([name for name, arm in self.arms.items() if arm is not None])
        if not 0 <= self.c < math.inf:
            raise UserError("decoding.c", self.c, "must be a number from 0 (no exploration) on")
        if not 0 < self.gamma <= 1:
            raise UserError("decoding.gamma", self.gamma, "must be above 0 and at most 1 (arms drawn alike)")

    @property
    def takes_checkpoint(self) -> bool:
        return any(takes_checkpoint(arm) for arm in self.arms.values())

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> BanditSpec:
        kept = usable(self.arms, checkpoint)
        check_arms(list(kept), "" if checkpoint is not None else " without a checkpoint")
        children = {
            name: built(arm, target, checkpoint, allow_other_target, self.batch_invariant) for name, arm in kept.items()
        }
        return BanditSpec(
            children,
            self.bandit,
            self.scope == "stream",
            clock(target, invariant=self.batch_invariant) if self.reward == "modelled" else None,
            replace(self, arms={name: used(arm, children[name]) for name, arm in kept.items()}),
        )

    def bandit(self, arms: int, sequence: int) -> Policy:
        """The bandit of a sequence, EXP3's draws keyed by it."""
        if self.policy == "ucb":
            return Ucb(arms, self.c)
        return Exp3(arms, self.gamma, f"{self.seed}/{sequence}")


# ---------------------------------------------------------------- settings within settings


def usable(methods: Mapping[str, Any], checkpoint: Any) -> dict[str, Any]:
    """Those that are no null and, where they need a drafter, have one."""
    return {
        name: method
        for name, method in methods.items()
        if method is not None and (checkpoint is not None or not method.needs_checkpoint)
    }


def built(
    method: Any, target: Target, checkpoint: Any, allow_other_target: bool, batch_invariant: bool
) -> Proposer | None:
    """A method's proposer; None where it is null, plain decoding, or needs a drafter that is not there.

    Args:
        batch_invariant: of the method around it: what it times are the forwards that are decoded with.
    """
    if method is None or (checkpoint is None and method.needs_checkpoint):
        return None
    if is_dataclass(method) and not isinstance(method, type) and hasattr(method, "batch_invariant"):
        method = replace(method, batch_invariant=batch_invariant)
    return method.build(target, checkpoint if takes_checkpoint(method) else None, allow_other_target)


def used(method: Any, proposer: Proposer | None) -> Any:
    """The settings that a method's proposer works with, `auto` resolved."""
    return getattr(proposer, "settings", method)


def takes_checkpoint(method: Any) -> bool:
    """Whether a method reads a drafter, or may."""
    return method is not None and getattr(method, "takes_checkpoint", method.needs_checkpoint)


# ---------------------------------------------------------------- ranges


def check_run(n: int) -> None:
    if not 1 <= n <= LONGEST:
        raise UserError("decoding.n", n, f"must be 1 to {LONGEST}, the last tokens that are looked up")


def check_length(length: int) -> None:
    if not 1 <= length <= ROOM:
        raise UserError("decoding.length", length, f"must be 1 to {ROOM}, which one round can verify")


def check_method(key: str, method: Any) -> None:
    if method is not None and not all(hasattr(method, name) for name in ("build", "needs_checkpoint", "label")):
        given = method if isinstance(method, str | int | float) else type(method).__name__
        remedy = "a decoding method is expected, as in {_target_: specwave.copying.PldDecoding, n: 3}, or null for none"
        raise UserError(key, given, remedy)


def check_arms(names: list[str], when: str = "") -> None:
    if len(names) < 2:
        remedy = f"a bandit chooses among at least two arms,{when} there is {f'only {names[0]}' if names else 'none'}"
        raise UserError("decoding.arms", names, remedy)
