"""Self-speculation: the target drafts for itself with a part of its own sub-layers (KnapSpec and its rivals)."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Adaptive": "stops",
    "AsdDecoding": "asd",
    "Below": "stops",
    "ClaspDecoding": "clasp",
    "DelDecoding": "del_",
    "DraftVerifyDecoding": "draft_verify",
    "KangarooDecoding": "kangaroo",
    "KnapSpec": "knapspec",
    "KnapSpecDecoding": "knapspec",
    "LayerSkipDecoding": "layerskip",
    "Midway": "midway",
    "SelfSpeculation": "proposer",
    "SwiftDecoding": "swift",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """On first use: pure files of this room are imported without them."""
    if name in _HOMES:
        return getattr(import_module(f"specwave.skipping.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
