"""Training in several processes: `conf/trainer/ddp.yaml`, `fsdp.yaml`, `deepspeed.yaml`, `deepspeed_cpu.yaml`, and what
they ask of Lightning.

Every process loads the frozen target for itself; drafters, gradients and optimiser states are what they share. Knows of
drafters only that they are the `drafters` of a module, each with a `norm` and an `lm_head` used outside their forward.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
import shutil
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from torch import nn

from specwave.app.trainer import TrainerConfig, gpus
from specwave.artifacts import UserError, write_text
from specwave.data.world import Engine

POINTER = "latest"  # the file in which DeepSpeed looks for the name of the newest checkpoint
STEP = "step_"  # such a name: step_<n>, a folder
PARTS = "*_optim_states.pt"  # in it, one of each process


@dataclass
class DdpConfig(TrainerConfig):
    """`conf/trainer/ddp.yaml`: every process holds all drafters; gradients are summed while they are computed."""

    accelerator: str = "auto"
    devices: int | None = None
    num_nodes: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_nodes < 1:
            raise UserError("trainer.num_nodes", self.num_nodes, "must be ≥ 1")

    @property
    def per_node(self) -> int:
        """Processes on each machine: those asked for, else one for every GPU, else two on a CPU."""
        return self.devices or (gpus() if self.on_gpu else 2)

    @property
    def nodes(self) -> int:
        return self.num_nodes

    def device(self) -> str:
        """Of this process: `cpu` or `cuda:<n>`; refuses more devices than are here, before a process is started."""
        if self.accelerator in ("gpu", "cuda") and self.per_node > gpus():
            self.refuse_gpus(self.per_node)
        if self.on_gpu:
            if self.per_node > gpus():
                self.refuse_gpus(self.per_node)
            place = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
            torch.cuda.set_device(place)
            return f"cuda:{place}"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if self.per_node > max(2, cores):
            remedy = f"{self.per_node} processes are asked for and this machine has {cores} cores: use at most as many"
            raise UserError("trainer.devices", self.per_node, remedy)
        return "cpu"

    def numbered(self, wanted: str) -> str:
        raise UserError("model.device", wanted, "every process takes a GPU of its own: give auto or cuda")

    def places(self, device: torch.device) -> int | list[int]:
        return self.per_node

    def strategy(self, clip: float, drafters: int) -> Any:
        quiet()
        # Buffers are the vocabulary map, the same everywhere; sending them would make processes wait in validation.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")  # its newer name is not in every torch
        return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)


@dataclass
class FsdpConfig(DdpConfig):
    """`conf/trainer/fsdp.yaml`: weights, gradients and optimiser states are cut into a part for each process, by torch
    alone. The drafters are one unit: whole in every process from the forward pass to the end of the backward pass."""

    sharded: ClassVar[bool] = True  # how its memory is counted

    accelerator: str = "gpu"
    max_steps: int = 2000
    save_every: int = 200
    validate_every: int = 200

    def device(self) -> str:
        if not self.on_gpu:
            raise UserError("trainer", "fsdp", "torch's FSDP takes GPUs, and none is used here: use trainer=ddp")
        return super().device()

    def strategy(self, clip: float, drafters: int) -> Any:
        quiet()
        return Fsdp()

    def engine(self, trainer: pl.Trainer) -> Engine:
        strategy = trainer.strategy
        assert isinstance(strategy, Fsdp)
        return Engine(parted=True, whole=strategy.whole)


@dataclass
class DeepSpeedConfig(DdpConfig):
    """`conf/trainer/deepspeed.yaml`, `deepspeed_cpu.yaml`: the drafters' optimiser states (ZeRO-1), gradients too (2)
    and weights too (3) are cut into a part for each process.

    All drafters are one engine: DeepSpeed has one optimiser, and engines beside each other would each send small
    messages of their own. Its clip is one of the norm of all K drafters' gradients together, at clip·√K: where each is
    at its own limit, it is at this one. For one drafter that is its own clip.
    """

    accelerator: str = "gpu"
    devices: int | None = 8
    precision: str = "bf16-mixed"
    max_steps: int = 2000
    save_every: int = 200
    validate_every: int = 200
    zero_stage: int = 2
    offload: Literal["none", "optimizer", "all"] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero_stage not in (1, 2, 3):
            raise UserError("trainer.zero_stage", self.zero_stage, "must be 1, 2 or 3")
        if self.offload == "all" and self.zero_stage < 3:
            raise UserError("trainer.offload", "all", "weights are cut, and can be moved, by trainer.zero_stage=3 only")

    def device(self) -> str:
        if importlib.util.find_spec("deepspeed") is None:
            raise UserError("trainer", "deepspeed", "DeepSpeed is not installed: pip install deepspeed, or trainer=ddp")
        return super().device()

    def strategy(self, clip: float, drafters: int) -> Any:
        quiet()
        if not self.on_gpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return ZeRO(self.zero_stage, self.offload, clip * math.sqrt(drafters), self.on_gpu)

    def plugins(self) -> list[Any]:
        return []  # the strategy writes its checkpoints itself

    def engine(self, trainer: pl.Trainer) -> Engine:
        strategy = trainer.strategy
        assert isinstance(strategy, ZeRO)
        return Engine(clips=True, parted=self.zero_stage == 3, whole=strategy.whole, norm=strategy.norm)

    def last_step(self, path: Path) -> int:
        return newest(path, self.processes)


def quiet() -> None:
    """No line from each process that it has found the others."""
    for name in ("lightning_fabric.utilities.distributed", "pytorch_lightning.strategies.deepspeed"):
        logging.getLogger(name).setLevel(logging.WARNING)


class Fsdp(FSDPStrategy):
    """Lightning's strategy. Weights stay float32 and products are narrowed by autocast, as in the other trainers."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import MixedPrecision

        super().__init__(mixed_precision=MixedPrecision(), state_dict_type="full")

    def whole(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Within it all weights are whole in every process; changes to them are lost."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert self.model is not None
        return FullyShardedDataParallel.summon_full_params(self.model, writeback=False)


class ZeRO(DeepSpeedStrategy):
    """Lightning's strategy, with whole checkpoints, and with a CPU in the place of a GPU where there is none.

    A checkpoint is a folder: `step_<n>` with a part of each process, and `latest`, which names it. New parts are on
    disk before the name changes, old ones go after that.
    """

    def __init__(self, stage: int, offload: str, clip: float, on_gpu: bool):
        for message in (".*torch.jit.script.*", ".*all_gather_into_tensor.*", ".*reduce_scatter_tensor.*"):
            warnings.filterwarnings("ignore", message=message)  # DeepSpeed's use of torch, not the user's
        super().__init__(
            stage=stage,
            offload_optimizer=offload != "none",
            offload_parameters=offload == "all",
            logging_batch_size_per_gpu=1,
        )
        assert isinstance(self.config, dict)
        self.config["gradient_clipping"] = clip
        self.config["zero_force_ds_cpu_optimizer"] = False  # torch's fused AdamW runs on CPUs too, and needs no build
        self.on_gpu = on_gpu

    # ---------------------------------------------------------------- without a GPU

    @property
    def root_device(self) -> torch.device:
        return super().root_device if self.on_gpu else torch.device("cpu", 0)

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # Lightning's own refuses what is not CUDA

    def setup_distributed(self) -> None:
        if self.on_gpu:
            super().setup_distributed()
            return
        # It would compile for a minute what carries messages through memory; gloo carries them as well. (By its name:
        # as an attribute of its package it is hidden by torch.)
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    # ---------------------------------------------------------------- weights

    def init_deepspeed(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*configure_gradient_clipping.*")  # the module knows
            super().init_deepspeed()

    def _initialize_deepspeed_train(self, model: Any) -> None:
        if self.zero_stage_3:
            import deepspeed

            for drafter in model.drafters.values():
                for part in (drafter.norm, drafter.lm_head):  # the loss takes their gradients in chunks, by itself
                    for parameter in part.parameters():
                        deepspeed.zero.register_external_parameter(model, parameter)
        super()._initialize_deepspeed_train(model)

    def whole(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Within it the module's weights are whole in every process; changes to them are lost."""
        if not self.zero_stage_3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(module.parameters()))

    def norm(self) -> float:
        """Of all gradients of the last step, before the clip."""
        return float(self.deepspeed_engine.get_global_grad_norm() or 0.0)

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        folder, tag = Path(self.broadcast(str(filepath))), f"{STEP}{checkpoint['global_step']}"
        kept = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        self.deepspeed_engine.save_checkpoint(str(folder), tag=tag, client_state=kept, save_latest=False)
        if self.is_global_zero:  # the engine has waited for the parts of all processes
            for part in (folder / tag).iterdir():
                with open(part, "rb") as stream:
                    os.fsync(stream.fileno())
            write_text(folder / POINTER, tag)
            for older in folder.glob(f"{STEP}*"):
                if older.name != tag:
                    shutil.rmtree(older, ignore_errors=True)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        found, content = self.deepspeed_engine.load_checkpoint(str(checkpoint_path), load_lr_scheduler_states=False)
        if found is None:
            raise UserError("resume", checkpoint_path, "DeepSpeed cannot read this checkpoint: begin in another folder")
        return content


def newest(folder: Path, processes: int) -> int:
    """The step of a checkpoint of ZeRO; refuses one that is not whole, or was cut for another number of processes."""
    remedy = "remove it to begin anew, or choose another folder"
    try:
        tag = (folder / POINTER).read_text(encoding="utf-8").strip()
        step = int(tag.removeprefix(STEP))
    except (OSError, ValueError):
        raise UserError("resume", folder, f"this is no checkpoint of trainer=deepspeed; {remedy}") from None
    parts = len(list((folder / tag).glob(PARTS)))
    if not parts:
        raise UserError("resume", folder, f"its {tag} holds no optimiser states; {remedy}")
    if parts != processes:
        raise UserError(
            "resume",
            folder,
            f"it was cut into a part for each of {parts} processes, and {processes} would read it: resume with "
            f"{parts}, or begin anew from its drafters with drafter.warm_start=<run folder>/last/<group>",
        )
    return step
