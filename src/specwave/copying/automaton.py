"""The longest run of last tokens that has stood before, whatever its length: a suffix automaton that grows online.

A state is a set of substrings that end at the same places of the text; `length` is that of the longest of them. Its
link leads to the longest suffix that ends at more places, so the states on the links' way from the whole text's state
to the root (the empty string) hold all suffixes. The first link's state is the longest that has occurred before.
Blumer et al. 1985: at most 2 states and 3 transitions a token, O(1) amortised.

**The most recent end** of a state changes with every token, for all states on the way, which in a loop is as long as
the text. So it is not written into states. Of each place r is kept how far down the way of r (which began at the state
of the text up to r) newer places have come:

    floor[r]  the states of r's way longer than this have r as their last end; the others have a newer one
    below[r]  the state on r's way of that length
    taker[r]  the newest place whose way they are on

A token at place i takes its way over, piece by piece: the state's last end r is found from any place it ends at, by
following `taker` while `floor` says that the state is taken; r then keeps what is longer, and the way goes on at
`below[r]`. The pieces are those of the accesses of a link-cut tree (Sleator & Tarjan 1983), so O(log n) of them per
token, amortised; in texts and in loops it is one or two.

Knows nothing about models and holds no copy of the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from specwave.copying.match import Match, Occurrence

_ROOT, _NONE = 0, -1


class SuffixAutomaton:
    """An index as `match.Index` has it; see the top of the file. Integers lie in arrays of 4 bytes."""

    def __init__(self, occurrence: Occurrence = "first"):
        self.recent = occurrence == "recent"
        self.count, self.last = 0, _ROOT
        self.end = _NONE  # of the match: the place at which its earlier occurrence ends
        self.length, self.link, self.first = array("i"), array("i"), array("i")  # by state; `first`: its earliest end
        # Most states have one transition, which lies here; what a branching one has beside it lies in `others`.
        self.token, self.target = array("i"), array("i")
        self.others: dict[int, dict[int, int]] = {}
        self.known = array("i")  # by state: some place it ends at
        self.floor, self.below, self.taker = array("i"), array("i"), array("i")  # by place
        self._state(0, _NONE)

    def __len__(self) -> int:
        return self.count

    def find(self) -> Match | None:
        if self.end == _NONE:
            return None
        return Match(self.length[self.link[self.last]], self.end + 1)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        place, link = self.count, self.link
        new, state, found = self._state(place + 1, place), self.last, _NONE
        while state != _NONE:
            found = self._step(state, token)
            if found != _NONE:
                break
            self._lead(state, token, new)
            state = link[state]
        if found == _NONE:
            link[new] = _ROOT
        elif self.length[found] == self.length[state] + 1:
            link[new] = found
        else:  # `found` holds longer strings too, which do not end here: they part
            link[new] = self._split(found, state, token)
        self.last, self.count = new, place + 1
        before = self._take(link[new], place) if self.recent else self.first[link[new]]
        self.end = _NONE if link[new] == _ROOT else before

    def _state(self, length: int, place: int) -> int:
        self.length.append(length)
        self.link.append(_NONE)
        self.first.append(place)
        self.token.append(_NONE)
        self.target.append(_NONE)
        if self.recent:
            self.known.append(place)
        return len(self.length) - 1

    def _step(self, state: int, token: int) -> int:
        if self.token[state] == token:
            return self.target[state]
        others = self.others.get(state)
        return _NONE if others is None else others.get(token, _NONE)

    def _lead(self, state: int, token: int, target: int) -> None:
        own = self.token[state]
        if own in (token, _NONE):
            self.token[state], self.target[state] = token, target
        else:
            self.others.setdefault(state, {})[token] = target

    def _split(self, state: int, before: int, token: int) -> int:
        """A new state for the strings of `state` that end in a string of `before` and `token`, or within it."""
        part = self._state(self.length[before] + 1, self.first[state])
        self.token[part], self.target[part] = self.token[state], self.target[state]
        if state in self.others:
            self.others[part] = dict(self.others[state])
        if self.recent:
            self.known[part] = self.known[state]
        self.link[part], self.link[state] = self.link[state], part
        while before != _NONE and self._step(before, token) == state:
            self._lead(before, token, part)
            before = self.link[before]
        return part

    def _take(self, state: int, place: int) -> int:
        """Gives the way from `state` to the root to `place`; the state's last end until now."""
        length, known, floor, below, taker = self.length, self.known, self.floor, self.below, self.taker
        answer = _NONE
        while state != _ROOT:
            owner = known[state]
            while floor[owner] >= length[state]:
                after = taker[owner]
                if floor[after] >= floor[owner]:  # who took that over has all that was taken here, too
                    after = taker[owner] = taker[after]
                owner = after
            if answer == _NONE:
                answer = owner
            known[state] = place
            following = below[owner]
            floor[owner], below[owner], taker[owner] = length[state], state, place
            state = following
        floor.append(0)
        below.append(_ROOT)
        taker.append(_NONE)
        return answer
