"""Run as a script by test_training.py: trains in child processes that kill themselves, until one finishes.

    python killed.py <model folder> <run folder> <seed or "none">

Prints the step and the place of every kill. Children are forked before any tensor is computed here.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytorch_lightning as pl
import torch

import specwave.artifacts
import specwave.eagle.export
from specwave.app.exports import Exports
from specwave.app.train import TrainConfig, main
from specwave.app.trainer import TrainerConfig
from specwave.data import Sample
from specwave.data.samples import prepare
from specwave.eagle.module import GroupTraining
from specwave.eagle.options import Eagle3
from specwave.target import ModelConfig

STEPS, SAVE, KILLS = 16, 3, 5
PLACES = (
    "before the step",
    "before the optimiser",
    "writing the first checkpoint from there on",
    "in the first validation from there on",
    "writing a drafter validated from there on",
)


@dataclass
class Given:
    """Random conversations."""

    batch_size: int = 3
    max_length: int = 64

    def prepared(self, target):
        draw = torch.Generator().manual_seed(0)
        samples = []
        for index in range(14):
            ids = torch.randint(3, 259, (14 + index,), generator=draw).tolist()
            samples.append(Sample(ids, [False] * 5 + [True] * (len(ids) - 5), f"s{index}"))
        return prepare(samples, 64, 2, target.tokenizer.decode)


def train(model: Path, folder: Path, resume: bool) -> None:
    config = TrainConfig(
        model=ModelConfig("tiny", str(model), dtype="float32", device="cpu"),
        data=Given(),
        drafter=Eagle3(steps=2, draft_vocab_size=64, export_dtype="float32"),
        trainer=TrainerConfig(max_steps=STEPS, save_every=SAVE, validate_every=6, log_every=2),
        logger=lambda save_dir: pl.loggers.CSVLogger(save_dir, name="", version="", flush_logs_every_n_steps=1),
        groups=[[2, 4, 5], [7]],
    )
    quiet = {"say": lambda text: None, "note": lambda **facts: None}
    main(config, SimpleNamespace(folder=folder, resume=resume, main=True, **quiet))


def arm(step: int, place: str) -> None:
    """Patches this process to kill itself at `step`."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if place == PLACES[0]:
        before = GroupTraining.training_step

        def training_step(self, batch, batch_idx):
            if self.global_step == step:
                die()
            return before(self, batch, batch_idx)

        GroupTraining.training_step = training_step
    elif place == PLACES[1]:
        clip = GroupTraining.configure_gradient_clipping

        def configure_gradient_clipping(self, optimizer, *more, **named):
            clip(self, optimizer, *more, **named)
            if self.global_step == step:
                die()

        GroupTraining.configure_gradient_clipping = configure_gradient_clipping
    elif place == PLACES[3]:
        validation = GroupTraining.validation_step

        def validation_step(self, batch, batch_idx):
            if self.global_step >= step:
                die()
            return validation(self, batch, batch_idx)

        GroupTraining.validation_step = validation_step
    elif place == PLACES[4]:
        validated = Exports.validated

        def dying(self):
            def unfinished(path, content):
                if Path(path).name == "card.json" and self.module.global_step >= step:
                    die()
                write(path, content)

            write, specwave.eagle.export.write_json = specwave.eagle.export.write_json, unfinished
            validated(self)
            specwave.eagle.export.write_json = write

        Exports.validated = dying
    else:
        replace = os.replace

        def dying_replace(source, final):
            begun = int(str(final).endswith("last.ckpt") and torch.load(source, weights_only=True)["global_step"])
            if begun > step or begun == STEPS:  # the new checkpoint is whole beside its place and never renamed
                die()
            replace(source, final)

        specwave.artifacts.os.replace = dying_replace


def attempts(model: Path, folder: Path, seed: int | None) -> None:
    draw, last = random.Random(seed), folder / "checkpoints" / "last.ckpt"
    places = draw.sample(PLACES, len(PLACES))
    for attempt in range(KILLS + 1 if seed is not None else 1):
        reached = torch.load(last, weights_only=True)["global_step"] if last.exists() else 0
        step, place = min(STEPS - 1, reached + draw.randint(1, 6)), places[attempt % len(places)]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if seed is not None and attempt < KILLS:
                    arm(step, place)
                train(model, folder, resume=attempt > 0)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        ended = f"killed at step {step} {place}" if killed else f"exit {os.WEXITSTATUS(status)}"
        print(f"seed {seed}, attempt {attempt} from step {reached}: {ended}", flush=True)


if __name__ == "__main__":
    attempts(Path(sys.argv[1]), Path(sys.argv[2]), None if sys.argv[3] == "none" else int(sys.argv[3]))
