"""`trainer=fsdp` without a GPU: what it composes to, that it is refused, and the arithmetic of gradients in parts. The
engine itself is torch's and needs GPUs."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from pytorch_lightning.strategies import FSDPStrategy

from specwave.app import config as configs
from specwave.app import distributed, trainer
from specwave.app.distributed import FsdpConfig
from specwave.app.preflight import architecture, forecast
from specwave.app.run import Run
from specwave.app.train import main
from specwave.artifacts import UserError
from specwave.data import world
from specwave.eagle import budget

CONF = Path(__file__).resolve().parents[2] / "conf"


def composed(*overrides, model="tiny"):
    overrides = [f"model={model}", "trainer=fsdp", *overrides]
    return configs.build("train", configs.check("train", configs.compose("train", overrides)))


@pytest.fixture
def gpus(monkeypatch):
    """A machine that says it has four."""
    for module in (distributed, trainer):
        monkeypatch.setattr(module, "gpus", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.fixture
def no_gpu(monkeypatch):
    for module in (distributed, trainer):
        monkeypatch.setattr(module, "gpus", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_file_repeats_the_defaults():
    content = yaml.safe_load((CONF / "trainer" / "fsdp.yaml").read_text())
    assert content.pop("_target_") == "specwave.app.distributed.FsdpConfig"
    assert content == asdict(FsdpConfig())
    assert isinstance(composed().trainer, FsdpConfig)


@pytest.mark.parametrize("more", [[], ["trainer.accelerator=auto"], ["trainer.accelerator=cpu"], ["trainer.devices=2"]])
def test_without_gpus_it_is_refused_in_a_line(no_gpu, tmp_path, monkeypatch, more):
    """Before the target is loaded and before a process is started, whatever else is asked for."""
    monkeypatch.setattr("specwave.target.ModelConfig.load", lambda self: pytest.fail("the target was loaded"))
    with pytest.raises(UserError) as refused:
        main(composed(*more), Run(tmp_path))
    assert str(refused.value) == "trainer=fsdp: torch's FSDP takes GPUs, and none is used here: use trainer=ddp"


def test_more_gpus_than_there_are(gpus):
    with pytest.raises(UserError, match=r"trainer\.devices=8: 8 CUDA GPUs are asked for and 4 are here"):
        FsdpConfig(devices=8).device()


def test_with_gpus_it_is_torch_s(gpus, monkeypatch):
    """A process for each of four; weights and sums of gradients in float32, whole checkpoints in one file."""
    made = FsdpConfig()
    assert (made.device(), made.processes, FsdpConfig(num_nodes=2).processes) == ("cuda:0", 4, 8)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert made.device() == "cuda:3"
    strategy = made.strategy(0.5, 2)
    assert isinstance(strategy, FSDPStrategy)
    mixed = strategy.mixed_precision_config
    assert (mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype) == (None, None, None)
    assert strategy._state_dict_type == "full"
    assert strategy.kwargs["use_orig_params"] is True  # each drafter's gradients are found by its own parameters
    assert [type(plugin).__name__ for plugin in made.plugins()] == ["AtomicCheckpoints"]


def test_the_engine_says_that_weights_are_in_parts(gpus, monkeypatch):
    """So that each drafter's norm is that of all parts, and no gradient is taken before the one backward pass."""
    strategy = distributed.Fsdp()
    strategy.model = torch.nn.Linear(2, 2)
    asked = []
    monkeypatch.setattr(
        "torch.distributed.fsdp.FullyShardedDataParallel.summon_full_params",
        lambda model, writeback: asked.append((model, writeback)),
    )
    engine = FsdpConfig().engine(type("Trainer", (), {"strategy": strategy})())
    engine.whole(torch.nn.Linear(1, 1))
    assert (engine.parted, engine.clips) == (True, False)
    assert asked == [(strategy.model, False)]  # the one unit that all drafters are in


# ---------------------------------------------------------------- gradients in parts


def held(values):
    parameter = torch.nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


@pytest.mark.parametrize("largest", [0.5, 100.0])
def test_a_whole_gradient_is_clipped_as_torch_does(largest):
    values = [[3.0, 4.0], [12.0]]
    ours, theirs = [[held(each) for each in values] for _ in range(2)]
    norm = world.clip_parts(ours, largest)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, largest))
    assert float(norm) == 13.0
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_parts_are_clipped_by_the_norm_of_all(monkeypatch):
    """Two processes hold [3, 4] and [12] of one gradient: each scales its part by 1/13, and alone would not."""
    parts = [[held([3.0, 4.0])], [held([12.0])]]
    for mine, other in (parts, parts[::-1]):
        theirs = sum(float(parameter.grad.square().sum()) for parameter in other)
        monkeypatch.setattr(world, "total", lambda x, theirs=theirs: x + theirs)
        before = [parameter.grad.clone() for parameter in mine]
        assert float(world.clip_parts(mine, 1.0)) == 13.0
        for parameter, was in zip(mine, before, strict=True):
            torch.testing.assert_close(parameter.grad, was / 13)
            parameter.grad = was


def test_a_process_without_a_part_takes_part_in_the_sum(monkeypatch):
    """Small drafters may lie in other processes as a whole: no gradient here, or an empty one."""
    monkeypatch.setattr(world, "total", lambda x: x + 169.0)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    assert float(world.clip_parts([torch.nn.Parameter(torch.zeros(2))], 1.0)) == 13.0
    assert float(world.clip_parts([held([])], 1.0)) == 13.0


# ---------------------------------------------------------------- memory


def test_its_memory_is_counted(no_gpu):
    """Between steps everything is cut up; within one, weights and gradients are whole beside the own part."""
    config = composed("trainer.devices=8", "groups=[[5,23,35],[2,18,33]]", model="qwen3_4b")
    found = forecast(config, architecture(config.model))
    plan, parts = found.plan, found.parts
    assert (plan.sharded, plan.processes, plan.mixed) == (True, 8, True)
    parameters = sum(map(budget.drafter_parameters, plan.drafters))
    assert parts["weights"] == parts["gradients"] == 4 * parameters + 4 * parameters // 8
    assert parts["optimiser"] == 8 * parameters // 8
    whole = budget.memory(replace(plan, sharded=False))
    assert whole["optimiser"] == 8 * parameters
    assert parts["activations"] > 1.9 * whole["activations"]  # one backward pass for both drafters
    assert parts["target"] == whole["target"]
    assert os.environ.get("LOCAL_RANK") is None
