"""Where the seconds of a decoding go."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from specwave.target import Session


class Laps:
    """Adds what has passed since the last lap to figures of the result, without what recording forwards took of it. On
    a GPU laps are events in its stream, read when the device has passed them: nobody waits."""

    def __init__(self, device: torch.device, result: Any):
        self.result, self.device, self.cuda = result, device, device.type == "cuda"
        self.pending = deque[tuple[tuple[str, ...], Any, Any, float]]()
        self.start, self.at = time.perf_counter(), self._now()

    def watch(self, session: Session) -> None:
        """Whose recordings are warm-up from now on."""
        self.session, self.recorded = session, session.warmup_seconds

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def lap(self, *figures: str) -> None:
        before, self.at = self.at, self._now()
        fresh = self.session.warmup_seconds - self.recorded
        self.recorded += fresh
        self.result.warmup_seconds += fresh
        self.start += fresh
        self.pending.append((figures, before, self.at, fresh))
        while self.pending and (not self.cuda or self.pending[0][2].query()):
            self._count()

    def pause(self) -> None:
        """What passes from now on is nobody's."""
        self.paused = time.perf_counter()
        self.result.seconds = self.paused - self.start

    def resume(self) -> None:
        self.start += time.perf_counter() - self.paused
        self.at = self._now()

    def settle(self) -> None:
        """Counts every lap."""
        while self.pending:
            self.pending[0][2].synchronize()
            self._count()

    def _count(self) -> None:
        figures, before, after, recorded = self.pending.popleft()
        seconds = before.elapsed_time(after) / 1000 if self.cuda else after - before
        for figure in figures:
            setattr(self.result, figure, getattr(self.result, figure) + seconds - recorded)
