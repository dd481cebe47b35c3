"""Several proposers as one: in every round each sequence's draft comes from one of them.

The rule that keeps acceptance from collapsing after a long copy: every child is told of every round (`observe`),
whoever drafted, the target's states are captured for all of them, and who is asked again catches up in one batch.

Children draft in the same session: where a second one forwards in a round, the keys that the first left in the cache
behind the committed tokens are no longer its own, so nobody's draft is verified from its `resume` on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specwave.copying.ledger import PLAIN, Ledger
from specwave.copying.lookup import Lookup, chains
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
        self.forwarding = set[str]()  # children that were asked in this round and may have run the target
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
        self.forwarding = set()
        by_row = self.draft(contexts)
        trees = [by_row[context.row] for context in contexts]
        return [replace(tree, resume=None) for tree in trees] if len(self.forwarding) > 1 else trees

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
        trees = self.drafts(name, contexts)
        self.ledger.spent(name, [context.row for context in contexts], time.perf_counter() - began)
        return trees

    def drafts(self, name: str, contexts: Sequence[Context]) -> list[Tree]:
        """A child's drafts, on nobody's account."""
        if not self.copies(name):
            self.forwarding.add(name)
        return self.children[name].propose(contexts)

    def copies(self, name: str) -> bool:
        """Whether a child only looks up, or does nothing at all."""
        child = self.children[name]
        if isinstance(child, Composite):
            return all(map(child.copies, child.children))
        return isinstance(child, Lookup | Plain)

    # What children write beside the answers lies in a folder of each one's name.

    def take_up(self, folder: Path) -> None:
        for child, own in self._with("take_up", folder):
            child.take_up(own)

    def warmed_up(self) -> None:
        for child in self.children.values():
            if hasattr(child, "warmed_up"):
                child.warmed_up()

    def flush(self, folder: Path) -> None:
        for child, own in self._with("flush", folder):
            child.flush(own)

    def report(self, folder: Path) -> None:
        for child, own in self._with("report", folder):
            child.report(own)

    def _with(self, method: str, folder: Path) -> Iterator[tuple[Any, Path]]:
        for name, child in self.children.items():
            if hasattr(child, method) and not self.copies(name):
                (folder / name).mkdir(parents=True, exist_ok=True)
                yield child, folder / name


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
