"""Training as a whole, on a tiny random target: joint = single, kill and resume, stops, and what is written."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import yaml
from safetensors.torch import load_file

from specwave.app.distributed import DdpConfig
from specwave.app.groups import wanted_groups
from specwave.app.train import TrainConfig, main
from specwave.app.trainer import TrainerConfig
from specwave.artifacts import Selection, UserError
from specwave.benchmark.drafters import find_drafters
from specwave.data.samples import BuiltinData
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.export import read_drafter
from specwave.eagle.loss import counting_slots, ttt_loss
from specwave.eagle.module import GroupTraining
from specwave.eagle.options import Eagle3
from specwave.eagle.slots import ahead
from specwave.eagle.start import initialise
from specwave.eagle.targets import read_target
from specwave.eagle.vocab import build_vocab_map
from specwave.target import ModelConfig

HERE = Path(__file__).resolve().parent
CONF = HERE.parents[1] / "conf"
DATA = BuiltinData(limit=14, validation=3, max_new_tokens=16, batch_size=3)


def csv_logger(save_dir):
    return pl.loggers.CSVLogger(save_dir, name="", version="", flush_logs_every_n_steps=1)


def run_in(folder, resume=False):
    said, noted = [], {}
    own = {"say": said.append, "note": noted.update, "said": said, "noted": noted}
    return SimpleNamespace(folder=folder, resume=resume, main=True, status="finished", **own)


def a_config(family_folders, **changes) -> TrainConfig:
    settings = {
        "model": ModelConfig("tiny", str(family_folders["llama"]), dtype="float32", device="cpu"),
        "data": DATA,
        "drafter": Eagle3(steps=3, draft_vocab_size=128, export_dtype="float32"),
        "trainer": TrainerConfig(max_steps=6, save_every=4, validate_every=4, log_every=2),
        "logger": csv_logger,
        "groups": [[2, 4, 5]],
    }
    return TrainConfig(**{**settings, **changes})


def rows_of(folder):
    with open(folder / "metrics.csv", newline="") as stream:
        return list(csv.DictReader(stream))


def untimed(folder):
    """The rows of metrics.csv without what a clock says."""
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows_of(folder)]


# ---------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def joint(family_folders, tmp_path_factory):
    """Three groups in one run, one of them named by its rule."""
    run = run_in(tmp_path_factory.mktemp("joint"))
    main(a_config(family_folders, groups=[[2, 4, 5], "eagle2", [0, 3]]), run)
    return run


def test_what_a_run_writes(joint, tiny):
    folder = joint.folder
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints",
        "drafters",
        "last",
        "metrics.csv",
        "curves.png",
        "curves.svg",
    }
    assert {path.name for path in (folder / "drafters").iterdir()} == {"L2-4-5", "L7", "L0-3"}
    for name, layers, rule in (("L2-4-5", (2, 4, 5), None), ("L7", (7,), "eagle2"), ("L0-3", (0, 3), None)):
        config, tensors, card = read_drafter(folder / "drafters" / name)
        assert config.layers == layers
        assert config == DrafterConfig.of_target(tiny.arch, layers, 128)
        assert "embed_tokens.weight" not in tensors
        assert card["target"] == {"name": "tiny", "fingerprint": tiny.fingerprint, "num_layers": 8}
        assert card["training"]["rule"] == rule
        assert card["training"]["step"] == card["training"]["validated_at"]
        assert card["training"]["validation"]["tau_hat"] >= 1
        assert card["training"]["steps"] == 3
        assert card["data"]["validation_samples"] == 3
        assert 0 < card["data"]["draft_vocabulary_coverage"] <= 1
        assert card["pictures"] == ["curves.png"]
        assert (folder / "drafters" / name / "curves.png").stat().st_size > 10_000
        assert read_drafter(folder / "last" / name)[2]["training"]["step"] == 6
    table = "\n".join(joint.said)
    assert all(word in table for word in ("L2-4-5", "L7", "L0-3", "tau_hat", "a_0", "a_2", "SGLang cannot"))
    assert joint.noted["tokens"] > 0


def test_metrics_by_step(joint):
    rows = rows_of(joint.folder)
    training = [row for row in rows if row["L7/loss"]]
    assert [int(row["step"]) for row in training] == [2, 4, 6]
    assert [int(row["step"]) for row in rows if row["L7/val_tau_hat"]] == [4, 6]
    tokens = [int(row["tokens"]) for row in training]
    assert tokens == sorted(tokens)
    assert tokens[0] > 0
    for key in ("loss", "a_0", "a_1", "a_2", "tau_hat", "grad_norm"):
        assert all(row[f"L2-4-5/{key}"] for row in training), key
    assert float(training[-1]["lr"]) == pytest.approx(1.5e-3 * Eagle3().rate(5, 6))
    assert float(training[0]["tokens_per_second"]) > 0


def test_the_checkpoint_is_plain_data_without_the_target(joint, tiny):
    content = torch.load(joint.folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["global_step"] == 6
    assert {name.split(".")[1] for name in content["state_dict"]} == {"L2-4-5", "L7", "L0-3"}
    one = Eagle3Drafter(DrafterConfig.of_target(tiny.arch, (2, 4, 5), 128))
    own = {name.removeprefix("drafters.L2-4-5.") for name in content["state_dict"] if ".L2-4-5." in name}
    assert own == set(one.state_dict())


@pytest.mark.parametrize(("group", "name"), [([2, 4, 5], "L2-4-5"), ([7], "L7"), ([0, 3], "L0-3")])
def test_a_joint_run_equals_single_runs(joint, family_folders, tmp_path, group, name):
    """Float32 on one CPU: the same operations on the same numbers, so bit for bit."""
    main(a_config(family_folders, groups=[group]), run_in(tmp_path))
    for kind in ("drafters", "last"):
        together = load_file(joint.folder / kind / name / "model.safetensors")
        alone = load_file(tmp_path / kind / name / "model.safetensors")
        for key, tensor in alone.items():
            assert torch.equal(together[key], tensor), key
        figures = [
            read_drafter(folder / kind / name)[2]["training"]["validation"] for folder in (joint.folder, tmp_path)
        ]
        assert figures[0] == figures[1]


def test_drafters_are_the_best_validated_and_last_the_last(joint):
    rows = rows_of(joint.folder)
    for name in ("L2-4-5", "L7", "L0-3"):
        held = {int(row["step"]): float(row[f"{name}/val_tau_hat"]) for row in rows if row[f"{name}/val_tau_hat"]}
        training = read_drafter(joint.folder / "drafters" / name)[2]["training"]
        assert training["validation"]["tau_hat"] == pytest.approx(max(held.values()))
        assert training["step"] == max(step for step, tau in held.items() if tau == max(held.values()))


def test_a_validation_that_is_worse_leaves_the_best(family_folders, tmp_path, monkeypatch):
    """τ̂ of the validations at steps 2, 4 and 6 is made 2, 3 and 1."""
    figures = GroupTraining._figures

    def falling(self, tallies):
        found = figures(self, tallies)
        if tallies is getattr(self, "_held_out", None):
            for entry in found.values():
                entry["tau_hat"] = {2: 2.0, 4: 3.0, 6: 1.0}[self.global_step]
        return found

    monkeypatch.setattr(GroupTraining, "_figures", falling)
    trainer = TrainerConfig(max_steps=6, save_every=2, validate_every=2, log_every=2, decode=0)
    main(a_config(family_folders, trainer=trainer), run_in(tmp_path))
    cards = {kind: read_drafter(tmp_path / kind / "L2-4-5")[2]["training"] for kind in ("drafters", "last")}
    assert (cards["drafters"]["step"], cards["drafters"]["validation"]["tau_hat"]) == (4, 3.0)
    assert cards["last"]["step"] == 6


def test_held_out_prompts_are_really_decoded(joint, family_folders, tmp_path):
    """val_tau is committed tokens per verification of these very drafters; 0 prompts is none."""
    rows = [row for row in rows_of(joint.folder) if row["L7/val_tau"]]
    assert [int(row["step"]) for row in rows] == [4, 6]
    assert all(1 <= float(row["L7/val_tau"]) <= 4 for row in rows)
    assert any(line.endswith("tau is of decoding 3 of them") for line in joint.said)
    trainer = TrainerConfig(max_steps=2, save_every=2, validate_every=2, log_every=2, decode=0)
    main(a_config(family_folders, trainer=trainer), run_in(tmp_path))
    assert not any("/val_tau" in key and "hat" not in key for key in rows_of(tmp_path)[0])


# ---------------------------------------------------------------- kill and resume


@pytest.mark.parametrize("seed", [20261104])
def test_killed_at_five_random_steps_and_resumed(family_folders, tmp_path, seed):
    """Weights, optimiser and metrics of a run killed five times are those of a run left alone, bit for bit."""
    environment = os.environ | {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    outputs = []
    for folder, how in (("whole", "none"), ("killed", str(seed))):
        command = [sys.executable, str(HERE / "killed.py"), str(family_folders["llama"]), str(tmp_path / folder), how]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    print(outputs[1])
    assert outputs[0].count("exit 0") == outputs[1].count("exit 0") == 1, outputs
    assert outputs[1].count("killed at step") == 5, outputs
    content = [
        torch.load(tmp_path / folder / "checkpoints" / "last.ckpt", weights_only=True) for folder in ("whole", "killed")
    ]
    for name, tensor in content[0]["state_dict"].items():
        assert torch.equal(content[1]["state_dict"][name], tensor), name
    moments = [checkpoint["optimizer_states"][0]["state"] for checkpoint in content]
    for place, state in moments[0].items():
        for key, tensor in state.items():
            assert torch.equal(moments[1][place][key], tensor), (place, key)
    assert content[0]["specwave"]["tokens"] == content[1]["specwave"]["tokens"]
    for name in ("L2-4-5", "L7"):
        files = [
            (tmp_path / folder / kind / name / "model.safetensors").read_bytes()
            for folder in ("whole", "killed")
            for kind in ("drafters", "last")
        ]
        assert files[:2] == files[2:]
    steps = [
        [int(row["step"]) for row in rows_of(tmp_path / folder) if row["L7/loss"]] for folder in ("whole", "killed")
    ]
    assert steps[0] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert len(steps[1]) == len(set(steps[1]))  # no step twice
    assert not list((tmp_path / "killed").rglob("*.part"))
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "killed")


def test_a_training_in_parts_is_the_training(joint, family_folders, tmp_path):
    """Every part ends after its first step; the last one finishes."""
    trainer = TrainerConfig(max_steps=6, save_every=4, validate_every=4, log_every=2, minutes=1e-9)
    said = []
    while not any("written:" in line for line in said):
        assert len(said) < 6
        run = run_in(tmp_path, resume=True)
        main(a_config(family_folders, groups=[[2, 4, 5], "eagle2", [0, 3]], trainer=trainer), run)
        said.append("\n".join(run.said))
        assert run.status == ("finished" if "written:" in said[-1] else "stopped")
    assert "stopped after 1e-09 minutes at step 5 of 6: go on with resume=true" in said[4]
    for kind in ("drafters", "last"):
        for name in ("L2-4-5", "L7", "L0-3"):
            files = [folder / kind / name / "model.safetensors" for folder in (joint.folder, tmp_path)]
            assert files[0].read_bytes() == files[1].read_bytes(), (kind, name)
    assert untimed(tmp_path) == untimed(joint.folder)


def test_when_time_is_up_does_not_decide_what_is_validated(family_folders, tmp_path, monkeypatch):
    """τ̂ falls from step to step: the best is that of the first validation, not one taken where a part ended."""
    figures = GroupTraining._figures

    def falling(self, tallies):
        found = figures(self, tallies)
        if tallies is getattr(self, "_held_out", None):
            for entry in found.values():
                entry["tau_hat"] = 9.0 - self.global_step
        return found

    monkeypatch.setattr(GroupTraining, "_figures", falling)
    for _ in range(5):
        trainer = TrainerConfig(max_steps=5, save_every=2, validate_every=3, log_every=2, decode=0, minutes=1e-9)
        main(a_config(family_folders, trainer=trainer), run_in(tmp_path, resume=True))
    training = read_drafter(tmp_path / "drafters" / "L2-4-5")[2]["training"]
    assert (training["step"], training["validation"]["tau_hat"]) == (3, 6.0)
    assert [row["step"] for row in rows_of(tmp_path) if row["L2-4-5/val_tau_hat"]] == ["3", "5"]


def test_an_interruption_stays_one(family_folders, tmp_path, monkeypatch):
    """Lightning turns Ctrl-C into exit code 1, and a sweep would go on to its next job."""

    def interrupted(self, batch, batch_idx):
        raise KeyboardInterrupt

    monkeypatch.setattr(GroupTraining, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(a_config(family_folders), run_in(tmp_path))


def test_a_terminated_training_has_not_finished(family_folders, tmp_path, monkeypatch):
    """Lightning takes a note of SIGTERM and ends with a SystemExit without a code: exit code 0."""
    step = GroupTraining.training_step

    def terminated(self, batch, batch_idx):
        if self.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(GroupTraining, "training_step", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        main(a_config(family_folders), run_in(tmp_path))
    assert stop.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 4
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("content", [b"", b"torn", "cut", {"global_step": 3}])
def test_a_damaged_checkpoint_is_named(joint, family_folders, tmp_path, content):
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    if isinstance(content, dict):
        torch.save(content, last)
    else:
        whole = (joint.folder / "checkpoints" / "last.ckpt").read_bytes()
        last.write_bytes(whole[: len(whole) // 2] if content == "cut" else content)
    with pytest.raises(UserError, match=r"resume=.*last\.ckpt: the file is damaged"):
        main(a_config(family_folders), run_in(tmp_path, resume=True))


def test_a_finished_run_resumes_to_itself(joint, family_folders):
    before, rows = (joint.folder / "drafters" / "L7" / "model.safetensors").read_bytes(), untimed(joint.folder)
    again = run_in(joint.folder, resume=True)
    main(a_config(family_folders, groups=[[2, 4, 5], "eagle2", [0, 3]]), again)
    assert (joint.folder / "drafters" / "L7" / "model.safetensors").read_bytes() == before
    assert again.noted["tokens"] == joint.noted["tokens"]
    assert untimed(joint.folder) == rows  # the last step is validated behind its checkpoint, so again: one row
    assert [int(row["step"]) for row in rows_of(joint.folder) if row["L7/loss"]] == [2, 4, 6]


def test_resume_with_other_groups_is_refused(joint, family_folders):
    with pytest.raises(UserError, match=r"resume=true: the checkpoint has the groups"):
        main(a_config(family_folders, groups=[[1]]), run_in(joint.folder, resume=True))


def test_resume_with_other_data_is_refused(joint, family_folders):
    """The drafters would go on with the old draft vocabulary and learn the new one's distribution."""
    config = a_config(family_folders, groups=[[2, 4, 5], "eagle2", [0, 3]], data=replace(DATA, limit=13))
    with pytest.raises(UserError, match=r"resume=true: the checkpoint has the training data [0-9a-f]{16}, this run"):
        main(config, run_in(joint.folder, resume=True))


