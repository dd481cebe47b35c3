"""Several proposers as one: in every round each sequence's draft comes from one of them.

The rule that keeps acceptance from collapsing after a long copy: every child is told of every round (`observe`),
whoever drafted, the target's states are captured for all of them, and who is asked again catches up in one batch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from specwave.copying.ledger import PLAIN, Ledger
from specwave.copying.lookup import chains
from specwave.decoding import BaseProposer, Context, Proposer, Tree, Verdict
from specwave.target import Session, Wants


class Plain(BaseProposer):
    """Proposes nothing, on the target's device."""

    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        return chains([[] for _ in contexts], contexts)


class Composite(BaseProposer, ABC):
    """What composites share; `draft` says which child drafts for which context.

    Args:
        children: by name, which the account uses; None is plain decoding.
        settings: what a result's settings shall name, where `auto` was resolved.
    """

    def __init__(self, children: Mapping[str, Proposer | None], settings: Any = None):
        self.children: dict[str, Proposer] = {
            name: Plain() if child is None else child for name, child in children.items()
        }
        if any(child.scope == "stream" for child in self.children.values()):
            self.scope = "stream"
        self.ledger = Ledger()
        if settings is not None:
            self.settings = settings

    def prepare(self, session: Session, data: Any) -> None:
        for child in self.children.values():
            child.prepare(session, data)

    def begin(self, contexts: Sequence[Context]) -> None:
        self.ledger.begin([context.row for context in contexts])
        for child in self.children.values():
            child.begin(contexts)

    def end(self, row: int) -> None:
        for child in self.children.values():
            child.end(row)

    def wants(self, contexts: Sequence[Context]) -> Wants:
        wanted = Wants()
        for child in self.children.values():
            wanted = wanted | child.wants(contexts)
        return wanted

    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        self.ledger.start()
        trees = self.draft(contexts)
        return [trees[context.row] for context in contexts]

    @abstractmethod
    def draft(self, contexts: Sequence[Context]) -> dict[int, Tree]:
        """The tree of each row, its source noted in the ledger."""

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.ledger.observe(verdicts)
        for child in self.children.values():
            child.observe(verdicts)

    def ask(self, name: str, contexts: Sequence[Context]) -> list[Tree]:
        """A child's drafts; the time is on its account."""
        began = time.perf_counter()
        trees = self.children[name].propose(contexts)
        self.ledger.spent(name, [context.row for context in contexts], time.perf_counter() - began)
        return trees


class FirstOf(Composite):
    """The children in order: a row's draft is that of the first one that has any."""

    def draft(self, contexts: Sequence[Context]) -> dict[int, Tree]:
        trees: dict[int, Tree] = {}
        waiting, why = list(contexts), "match"
        for name in self.children:
            if not waiting:
                break
            for context, tree in zip(waiting, self.ask(name, waiting), strict=True):
                trees[context.row] = tree
                if len(tree):
                    self.ledger.note(context.row, name, why)
            waiting, why = [context for context in waiting if not len(trees[context.row])], f"no {name}"
        for context in waiting:
            self.ledger.note(context.row, PLAIN, why)
        return trees
