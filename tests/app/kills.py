"""Run as a script by test_kills.py: `train.py`'s jobs in children, left alone and killed at random moments.

    python kills.py <model folder> <folder>

A moment is a share of the time that the job takes when it is left alone, so it may fall anywhere: into a library, a
write, between two files. A killed job is started again with resume=true; where it comes to its end another folder
begins, until it was killed often enough, and the last folder is then finished. Beside <job>-whole stand <job>-0, …,
each with a cache of its own. Prints what became of each attempt. Configs are composed once, and no tensor is computed
before the children are forked.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import datasets  # noqa: F401 - seconds to import: here, not in every child
import matplotlib.figure  # noqa: F401
import torch

import specwave.app.fitting
import specwave.app.regenerate
import specwave.app.train
import specwave.eagle.module  # noqa: F401
from specwave.app import config as configs
from specwave.app.door import prepare_environment
from specwave.app.job import Job
from specwave.target.identity import read_tokenizer

KILLS = {"train": 7, "regenerate": 6, "cache": 7}
RUN, STATES, CACHE = "run", "states", "cache"


def talks(count: int) -> str:
    """Conversations of one to three turns, a line for each."""
    rows = []
    for number in range(count):
        told = [{"from": "human", "value": f"question {number}"}, {"from": "gpt", "value": f"answer {number} " * 4}]
        rows.append({"id": f"talk-{number}", "conversations": told * (1 + number % 3)})
    return "".join(json.dumps(row) + "\n" for row in rows)


def overrides(job: str, model: Path, root: Path, folder: Path) -> list[str]:
    given = [f"model.source={model}", "model.dtype=float32", "drafter.export_dtype=float32", "drafter.steps=2"]
    given += ["data.batch_size=2", "data.validation=2", "drafter.draft_vocab_size=64", "groups=[[2,4,5],[7]]"]
    given += ["trainer.max_steps=8", "trainer.save_every=2", "trainer.validate_every=3", "trainer.log_every=1"]
    if job == "train":  # the answers to its prompts are kept in the cache
        given += ["data.limit=10", "data.max_new_tokens=8", "trainer.decode=1"]
    else:
        given += ["data=jsonl", f"data.path={root / 'talks.jsonl'}"]
    if job == "regenerate":
        given += ["task=regenerate", "regenerate.max_new_tokens=6", "regenerate.batch_size=3"]
        given += ["regenerate.temperature=1.0"]
    if job == "cache":  # of tokens, and of the target's states
        given += ["states.mode=offline", f"states.path={folder / STATES}", "states.shard_mib=1", "trainer.max_steps=2"]
    return ["model=tiny", *given]


def start(work: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


def runner(job: str, model: Path, root: Path, folder: Path) -> Callable[[], int]:
    """What a child does: the run that the command line means, going on where there is something to go on from."""
    given = [*overrides(job, model, root, folder), "resume=true"]
    composed = configs.compose("train", given)

    def work() -> int:
        os.environ["SPECWAVE_CACHE"] = str(folder / CACHE)
        (folder / RUN).mkdir(parents=True, exist_ok=True)
        return Job("train", ["train.py", *given]).attempt(composed, folder / RUN, given, None)[0]

    return work


def attempt(work: Callable[[], int], end: float) -> int:
    """A child's exit code, −9 where it was still at work when the clock stood at `end` and was killed."""
    child = start(work)
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(job: str, wanted: int, model: Path, root: Path) -> None:
    """Kills the job so many times."""
    draw, kills, began = random.Random(f"20261201 {job}"), 0, time.monotonic()
    print(f"{job}, left alone: exit {attempt(runner(job, model, root, root / f'{job}-whole'), math.inf)}", flush=True)
    whole = time.monotonic() - began
    for number in itertools.count():
        work, code, tries = runner(job, model, root, root / f"{job}-{number}"), -signal.SIGKILL, 0
        while code == -signal.SIGKILL:
            share, began = draw.random(), time.monotonic()
            code = attempt(work, began + share * whole if kills < wanted else math.inf)
            if code == -signal.SIGKILL:
                kills += 1
                print(f"{job}-{number}: killed after {share:.0%}", flush=True)
            elif tries == 0:
                whole = time.monotonic() - began  # a busy machine is not always as busy
            tries += 1
        print(f"{job}-{number}: exit {code}", flush=True)
        if kills == wanted:
            return


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare_environment()
    read_tokenizer(Path(sys.argv[1]))  # imports what every child needs
    (Path(sys.argv[2]) / "talks.jsonl").write_text(talks(24))
    for name, count in KILLS.items():
        kill(name, count, Path(sys.argv[1]), Path(sys.argv[2]))
