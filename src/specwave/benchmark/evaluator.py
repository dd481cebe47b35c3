"""The evaluation as a Lightning module: `Trainer.predict` on one device or several, each with questions of its own.

Devices take every n-th of the questions that wait, so categories and lengths are spread alike; each writes an answers
file of its own, merged when all are done. Within a device the order of methods is balanced as on one (`answering.py`).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from tqdm import tqdm

from specwave.benchmark.answering import Answerer, Method
from specwave.benchmark.questions import Question
from specwave.termination import end_on_terminate

LONGEST = timedelta(days=7)  # a device that is done waits for the others


class Share:
    """The questions of one device, as Lightning iterates them. A list would be several loaders to it."""

    def __init__(self, places: Sequence[int]):
        self.places = places

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class Evaluator(pl.LightningModule):
    """Answers what is not answered yet. A batch is the place of one question.

    Once the clock stands at `end` (of `time.monotonic()`; None: never) no question is begun any more.
    """

    def __init__(
        self,
        answerer: Answerer,
        methods: Sequence[Method],
        questions: Sequence[Question],
        end: float | None = None,
    ):
        super().__init__()
        self.end, self.threads = end, torch.get_num_threads()
        self.answerer, self.methods, self.questions = answerer, list(methods), list(questions)
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def waiting(self) -> list[int]:
        """Places of the questions that some method has not answered. All devices see the same: what each writes from
        now on is read by no other."""
        return [
            number
            for number, question in enumerate(self.questions)
            if any(question.id not in method.answers.done for method in self.methods)
        ]

    def predict_dataloader(self) -> Any:
        own = self.waiting()[self.trainer.global_rank :: self.trainer.world_size]
        self.progress = tqdm(
            total=len(own), desc="questions", unit="question", disable=True if self.global_rank else None
        )
        return Share(own)

    def on_predict_start(self) -> None:
        end_on_terminate(self.trainer)
        torch.set_num_threads(self.threads)  # Lightning divides the cores by the devices, whatever was set before
        waiting = [self.questions[number].id for number in self.waiting()]
        for method in self.methods:
            if not set(waiting) <= method.answers.done:
                self.answerer.warm_up(method)

    def predict_step(self, number: int, batch_idx: int = 0) -> int:
        if self.end is not None and monotonic() > self.end:
            return number
        question = self.questions[number]
        self.progress.set_postfix_str(question.category, refresh=False)
        # Who begins: a device has every n-th question, and takes turns among its own.
        self.answerer.answer_all(self.methods, question, number // self.trainer.world_size)
        self.progress.update()
        return number

    def on_predict_end(self) -> None:
        self.progress.close()


def predict(evaluator: Evaluator, devices: int = 1) -> None:
    """Answers all questions, or those that time allows; returns when every device is done. On each device but the
    first the answers are then the first's to read.

    Raises:
        KeyboardInterrupt, SystemExit: when the user or the system ends the run.
    """
    try:
        if evaluator.waiting():
            _predict(evaluator, devices)
    finally:
        for method in evaluator.methods:
            method.answers.close()


def _predict(evaluator: Evaluator, devices: int) -> None:
    logging.getLogger("lightning_fabric.utilities.distributed").setLevel(
        logging.WARNING
    )  # every process would say hello
    device = evaluator.answerer.target.device
    cuda = device.type == "cuda"
    only: Any = [device.index or 0] if cuda else 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(zero length|LeafSpec).*")
        trainer = pl.Trainer(
            accelerator="gpu" if cuda else "cpu",
            devices=devices if devices > 1 else only,
            strategy=DDPStrategy(timeout=LONGEST) if devices > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        try:
            trainer.predict(evaluator, return_predictions=False)
        except SystemExit as stop:  # Lightning's exit code for an interruption is that of a crash
            if isinstance(stop.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise
        trainer.strategy.barrier("answers")
