"""Who drafted what, why, and what became of it: the account of a decoding with several sources.

A round of one sequence has one source, which is whoever drafted; "plain" is nobody. Knows nothing about methods.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specwave.decoding import Verdict

PLAIN = "plain"


@dataclass
class Tally:
    """What one source did for one sequence.

    Attributes:
        rounds: rounds it drafted for.
        hits: those of them in which at least one of its drafts was accepted.
        drafted, accepted: tokens.
        draft_seconds: what asking it took, in rounds of others too (a look-up that finds nothing costs as well).
        seconds: what its rounds took, from the first question to the verdict. Rows of a batch share both alike.
        why: rounds by the reason it was chosen for.
    """

    rounds: int = 0
    hits: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    seconds: float = 0.0
    why: dict[str, int] = field(default_factory=dict)


class Ledger:
    """The tallies of the decoding that began last, by row and source. They outlive the rows."""

    def __init__(self) -> None:
        self.tallies: dict[int, dict[str, Tally]] = {}
        self.drafts: dict[int, tuple[str, str]] = {}  # by row: source and reason of the round that runs
        self.began = 0.0

    def begin(self, rows: Iterable[int]) -> None:
        self.tallies = {row: {} for row in rows}
        self.drafts = {}

    def start(self) -> None:
        """A round begins."""
        self.began = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Seconds since the round began."""
        return time.perf_counter() - self.began

    def spent(self, source: str, rows: Sequence[int], seconds: float) -> None:
        """A source was asked for the drafts of these rows."""
        for row in rows:
            self._tally(row, source).draft_seconds += seconds / len(rows)

    def note(self, row: int, source: str, why: str) -> None:
        """The round's draft of this row is this source's."""
        self.drafts[row] = source, why

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """A round ends. Rows without a note, which someone else drafted for, count nowhere."""
        seconds = self.elapsed / max(1, len(verdicts))
        for verdict in verdicts:
            row, accepted = verdict.context.row, len(verdict.path) - 1
            if row not in self.drafts:
                continue
            source, why = self.drafts.pop(row)
            tally = self._tally(row, source)
            tally.rounds += 1
            tally.hits += accepted > 0
            tally.drafted += len(verdict.tree)
            tally.accepted += accepted
            tally.seconds += seconds
            tally.why[why] = tally.why.get(why, 0) + 1

    def of(self, row: int) -> dict[str, dict[str, Any]]:
        """A row's account by source, as plain data."""
        return {source: asdict(tally) for source, tally in self.tallies.get(row, {}).items()}

    def _tally(self, row: int, source: str) -> Tally:
        return self.tallies.setdefault(row, {}).setdefault(source, Tally())
