"""BanditSpec: every round pulls an arm, which is a way to draft; the reward is the round's tokens per second.

The bandit never looks at the target's randomness of the round to come, so drafts stay deterministic in the sense of
sample-and-match, and the output is the target's own.

An arm with a drafter reads the whole prompt when it is first pulled in a sequence. By the clock that round says nothing
of those to come and is not learned from: the arm is pulled once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specwave.copying.bandit import Policy, Rated
from specwave.copying.composite import Composite
from specwave.copying.ledger import PLAIN
from specwave.decoding import Context, Proposer, Tree, Verdict


class BanditSpec(Composite):
    """Arms and who chooses among them.

    Args:
        arms: by name; None is plain decoding.
        policy: makes a bandit of so many arms for the sequence of this key; in a stream the first one serves all.
        stream: one bandit for all rows, kept from decoding to decoding; otherwise a new one for each sequence.
        times: T(k), seconds of a forward over k tokens, in place of the clock: rewards then repeat exactly.
    """

    def __init__(
        self,
        arms: Mapping[str, Proposer | None],
        policy: Callable[[int, int], Policy],
        stream: bool = False,
        times: Callable[[int], float] | None = None,
        settings: Any = None,
    ):
        super().__init__(arms, settings)
        self.names, self.policy, self.times = list(self.children), policy, times
        self.stream = stream
        if stream:
            self.scope = "stream"
        self.bandits: dict[int, Rated] = {}  # by row
        self.shared: Rated | None = None
        self.pulled: dict[int, int] = {}  # by row: the arm of the round that runs
        self.cold: dict[int, set[int]] = {}  # by row: arms that have a prompt to read yet

    def begin(self, contexts: Sequence[Context]) -> None:
        super().begin(contexts)
        self.pulled = {}
        reading = set() if self.times else {arm for arm, name in enumerate(self.names) if not self.copies(name)}
        self.cold = {context.row: set(reading) for context in contexts}
        if not self.stream:
            self.bandits = {context.row: self._bandit(context) for context in contexts}
            return
        if self.shared is None:
            self.shared = self._bandit(contexts[0])
        self.bandits = {context.row: self.shared for context in contexts}

    def _bandit(self, context: Context) -> Rated:
        return Rated(self.policy(len(self.names), context.sequence))

    def end(self, row: int) -> None:
        super().end(row)
        self.bandits.pop(row, None)
        self.pulled.pop(row, None)
        self.cold.pop(row, None)

    def draft(self, contexts: Sequence[Context]) -> dict[int, Tree]:
        self.pulled = {context.row: self.bandits[context.row].choose() for context in contexts}
        trees: dict[int, Tree] = {}
        for arm, name in enumerate(self.names):
            own = [context for context in contexts if self.pulled[context.row] == arm]
            if not own:
                continue
            for context, tree in zip(own, self.ask(name, own), strict=True):
                trees[context.row] = tree
                self.ledger.note(context.row, name if len(tree) else PLAIN, f"{name} pulled")
        return trees

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        elapsed = self.ledger.elapsed
        for verdict in verdicts:
            row = verdict.context.row
            if row not in self.pulled:
                continue
            arm = self.pulled.pop(row)
            if arm in self.cold[row]:
                self.cold[row].discard(arm)
            else:
                seconds = elapsed if self.times is None else self.times(1 + len(verdict.tree))
                self.bandits[row].update(arm, len(verdict.tokens) / seconds)
        super().observe(verdicts)
