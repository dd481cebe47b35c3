"""Self-speculation: the target drafts for itself with a part of its own sub-layers (KnapSpec)."""

from typing import Any

__all__ = ["KnapSpec", "KnapSpecDecoding", "SelfSpeculation"]


def __getattr__(name: str) -> Any:
    """Proposers on first use: pure files of this room are imported without them."""
    if name in __all__:
        from specwave.skipping import knapspec

        return getattr(knapspec, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
