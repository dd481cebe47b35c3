"""When a chain of drafts ends before its γ-th token: rules that look at the token drafted last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Stop(Protocol):
    """Asked after every draft step. `idle`: it never ends a chain, so nobody need look at probabilities."""

    @property
    def idle(self) -> bool: ...

    def ends(self, probabilities: Sequence[float]) -> list[bool]:
        """Whether each row's chain ends behind the token just drafted, which was drawn with this probability. That
        token is verified too: it is there, and one token more costs a verification little."""


@dataclass(frozen=True)
class Below:
    """KnapSpec's rule: a token drafted with less than `probability` is the last one. 0 is never."""

    probability: float = 0.7

    @property
    def idle(self) -> bool:
        return self.probability <= 0.0

    def ends(self, probabilities: Sequence[float]) -> list[bool]:
        return [each < self.probability for each in probabilities]
