"""What SIGTERM does to a process of ours. Imports nothing heavy: every door begins with it."""

from __future__ import annotations

import signal
import threading
from typing import Any


def end_on_terminate(trainer: Any = None) -> None:
    """From now on SIGTERM ends this process at once, with the exit code 128 + SIGTERM.

    Args:
        trainer: Lightning's, whose further processes of this machine it ends too; to be called once its loop has begun.
            Its own handler would only take a note and wait for the others, which may wait for this one. Of the note
            comes a SystemExit without a code, as of a run that ended well. It puts the handler before back in the end.
    """

    def end(signum: int, _: Any) -> None:
        launcher = None if trainer is None else trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        raise SystemExit(128 + signum)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