def test_a_killed_resume_keeps_the_figures_so_far(joint, family_folders, tmp_path, monkeypatch):
    """Lightning's logger removes metrics.csv before the rows are written again."""
    shutil.copytree(joint.folder, tmp_path / "run")
    before = rows_of(tmp_path / "run")

    def killed(self):
        raise KeyboardInterrupt

    save = pl.loggers.csv_logs.ExperimentWriter.save
    monkeypatch.setattr(pl.loggers.csv_logs.ExperimentWriter, "save", killed)
    config = a_config(family_folders, groups=[[2, 4, 5], "eagle2", [0, 3]])
    with pytest.raises(KeyboardInterrupt):
        main(config, run_in(tmp_path / "run", resume=True))
    monkeypatch.setattr(pl.loggers.csv_logs.ExperimentWriter, "save", save)
    main(config, run_in(tmp_path / "run", resume=True))
    assert rows_of(tmp_path / "run")[: len(before)] == before
    assert not (tmp_path / "run" / "metrics.earlier.csv").exists()


# ---------------------------------------------------------------- stops


def test_a_nan_in_a_validation_stops_that_drafter_alone(joint, family_folders, tmp_path, monkeypatch):
    outcomes = GroupTraining._outcomes

    def poisoned(self, batch):
        found = outcomes(self, batch)
        if not self.training and "L7" in found:
            found["L7"] = replace(found["L7"], losses=found["L7"].losses * float("nan"))
        return found

    monkeypatch.setattr(GroupTraining, "_outcomes", poisoned)
    run = run_in(tmp_path)
    with pytest.warns(
        UserWarning, match="held-out loss of L7 is not finite at step 4 in the batch of held-out prompts"
    ):
        main(a_config(family_folders, groups=[[2, 4, 5], "eagle2", [0, 3]]), run)
    assert "L7 stopped early" in "\n".join(run.said)
    cards = {name: read_drafter(tmp_path / "last" / name)[2]["training"] for name in ("L7", "L0-3")}
    assert "held-out loss" in cards["L7"]["stopped"]
    assert cards["L7"]["validation"] == {}
    assert cards["L0-3"]["validation"] == read_drafter(joint.folder / "last" / "L0-3")[2]["training"]["validation"]
    assert [bool(row["L7/loss"]) for row in rows_of(tmp_path) if row["L0-3/loss"]] == [True, True, False]


