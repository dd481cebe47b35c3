"""Run as a script by test_states_folder.py: captures states in children that kill themselves, until one finishes.

    python captured.py <model folder> <folder>

Fills <folder>/<recompute or top_k>-<whole or killed>. For `killed` every child but the last dies at one of the moments
below, in a drawn order. Prints what became of each.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import safetensors.torch
import torch

import specwave.artifacts
from specwave.data import Sample
from specwave.data.samples import prepare
from specwave.eagle.offline import StatesConfig, offline
from specwave.target import ModelConfig, Target
from specwave.target.identity import read_tokenizer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_the_forward(left: int) -> None:
    states = Target.states

    def dying(self, *given):
        nonlocal left
        left -= 1
        if left < 0:
            die()
        return states(self, *given)

    Target.states = dying


def half_a_shard_written(left: int) -> None:
    save = safetensors.torch.save_file

    def dying(tensors, name, metadata=None):
        nonlocal left
        left -= 1
        save(tensors, name, metadata=metadata)
        if left < 0:
            os.truncate(name, os.path.getsize(name) // 2)
            die()

    safetensors.torch.save_file = dying


def replacing(left: int, ending: str, before: bool) -> None:
    replace = os.replace

    def dying(source, final):
        nonlocal left
        if str(final).endswith(ending):
            left -= 1
        if left < 0 and before:
            die()
        replace(source, final)
        if left < 0:
            die()

    specwave.artifacts.os.replace = dying


MOMENTS = {
    "in the first forward": lambda: in_the_forward(0),
    "half a shard written": lambda: half_a_shard_written(1),
    "a shard whole beside its place": lambda: replacing(0, ".safetensors", before=True),
    "a shard in its place and not in the index": lambda: replacing(1, ".safetensors", before=False),
    "the index whole beside its place": lambda: replacing(1, "index.json", before=True),
    "the index written": lambda: replacing(1, "index.json", before=False),
    "in a later forward": lambda: in_the_forward(1),
}


def samples(count: int = 60) -> list[Sample]:
    """Random conversations of 60 to 178 tokens: 7,140 in all, seven to nine shards of a MiB."""
    draw, made = torch.Generator().manual_seed(0), []
    for index in range(count):
        ids = torch.randint(3, 259, (60 + 2 * index,), generator=draw).tolist()
        made.append(Sample(ids, [False] * 20 + [True] * (len(ids) - 20), f"s{index}"))
    return made


def capture(model: Path, folder: Path, targets: str) -> None:
    target = ModelConfig("tiny", str(model), dtype="float32", device="cpu").load()
    data = prepare(samples(), 256, 5, target.tokenizer.decode)
    settings = StatesConfig("offline", str(folder), "float32", targets, shard_mib=1)
    offline(target, data, [(2, 4, 5), (7,)] if targets == "recompute" else [(2, 4, 5)], settings, say=print)


def attempt(model: Path, folder: Path, targets: str, moment: str | None) -> None:
    child = os.fork()
    if not child:
        code = 1
        try:
            if moment is not None:
                MOMENTS[moment]()
            capture(model, folder, targets)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    how = f"killed by {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
    there = sorted(path.name for path in folder.rglob("*") if path.is_file())
    print(
        f"{folder.name}, {moment}: {how}; {len([name for name in there if name.startswith('shard')])} shards",
        flush=True,
    )


if __name__ == "__main__":
    model, root = map(Path, sys.argv[1:])
    read_tokenizer(model)  # imports what every child would import anew
    drawn = random.Random(20261130).sample(list(MOMENTS), len(MOMENTS))
    for targets in ("recompute", "top_k"):
        for how, moments in (("whole", [None]), ("killed", [*drawn, None])):
            for each in moments:
                attempt(model, root / f"{targets}-{how}", targets, each)
