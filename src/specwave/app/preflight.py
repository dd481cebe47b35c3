"""Before a training run: what it will need in each process and on disk, and about how long it will take.

`dry_run=true` prints it and stops, without the target's weights; a run refuses what cannot fit. Memory and disk are
counted (eagle/budget.py, and skipping/budget.py for an adapter); speed is a guess from how fast this device, or the GPU
named by `plan_for`, multiplies.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from specwave.app.groups import drafter_configs, selection_paths, wanted_groups
from specwave.artifacts import Selection, UserError, cache_dir, read_json, reading
from specwave.eagle import budget
from specwave.eagle.budget import Plan
from specwave.skipping import budget as adapter_budget
from specwave.skipping.adapter import AdapterConfig
from specwave.skipping.adapter_folder import METHOD
from specwave.skipping.budget import AdapterPlan
from specwave.skipping.exits import exit_block
from specwave.skipping.options import Kangaroo
from specwave.target.arch import Arch, read_arch
from specwave.target.folder import local_folder

if TYPE_CHECKING:
    from specwave.app.train import TrainConfig

GIB = 2**30
LIBRARIES = {"cpu": 0.6 * GIB, "cuda": 1.5 * GIB}  # Python with its libraries; CUDA's context and NCCL's buffers
# Of what a device multiplies at best: the target's pass, and a drafter forward and backward. Assumed, not measured.
SHARES = (0.6, 0.35)


@dataclass(frozen=True)
class Gpu:
    """Bytes of memory, and dense bf16 operations a second that large products reach (about 70 % of the data sheet)."""

    memory: float
    rate: float


GPUS = {"h100": Gpu(80e9, 690e12), "h200": Gpu(141e9, 690e12), "a100": Gpu(80e9, 220e12)}

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN3_4B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
}
# config.json of the models in conf/model that lie on the hub, as far as an architecture is read from it.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-4B": _QWEN3_4B,
    "Qwen/Qwen3-4B-Instruct-2507": {**_QWEN3_4B, "max_position_embeddings": 262144, "rope_theta": 5000000.0},
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_parameters": _LLAMA3,
    },
}


def architecture(model: Any) -> Arch:
    """Of a ModelConfig: known by heart, or read from the model's config.json; no weights are fetched or loaded."""
    if model.source in CONFIGS:
        return read_arch(CONFIGS[model.source])
    path = local_folder(model.source, model.revision, ["config.json"]) / "config.json"
    with reading("model.source", path, "fetch the model again"):
        return read_arch(read_json(path, "model.source"))


@dataclass(frozen=True)
class Forecast:
    """Bytes, seconds and tokens of a run; `parts` of memory by what they are for."""

    plan: Plan | AdapterPlan
    sizes: dict[str, int]  # parameters of what is trained, by its name
    operations: tuple[float, float]  # for a token: the target's pass, what is trained
    parts: dict[str, int]
    memory: float  # of a process, its libraries included
    room: float  # that a process has
    disk: dict[str, int]
    states: int  # bytes of a token kept by states.mode=offline; 0: online
    tokens: int  # of a step in all processes, padding included
    steps: int


def forecast(config: TrainConfig, arch: Arch) -> Forecast:
    """What the configuration means for a target of this architecture, planned for GPUs where it asks for them."""
    trainer, states = config.trainer, config.states
    on_gpu = trainer.on_gpu or trainer.accelerator in ("gpu", "cuda")
    narrow = config.model.dtype in ("bfloat16", "float16") or (config.model.dtype == "auto" and (on_gpu or cpu_bf16()))
    shared: dict[str, Any] = {
        "arch": arch,
        "rows": config.data.batch_size,
        "length": min(config.data.max_length, arch.max_length),
        "target_bytes": 2 if narrow else 4,
        "mixed": trainer.precision == "bf16-mixed" or (trainer.precision == "auto" and narrow),
        "device": "cuda" if on_gpu else "cpu",
    }
    kept = 2 if states.dtype == "bfloat16" else 4
    top_k = states.k if states.targets == "top_k" else None
    stored = 2 if config.drafter.export_dtype == "bfloat16" else 4
    plan: Plan | AdapterPlan
    if isinstance(config.drafter, Kangaroo):
        block = exit_block(config.drafter.exit, arch.num_layers, "drafter.exit")
        plan = AdapterPlan(adapter=AdapterConfig.of_target(arch, block), **shared)
        sizes = {METHOD: adapter_budget.adapter_parameters(plan.adapter)}
        passed = budget.target_operations(arch, plan.length, plan.answered)
        operations = passed, adapter_budget.operations(plan)
        parts = {"target": budget.target_memory(arch, plan.target_bytes, plan.device), **adapter_budget.memory(plan)}
        disk, of_token = adapter_budget.disk(plan, stored), adapter_budget.state_bytes(plan, kept, top_k)
    else:
        plan, sizes = _drafters(config, arch, shared)
        operations, parts, disk = budget.operations(plan), budget.memory(plan), budget.disk(plan, stored)
        of_token = budget.state_bytes(plan, kept, top_k)
    if states.mode == "offline":  # the blocks are dropped
        parts["target"] -= plan.target_bytes * arch.num_layers * budget.block_parameters(arch)
    return Forecast(
        plan=plan,
        sizes=sizes,
        operations=operations,
        parts=parts,
        memory=sum(parts.values()) + LIBRARIES[plan.device],
        room=memory_of(plan, config.plan_for, trainer.per_node, config.model.device),
        disk=disk,
        states=of_token if states.mode == "offline" else 0,
        tokens=plan.tokens * plan.processes,
        steps=trainer.max_steps,
    )