def test_a_card_speaks_of_its_own_weights(family_folders, tmp_path):
    """Saved at steps 2, 4 and 5, validated at 3 and 5."""
    trainer = TrainerConfig(max_steps=5, save_every=2, validate_every=3, log_every=2, decode=0)
    main(a_config(family_folders, trainer=trainer), run_in(tmp_path))
    best, last = (read_drafter(tmp_path / kind / "L2-4-5")[2]["training"] for kind in ("drafters", "last"))
    assert best["validated_at"] == best["step"]
    assert last["validated_at"] == last["step"] == 5
    held = {row["step"]: row["L2-4-5/val_loss"] for row in rows_of(tmp_path) if row["L2-4-5/val_loss"]}
    assert last["validation"]["loss"] == pytest.approx(float(held["5"]))


def test_nan_stops_before_anything_is_overwritten(family_folders, tmp_path, monkeypatch):
    """The batch of step 5 holds a NaN; the checkpoint of step 4 stays, and the message names the samples."""
    read, seen = GroupTraining.read, []

    def poisoned(self, batch):
        found = read(self, batch)
        if self.global_step == 5:
            seen.append(batch["names"])
            found.states = {layer: state.clone() for layer, state in found.states.items()}
            found.states[4][0, 0, 0] = float("nan")
        return found

    monkeypatch.setattr(GroupTraining, "read", poisoned)
    with pytest.raises(UserError) as caught:
        main(a_config(family_folders), run_in(tmp_path))
    assert "loss of L2-4-5 is not finite at step 5" in str(caught.value)
    assert seen[0][0] in str(caught.value)
    content = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["global_step"] == 4
    assert all(torch.isfinite(tensor.float()).all() for tensor in content["state_dict"].values())
    assert read_drafter(tmp_path / "drafters" / "L2-4-5")[2]["training"]["step"] == 4


