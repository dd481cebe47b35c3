"""EAGLE-3 drafters: the block, its objective, its files, its proposer."""

from typing import Any

__all__ = ["Eagle3", "Eagle3Decoding", "load_drafter"]


def __getattr__(name: str) -> Any:
    """The proposer on first use: pure files of this room are imported without it."""
    if name in __all__:
        from specwave.eagle import proposer

        return getattr(proposer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