def _drafters(config: TrainConfig, arch: Arch, shared: dict[str, Any]) -> tuple[Plan, dict[str, int]]:
    """EAGLE-3's: (the plan, parameters by group)."""
    trainer = config.trainer
    named = [Selection.load(path) for path in selection_paths(config.selection)]
    chosen = [one for one in named if one.num_layers == arch.num_layers]  # another model's are refused by name later
    groups = wanted_groups(config, chosen, arch.num_layers)
    target: Any = SimpleNamespace(arch=arch, vocab_size=arch.vocab_size)
    plan = Plan(
        drafters=drafter_configs(config, target, groups),
        steps=config.drafter.steps,
        checkpointing=config.drafter.checkpointing,
        zero=getattr(trainer, "zero_stage", 0),
        offload=getattr(trainer, "offload", "none"),
        sharded=getattr(trainer, "sharded", False),
        processes=trainer.processes,
        **shared,
    )
    return plan, dict(zip([one.name for one in groups], map(budget.drafter_parameters, plan.drafters), strict=True))


# ---------------------------------------------------------------- devices


def cpu_bf16() -> bool:
    """Whether this CPU multiplies bf16 itself."""
    kinds = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, kind, lambda: False)() for kind in kinds)


def memory_of(plan: Plan | AdapterPlan, planned: str, per_node: int, named: str = "cuda") -> float:
    """Bytes that a process has: a GPU's, the one named by its number where one is, or its share of the machine's."""
    if plan.device == "cpu":
        return system_memory() / per_node
    if torch.cuda.is_available():
        number = named.partition(":")[2]
        here = number.isdecimal() and int(number) < torch.cuda.device_count()  # what is not is refused by a training
        return float(torch.cuda.get_device_properties(int(number) if here else 0).total_memory)
    return GPUS[planned].memory


def speed(found: Forecast, planned: str) -> float:
    """Tokens a second of all processes together, padding included: a guess, see `SHARES`."""
    plan = found.plan
    if plan.device == "cuda" and not torch.cuda.is_available():
        rate = GPUS[planned].rate
    else:
        size = 4096 if plan.device == "cuda" else 1024
        rate = product_rate(plan.device, size, torch.bfloat16 if plan.mixed else torch.float32)
    passed, drafted = found.operations
    pass_share, drafter_share = SHARES
    each = drafted / drafter_share + (0.0 if found.states else passed / pass_share)
    return plan.processes * rate / each


