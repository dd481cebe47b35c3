"""A round's draft: a tree of tokens below the last committed one, and its masks.

Letters: B rows, K nodes of the forward (the root is node 0, a drafted token i is node i + 1).

A worked example, drafts a, b below the root r and c below a:

    drafts   tokens  [a, b, c]      parents [-1, -1, 0]     (-1 is the root)
    nodes            [r, a, b, c]           [0, 0, 0, 1]    (the root is its own parent)
    sees             r: r · a: r a · b: r b · c: r a c      depth 0 1 1 2
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Resume:
    """Where verification may go on: blocks 0…block−1 have run on the tree's tokens, their keys and values lie in the
    session's cache behind the committed ones, and `hidden` [K, D] is block `block`−1's output for root and drafts.
    `blocks` has outputs [K, D] of yet earlier blocks, for methods that want them of every verified node."""

    block: int
    hidden: Tensor
    blocks: dict[int, Tensor] = field(default_factory=dict)

    def output(self, layer: int) -> Tensor | None:
        """An earlier block's output [K, D]; None if it was not kept."""
        return self.hidden if layer == self.block - 1 else self.blocks.get(layer)

    def first(self, count: int) -> Resume:
        """The same of the first `count` nodes."""
        return Resume(self.block, self.hidden[:count], {layer: each[:count] for layer, each in self.blocks.items()})


@dataclass
class Tree:
    """Drafted tokens int64 [k] and the draft each hangs on, int64 [k], −1 for the root; parents come first.

    `q` [k, V] holds the distributions that a *sampled chain* was really drawn from; None for every draft that was made
    without randomness of its own (top-k trees, copies, argmax chains). An empty tree is plain decoding. `depth` is
    known to those who draft level by level: no draft lies deeper below the root, so that nobody need look.

    Raises:
        ValueError: not a parent for every draft; states to go on from that are not those of root and drafts.
    """

    tokens: Tensor
    parents: Tensor
    q: Tensor | None = None
    resume: Resume | None = None
    depth: int | None = None

    def __post_init__(self) -> None:
        if self.parents.shape != self.tokens.shape:
            raise ValueError(f"{len(self.tokens)} drafts with {len(self.parents)} parents")
        if self.resume is not None:
            counts = {len(states) for states in (self.resume.hidden, *self.resume.blocks.values())}
            if counts != {len(self.tokens) + 1}:
                raise ValueError(f"{len(self.tokens)} drafts and their root with states of {sorted(counts)} nodes")

    @staticmethod
    def empty(device: torch.device | str = "cpu") -> Tree:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return Tree(none, none)

    @staticmethod
    def chain(tokens: Tensor | list[int], q: Tensor | None = None, resume: Resume | None = None) -> Tree:
        tokens = torch.as_tensor(tokens, dtype=torch.int64)
        return Tree(tokens, torch.arange(-1, len(tokens) - 1, device=tokens.device), q, resume, len(tokens))

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device | str) -> Tree:
        """This tree on a device; itself where it is there."""
        tokens, parents = self.tokens.to(device), self.parents.to(device)
        if tokens is self.tokens and parents is self.parents:
            return self
        return Tree(tokens, parents, self.q, self.resume, self.depth)

    def check(self, parents: list[int] | None = None) -> int:
        """How deep it is.

        Args:
            parents: its parents, where they have come to the host already.

        Raises:
            ValueError: a draft without its parent before it (sglang#36201), q that belongs to no chain, drafts deeper
                than `depth` says.
        """
        parents = self.parents.tolist() if parents is None else parents
        levels: list[int] = []
        for place, parent in enumerate(parents):
            if self.q is not None and parent != place - 1:
                raise ValueError("sampled trees need recursive residuals, which are not implemented: sample a chain")
            if not -1 <= parent < place:
                raise ValueError(f"a draft must come after its parent: parents {parents}")
            levels.append(1 if parent < 0 else levels[parent] + 1)
        deepest = max(levels, default=0)
        if self.depth is not None and deepest > self.depth:
            raise ValueError(f"a tree said to be at most {self.depth} deep has {deepest} levels: parents {parents}")
        return deepest

    def cut(self, levels: int) -> Tree:
        """Without the drafts deeper than `levels` below the root.

        Raises:
            ValueError: see `check`.
        """
        if levels >= (len(self) if self.depth is None else self.depth):  # a tree is never deeper than it is large
            return self
        if levels <= 0:
            none = self.tokens[:0]
            return Tree(none, none, resume=None if self.resume is None else self.resume.first(1))
        self.check()
        depth = ancestors(nodes(self)[1][None])[0].sum(-1)[1:] - 1
        keep = (depth <= levels).nonzero()[:, 0]
        place = torch.full((len(self) + 1,), -1, dtype=torch.int64, device=keep.device)
        place[keep] = torch.arange(len(keep), device=keep.device)  # place[-1] stays −1: the root
        resume = None  # whose keys lie in the cache in the order of the nodes: good for as long as the last ones go
        if self.resume is not None and torch.equal(keep, torch.arange(len(keep), device=keep.device)):
            resume = self.resume.first(len(keep) + 1)
        q = None if self.q is None else self.q[keep]
        return Tree(self.tokens[keep], place[self.parents[keep]], q, resume, levels)


def nodes(tree: Tree) -> tuple[Tensor, Tensor]:
    """(tokens [k+1] without the root's, which is −1; parents [k+1]) as nodes of the forward."""
    root = tree.tokens.new_full((1,), -1)
    return torch.cat([root, tree.tokens]), torch.cat([root + 1, tree.parents + 1])


def ancestors(parents_BK: Tensor, depth: int | None = None) -> Tensor:
    """bool [B, K, K]: node k sees node j if j is k itself or above it. Doubling, so log2(depth) steps.

    `depth`: no node lies deeper below the root; by default as deep as K nodes can.
    """
    size = parents_BK.shape[1]
    count = size - 1 if depth is None else min(size - 1, depth)  # steps from the deepest node to the root
    reach = torch.eye(size, device=parents_BK.device).expand(len(parents_BK), -1, -1).clone()
    reach.scatter_(2, parents_BK[:, :, None], 1.0)
    span = 1
    while span < count:
        reach = (reach @ reach).clamp_(max=1.0)
        span *= 2
    return reach > 0