def test_an_infinite_gradient_stops_before_the_optimiser(family_folders, tmp_path, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *given: clip(*given) * float("inf"))
    with pytest.raises(UserError, match=r"gradient of L2-4-5 is not finite at step 0"):
        main(a_config(family_folders), run_in(tmp_path))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_nan_stops_that_drafter_alone(joint, family_folders, tmp_path, monkeypatch, how):
    """From step 3 on L7's loss, or its gradient, is not finite; the others train as if nothing were."""
    outcome = GroupTraining._outcome

    def poisoned(self, name, *given):
        found = outcome(self, name, *given)
        if self.training and self.global_step >= 3 and name == "L7":
            if how == "loss":
                found.loss = found.loss * float("nan")
            else:
                found.loss.register_hook(lambda gradient: gradient * float("inf"))
        return found

    monkeypatch.setattr(GroupTraining, "_outcome", poisoned)
    run = run_in(tmp_path)
    with pytest.warns(UserWarning, match=rf"{how} of L7 is not finite at step 3 .*; the other drafters go on"):
        main(a_config(family_folders, groups=[[2, 4, 5], "eagle2", [0, 3]]), run)
    for name in ("L2-4-5", "L0-3"):
        files = [folder / "last" / name / "model.safetensors" for folder in (joint.folder, tmp_path)]
        assert files[0].read_bytes() == files[1].read_bytes()
    _, tensors, card = read_drafter(tmp_path / "last" / "L7")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert f"{how} of L7 is not finite at step 3" in card["training"]["stopped"]
    assert list(run.noted["stopped"]) == ["L7"]
    assert any(line.startswith("L7 stopped early") for line in run.said)


