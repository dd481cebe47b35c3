"""When a chain of drafts ends before its γ-th token: rules that look at the token drafted last.

`decoding.stop` names one for any way to make plans: a probability, or a node with the `_target_` of a rule, such as
{_target_: specwave.skipping.Adaptive}. What YAML describes is a `Rule`; decodings ask the `Stop` that it starts, which
may learn from every round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from specwave.artifacts import UserError
from specwave.decoding import Context, Verdict


class Stop(Protocol):
    """A rule at work on one decoding at a time. `idle`: it never ends a chain, so nobody need look at probabilities."""

    @property
    def idle(self) -> bool: ...

    def begin(self, contexts: Sequence[Context]) -> None:
        """A decoding begins: rows are numbers of this one from now on."""

    def ends(self, contexts: Sequence[Context], probabilities: Sequence[float]) -> list[bool]:
        """Whether each row's chain ends behind the token just drafted, which was drawn with this probability. That
        token is verified too: it is there, and one token more costs a verification little.

        Asked after every draft step of the batch unless idle, of all its rows: of those whose chains have ended too,
        and behind the last step, whose answer nobody needs. The chain that counts is the verdict's."""

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """After every round."""


@runtime_checkable
class Rule(Protocol):
    """A stop rule as YAML has it: plain settings, under a `label` that goes into results."""

    label: str

    def start(self) -> Stop: ...


@dataclass(frozen=True)
class Below:
    """KnapSpec's and SWIFT's rule: a token drafted with less than `probability` is the last one. 0 is never, so that
    chains have a fixed length. It learns nothing, so it is the rule and the rule at work."""

    probability: float = 0.7

    label = "below"

    @property
    def idle(self) -> bool:
        return self.probability <= 0.0

    def start(self) -> Below:
        return self

    def begin(self, contexts: Sequence[Context]) -> None: ...

    def ends(self, contexts: Sequence[Context], probabilities: Sequence[float]) -> list[bool]:
        return [each < self.probability for each in probabilities]

    def observe(self, verdicts: Sequence[Verdict]) -> None: ...


@dataclass(frozen=True)
class Adaptive:
    """Draft & Verify's rule: a token drafted with less than a threshold is the last one, and the threshold moves.

    Of a round in which A of D drafts were accepted, with AR = 0 and threshold = `first` before the first round:

        AR        ← keep_rate · AR + (1 − keep_rate) · A/D
        wanted    = threshold + step where AR < target, else threshold − step
        threshold ← keep · threshold + (1 − keep) · wanted

    So drafts that are too seldom right become shorter. Where AR is high and the chain had its full length, which a
    lower threshold could not make longer, the threshold stays, as in the released code. It is not held within 0 … 1.
    Every sequence has its own. Source: Draft & Verify (arXiv 2309.08168) §3.4 and its code, whose numbers the defaults
    are.
    """

    first: float = 0.8
    target: float = 0.9
    step: float = 0.01
    keep_rate: float = 0.5
    keep: float = 0.9

    label = "adaptive"

    def __post_init__(self) -> None:
        for name in ("first", "target", "keep_rate", "keep"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"decoding.{name}", getattr(self, name), "must be 0 to 1")
        if not 0.0 <= self.step <= 1.0:
            raise UserError("decoding.step", self.step, "must be 0 (the threshold never moves) to 1")

    def start(self) -> Moving:
        return Moving(self)

    def moved(self, rate: float, threshold: float, accepted: int, drafted: int, whole: bool) -> tuple[float, float]:
        """(AR, threshold) after a round. `whole`: the chain was ended by its length, not by the threshold."""
        rate = self.keep_rate * rate + (1 - self.keep_rate) * accepted / drafted
        step = self.step if rate < self.target else 0.0 if whole else -self.step
        return rate, self.keep * threshold + (1 - self.keep) * (threshold + step)


class Moving:
    """`Adaptive` at work.

    Attributes:
        thresholds: by row.
    """

    idle = False

    def __init__(self, rule: Adaptive):
        self.rule = rule
        self.begin([])

    def begin(self, contexts: Sequence[Context]) -> None:
        self.rates: dict[int, float] = {context.row: 0.0 for context in contexts}
        self.thresholds: dict[int, float] = {context.row: self.rule.first for context in contexts}
        self._asked: dict[int, list[float]] = {}  # by row: probabilities of this round's drafts

    def ends(self, contexts: Sequence[Context], probabilities: Sequence[float]) -> list[bool]:
        for context, probability in zip(contexts, probabilities, strict=True):
            self._asked.setdefault(context.row, []).append(probability)
        pairs = zip(contexts, probabilities, strict=True)
        return [probability < self.thresholds[context.row] for context, probability in pairs]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            row, drafted = verdict.context.row, len(verdict.tree)
            chain = self._asked.pop(row, [])[:drafted]  # nothing where this round's drafts were another's
            if chain:
                whole = chain[-1] >= self.thresholds[row]
                accepted = len(verdict.path) - 1
                moved = self.rule.moved(self.rates[row], self.thresholds[row], accepted, drafted, whole)
                self.rates[row], self.thresholds[row] = moved


def stop_rule(stop: Any, key: str = "decoding.stop") -> Rule:
    """What `decoding.stop` means: a probability is `Below`, 0 a fixed length; a rule is itself.

    Raises:
        UserError: anything else.
    """
    if isinstance(stop, int | float) and not isinstance(stop, bool):
        if 0.0 <= stop <= 1.0 and not math.isnan(stop):
            return Below(float(stop))
        raise UserError(key, stop, "is a probability, 0 (chains are never ended early) to 1")
    if isinstance(stop, Rule) and not isinstance(stop, type):
        return stop
    given = "null" if stop is None else stop if isinstance(stop, str | bool) else type(stop).__name__
    remedy = "a probability, 0 (chains are never ended early) to 1, or a rule is expected, as in "
    raise UserError(key, given, f"{remedy}{{_target_: specwave.skipping.Adaptive}}")
