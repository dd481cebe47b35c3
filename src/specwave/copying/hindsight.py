"""The best source of every round, known beforehand: a choice among these sources that no method can make.

The output is the target's own whoever drafts, so it is decoded first, plainly, and held against the drafts of all
sources. A round counts as if only the source that is taken had been asked: what looking ahead and asking the others
takes is set aside (`Session.aside_seconds`). That flatters a drafter a little: it catches up with the others' rounds
for nothing. In each round no choice among the sources commits more; whole answers may come to a round fewer by luck,
since where a round ends decides what the next one finds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specwave.artifacts import UserError
from specwave.copying.composite import Composite
from specwave.copying.ledger import PLAIN
from specwave.copying.proposers import built, check_method, takes_checkpoint, usable, used
from specwave.decoding import Context, Proposer, Tree, generate
from specwave.target import Target
from specwave.target.clock import wait


@dataclass(frozen=True)
class OracleDecoding:
    """`decoding=oracle`: in every round the draft of which most will be accepted, of equal ones the smallest, of those
    the first of `sources`, decoding methods by names of yours, null for none. Those that need a drafter take the one in
    `checkpoint` and are left out without. A round in which nobody's draft is any good is a plain one."""

    sources: dict[str, Any]
    batch_invariant: bool = False

    needs_checkpoint = False
    label = "oracle"

    def __post_init__(self) -> None:
        for name, method in self.sources.items():
            check_method(f"decoding.sources.{name}", method)
        if PLAIN in self.sources:
            raise UserError(f"decoding.sources.{PLAIN}", PLAIN, "plain rounds are there anyway: give another name")
        if not any(method is not None for method in self.sources.values()):
            raise UserError("decoding.sources", self.sources, "give at least one decoding method by a name of yours")

    @property
    def takes_checkpoint(self) -> bool:
        return any(takes_checkpoint(method) for method in self.sources.values())

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> Hindsight:
        kept = usable(self.sources, checkpoint)
        if not kept:
            raise UserError("decoding.sources", list(self.sources), "they all need a drafter: give its checkpoint")
        children = {
            name: built(one, target, checkpoint, allow_other_target, self.batch_invariant) for name, one in kept.items()
        }
        return Hindsight(children, replace(self, sources={name: used(kept[name], children[name]) for name in kept}))


class Hindsight(Composite):
    """The rule at the top of this file.

    Args:
        children: by name; a plain one is added.
    """

    def __init__(self, children: Mapping[str, Proposer | None], settings: Any = None):
        super().__init__({PLAIN: None, **children}, settings)  # of empty drafts the first is taken: nobody's
        self.outputs: dict[int, list[int]] = {}  # by row: what plain decoding gives

    def begin(self, contexts: Sequence[Context]) -> None:
        super().begin(contexts)
        began = now(contexts[0])
        self.outputs = {}
        self._look_ahead(contexts)
        contexts[0].session.aside_seconds += now(contexts[0]) - began

    def end(self, row: int) -> None:
        super().end(row)
        self.outputs.pop(row, None)

    def draft(self, contexts: Sequence[Context]) -> dict[int, Tree]:
        began = now(contexts[0])
        self._look_ahead([context for context in contexts if self._future(context) is None])
        drafts, seconds = dict[str, list[Tree]](), dict[str, float]()
        for name in self.children:
            asked = now(contexts[0])
            drafts[name] = self.drafts(name, contexts)
            seconds[name] = (now(contexts[0]) - asked) / len(contexts)
        trees, counted = dict[int, Tree](), 0.0
        for place, context in enumerate(contexts):
            future = (self._future(context) or [])[:-1]  # the last token is the target's own, whoever drafts it
            worth = {name: (accepted(own[place], future), -len(own[place])) for name, own in drafts.items()}
            best = max(worth, key=worth.__getitem__)
            trees[context.row] = drafts[best][place]
            self.ledger.note(context.row, best, "most accepted" if worth[best][0] else "none accepted")
            self.ledger.spent(best, [context.row], seconds[best])
            counted += seconds[best]
        aside = now(contexts[0]) - began - counted
        contexts[0].session.aside_seconds += aside
        self.ledger.began += aside
        return trees

    def _future(self, context: Context) -> list[int] | None:
        """The tokens to come; None where the target's rounding has led elsewhere than plain decoding."""
        done, known = context.tokens[context.prompt_length :], self.outputs[context.row]
        return known[len(done) :] if known[: len(done)] == done else None

    def _look_ahead(self, contexts: Sequence[Context]) -> None:
        """Decodes these rows to their ends, from where they are."""
        for context in contexts:
            plain = generate(
                context.session.target,
                None,
                [context.tokens],
                max_new_tokens=context.remaining,
                sampling=context.sampling,
                sequence_ids=[context.sequence],
                batch_invariant=context.session.invariant,
            )
            self.outputs[context.row] = context.tokens[context.prompt_length :] + plain.tokens[0]


def now(context: Context) -> float:
    """Seconds by the clock, when the device has done what it was given."""
    wait(context.session.target)
    return time.perf_counter()


def accepted(tree: Tree, future: Sequence[int]) -> int:
    """How many drafts lie on the path that the next tokens take."""
    below: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)):
        below.setdefault((parent, token), node)
    node = -1
    for count, token in enumerate(future):
        if (node, token) not in below:
            return count
        node = below[node, token]
    return len(future)
