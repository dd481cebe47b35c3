"""The target drafting for itself: a *source* says which sub-layers are kept, a *stop rule* when a chain ends.

One plan serves all rows of a batch, since their draft steps are one forward. What a source does happens inside the
loop's clock: its time is draft time. Knows nothing about how plans are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from specwave.decoding import BaseProposer, Context, Tree, Verdict
from specwave.skipping.drafting import draft_chains
from specwave.skipping.logs import Logged
from specwave.skipping.plans import Plan
from specwave.skipping.stops import Stop
from specwave.target import Target, Wants


class Source(Protocol):
    """Where plans come from. Asked and told in the order of the loop: begin, then per round plan, wants, observe."""

    scope: Literal["sequence", "stream"]

    def begin(self, contexts: Sequence[Context]) -> None:
        """A decoding begins, after prefill."""

    def end(self, row: int) -> None:
        """Row `row` is finished."""

    def plan(self, contexts: Sequence[Context]) -> Plan | None:
        """What is drafted in this round; None or γ = 0: nothing."""

    def wants(self, contexts: Sequence[Context]) -> Wants:
        """States that this round's verification shall capture."""

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """After every round."""

    def report(self, folder: Path) -> None:
        """Writes what is worth keeping beside the answers."""


class SelfSpeculation(BaseProposer):
    """Chains drafted with a kept set of the target's sub-layers, one decoding at a time.

    `settings` is the dataclass of the method's config, whose keys go into results.
    """

    def __init__(self, target: Target, settings: Any, source: Source, stop: Stop):
        self.target, self.settings, self.source, self.stop = target, settings, source, stop
        self.scope = source.scope
        self.contexts: dict[int, Context] = {}

    def begin(self, contexts: Sequence[Context]) -> None:
        self.contexts = {context.row: context for context in contexts}
        self.source.begin(contexts)
        self.stop.begin(contexts)

    def end(self, row: int) -> None:
        self.contexts.pop(row, None)
        self.source.end(row)

    def wants(self, contexts: Sequence[Context]) -> Wants:
        return self.source.wants(contexts) if self._owns(contexts) else Wants()  # prefill is before `begin`

    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        self._own(contexts)
        plan = self.source.plan(contexts)
        if plan is None or plan.gamma == 0:
            return [Tree.empty(self.target.device) for _ in contexts]
        return [Tree.chain(chain) for chain in draft_chains(contexts, plan.kept, plan.gamma, self.stop)]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self._own([verdict.context for verdict in verdicts])
        self.source.observe(verdicts)
        self.stop.observe(verdicts)

    def take_up(self, folder: Path) -> None:
        """A run begins, or goes on, in this folder."""
        if isinstance(self.source, Logged):
            self.source.take_up(folder)

    def warmed_up(self) -> None:
        """A warm-up is over, whose plans nobody shall count."""
        if isinstance(self.source, Logged):
            self.source.forget_log()

    def flush(self, folder: Path) -> None:
        """Writes what was learned by now beside the answers."""
        if isinstance(self.source, Logged):
            self.source.flush(folder)

    def report(self, folder: Path) -> None:
        """Writes what is worth keeping beside the answers."""
        self.source.report(folder)

    def _owns(self, contexts: Sequence[Context]) -> bool:
        return all(self.contexts.get(context.row) is context for context in contexts)

    def _own(self, contexts: Sequence[Context]) -> None:
        if not self._owns(contexts):
            raise ValueError("this proposer has begun another decoding since: build one for each that runs at a time")