# ---------------------------------------------------------------- mistakes found early


class Never:
    """Data that must not be asked for."""

    batch_size, max_length = 3, 64

    def prepared(self, target):
        raise AssertionError("answers take minutes: check first")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[2, 8]], r"groups\[0\]=\[2, 8\]: layer 8 is unknown: the model has layers 0 to 7"),
        ([[2, -1]], "layer -1 is unknown"),
        ([[1], [2, 2]], r"groups\[1\]=\[2, 2\]: a layer appears twice"),
        ([[0, 1, 2, 3, 4, 5, 6, 7, 7]], "9 layers are asked for, the model has 8"),
        ([[]], "name at least one layer"),
        (["eagle4"], "there is no such rule"),
        ([3], "a group is a list of layers, a rule's name"),
    ],
)
def test_wrong_groups(family_folders, tmp_path, groups, message):
    with pytest.raises(UserError, match=message):
        main(a_config(family_folders, groups=groups, data=Never()), run_in(tmp_path))
    assert not list(tmp_path.iterdir())


def test_eight_gpus_where_there_are_none(tmp_path, monkeypatch):
    """Refused in the first line of main: no model is loaded, no process started."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer = TrainerConfig(accelerator="gpu", devices=8)
    with pytest.raises(
        UserError, match=r"trainer.devices=8: 8 CUDA GPUs are asked for and 0 are here: use trainer=cpu"
    ):
        main(TrainConfig(ModelConfig("tiny", "tiny"), None, None, trainer, None), run_in(tmp_path))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)


@pytest.mark.parametrize(
    ("trainer", "wanted", "found"),
    [
        (TrainerConfig("gpu"), "cuda:1", ("cuda:1", [1])),
        (TrainerConfig("gpu"), "auto", ("cuda", 1)),
        (TrainerConfig("gpu"), "cuda", ("cuda", 1)),
        (TrainerConfig("cpu"), "cpu", ("cpu", 1)),
        (TrainerConfig("gpu"), "cuda:2", "model.device=cuda:2: there are 2 CUDA devices here"),
        (TrainerConfig("cpu"), "cuda:1", "model.device=cuda:1: the trainer runs on cpu: set model.device=cpu"),
        (DdpConfig("gpu"), "cuda", ("cuda:0", 2)),
        (DdpConfig("gpu"), "cuda:1", "model.device=cuda:1: every process takes a GPU of its own: give auto or cuda"),
    ],
)
def test_a_gpu_by_its_number_is_the_targets_and_lightnings(trainer, wanted, found, two_gpus, monkeypatch):
    """(the device that the target is loaded to, Lightning's `devices`)."""
    model = ModelConfig("tiny", "tiny", device=wanted)
    if isinstance(found, str):
        with pytest.raises(UserError) as refused:
            trainer.device_for(model)
        assert str(refused.value).startswith(found)
        return
    monkeypatch.setattr("specwave.app.trainer.pl.Trainer", lambda **given: given["devices"])
    device = trainer.device_for(model)
    assert (device, trainer.build(torch.float32, torch.device(device), None, [])) == found


def test_one_gpu_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"trainer.accelerator=gpu: there is no CUDA GPU here: use trainer=cpu"):
        TrainerConfig(accelerator="gpu").device()


