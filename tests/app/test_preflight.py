"""What a run will need: parameters against the modules themselves, memory against measured peaks, and refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch

from specwave.app import config as configs
from specwave.app import preflight
from specwave.app.preflight import CONFIGS, architecture, forecast, refuse, report
from specwave.app.run import Run
from specwave.app.train import main
from specwave.artifacts import UserError
from specwave.eagle import budget
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.skipping import budget as adapter_budget
from specwave.skipping.adapter import Adapter, AdapterConfig
from specwave.skipping.adapter_folder import write_adapter
from specwave.skipping.budget import AdapterPlan
from specwave.target import ModelConfig
from specwave.target.arch import read_arch

HERE = Path(__file__).resolve().parent
GIB = 2**30


def composed(*overrides):
    return configs.build("train", configs.check("train", configs.compose("train", list(overrides))))


def planned(*overrides):
    config = composed(*overrides)
    return config, forecast(config, architecture(config.model))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# ---------------------------------------------------------------- counts


def test_parameters_of_targets(families):
    for target in families.values():
        stored = sum(tensor.numel() for _, tensor in target._stored())
        assert budget.target_parameters(target.arch) == stored, target.arch.family


@pytest.mark.parametrize(("source", "billion"), [("Qwen/Qwen3-4B", 4.022), ("meta-llama/Llama-3.1-8B-Instruct", 8.030)])
def test_the_papers_models_are_known_by_heart(source, billion):
    """The sizes their makers give."""
    assert budget.target_parameters(read_arch(CONFIGS[source])) == pytest.approx(billion * 1e9, rel=1e-3)


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True}, {"norm_before_fc": True}])
def test_parameters_of_a_drafter(tiny, switches):
    config = DrafterConfig.of_target(tiny.arch, (1, 4, 6), 100, **switches)
    with torch.device("meta"):
        module = Eagle3Drafter(config)
    assert budget.drafter_parameters(config) == sum(parameter.numel() for parameter in module.parameters())


def test_parameters_of_an_adapter(families):
    for target in families.values():
        config = AdapterConfig.of_target(target.arch, 2)
        with torch.device("meta"):
            module = Adapter(config)
        assert adapter_budget.adapter_parameters(config) == sum(parameter.numel() for parameter in module.parameters())


def test_every_model_file_on_the_hub_is_known():
    from specwave.artifacts import conf_dir

    for name in ("qwen3_4b", "llama31_8b"):
        assert composed(f"model={name}").model.source in CONFIGS
        assert (conf_dir() / "model" / f"{name}.yaml").is_file()


def test_disk_against_a_run(tiny, tmp_path):
    """A checkpoint and a drafter as training writes them: the count is within 1 % of the bytes."""
    from specwave.eagle.export import TargetFacts, write_drafter

    config = DrafterConfig.of_target(tiny.arch, (1, 4, 6), 100)
    drafter = Eagle3Drafter(config, torch.arange(100) * 0, torch.arange(512) < 100)
    optimizer = torch.optim.AdamW(drafter.parameters())
    sum(parameter.sum() for parameter in drafter.parameters()).backward()
    optimizer.step()
    torch.save({"state_dict": drafter.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / "last")
    write_drafter(tmp_path / "d", drafter, TargetFacts("tiny", "f", 8))
    plan = budget.Plan(tiny.arch, [config], 3, 1, 64)
    counted = budget.disk(plan, 2)
    assert (tmp_path / "last").stat().st_size == pytest.approx(counted["checkpoints"] / 2, rel=0.05)
    stored = (tmp_path / "d" / "model.safetensors").stat().st_size
    assert stored == pytest.approx(counted["drafters and last"] / 2, rel=0.05)


def test_disk_of_an_adapter_against_its_files(tiny, tmp_path):
    config = AdapterConfig.of_target(tiny.arch, 2)
    adapter = Adapter(config)
    optimizer = torch.optim.AdamW(adapter.parameters())
    sum(parameter.sum() for parameter in adapter.parameters()).backward()
    optimizer.step()
    torch.save({"state_dict": adapter.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / "last")
    write_adapter(tmp_path / "a", adapter, tiny)
    counted = adapter_budget.disk(AdapterPlan(tiny.arch, config, 1, 64), 2)
    assert (tmp_path / "last").stat().st_size == pytest.approx(counted["checkpoints"] / 2, rel=0.1)  # 5 kB of names
    stored = (tmp_path / "a" / "model.safetensors").stat().st_size
    assert stored == pytest.approx(counted["drafters and last"] / 2, rel=0.05)


# ---------------------------------------------------------------- memory


SHAPES = {
    "long rows": {"rows": 4, "length": 1024, "width": 256, "steps": 3, "vocabulary": 4096, "draft": 2048, "groups": 1},
    "many steps": {"rows": 8, "length": 256, "width": 256, "steps": 7, "vocabulary": 8192, "draft": 4096, "groups": 1},
    "adapter": {"rows": 8, "length": 1024, "width": 256, "steps": 1, "vocabulary": 8192, "draft": 1, "groups": 0},
    "groups": {"rows": 4, "length": 512, "width": 384, "steps": 2, "vocabulary": 4096, "draft": 4096, "groups": 3},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_within_15_percent_of_the_peak(tmp_path, shape):
    """Resident memory of a child that trains two steps, above what it had before the target was loaded."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, str(HERE / "peak.py"), str(tmp_path), json.dumps(SHAPES[shape])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(shape, found)
    assert found["forecast"] == pytest.approx(found["peak"], rel=0.15)


