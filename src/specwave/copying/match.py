"""Where the last tokens have stood before: an index over one sequence, prompt and output, that grows with it.

    place  0 1 2 3 4 5 6        the last 3 tokens, a b c, stand at 0 … 2 too: Match(length=3, start=3),
    text   a b c d a b c        whose continuation is d a b c

Tokens are only ever added, since only committed ones are. `LastN` looks at runs of bounded length; the longest run of
any length is `automaton.SuffixAutomaton`'s. Both know nothing about models and hold no copy of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

Occurrence = Literal["first", "recent"]
_BITS = 32  # of a key, per token


class Match(NamedTuple):
    """The last `length` tokens stand before place `start` too, where their continuation then begins."""

    length: int
    start: int


class Index(Protocol):
    """What the proposers ask: both classes of this room answer it."""

    def __len__(self) -> int:
        """Tokens taken up so far."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Takes up the next tokens of the sequence."""

    def find(self) -> Match | None:
        """Of the runs of last tokens that have an earlier occurrence, one that may overlap them, the longest."""


class LastN:
    """The longest run of last tokens, `longest` down to `shortest` of them, that has an earlier occurrence.

    One dict holds every run met; its key is the run itself, as a number of 32 bits a token, so nothing collides. A
    token costs one entry for each length, whatever came before it: O(1), with `longest` − `shortest` + 1 in the
    constant of time and memory.

    Args:
        occurrence: which earlier occurrence is meant, the leftmost or the most recent.
    """

    def __init__(self, longest: int, shortest: int = 1, occurrence: Occurrence = "first"):
        if not 1 <= shortest <= longest:
            raise ValueError(f"runs of {longest} down to {shortest} tokens: there are none")
        self.masks = [(1 << _BITS * length) - 1 for length in range(shortest, longest + 1)]
        self.shortest, self.recent = shortest, occurrence == "recent"
        self.starts: dict[int, int] = {}  # by run: where its continuation begins
        self.run = 0  # the last `longest` tokens, each plus one: a run is no shorter run with zeros before it
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def extend(self, tokens: Iterable[int]) -> None:
        starts, masks, run, count = self.starts, self.masks, self.run, self.count
        for token in tokens:
            # The runs that end before this token: they become known only now, so that `find` never meets itself.
            for mask in masks[: max(0, count - self.shortest + 1)]:
                if self.recent:
                    starts[run & mask] = count
                else:
                    starts.setdefault(run & mask, count)
            run = (run << _BITS | token + 1) & masks[-1]
            count += 1
        self.run, self.count = run, count

    def find(self) -> Match | None:
        for place in range(min(len(self.masks), self.count) - 1, -1, -1):
            start = self.starts.get(self.run & self.masks[place])
            if start is not None:
                return Match(self.shortest + place, start)
        return None


def continuation(tokens: Sequence[int], start: int, length: int, overlap: bool = False) -> list[int]:
    """Up to `length` tokens from `start` on.

    Args:
        overlap: a copy that comes to the end of the text goes on with what it has copied (as in LZ77), so that a loop
            is drafted on however short it is; otherwise it ends there.
    """
    found = list(tokens[start : start + length])
    if overlap and found:
        found = (found * (length // len(found) + 1))[:length]
    return found