def system_memory() -> float:
    """Bytes of this machine; infinite where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("MemTotal:"))) * 1024
    except (OSError, StopIteration, ValueError):
        return float("inf")


def product_rate(kind: str, size: int, dtype: torch.dtype) -> float:
    """Operations a second of square products, the best of a few."""
    x = torch.ones(size, size, dtype=dtype, device=kind)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        float((x @ x)[0, 0])  # reading a number waits for the GPU
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best


# ---------------------------------------------------------------- what is said


def report(found: Forecast, config: TrainConfig, say: Callable[[str], None]) -> None:
    """A page for the console."""
    plan, arch, trainer = found.plan, found.plan.arch, config.trainer
    say(
        f"{config.model.name}: {arch.num_layers} blocks of width {arch.hidden_size}, vocabulary {arch.vocab_size:,}, "
        f"{budget.target_parameters(arch) / 1e9:.2f} billion parameters"
    )
    where = f"{trainer.per_node} × {config.plan_for.upper() if plan.device == 'cuda' else 'CPU process'}"
    if plan.device == "cuda" and torch.cuda.is_available():
        where = f"{trainer.per_node} × {torch.cuda.get_device_name(0)}"
    cut = f", ZeRO-{plan.zero}" if plan.zero else ", FSDP" if plan.sharded else ""
    say(f"on {where}{f' on each of {trainer.nodes} machines' if trainer.nodes > 1 else ''}{cut}")
    for name, size in found.sizes.items():
        say(f"  {name:<24} {size / 1e6:8.1f} million parameters")
    say(f"memory of a process: {gib(found.memory)} of {gib(found.room)}, for rows of {plan.length} tokens, all answers")
    for part, size in found.parts.items():
        say(f"  {part:<24} {gib(size):>12}")
    say(f"  {'libraries':<24} {gib(LIBRARIES[plan.device]):>12}")
    say(f"on disk: {', '.join(f'{name} {gib(size)}' for name, size in found.disk.items())}")
    if found.states:
        say(f"  states: {found.states:,} bytes a token, {found.states / GIB * 1e6:.1f} GiB for a million")
    rate, all_tokens = speed(found, config.plan_for), found.tokens * found.steps
    say(
        f"a step: {plan.processes} × {plan.rows} rows, {found.tokens:,} tokens; {found.steps:,} steps are "
        f"{all_tokens / 1e6:,.1f} million"
    )
    say(f"about {rate:,.0f} tokens/s, {all_tokens / rate / 3600:.1f} hours: a guess")


def gib(size: float) -> str:
    """Of a small one MiB, so that two different sizes are not both 0.00."""
    return f"{size / 2**20:,.2f} MiB" if 0 < size < GIB / 10 else f"{size / GIB:,.2f} GiB"


def described(found: Forecast) -> dict[str, Any]:
    """Plain data for run.yaml."""
    return {
        "groups": list(found.sizes),
        "memory_bytes": int(found.memory),
        "room_bytes": int(found.room) if found.room < float("inf") else None,
        "parts": found.parts,
        "disk_bytes": found.disk,
        "tokens": found.tokens * found.steps,
    }


def refuse(found: Forecast, folder: Path) -> list[str]:
    """Warnings; raises where the run cannot be.

    Raises:
        UserError: the target alone, or what stays in memory all the time, is more than a process has; the disk lacks
            room for checkpoints and drafters.
    """
    plan, parts = found.plan, found.parts
    if parts["target"] + LIBRARIES[plan.device] > found.room:
        size = f"the target takes {gib(parts['target'])} in each process, which has {gib(found.room)}"
        if plan.zero:
            remedy = (
                f"{size}: ZeRO cuts the drafters, not the target; use a smaller model.dtype, a GPU with more memory, "
            )
            remedy += "or states.mode=offline"
            raise UserError("trainer.zero_stage", plan.zero, remedy)
        raise UserError("model", plan.arch.family, f"{size}: use a smaller model.dtype, or a device with more memory")
    staying = sum(parts[name] for name in ("target", "weights", "gradients", "optimiser")) + LIBRARIES[plan.device]
    if staying > found.room:
        size = f"target, weights and optimiser take {gib(staying)} in each process, which has {gib(found.room)}"
        if isinstance(plan, AdapterPlan):
            remedy = "use a smaller model.dtype, or a device with more memory"
            raise UserError("drafter", METHOD, f"{size}: {remedy}")
        remedy = "train fewer groups, or use trainer=deepspeed with zero_stage=3"
        raise UserError("groups", ", ".join(found.sizes), f"{size}: {remedy}")
    needed, free = sum(found.disk.values()), shutil.disk_usage(existing(folder)).free
    if needed > free:
        remedy = f"checkpoints and drafters need {gib(needed)}, {gib(free)} are free there: make room, or name another"
        raise UserError("hydra.run.dir", folder, remedy)
    if found.memory > found.room:
        size = f"a step may need {gib(found.memory)} in each process, which has {gib(found.room)}"
        further = "" if isinstance(plan, AdapterPlan) else ", or set drafter.checkpointing=true"
        return [f"{size}: should it fail, lower data.batch_size or data.max_length{further}"]
    return []


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((place for place in (folder, *folder.absolute().parents) if place.is_dir()), cache_dir())
