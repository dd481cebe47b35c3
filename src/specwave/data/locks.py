"""One process at a time for what several would make, such as the ranks of one run; the others wait and find it made."""

from __future__ import annotations

import contextlib
from typing import IO, Any

try:
    import fcntl
except ImportError:  # no file locks on this system
    fcntl = None  # type: ignore[assignment]


def wait_for(stream: IO[Any]) -> None:
    """Waits until no other process holds the open file; held until it is closed, or its process dies."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(stream, fcntl.LOCK_EX)
