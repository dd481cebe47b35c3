"""A run shown at a tracker's service. Imports none of them: they and Lightning take seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specwave.app.run import Run


@contextlib.contextmanager
def tracking(make: Any, run: Run) -> Iterator[Any]:
    """The run at a tracker's service, ended there however it ends here; None without one, and for loggers that only
    keep rows of training, of which selections and evaluations have none."""
    tracker = make(save_dir=str(run.folder)) if make is not None and run.main else None
    if not hasattr(tracker, "show"):
        yield None
        return
    from specwave.app.trainer import ended

    with ended(tracker):
        yield tracker
