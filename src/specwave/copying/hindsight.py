"""The best source of every round, known afterwards: what no choice among these children can beat.

The output is the target's own whoever drafts, so it can be decoded first and held against the drafts of all children in
a second pass. That pass shows how many tokens a round could have committed; its time, in which everybody drafts, is
nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specwave.copying.composite import Composite
from specwave.decoding import Context, Proposer, Tree


class Hindsight(Composite):
    """The draft of which most will be accepted; of equal ones the smaller, of those the first child's.

    Args:
        outputs: by row, the tokens that will be committed (`Generation.tokens` under the same arguments).
    """

    def __init__(self, children: Mapping[str, Proposer | None], outputs: Sequence[Sequence[int]]):
        super().__init__(children)
        self.outputs = outputs

    def draft(self, contexts: Sequence[Context]) -> dict[int, Tree]:
        trees: dict[int, Tree] = {}
        worth: dict[int, tuple[int, int]] = {}
        for name in self.children:
            for context, tree in zip(contexts, self.ask(name, contexts), strict=True):
                row, done = context.row, len(context.tokens) - context.prompt_length
                value = accepted(tree, self.outputs[row][done:]), -len(tree)
                if row not in worth or value > worth[row]:
                    worth[row], trees[row] = value, tree
                    self.ledger.note(row, name, "most accepted")
        return trees


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
