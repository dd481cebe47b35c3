"""Trees grown level by level out of a drafter's logits: which nodes it reads next, which drafts are kept.

Letters: B rows, N nodes of a frontier (the nodes that the drafter reads together; the first frontier is the root), k
children of each, M candidates, W nodes below the root read so far, V ids of the drafter. Tensors only: no loop over
nodes, no host sync. Knows nothing about drafters, their caches and the target's ids.

Source: EAGLE-2 (Li et al. 2024), whose dynamic tree EAGLE-3 keeps; methods.md §5. A worked example, top_k = 2, two
levels, four drafts kept, next to each draft the probability of the path that ends there:

    candidates    a .6   b .32   ac .30   ad .24   be .29   bf .03      found in this order, parents before children
    best four     a      b       ac       be                            equal ones would stay in order
    parents      -1     -1       0        1                             places among the kept, -1 is the root

A path is never more probable than its beginning, and of two equal ones the beginning stands earlier: so in this order
no draft comes without its parent, and the first n drafts are the best tree of n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Frontier:
    """What the drafter reads next: `ids` int64 [B, N]; `source` int64 [B, N], the node of the frontier before that each
    hangs on; `sees` bool [B, N, W], which nodes read so far each one sees, those of this frontier last.

    None says the usual: there is one node to hang on, every node is seen.
    """

    ids: Tensor
    source: Tensor | None = None
    sees: Tensor | None = None


class Growth(Protocol):
    """One round of one batch: `add` after every reading, `finish` after the last, whose `add` answers None."""

    def add(self, logits_BNV: Tensor) -> Frontier | None:
        """Takes the logits at the frontier's nodes, answers with the next frontier."""

    def finish(self) -> tuple[Tensor, Tensor]:
        """(ids [B, K], parents [B, K]) of the kept drafts, parents first; −1 is the root."""


class Shape(Protocol):
    """What trees a proposer drafts."""

    @property
    def levels(self) -> int:
        """Readings per round: how far below the root the deepest draft lies."""

    @property
    def slots(self) -> int:
        """How many nodes below the root are read, at most."""

    @property
    def ranks(self) -> int:
        """How many children a node has, at most."""

    def start(self, rows: int) -> Growth:
        """A new round of a batch."""


# ---------------------------------------------------------------- the pure parts