def test_zero_cuts_and_offload_moves():
    arch = read_arch(CONFIGS["Qwen/Qwen3-4B"])
    drafters = [DrafterConfig.of_target(arch, (2, 18, 33), 32000)]
    parameters = budget.drafter_parameters(drafters[0])
    plan = budget.Plan(arch, drafters, 7, 1, 2048, processes=8)
    ddp = budget.memory(plan)
    assert (ddp["weights"], ddp["gradients"], ddp["optimiser"]) == (4 * parameters, 4 * parameters, 8 * parameters)
    stages = {stage: budget.memory(replace(plan, zero=stage)) for stage in (1, 2, 3)}
    assert [stages[stage]["optimiser"] for stage in (1, 2, 3)] == [12 * parameters // 8] * 3
    assert stages[1]["gradients"] == 2 * parameters
    assert stages[2]["gradients"] == stages[3]["weights"] == 2 * parameters // 8
    assert budget.memory(replace(plan, zero=2, offload="optimizer"))["optimiser"] == 0
    assert all(parts["target"] == ddp["target"] for parts in stages.values())
    assert budget.memory(replace(plan, checkpointing=True))["activations"] < ddp["activations"] / 2


def test_several_drafters_need_the_activations_of_one(tmp_path):
    arch = read_arch(CONFIGS["Qwen/Qwen3-4B"])
    wide, narrow = (DrafterConfig.of_target(arch, layers, 32000) for layers in ((2, 18, 33), (35,)))
    plan = budget.Plan(arch, [wide], 7, 1, 2048, processes=8)
    both = {zero: budget.memory(replace(plan, drafters=[wide, narrow], zero=zero)) for zero in (0, 2, 3)}
    one, other = (budget.memory(replace(plan, drafters=[each])) for each in (wide, narrow))
    for part in ("activations", "head"):
        assert both[0][part] == both[2][part] == one[part] > other[part] / 2
    assert both[3]["activations"] == one["activations"] + other["activations"]
    parameters = sum(map(budget.drafter_parameters, (wide, narrow)))
    assert [both[zero]["gradients"] for zero in (0, 2, 3)] == [4 * parameters, 2 * parameters, 2 * parameters // 8]


# ---------------------------------------------------------------- dry_run


@pytest.mark.parametrize("model", ["qwen3_4b", "llama31_8b"])
def test_dry_run_of_the_papers_setting_needs_no_weights(no_gpu, tmp_path, model):
    """8 GPUs, none here, no hub: a page, and facts for run.yaml."""
    overrides = [f"model={model}", "trainer=deepspeed", "data=sharegpt_ultrachat", "drafter.steps=7", "dry_run=true"]
    config = composed(*overrides, "drafter.draft_vocab_size=32000", "groups=[eagle3,eagle2,low_entropy,[5,23,31]]")
    run, said = Run(tmp_path), []
    run.say = said.append
    main(config, run)
    text = "\n".join(said)
    for words in (
        "8 × H100",
        "ZeRO-2",
        "L5-23-31",
        "memory of a process",
        "tokens/s",
        "hours: a guess",
        "target",
        "on disk",
    ):
        assert words in text, words
    least = {"qwen3_4b": 7, "llama31_8b": 15}[model]
    assert run.facts["forecast"]["memory_bytes"] > least * GIB
    assert not list(tmp_path.iterdir())


def printed_runs():
    """(overrides, what the page says that they print) of every dry run on docs/scaling.md."""
    page = (HERE.parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        command, _, printed = block.partition("\n")
        if "dry_run=true" in command and "memory of a process" in printed:
            yield shlex.split(command.removeprefix("python train.py")), printed.splitlines()


def test_the_page_prints_what_the_papers_setting_prints(no_gpu):
    """Both models, and every group of tables 2 and 3: six drafters for each."""
    found = list(printed_runs())
    assert [overrides[0] for overrides, _ in found] == ["model=qwen3_4b", "model=llama31_8b"]
    for overrides, printed in found:
        config, forecasted = planned(*overrides)
        said: list[str] = []
        report(forecasted, config, said.append)
        assert len(forecasted.sizes) == 6
        assert said == printed


def test_small_sizes_differ():
    """What a tiny run needs and what is free are not both 0.00 GiB."""
    assert [preflight.gib(size) for size in (0, 5 * 2**20, GIB / 2, 3e12)] == [
        "0.00 GiB", "5.00 MiB", "0.50 GiB", "2,793.97 GiB",
    ]  # fmt: skip


def test_a_dry_run_of_an_adapter(no_gpu, tmp_path):
    """Its parameters, the head's chunk of a wide vocabulary, no word of groups; longer rows need more."""
    base = ["model=llama31_8b", "drafter=kangaroo", "trainer=gpu"]
    config, found = planned(*base, "dry_run=true")
    run, said = Run(tmp_path), []
    run.say = said.append
    main(config, run)
    assert f"  {'kangaroo':<24} {42.0:8.1f} million parameters" in said  # 4096 · (2 · 4096 + 2 · 1024 + 2)
    assert run.facts["forecast"]["parts"]["head"] > 18 * 128256 * 256
    assert found.memory > 15 * GIB
    assert (
        planned("model=llama31_8b", "drafter=kangaroo", "trainer=gpu", "data.max_length=2048")[1].memory > found.memory
    )
    with pytest.raises(UserError, match=r"drafter=kangaroo: target, weights and optimiser take"):
        refuse(replace(found, room=found.parts["target"] + preflight.LIBRARIES["cuda"] + 1), tmp_path)
    (warning,) = refuse(replace(found, room=found.memory - 1), tmp_path)
    assert warning.endswith("lower data.batch_size or data.max_length")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_more_for_more(no_gpu):
    """More groups and longer rows need more; checkpointing less; eight processes are faster than one."""
    base = ["model=qwen3_4b", "trainer=gpu", "data=sharegpt_ultrachat"]
    _, one = planned(*base)
    assert planned(*base, "groups=[eagle3,eagle2]")[1].memory > one.memory
    assert planned(*base, "data.max_length=4096")[1].memory > one.memory
    assert planned(*base, "drafter.checkpointing=true")[1].memory < one.memory
    assert planned(*base, "states.mode=offline")[1].parts["target"] < one.parts["target"] / 2
    eight = planned(*[*base[::2], "trainer=deepspeed"])[1]
    assert preflight.speed(eight, "h100") == pytest.approx(8 * preflight.speed(one, "h100"))
    assert preflight.speed(one, "a100") < preflight.speed(one, "h100")


def test_offline_states_are_counted(no_gpu):
    """eagle3.md's formula: 2·H·(layers, and block N−1)."""
    _, found = planned("model=llama31_8b", "trainer=gpu", "states.mode=offline", "data=sharegpt_ultrachat")
    assert found.states == 2 * 4096 * 4
    said = []
    report(found, composed("model=llama31_8b", "trainer=gpu", "states.mode=offline"), said.append)
    assert any("32,768 bytes a token" in line for line in said)


# ---------------------------------------------------------------- refusals


def test_zero_3_does_not_cut_the_target(no_gpu, tmp_path):
    config, found = planned("model=llama31_8b", "trainer=deepspeed", "trainer.zero_stage=3")
    with pytest.raises(UserError, match=r"trainer\.zero_stage=3: the target takes 14\.96 GiB in each process, which"):
        refuse(replace(found, room=14 * GIB), tmp_path)
    assert config.trainer.zero_stage == 3
    assert refuse(found, tmp_path) == []


def test_what_does_not_fit(no_gpu, tmp_path, monkeypatch):
    _, found = planned("model=qwen3_4b", "trainer=gpu", "groups=[eagle3,eagle2]")
    with pytest.raises(UserError, match=r"model=qwen3: the target takes 7\.49 GiB"):
        refuse(replace(found, room=8 * GIB), tmp_path)
    with pytest.raises(UserError, match=r"groups=L2-18-33, L35: target, weights and optimiser take"):
        refuse(replace(found, room=12 * GIB), tmp_path)
    (warning,) = refuse(replace(found, room=found.memory - 1), tmp_path)
    assert "lower data.batch_size" in warning
    with pytest.raises(UserError, match=r"hydra\.run\.dir=.*checkpoints and drafters need"):
        refuse(replace(found, disk={"checkpoints": 10**18}), tmp_path / "not" / "yet")


def test_a_run_is_checked_before_the_target_is_loaded(no_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "system_memory", lambda: 10 * 2**20)
    config = composed("model=tiny")
    monkeypatch.setattr(type(config.model), "load", lambda self: pytest.fail("the target was loaded"))
    with pytest.raises(UserError, match=r"model=llama: the target takes"):
        main(config, Run(tmp_path))


def test_only_the_config_is_fetched_of_a_model_on_the_hub(family_folders, monkeypatch):
    asked = []

    def fetched(source, revision, allow_patterns):
        asked.append((source, allow_patterns))
        return str(family_folders["llama"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    assert architecture(ModelConfig("hub", "somebody/model")).num_layers == 8
    assert asked == [("somebody/model", ["config.json"])]


@pytest.mark.parametrize("content", ['{"model_type": ', "{}", '{"model_type": "llama"}', "[]"])
def test_a_damaged_config_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"^model"):
        architecture(ModelConfig("own", str(tmp_path)))
