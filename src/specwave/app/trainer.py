"""Where and how long training runs: devices, precision, checkpoints, the progress bar, the metrics file.

Knows nothing about drafters.
"""

from __future__ import annotations

import csv
import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO
from tqdm import tqdm

from specwave.artifacts import UserError, drop_torn_line, reading, write_torch

ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed")


@dataclass
class TrainerConfig:
    """`conf/trainer/*.yaml`."""

    accelerator: str = "cpu"
    devices: int = 1
    precision: str = "auto"
    max_steps: int = 300
    save_every: int = 100
    validate_every: int = 100
    log_every: int = 10
    decode: int = 4
    minutes: float | None = None

    def __post_init__(self) -> None:
        for key in ("devices", "max_steps", "save_every", "validate_every", "log_every"):
            if getattr(self, key) < 1:
                raise UserError(f"trainer.{key}", getattr(self, key), "must be ≥ 1")
        if self.decode < 0:
            raise UserError("trainer.decode", self.decode, "must be ≥ 0, which is none")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise UserError("trainer.minutes", self.minutes, "must be > 0, or null for no limit")
        for key, known in (("accelerator", ACCELERATORS), ("precision", PRECISIONS)):
            if getattr(self, key) not in known:
                raise UserError(f"trainer.{key}", getattr(self, key), f"must be one of {', '.join(known)}")

    def device(self) -> str:
        """`cpu` or `cuda`; refuses devices that are not here, before a process is started for them."""
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if self.accelerator in ("gpu", "cuda") and self.devices > found:
            if self.devices == 1:
                raise UserError("trainer.accelerator", self.accelerator, "there is no CUDA GPU here: use trainer=cpu")
            remedy = f"{self.devices} CUDA GPUs are asked for and {found} are here: use "
            raise UserError(
                "trainer.devices", self.devices, remedy + (f"trainer.devices={found}" if found else "trainer=cpu")
            )
        if self.devices > 1:
            raise UserError("trainer.devices", self.devices, "training runs on one device: set trainer.devices=1")
        return "cpu" if self.accelerator == "cpu" or not found else "cuda"

    def build(self, target_dtype: torch.dtype, logger: Any, callbacks: list[pl.Callback]) -> pl.Trainer:
        """A trainer that writes nothing of its own; precision `auto` is bf16 autocast where the target is bf16."""
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # of Lightning about its own code
        warnings.filterwarnings(
            "ignore", message=".*does not have many workers.*"
        )  # reading a batch takes microseconds
        mixed = "bf16-mixed" if target_dtype == torch.bfloat16 else "32-true"
        return pl.Trainer(
            accelerator="gpu" if self.device() == "cuda" else "cpu",
            devices=self.devices,
            precision=mixed if self.precision == "auto" else self.precision,  # type: ignore[arg-type]
            max_steps=self.max_steps,
            val_check_interval=self.validate_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            logger=logger,
            log_every_n_steps=1,
            callbacks=callbacks,
            plugins=[AtomicCheckpoints()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )


class AtomicCheckpoints(TorchCheckpointIO):
    """A checkpoint is whole or absent, and on disk before it replaces the one before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_torch(path, checkpoint)


class Keeper(pl.Callback):
    """Calls `stepped()` after every step; every n steps and after the last one writes `last.ckpt` and calls `saved()`;
    calls `validated()` after a validation. After so many minutes it saves and ends the attempt: `in_time` is False.

    Callbacks come before the module's own hooks: what belongs to a step and into its checkpoint goes into `stepped`.
    """

    def __init__(
        self,
        path: Path,
        every: int,
        stepped: Callable[[], None],
        saved: Callable[[], None],
        validated: Callable[[], None],
        minutes: float | None = None,
    ):
        self.path, self.every, self.stepped, self.saved, self.validated = path, every, stepped, saved, validated
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self.in_time = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.stepped()
        last = trainer.global_step == trainer.max_steps
        if self.end is not None and time.monotonic() > self.end and not last:
            self.in_time = False
            trainer.should_stop = True
        if trainer.global_step % self.every == 0 or last or not self.in_time:
            trainer.save_checkpoint(self.path, weights_only=False)
            self.saved()

    def on_validation_end(self, *_: Any) -> None:
        self.validated()


class Progress(pl.Callback):
    """A bar over all steps with the time left; a resumed run begins where it stood."""

    def __init__(self, describe: Callable[[], str]):
        self.describe = describe

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.bar = tqdm(total=trainer.max_steps, initial=trainer.global_step, desc="training", unit="step")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.bar.update(trainer.global_step - self.bar.n)
        self.bar.set_postfix_str(self.describe(), refresh=False)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if hasattr(self, "bar"):
            self.bar.close()


def last_step(path: Path) -> int:
    """The step of a checkpoint; refuses one that is not whole."""
    also = (RuntimeError, pickle.UnpicklingError)
    with reading("resume", path, "remove it to begin anew, or choose another folder", also=also):
        content = torch.load(path, weights_only=True, mmap=True)
        missing = {"state_dict", "optimizer_states", "lr_schedulers", "loops", "specwave"} - content.keys()
        if missing:
            raise ValueError(f"no checkpoint of a training run: it lacks {', '.join(sorted(missing))}")
        return int(content["global_step"])


def fit(trainer: pl.Trainer, *arguments: Any, **options: Any) -> None:
    """`trainer.fit`, but an interruption stays one: Lightning makes it exit code 1, and a sweep would go on."""
    try:
        trainer.fit(*arguments, **options)
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


def open_logger(make: Callable[..., Any], folder: Path, step: int) -> Any:
    """The logger in the run's folder; of an earlier attempt's metrics.csv the rows up to `step` are kept."""
    with reading("resume", folder / "metrics.csv", "remove the file, or choose another folder"):
        rows = [row for row in _rows(folder) if int(row["step"]) <= step]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the folder is not empty: it is the run's
        logger = make(save_dir=str(folder))
        if isinstance(logger, pl.loggers.CSVLogger):
            experiment: Any = logger.experiment
            experiment.metrics = rows
            experiment.save()
    return logger


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv, empty fields left out; [] where there is none."""
    return [{key: float(value) for key, value in row.items() if value} for row in _rows(folder)]


def _rows(folder: Path) -> list[dict[str, str]]:
    path = folder / "metrics.csv"
    if not path.is_file():
        return []
    drop_torn_line(path)
    with open(path, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def sweep_up(folder: Path) -> None:
    """Removes what a killed attempt was writing: parts beside the files they were to replace."""
    for part in folder.rglob(".*.part"):
        part.unlink(missing_ok=True)
