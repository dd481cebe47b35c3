"""Drafts copied from the sequence itself: what followed the last tokens where they stood before.

Knows nothing about probes and drafters; `composite` puts copies and other drafts together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specwave.copying.match import Index, Match, continuation
from specwave.decoding import BaseProposer, Context, Tree


class Lookup(BaseProposer):
    """Chains of copied tokens; an empty tree where the last tokens stand nowhere else.

    Args:
        index: makes the index of a new sequence.
        length: how many tokens to copy after a match.
        overlap: as in `continuation`.
    """

    def __init__(self, index: Callable[[], Index], length: Callable[[Match], int], overlap: bool = False):
        self.index, self.length, self.overlap = index, length, overlap
        self.rows: dict[int, tuple[Context, Index]] = {}  # of the decoding that began last

    def begin(self, contexts: Sequence[Context]) -> None:
        self.rows = {context.row: (context, self.index()) for context in contexts}
        for context in contexts:
            self.find(context)

    def end(self, row: int) -> None:
        self.rows.pop(row, None)

    def find(self, context: Context) -> Match | None:
        """The match of the last tokens. What was committed since the last call is taken up first, so that rounds in
        which nobody asks cost nothing and wait as tokens."""
        owner, index = self.rows.get(context.row, (None, None))
        if owner is not context or index is None:
            raise ValueError("this proposer has begun another decoding since: make one for each that runs at a time")
        index.extend(context.tokens[len(index) :])
        return index.find()

    def copied(self, context: Context) -> list[int]:
        """The tokens to draft, no more than can still be committed below the target's own."""
        match = self.find(context)
        if match is None:
            return []
        length = min(self.length(match), context.remaining - 1)
        return continuation(context.tokens, match.start, length, self.overlap) if length > 0 else []

    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        return chains([self.copied(context) for context in contexts], contexts)


def chains(drafts: Sequence[Sequence[int]], contexts: Sequence[Context]) -> list[Tree]:
    """A chain for each context, on its target's device: one transfer for all of them."""
    if not contexts:
        return []
    device = contexts[0].session.target.device
    counts = [len(draft) for draft in drafts]
    if not any(counts):
        return [Tree.empty(device) for _ in contexts]
    tokens = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int64, device=device)
    parents = torch.arange(-1, max(counts), device=device)
    return [Tree(own, parents[:count], depth=count) for own, count in zip(tokens.split(counts), counts, strict=True)]