def test_auto_takes_what_is_there_and_spawns_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert TrainerConfig(accelerator="auto").device() == "cpu"
    with pytest.raises(UserError, match=r"trainer.devices=8: training runs on one device"):
        TrainerConfig(accelerator="auto", devices=8).device()


def a_selection(tiny, folder, **changes) -> Path:
    facts = {
        "model": "tiny",
        "fingerprint": tiny.fingerprint,
        "num_layers": 8,
        "selector": "elsi",
        "m": 2,
        "layers": [1, 6],
        "entropy": 1.0,
        "beam": [{"layers": layers, "entropy": 1.0} for layers in ([1, 6], [0, 6], [2, 6])],
        "layer_entropy": [0.0] * 8,
        "transitions": [0.0] * 7,
        "calibration": {},
    }
    Selection(**{**facts, **changes}).save(folder / "selection.json")
    return folder


def test_groups_of_a_selection(tiny, family_folders, tmp_path):
    chosen = Selection.load(a_selection(tiny, tmp_path))
    config = a_config(family_folders, selection=str(tmp_path), top=2, groups=None)

    def found(config, *selections):
        return [(wanted.layers, wanted.rule) for wanted in wanted_groups(config, selections or [chosen], 8)]

    assert found(config) == [((1, 6), "elsi"), ((0, 6), "elsi")]
    config = a_config(family_folders, selection=str(tmp_path), groups=["eagle3", [6, 1], [7]])
    assert found(config) == [((1, 6), "elsi"), ((2, 4, 5), "eagle3"), ((7,), None)]
    other = Selection.load(
        a_selection(tiny, tmp_path / "other", layers=[3], beam=[{"layers": [3], "entropy": 1.0}], m=1)
    )
    config = a_config(family_folders, selection=[str(tmp_path), str(tmp_path / "other")], groups=["eagle2", [3]])
    assert found(config, chosen, other) == [((1, 6), "elsi"), ((3,), "elsi"), ((7,), "eagle2")]
    with pytest.raises(UserError, match="the selection holds 1 groups"):
        found(a_config(family_folders, selection=["a", "b"], top=2, groups=None), chosen, other)
    assert [wanted.rule for wanted in wanted_groups(a_config(family_folders, groups=None), [], 8)] == ["eagle3"]
    for wrong in ([], [3], 3, [""]):
        with pytest.raises(UserError, match="selection="):
            a_config(family_folders, selection=wrong)


