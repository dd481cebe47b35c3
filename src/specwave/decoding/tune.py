"""How much to draft: the tree that commits most tokens per second, from what trees were worth and the clock.

A drafter is watched once with a large tree. Its drafts come best first, so the first n of those that lie no deeper than
L levels are the tree it would have drafted with these limits, and what of them the target accepted is what that smaller
tree would have earned. The best pair then follows from T(k), the time of a forward over k tokens, and the time a level
of drafting takes. The same for chains, which follow each first child.

Pure but for the tensors handed in: knows nothing about drafters and targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specwave.decoding.protocol import Verdict


@dataclass(frozen=True)
class Round:
    """One verified tree: the depth of each draft (1 below the root), best first, and the accepted drafts in order;
    `first` says of each draft whether it is the likeliest child of its parent."""

    depths: tuple[int, ...]
    accepted: tuple[int, ...]
    first: tuple[bool, ...]

    @classmethod
    def of(cls, verdict: Verdict) -> Round:
        parents = verdict.tree.parents.tolist()
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        met: set[int] = set()
        first = []
        for parent in parents:
            first.append(parent not in met)
            met.add(parent)
        return cls(tuple(depths), tuple(node - 1 for node in verdict.path[1:]), tuple(first))

    def tree(self, drafts: int, levels: int) -> int:
        """How many drafts a tree of these limits would have got accepted."""
        kept = [place for place, depth in enumerate(self.depths) if depth <= levels][:drafts]
        last = kept[-1] if kept else -1
        count = 0
        for place in self.accepted:
            if place > last or self.depths[place] > levels:
                break
            count += 1
        return count

    def chain(self, levels: int) -> int:
        """How many drafts a chain of so many levels would have got accepted."""
        count = 0
        for place in self.accepted[:levels]:
            if not self.first[place]:
                break
            count += 1
        return count


@dataclass(frozen=True)
class Choice:
    """A tree and what it is expected to yield. `drafts` 0 is plain decoding."""

    levels: int
    drafts: int
    chain: bool
    tokens: float  # per round, the target's own included
    seconds: float  # per round

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def choose(
    rounds: Sequence[Round],
    verify: Callable[[int], float],
    draft: Callable[[int, bool], float],
    sizes: Sequence[int],
    levels: int,
    overhead: float = 0.0,
) -> list[Choice]:
    """Plain decoding, every chain of up to `levels` levels, every tree of `sizes` drafts, by expected rate.

    Args:
        verify: T(k) in seconds, k tokens.
        draft: seconds to draft so many levels; True for a chain.
        overhead: seconds of a round outside both.

    Returns:
        best first; of equal ones the smaller.
    """
    count = max(len(rounds), 1)
    found = [Choice(0, 0, True, 1.0, verify(1) + overhead)]
    for depth in range(1, levels + 1):
        tokens = 1 + sum(one.chain(depth) for one in rounds) / count
        found.append(Choice(depth, depth, True, tokens, verify(depth + 1) + draft(depth, True) + overhead))
        for size in sizes:
            if size > depth:
                tokens = 1 + sum(one.tree(size, depth) for one in rounds) / count
                found.append(Choice(depth, size, False, tokens, verify(size + 1) + draft(depth, False) + overhead))
    return sorted(found, key=lambda choice: (-choice.rate, choice.drafts, choice.levels))
