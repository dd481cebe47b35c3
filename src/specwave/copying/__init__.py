"""Drafts copied from the sequence itself: matching, labels, the methods that copy and those that choose."""

from typing import Any

from specwave.copying.automaton import SuffixAutomaton
from specwave.copying.labels import copy_labels
from specwave.copying.match import LastN, Match

__all__ = [
    "BanditSpecDecoding",
    "CopySpecDecoding",
    "LastN",
    "Match",
    "PldDecoding",
    "SuffixAutomaton",
    "SuffixDecoding",
    "copy_labels",
]


def __getattr__(name: str) -> Any:
    """The methods on first use: pure files of this room are imported without the loop."""
    if name in __all__:
        from specwave.copying import proposers

        return getattr(proposers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