def test_a_group_with_switches_of_its_own(family_folders, tmp_path):
    """The same layers plain and with EAGLE-3.1's switches, beside each other; the plain one as if it were alone."""
    groups = [[2, 4, 5], {"layers": [2, 4, 5], "fc_norm": True, "norm_output": True}, {"layers": "eagle3"}]
    run = run_in(tmp_path)
    main(a_config(family_folders, groups=groups), run)
    switched = "L2-4-5+fc_norm+norm_output"
    assert {path.name for path in (tmp_path / "drafters").iterdir()} == {"L2-4-5", switched}
    config, _, card = read_drafter(tmp_path / "drafters" / switched)
    assert (config.fc_norm, config.norm_output, config.norm_before_fc) == (True, True, False)
    assert card["training"]["fc_norm"] is True
    assert not read_drafter(tmp_path / "drafters" / "L2-4-5")[0].fc_norm
    assert [drafter.label for drafter in find_drafters(str(tmp_path))] == ["L2-4-5", switched]
    assert any(line.startswith(switched) or switched in line for line in run.said)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"layers": [2], "fc_norms": True}, r"groups\[0\]\.fc_norms=True: a group is .* the switches are fc_norm"),
        ({"layers": [2], "fc_norm": 1}, r"groups\[0\]\.fc_norm=1"),
        ({"fc_norm": True}, r"groups\[0\]\.layers=None: a group is a list of layers"),
        ({"layers": [9]}, r"groups\[0\]\.layers=\[9\]: layer 9 is unknown"),
    ],
)
def test_wrong_switches_of_a_group(family_folders, tmp_path, entry, message):
    with pytest.raises(UserError, match=message):
        main(a_config(family_folders, groups=[entry], data=Never()), run_in(tmp_path))


# ---------------------------------------------------------------- warm start


def test_going_on_from_a_drafter(joint, family_folders, tmp_path):
    """The drafter named starts with its own weights and vocabulary, the others as they always do."""
    before = load_file(joint.folder / "drafters" / "L7" / "model.safetensors")
    options = Eagle3(
        steps=3, draft_vocab_size=128, export_dtype="float32", lr=1e-9, warm_start=str(joint.folder / "drafters" / "L7")
    )
    main(a_config(family_folders, drafter=options, groups=[[7], [0, 3]]), run_in(tmp_path))
    after = load_file(tmp_path / "last" / "L7" / "model.safetensors")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name].float(), tensor.float(), atol=1e-6, rtol=0)  # six steps of 1e-9
    assert torch.equal(load_file(tmp_path / "last" / "L0-3" / "model.safetensors")["d2t"], before["d2t"])


@pytest.mark.parametrize(
    ("changes", "groups", "message"),
    [
        ({}, [[0, 3]], r"drafter.warm_start=.*it is the drafter L7 of 128 draft tokens, which this run does not train"),
        ({"draft_vocab_size": 64}, [[7]], "set draft_vocab_size"),
        ({"norm_output": True}, [[7]], "does not train"),
        ({"warm_start": "nowhere"}, [[7]], r"drafter.warm_start=nowhere: no drafter of specwave is here"),
    ],
)
def test_a_drafter_that_cannot_be_gone_on_from(joint, family_folders, tmp_path, changes, groups, message):
    settings = {"draft_vocab_size": 128, "warm_start": str(joint.folder / "drafters" / "L7")} | changes
    with pytest.raises(UserError, match=message):
        main(a_config(family_folders, drafter=Eagle3(**settings), groups=groups, data=Never()), run_in(tmp_path))


def test_a_selection_of_another_model(tiny, family_folders, tmp_path):
    a_selection(tiny, tmp_path, fingerprint="0" * 32, model="other")
    with pytest.raises(UserError, match="made for other"):
        main(a_config(family_folders, selection=str(tmp_path), groups=None, data=Never()), run_in(tmp_path / "run"))


def test_pictures_of_a_selection_travel(tiny, family_folders, tmp_path):
    folder = a_selection(tiny, tmp_path)
    for name in ("entropy.png", "cka.png"):
        (folder / name).write_bytes(b"picture")
    trainer = TrainerConfig(max_steps=1)
    main(a_config(family_folders, selection=str(folder), groups=None, trainer=trainer), run_in(tmp_path / "run"))
    card = read_drafter(tmp_path / "run" / "drafters" / "L1-6")[2]
    assert card["pictures"] == ["entropy.png", "cka.png", "curves.png"]
    assert card["training"]["rule"] == "elsi"


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: TrainConfig(1, 1, 1, 1, 1, top=0), "top"),
        (lambda: TrainConfig(1, 1, 1, 1, 1, top=2), "top"),
        (lambda: TrainConfig(1, 1, 1, 1, 1, groups=[]), "groups"),
        (lambda: TrainerConfig(max_steps=0), "trainer.max_steps"),
        (lambda: TrainerConfig(accelerator="tpu"), "trainer.accelerator"),
        (lambda: TrainerConfig(precision="8"), "trainer.precision"),
        (lambda: Eagle3(lr=0), "drafter.lr"),
        (lambda: Eagle3(lr=float("nan")), "drafter.lr"),
        (lambda: Eagle3(decay=1.5), "drafter.decay"),
        (lambda: Eagle3(steps=0), "drafter.steps"),
        (lambda: Eagle3(init="zeros"), "drafter.init"),
        (lambda: Eagle3(betas=[0.9]), "drafter.betas"),
        (lambda: Eagle3(warmup=1.0), "drafter.warmup"),
        (lambda: Eagle3(export_dtype="int8"), "drafter.export_dtype"),
    ],
)
def test_ranges(make, key):
    with pytest.raises(UserError) as caught:
        make()
    assert caught.value.key == key
    assert caught.value.remedy


