"""Sources that plan while decoding, on states of the rounds just verified.

With window = 2 and every = 4:

    round       1  2     3  4  5  6     7 …
    watched     •  •           •  •
    drafts      none     plan 1         plan 2
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

from specwave.decoding import Context, Verdict
from specwave.skipping.logs import Logged
from specwave.skipping.plans import Plan
from specwave.target import Target, Wants


class Online(Logged):
    """Watches `window` rounds, plans, and plans again every `every` rounds; a decoding begins without a plan."""

    scope: Literal["sequence", "stream"] = "sequence"

    def __init__(self, target: Target, wanted: Wants, window: int, every: int):
        super().__init__(target)
        self.wanted, self.window, self.every = wanted, window, every
        self.begin([])

    def begin(self, contexts: Sequence[Context]) -> None:
        self.present: Plan | None = None
        self.watching = False
        self.rounds = self.planned_round = self.watched = 0
        self.forget()

    def end(self, row: int) -> None: ...

    def wants(self, contexts: Sequence[Context]) -> Wants:
        due = self.present is None or self.rounds - self.planned_round >= self.every - self.window
        self.watching = self.watching or due
        return self.wanted if self.watching else Wants()

    def plan(self, contexts: Sequence[Context]) -> Plan | None:
        if self.watched >= self.window:
            began = time.perf_counter()
            self.present = self.make(contexts)
            self.planned_round, self.watching, self.watched = self.rounds, False, 0
            self.forget()
            self.note(contexts, self.rounds, self.present, time.perf_counter() - began)
        return self.present

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.rounds += 1
        if self.watching:
            self.watched += 1
            self.take(verdicts)

    # ---------------------------------------------------------------- what a source adds

    def forget(self) -> None:
        """What was taken is of no use any more."""

    def take(self, verdicts: Sequence[Verdict]) -> None:
        """A watched round; its contexts hold the wanted states."""

    @abstractmethod
    def make(self, contexts: Sequence[Context]) -> Plan:
        """A plan from the rounds watched; γ = 0 drafts nothing."""
