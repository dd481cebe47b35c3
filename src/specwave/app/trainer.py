"""Where and how long training runs: devices, precision, checkpoints, the progress bar, the metrics file.

Knows nothing about drafters.
"""

from __future__ import annotations

import contextlib
import csv
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO
from tqdm import tqdm

from specwave.artifacts import UserError, drop_torn_line, reading, write_torch
from specwave.data.world import Engine
from specwave.target.load import ModelConfig, device_of
from specwave.termination import end_on_terminate

METRICS, EARLIER = "metrics.csv", "metrics.earlier.csv"
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
PRECISIONS = ("auto", "32-true", "bf16-mixed")  # float16 would need a scaled loss, and steps passed over


@dataclass
class TrainerConfig:
    """`conf/trainer/cpu.yaml` and `gpu.yaml`: one process. Several are in distributed.py."""

    accelerator: str = "cpu"
    devices: int | None = 1
    precision: str = "auto"
    max_steps: int = 300
    save_every: int = 100
    validate_every: int = 100
    log_every: int = 10
    decode: int = 4
    minutes: float | None = None

    def __post_init__(self) -> None:
        for key in ("devices", "max_steps", "save_every", "validate_every", "log_every"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
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
        count = self.devices or 1
        if self.accelerator in ("gpu", "cuda") and count > gpus():
            self.refuse_gpus(count)
        if count > 1:
            remedy = "training runs on one device with this trainer: set trainer.devices=1, or use trainer=ddp"
            raise UserError("trainer.devices", count, remedy)
        return "cuda" if self.on_gpu else "cpu"

    def device_for(self, model: ModelConfig) -> str:
        """Where target and drafters lie: `device()`, or the GPU that `model.device` names by its number.

        Raises:
            UserError: the trainer runs on another kind of device, or that GPU is not here.
        """
        device, wanted = self.device(), model.device
        own, kind = device.partition(":")[0], wanted.partition(":")[0]
        if kind not in ("auto", own):
            raise UserError("model.device", wanted, f"the trainer runs on {own}: set model.device={own}")
        if kind == wanted:
            return device
        device_of(wanted)
        return self.numbered(wanted)

    def numbered(self, wanted: str) -> str:
        """One GPU by its number."""
        return wanted

    def refuse_gpus(self, count: int) -> NoReturn:
        if count == 1:
            raise UserError("trainer.accelerator", self.accelerator, "there is no CUDA GPU here: use trainer=cpu")
        remedy = f"{count} CUDA GPUs are asked for and {gpus()} are here: use "
        raise UserError("trainer.devices", count, remedy + (f"trainer.devices={gpus()}" if gpus() else "trainer=cpu"))

    @property
    def on_gpu(self) -> bool:
        return self.accelerator != "cpu" and gpus() > 0

    @property
    def per_node(self) -> int:
        """Processes on each machine."""
        return 1

    @property
    def nodes(self) -> int:
        return 1

    @property
    def processes(self) -> int:
        return self.per_node * self.nodes

    def strategy(self, clip: float, drafters: int) -> Any:
        """Lightning's, for so many drafters, each clipped at `clip`."""
        return "auto"

    def plugins(self) -> list[Any]:
        return [AtomicCheckpoints()]

    def engine(self, trainer: pl.Trainer) -> Engine:
        """What the built trainer takes into its own hands."""
        return Engine()

    def last_step(self, path: Path) -> int:
        """The step of a checkpoint; refuses one that is not whole, or that this trainer cannot go on from."""
        return last_step(path)

    def places(self, device: torch.device) -> int | list[int]:
        """Lightning's `devices` for a target on this one."""
        return self.per_node if device.index is None else [device.index]

    def build(
        self,
        target_dtype: torch.dtype,
        device: torch.device,
        logger: Any,
        callbacks: list[pl.Callback],
        clip: float = 0.0,
        drafters: int = 1,
    ) -> pl.Trainer:
        """A trainer that writes nothing of its own; precision `auto` is bf16 autocast where the target is bf16.

        Args:
            device: the target's in this process.
        """
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # of Lightning about its own code
        warnings.filterwarnings(
            "ignore", message=".*does not have many workers.*"
        )  # reading a batch takes microseconds
        mixed = "bf16-mixed" if target_dtype == torch.bfloat16 else "32-true"
        return pl.Trainer(
            accelerator="gpu" if self.on_gpu else "cpu",
            devices=self.places(device),
            num_nodes=self.nodes,
            strategy=self.strategy(clip, drafters),
            precision=mixed if self.precision == "auto" else self.precision,  # type: ignore[arg-type]
            max_steps=self.max_steps,
            val_check_interval=self.validate_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            logger=logger,
            log_every_n_steps=1,
            callbacks=callbacks,
            plugins=self.plugins(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )


def gpus() -> int:
    """CUDA GPUs of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class AtomicCheckpoints(TorchCheckpointIO):
    """A checkpoint is whole or absent, and on disk before it replaces the one before."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_torch(path, checkpoint)


class Keeper(pl.Callback):
    """Calls `stepped()` after every step; every n steps and after the last one writes `last.ckpt` and calls `saved()`;
    calls `validated()` after a validation. Once the clock stands at `end` it saves and ends the attempt: `in_time` is
    False.

    Callbacks come before the module's own hooks: what belongs to a step and into its checkpoint goes into `stepped`.
    A step with a validation is saved behind it, so that a run that is killed within comes back to it.
    """

    def __init__(
        self,
        path: Path,
        every: int,
        stepped: Callable[[], None],
        saved: Callable[[], None],
        validated: Callable[[], None],
        end: float | None = None,
    ):
        """`end`: of `time.monotonic()`; None: no end."""
        self.path, self.every, self.stepped, self.saved, self.validated = path, every, stepped, saved, validated
        self.end, self.in_time, self.waiting = end, True, False

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        end_on_terminate(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.stepped()
        step, last = trainer.global_step, trainer.global_step == trainer.max_steps
        validates = step % int(trainer.val_check_interval) == 0
        if self.end is not None and not last:  # processes reach it at different moments: all stop where one does
            late = trainer.strategy.reduce_boolean_decision(monotonic() > self.end, all=False)
            self.in_time = not late
            trainer.should_stop = late
            if late and not validates:
                trainer.limit_val_batches = 0  # Lightning validates where it is stopped; when must not depend on time
        self.waiting = step % self.every == 0 or last or not self.in_time
        if not validates:
            self._save(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.validated()
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if self.waiting:
            self.waiting = False
            trainer.save_checkpoint(self.path, weights_only=False)
            self.saved()


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
    """`trainer.fit`, but an interruption stays one: Lightning makes it exit code 1, and a sweep would go on. Whatever
    ends it ends the processes that it started."""
    try:
        trainer.fit(*arguments, **options)
    except BaseException as error:
        end_others(trainer)
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise


def end_others(trainer: pl.Trainer) -> None:
    """Ends the other processes of this machine, which would wait for this one for ever."""
    started = getattr(trainer.strategy.launcher, "procs", [])
    others = list(started)
    started.clear()  # Lightning watches this list and would kill this process too
    for other in others:
        other.kill()
        other.wait()


def open_logger(make: Callable[..., Any], folder: Path, step: int, validated: bool) -> Any:
    """The logger in the run's folder; of an earlier attempt's metrics.csv the rows up to `step` are kept.

    Args:
        validated: whether the checkpoint of that step was taken behind its validation; else the validation is run again
            and what it wrote goes.
    """

    def kept(row: dict[str, str]) -> bool:
        again = int(row["step"]) == step and not validated
        return int(row["step"]) <= step and not (again and _of_validation(row))

    path, earlier = folder / METRICS, folder / EARLIER
    if path.is_file() and not earlier.is_file():
        os.replace(path, earlier)  # Lightning's logger begins by removing what it finds
    with reading("resume", path, "remove the file, or choose another folder"):
        rows = [row for row in _rows(earlier) if kept(row)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the folder is not empty: it is the run's
        logger = make(save_dir=str(folder))
        if isinstance(logger, pl.loggers.CSVLogger):
            experiment: Any = logger.experiment
            experiment.metrics = rows
            experiment.save()
    earlier.unlink(missing_ok=True)
    return logger


@contextlib.contextmanager
def ended(logger: Any) -> Iterator[None]:
    """Ends at its service what a logger began there (`close`), however the run ends."""
    close = getattr(logger, "close", lambda code: None)
    try:
        yield
    except BaseException:
        close(1)
        raise
    close(0)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv, empty fields left out; [] where there is none."""
    return [{key: float(value) for key, value in row.items() if value} for row in _rows(folder / METRICS)]


def _of_validation(row: dict[str, str]) -> bool:
    return any(value and key.rpartition("/")[2].startswith("val_") for key, value in row.items())


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    drop_torn_line(path)
    with open(path, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