def content(name):
    return {key: value for key, value in yaml.safe_load((CONF / name).read_text()).items() if key != "_target_"}


def test_defaults_are_the_same_in_yaml_and_dataclasses():
    assert content("drafter/eagle3.yaml") == asdict(Eagle3())
    assert content("data/builtin.yaml") == asdict(BuiltinData())
    assert content("trainer/cpu.yaml") == asdict(TrainerConfig())
    assert set(content("trainer/gpu.yaml")) == set(asdict(TrainerConfig()))
    whole = content("train.yaml")
    bare = TrainConfig(None, None, None, None, None)
    assert {key: whole[key] for key in ("selection", "top", "groups")} == {
        key: getattr(bare, key) for key in ("selection", "top", "groups")
    }


# ---------------------------------------------------------------- learning


def test_learning_rate_rises_and_falls():
    options = Eagle3(warmup=0.1)
    rates = [options.rate(step, 50) for step in range(51)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == 1.0
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[5:]))
    assert rates[27] == pytest.approx(0.5, abs=0.02)
    assert rates[50] == pytest.approx(0.0)


def test_the_targets_side_is_the_targets(tiny):
    """Restricted distributions, argmax marks and states of a batch, against the target's whole logits."""
    ids = torch.randint(3, 259, (2, 11))
    answer = torch.zeros(2, 11, dtype=torch.bool)
    answer[0, 4:9] = True
    answer[1, 6:] = True
    d2t, t2d = build_vocab_map(torch.randint(0, 9, (512,)), 200)
    chosen = torch.arange(200) + d2t
    states = tiny.states(ids, [2, 7])
    whole = tiny.logits(states[7])
    got = read_target(ids, answer, states, states[7], tiny.embedding, tiny.logits, chosen, t2d, chunk=3)
    needed = [(0, t) for t in (4, 5, 6, 7)] + [(1, t) for t in (6, 7, 8, 9)]
    assert got.target.shape == (8, 200)
    for row, t in needed:
        expected = torch.softmax(whole[row, t, chosen], -1)
        # float32 heads over 3 and over 22 rows add in different orders
        torch.testing.assert_close(got.target[got.row[row, t]], expected, rtol=1e-4, atol=1e-6)
        assert bool(got.in_vocab[row, t]) == bool(t2d[whole[row, t].argmax()])
    marked = [tuple(place) for place in got.in_vocab.nonzero().tolist()]
    assert set(marked) <= set(needed)


def test_a_drafter_learns(tiny):
    """Twelve steps over one batch take half of what is above the target's own entropy, the floor of the loss.

    In float32 and under bf16 autocast alike.
    """
    ids = torch.randint(3, 259, (3, 24))
    answer = torch.zeros(3, 24, dtype=torch.bool)
    answer[:, 6:] = True
    d2t, t2d = build_vocab_map(torch.ones(512), 512)
    states = tiny.states(ids, [2, 4, 7])
    batch = read_target(ids, answer, states, states[7], tiny.embedding, tiny.logits, torch.arange(512), t2d)
    entropy = -(batch.target * batch.target.log()).sum(-1)[batch.row]
    floor = 0.0
    for step in range(3):
        counted = counting_slots(answer, batch.in_vocab, 3)[step]
        floor += 0.8**step * ahead(entropy, step + 1)[counted].mean().item()
    ends = []
    for mixed in (False, True):
        drafter = Eagle3Drafter(DrafterConfig.of_target(tiny.arch, (2, 4, 7), 512), d2t, t2d)
        initialise(drafter, tiny, "target", seed=0)
        optimiser = torch.optim.AdamW(drafter.parameters(), lr=5e-3, weight_decay=0.0)
        losses = []
        for _ in range(12):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                outcome = ttt_loss(drafter, batch, 3)
            optimiser.zero_grad()
            outcome.loss.backward()
            optimiser.step()
            losses.append(outcome.loss.item())
        assert floor < losses[-1] < floor + 0.5 * (losses[0] - floor)
        ends.append((losses[0], losses[-1]))
    assert ends[1][0] == pytest.approx(ends[0][0], rel=0.02)  # bf16 keeps 8 bits: 0.4 % per operation


def test_a_card_is_json(joint):
    json.loads((joint.folder / "drafters" / "L7" / "card.json").read_text())