def children(logits_BNV: Tensor, above_BN: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Each node's `top_k` (or all V) likeliest continuations: (log-probabilities of their paths, ids), [B, N, k].

    `above` are those of the nodes. No step counts more than 0: what rounding makes of a certain one must not place a
    child before its parent.
    """
    wide = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
    value, ids = wide.topk(min(top_k, wide.shape[-1]))
    step = (value - wide.logsumexp(-1, keepdim=True)).clamp(max=0)
    return above_BN[..., None] + step, ids


def best(scores_BM: Tensor, count: int) -> Tensor:
    """The places [B, min(count, M)] of the largest, in that order; of equal ones the earlier comes first."""
    return scores_BM.sort(dim=1, descending=True, stable=True).indices[:, :count]


def keep(scores_BM: Tensor, parents_BM: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of all candidates: (their places [B, K], best first; their parents [B, K]).

    `parents` are places of candidates, −1 for the root, and so are those returned, but among the kept.
    """
    kept = best(scores_BM, count)
    order = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    place = kept.new_full((kept.shape[0], scores_BM.shape[1] + 1), -1)  # by candidate, the root in front
    place.scatter_(1, kept + 1, order)
    return kept, place.gather(1, parents_BM.gather(1, kept) + 1)


# ---------------------------------------------------------------- dynamic trees


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree: at every level the `top_k` likeliest paths get `top_k` children each, and in the end the `size`
    likeliest of all of them stay."""

    levels: int
    top_k: int
    size: int
    device: torch.device | str = "cpu"

    @property
    def slots(self) -> int:
        return (self.levels - 1) * self.top_k

    @property
    def ranks(self) -> int:
        return self.top_k

    def start(self, rows: int) -> Growth:
        return _DynamicGrowth(self, rows)


def candidates(levels: int, top_k: int) -> int:
    """How many drafts a dynamic tree chooses from, where the vocabulary is no smaller than `top_k`."""
    return top_k + (levels - 1) * top_k**2


class _DynamicGrowth:
    def __init__(self, shape: Dynamic, rows: int):
        self.shape = shape
        # Of the present frontier: log-probabilities, places among the candidates, nodes seen.
        self.above = torch.zeros(rows, 1, device=shape.device)
        self.places = torch.full((rows, 1), -1, dtype=torch.int64, device=shape.device)
        self.sees = torch.zeros(rows, 1, 0, dtype=torch.bool, device=shape.device)
        self.count = self.level = 0
        self.scores, self.ids, self.parents = list[Tensor](), list[Tensor](), list[Tensor]()

    def add(self, logits_BNV: Tensor) -> Frontier | None:
        score_BNk, ids_BNk = children(logits_BNV, self.above, self.shape.top_k)
        each = ids_BNk.shape[2]
        score, ids = score_BNk.flatten(1), ids_BNk.flatten(1)
        self.scores.append(score)
        self.ids.append(ids)
        self.parents.append(self.places[:, :, None].expand_as(ids_BNk).flatten(1))
        self.level += 1
        if self.level == self.shape.levels:
            return None
        chosen = best(score, self.shape.top_k)
        source, width = chosen // each, chosen.shape[1]
        self.above, self.places = score.gather(1, chosen), chosen + self.count
        self.count += score.shape[1]
        inherited = self.sees.gather(1, source[:, :, None].expand(-1, -1, self.sees.shape[2]))
        own = torch.eye(width, dtype=torch.bool, device=source.device).expand(len(source), -1, -1)
        self.sees = torch.cat([inherited, own], 2)
        return Frontier(ids.gather(1, chosen), source if self.level > 1 else None, self.sees)

    def finish(self) -> tuple[Tensor, Tensor]:
        scores = torch.cat(self.scores, 1).nan_to_num_(nan=-math.inf, neginf=-math.inf)  # NaN would come before all
        kept, parents = keep(scores, torch.cat(self.parents, 1), self.shape.size)
        return torch.cat(self.ids, 1).gather(1, kept), parents


# ---------------------------------------------------------------- fixed trees, chains


class Fixed:
    """A tree of the same shape every round. A draft is named by its path of ranks: (0, 1) is the second likeliest
    continuation of the likeliest one. Drafts come level by level, in order of their paths.

    Raises:
        ValueError: no path, a path twice, an empty one, a negative rank, one whose beginning is missing.
    """

    def __init__(self, paths: Sequence[Sequence[int]], device: torch.device | str = "cpu"):
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        check_paths(ordered)
        self.levels, self.size = len(ordered[-1]), len(ordered)
        self.ranks = 1 + max(max(path) for path in ordered)
        place = {path: i for i, path in enumerate(ordered)}
        place[()] = -1
        self.parents = torch.tensor([place[path[:-1]] for path in ordered], device=device)
        above = {path[:-1] for path in ordered}
        read = [path for path in ordered if path in above]
        self.slots = len(read)
        self.steps: list[_Step] = []
        frontier: list[tuple[int, ...]] = [()]
        before = 0
        for level in range(1, self.levels + 1):
            drafts = [path for path in ordered if len(path) == level]
            inner = [path for path in drafts if path in above]
            before += len(inner)
            sees = [[path[: len(other)] == other for other in read[:before]] for path in inner]
            self.steps.append(
                _Step(
                    # Children lie in one row of N·ranks per batch row.
                    torch.tensor([frontier.index(p[:-1]) * self.ranks + p[-1] for p in drafts], device=device),
                    torch.tensor([drafts.index(path) for path in inner], device=device),
                    None if len(frontier) == 1 else torch.tensor([frontier.index(p[:-1]) for p in inner]).to(device),
                    None if all(map(all, sees)) else torch.tensor(sees, device=device),
                )
            )
            frontier = inner

    @classmethod
    def chain(cls, levels: int, device: torch.device | str = "cpu") -> Fixed:
        return cls([(0,) * level for level in range(1, levels + 1)], device)

    def start(self, rows: int) -> Growth:
        return _FixedGrowth(self, rows)


@dataclass(frozen=True)
class _Step:
    """One level: which children of the frontier are drafts, which of the drafts are read next, what they hang on and
    see (None as in `Frontier`)."""

    drafts: Tensor
    inner: Tensor
    source: Tensor | None
    sees: Tensor | None


def check_paths(paths: Sequence[Sequence[int]]) -> None:
    """Refuses what is no tree."""
    known = {(), *map(tuple, paths)}
    if not paths or len(known) != len(paths) + 1:
        raise ValueError("a fixed tree names each draft once, by a path of one rank or more, and has one at least")
    for path in map(tuple, paths):
        if min(path) < 0:
            raise ValueError(f"ranks count from 0, got {list(path)}")
        if path[:-1] not in known:
            raise ValueError(f"{list(path)} hangs on {list(path[:-1])}, which is missing")


class _FixedGrowth:
    def __init__(self, shape: Fixed, rows: int):
        self.shape, self.rows, self.ids = shape, rows, list[Tensor]()

    def add(self, logits_BNV: Tensor) -> Frontier | None:
        ranks, step = self.shape.ranks, self.shape.steps[len(self.ids)]
        last = len(self.ids) + 1 == self.shape.levels
        if ranks == 1:  # a chain
            self.ids.append(logits_BNV.argmax(-1))
            return None if last else Frontier(self.ids[-1])
        drafts = logits_BNV.topk(ranks).indices.flatten(1)[:, step.drafts]
        self.ids.append(drafts)
        if last:
            return None
        source, sees = (
            None if fixed is None else fixed.expand(self.rows, *fixed.shape) for fixed in (step.source, step.sees)
        )
        return Frontier(drafts[:, step.inner], source, sees)

    def finish(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self.ids, 1), self.shape.parents.expand(self.rows, -1)
