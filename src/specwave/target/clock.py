"""T(k): how long this target takes, on this device, for one forward over k new tokens behind a context.

Measured once and noted in the cache, since it decides how many drafts are worth verifying.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import platform
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from specwave.artifacts import cache_dir, write_json
from specwave.target.load import Target

SIZES = (1, 2, 4, 8, 16, 32, 48, 64)
CONTEXT = 256  # cached tokens before the new ones
_REPEAT = 7
_SCHEME = 1


@dataclass(frozen=True)
class Clock:
    """Seconds of a forward over `sizes` tokens, ascending; between them a straight line, beyond them the last slope."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, tokens: int) -> float:
        pairs = list(zip(self.sizes, self.seconds, strict=True))
        if len(pairs) == 1:
            return self.seconds[0]
        for (low, start), (high, end) in itertools.pairwise(pairs):
            if tokens <= high or high == self.sizes[-1]:
                return max(0.0, start + (end - start) * (tokens - low) / (high - low))
        raise AssertionError("the last size ends the loop")


def clock(target: Target, sizes: tuple[int, ...] = SIZES, again: bool = False, invariant: bool = False) -> Clock:
    """T(k) of this target with its dtype on this device and number of threads.

    Args:
        sizes: ascending numbers of tokens; those that do not fit the target's positions are left out.
        again: measure even where a note exists.
        invariant: of batch-invariant forwards.
    """
    room = target.max_length - 1
    context = min(CONTEXT, room // 2)
    sizes = tuple(size for size in sizes if size <= room - context) or (1,)
    *where, forwards = device_facts(target).values()
    facts = [_SCHEME, *where, context, sizes, forwards, *["batch_invariant"] * invariant]
    path = cache_dir() / "clock" / f"{target.name}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"
    if not again:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged: measured again
            seconds = tuple(map(float, json.loads(path.read_text(encoding="utf-8"))["seconds"]))
            if len(seconds) == len(sizes) and all(0 < one < float("inf") for one in seconds):
                return Clock(sizes, seconds)
    found = Clock(sizes, _measure(target, sizes, context, invariant))
    with contextlib.suppress(OSError):
        write_json(path, {"sizes": sizes, "seconds": found.seconds, "context": context})
    return found


def device_facts(target: Target) -> dict[str, Any]:
    """What a time depends on beside what is timed, as plain values."""
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.processor()
    return {
        "fingerprint": target.fingerprint,
        "dtype": str(target.dtype),
        "device": device,
        "node": platform.node(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "forwards": target.forwards,
    }


@torch.inference_mode()
def _measure(target: Target, sizes: tuple[int, ...], context: int, invariant: bool) -> tuple[float, ...]:
    """Medians over rounds in which every size has its turn, so that a machine that slows down slows all of them."""
    session = target.session(1, context + max(sizes), invariant)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, target.vocab_size, (1, context + max(sizes)), generator=draw).to(target.device)
    session.forward(tokens[:, :context], logits=False)
    session.advance([context])
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(_REPEAT + 1):
        for size in sizes if turn % 2 else sizes[::-1]:
            wait(target)
            began = time.perf_counter()
            session.forward(tokens[:, context : context + size])
            wait(target)
            if turn:  # the first round warms up
                taken[size].append(time.perf_counter() - began)
    return tuple(statistics.median(values) for values in taken.values())


def wait(target: Target) -> None:
    """Until the device has done what it was given."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
