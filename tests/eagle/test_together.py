"""Two processes train as one does: DDP and DeepSpeed's ZeRO-1, 2 and 3 on two CPU processes beside one process."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from together import PROCESSES, STEPS, a_config, several

from specwave.app.distributed import DdpConfig, DeepSpeedConfig, newest
from specwave.app.run import Run
from specwave.app.train import main
from specwave.app.trainer import TrainerConfig
from specwave.artifacts import UserError
from specwave.eagle import load_drafter
from specwave.eagle.export import read_drafter
from specwave.target import load_target

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENGINES = {"ddp": {}, "zero1": {"zero_stage": 1}, "zero2": {"zero_stage": 2}, "zero3": {"zero_stage": 3}}
NAMES = ("L2-4-5", "L7")
CLIPPED = {"groups": [[7]], "clip": 0.1}  # a fifth of the gradient's norm
# Sums over processes add in another order: some 1e-6 of a loss after a step, more where Adam divides by a small moment.
CLOSE = {"rel": 2e-5, "abs": 2e-5}


def ports(count):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return found


def start(model, folder, scenarios):
    """What all processes printed; waits for them."""
    for scenario, port in zip(scenarios, ports(len(scenarios)), strict=True):
        scenario["port"] = port
    environment = os.environ | {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(HERE / "together.py"), str(model), str(folder), json.dumps(scenarios)]
    started = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        return "".join(process.communicate(timeout=900)[0] for process in started)
    finally:
        for process in started:
            process.kill()


def rows_of(folder, key):
    with open(folder / "metrics.csv", newline="") as stream:
        return {int(row["step"]): float(row[key]) for row in csv.DictReader(stream) if row.get(key)}


def weights(folder, name, kind="last"):
    return load_file(folder / kind / name / "model.safetensors")


@pytest.fixture(scope="module")
def one(family_folders, tmp_path_factory):
    """One process with as many rows a step."""
    folder = tmp_path_factory.mktemp("one")
    main(a_config(family_folders["llama"], TrainerConfig(**STEPS), 6), Run(folder))
    return folder


@pytest.fixture(scope="module")
def two(family_folders, tmp_path_factory, one):
    """Every engine left alone; killed before step 5 and resumed; and where something is not finite."""
    folder = tmp_path_factory.mktemp("two")
    whole = [{"name": name, "trainer": keys} for name, keys in ENGINES.items()]
    killed = [
        {"name": f"{name}-killed", "trainer": keys, **how}
        for name, keys in ((name, ENGINES[name]) for name in ("ddp", "zero2", "zero3"))
        for how in ({"die": 5}, {"resume": True})
    ]
    stops = [
        {"name": f"{name}-{what}", "trainer": ENGINES[name], "poison": [1, 3, "L7", what]}
        for name in ("ddp", "zero2")
        for what in ("loss", "gradient")
    ]
    others = [
        {"name": "ddp-cut", "trainer": {}, "die": 5},
        {"name": "ddp-packed", "trainer": {}, "packing": True, "rows": 2, "drafter": {"normaliser": "all"}},
        {"name": "zero2-three", "trainer": {"zero_stage": 2, "save_every": 1}, "die": 3},
        {"name": "zero2-clip", "trainer": {"zero_stage": 2}, "drafter": CLIPPED},
        {"name": "ddp-single", "trainer": {}, "drafter": {"groups": [[7]]}},
    ]
    printed = start(family_folders["llama"], folder, [*whole, *killed, *stops, *others])
    print(printed)
    return folder, printed


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_losses_as_one_process(one, two, engine):
    """Rows of unlike length: dividing by what counts in one process alone would show in the third digit."""
    folder, printed = two
    for rank in range(PROCESSES):
        assert f"{engine} {rank}: ended 0" in printed
    for name in NAMES:
        for key in ("loss", "a_0", "val_loss", "val_a_0", "val_tau_hat", "val_tau"):
            mine, theirs = (rows_of(place, f"{name}/{key}") for place in (one, folder / engine))
            assert list(mine) == list(theirs) == ([4, 6] if key.startswith("val") else [1, 2, 3, 4, 5, 6])
            assert list(theirs.values()) == pytest.approx(list(mine.values()), **CLOSE), (name, key)
    assert rows_of(folder / engine, "tokens") == rows_of(one, "tokens")


def test_a_joint_run_is_its_single_runs(two):
    """Under DDP as in one process: to the bit, since two processes' gradients add up in one way only."""
    folder, _ = two
    mine, theirs = weights(folder / "ddp-single", "L7"), weights(folder / "ddp", "L7")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert rows_of(folder / "ddp-single", "L7/loss") == rows_of(folder / "ddp", "L7/loss")


def test_the_gradient_is_that_of_one_process(one, two):
    """Before the first step the weights are the same, so the clip sees the same norm to rounding."""
    for name in NAMES:
        mine, theirs = (rows_of(place, f"{name}/grad_norm")[1] for place in (one, two[0] / "ddp"))
        assert theirs == pytest.approx(mine, rel=1e-5)


def test_one_drafter_is_clipped_alike(family_folders, two, tmp_path):
    """The engine's clip is the drafter's own where there is one."""
    main(a_config(family_folders["llama"], TrainerConfig(**STEPS), 6, **CLIPPED), Run(tmp_path))
    mine, theirs = (list(rows_of(place, "L7/loss").values()) for place in (tmp_path, two[0] / "zero2-clip"))
    assert theirs == pytest.approx(mine, **CLOSE)


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_the_norm_of_zero_is_of_all_drafters(one, two, engine):
    """Of both gradients together; what a clip of that norm is set to is drafter.clip·√2."""
    both = sum(rows_of(one, f"{name}/grad_norm")[1] ** 2 for name in NAMES) ** 0.5
    assert rows_of(two[0] / engine, "grad_norm")[1] == pytest.approx(both, rel=1e-4)


def test_packed_rows_and_a_normaliser_that_counts_padding(family_folders, two, tmp_path):
    config = a_config(family_folders["llama"], TrainerConfig(**STEPS), 4, packing=True, normaliser="all")
    main(config, Run(tmp_path))
    for key in ("loss", "grad_norm"):
        mine, theirs = (rows_of(place, f"L7/{key}") for place in (tmp_path, two[0] / "ddp-packed"))
        assert theirs[1] == pytest.approx(mine[1], rel=1e-5)


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
def test_killed_and_resumed(two, engine):
    """Before step 5, behind a checkpoint of step 4: the same weights as the run left alone, bit for bit."""
    folder, printed = two
    for rank in range(PROCESSES):
        assert f"{engine}-killed {rank}: ended -9\n" in printed
        assert f"{engine}-killed {rank}: ended 0\n" in printed
    for name in NAMES:
        alone, again = weights(folder / engine, name), weights(folder / f"{engine}-killed", name)
        for key, tensor in alone.items():
            assert torch.equal(tensor, again[key]), key
        for key in ("loss", "tau_hat", "val_loss"):
            found = [rows_of(folder / run, f"{name}/{key}") for run in (engine, f"{engine}-killed")]
            assert found[0] == found[1], key


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3"])
def test_one_process_alone_writes(two, engine):
    """Whole files, once: no metrics.csv of a second process, no torn part, no older checkpoint."""
    folder = two[0] / f"{engine}-killed"
    assert not list(folder.rglob("*.part"))
    assert {path.name for path in folder.iterdir()} == {
        *("checkpoints", "drafters", "last", "metrics.csv", "curves.png", "curves.svg", "facts0.json", "facts1.json")
    }
    last = folder / "checkpoints" / "last.ckpt"
    if engine == "ddp":
        assert torch.load(last, weights_only=True)["global_step"] == 6
    else:
        assert [path.name for path in last.glob("step_*")] == ["step_6"]
        assert newest(last, PROCESSES) == 6


@pytest.mark.parametrize("engine", ["zero1", "zero2", "zero3"])
def test_a_checkpoint_of_deepspeed_converts(two, tmp_path, engine):
    """Lightning's converter finds in it the very weights that are exported, and nothing of the target."""
    from pytorch_lightning.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    last = two[0] / engine / "checkpoints" / "last.ckpt"
    state = convert_zero_checkpoint_to_fp32_state_dict(last, tmp_path / "one.pt")["state_dict"]
    assert {name.split(".")[1] for name in state} == set(NAMES)
    for name in NAMES:
        own = {key.removeprefix(f"drafters.{name}."): value for key, value in state.items() if f".{name}." in key}
        exported = read_drafter(two[0] / engine / "last" / name)[1]
        assert set(own) <= set(exported)
        assert {"fc.weight", "lm_head.weight", "midlayer.self_attn.q_proj.weight"} <= set(own)
        for key, value in own.items():
            assert torch.equal(value, exported[key].to(value.dtype)), key


@pytest.mark.parametrize("engine", ENGINES)
def test_the_exported_drafter_drafts(two, family_folders, engine):
    target = load_target(family_folders["llama"], dtype="float32")
    for name in NAMES:
        load_drafter(two[0] / engine / "last" / name, target)
        training = read_drafter(two[0] / engine / "drafters" / name)[2]["training"]
        assert training["step"] == training["validated_at"]
        best = max(rows_of(two[0] / engine, f"{name}/val_tau_hat").values())
        assert training["validation"]["tau_hat"] == pytest.approx(best)


# ---------------------------------------------------------------- stops


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_nan_in_one_process_stops_that_drafter_in_all(two, what):
    """Of the second process only; the other drafter trains as if nothing were, and DDP does not wait."""
    folder, printed = two
    for rank in range(PROCESSES):
        assert f"ddp-{what} {rank}: ended 0" in printed
    stopped = json.loads((folder / f"ddp-{what}" / "facts0.json").read_text())["stopped"]
    assert list(stopped) == ["L7"]
    assert f"{what} of L7 is not finite at step 3" in stopped["L7"]
    assert printed.count("the other drafters go on") >= 1
    for key, tensor in weights(folder / "ddp", "L2-4-5").items():
        assert torch.equal(tensor, weights(folder / f"ddp-{what}", "L2-4-5")[key]), key
    assert all(tensor.isfinite().all() for tensor in weights(folder / f"ddp-{what}", "L7").values())


def test_a_loss_that_is_nan_under_zero_stops_that_drafter(two):
    """Its weights are those of step 3 from then on: the engine steps them with a rate of zero."""
    folder, _ = two
    stopped = json.loads((folder / "zero2-loss" / "facts0.json").read_text())["stopped"]
    assert list(stopped) == ["L7"]
    for key, tensor in weights(folder / "zero2-three", "L7").items():
        assert torch.equal(tensor, weights(folder / "zero2-loss", "L7")[key]), key
    assert not torch.equal(*(weights(folder / run, "L2-4-5")["fc.weight"] for run in ("zero2-three", "zero2-loss")))


def test_a_gradient_that_is_nan_under_zero_stops_the_run(two):
    """The engine would clip every drafter by it. Nothing is saved over the checkpoint of step 2."""
    folder, printed = two
    assert "gradient of L7 is not finite at step 3" in printed
    assert newest(folder / "zero2-gradient" / "checkpoints" / "last.ckpt", PROCESSES) == 2
    assert read_drafter(folder / "zero2-gradient" / "last" / "L2-4-5")[2]["training"]["step"] == 2


# ---------------------------------------------------------------- another number of processes


def test_a_checkpoint_of_ddp_goes_on_in_one_process(family_folders, one, two):
    """Weights and moments are whole in it: with as many rows a step the run is the same."""
    folder = two[0] / "ddp-cut"
    with pytest.raises(UserError, match=r"resume=true: the checkpoint has the rows of a step 6, this run 3"):
        main(a_config(family_folders["llama"], TrainerConfig(**STEPS), 3), Run(folder, resume=True))
    main(a_config(family_folders["llama"], TrainerConfig(**STEPS), 6), Run(folder, resume=True))
    for key in ("loss", "val_loss"):
        mine, theirs = (rows_of(place, f"L7/{key}") for place in (one, folder))
        assert list(theirs) == list(mine)
        assert list(theirs.values()) == pytest.approx(list(mine.values()), **CLOSE)


def test_a_checkpoint_of_zero_is_for_as_many_processes(family_folders, two):
    config = a_config(family_folders["llama"], several({"zero_stage": 2}), 6)
    config.trainer.devices = 1
    with pytest.raises(UserError, match=r"cut into a part for each of 2 processes, and 1 would read it: resume with 2"):
        main(config, Run(two[0] / "zero2", resume=True))


@pytest.mark.parametrize("damage", ["no pointer", "no parts", "a file"])
def test_a_damaged_checkpoint_of_zero(tmp_path, damage):
    last = tmp_path / "last.ckpt"
    if damage == "a file":
        last.write_bytes(b"torn")
    else:
        (last / "step_4").mkdir(parents=True)
        if damage == "no parts":
            (last / "latest").write_text("step_4")
    with pytest.raises(UserError, match=r"resume=.*last\.ckpt: .*remove it to begin anew"):
        newest(last, 2)


# ---------------------------------------------------------------- through the door


def door(*arguments, folder):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "train.py"), "model=tiny", *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)


SHORT = (
    "data.limit=12",
    "data.validation=2",
    "data.max_new_tokens=8",
    "trainer.max_steps=2",
    "trainer.save_every=1",
    "trainer.decode=0",
    "groups=[[1,6]]",
)


@pytest.mark.parametrize("trainer", ["ddp", "deepspeed_cpu"])
def test_a_run_starts_its_other_processes_itself(tmp_path, trainer):
    done = door(f"trainer={trainer}", "trainer.accelerator=cpu", *SHORT, "hydra.run.dir=run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written:") == done.stdout.count("run folder:") == 1
    record = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert (record["status"], record["config"]["trainer"]["devices"]) == (
        "finished",
        None if trainer == "ddp" else 2,
    )
    assert read_drafter(tmp_path / "run" / "last" / "L1-6")[2]["training"]["step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer=deepspeed"], "trainer.devices=8: 8 CUDA GPUs are asked for and 0 are here: use trainer=cpu"),
        (["trainer=ddp", "trainer.devices=99"], "trainer.devices=99: 99 processes are asked for and this machine has"),
    ],
)
def test_more_devices_than_there_are(tmp_path, arguments, message):
    """One line, and no process was started."""
    if torch.cuda.is_available():
        arguments = [*arguments, "trainer.devices=99"]
        message = "trainer.devices=99: 99 CUDA GPUs are asked for"
    done = door(*arguments, *SHORT, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: DdpConfig(num_nodes=0), "trainer.num_nodes"),
        (lambda: DdpConfig(devices=0), "trainer.devices"),
        (lambda: DeepSpeedConfig(zero_stage=4), "trainer.zero_stage"),
        (lambda: DeepSpeedConfig(offload="all"), "trainer.offload"),
        (lambda: DeepSpeedConfig(precision="16-mixed"), "trainer.precision"),
    ],
)
def test_ranges(make, key):
    with pytest.raises(UserError) as caught:
        make()
    assert caught.value.key == key


def test_without_deepspeed_it_is_named(monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name))
    with pytest.raises(UserError, match=r"trainer=deepspeed: DeepSpeed is not installed: pip install"):
        DeepSpeedConfig(accelerator="cpu", devices=2).device()


def test_more_processes_than_rows(monkeypatch):
    from specwave.data import Sample
    from specwave.data.datamodule import Stream

    samples = [Sample([1, 2, 3, 4], [False, True, True, True], f"s{place}") for place in range(3)]
    with pytest.raises(UserError, match=r"trainer\.devices=4: a step has 3 rows"):
        next(iter(Stream(samples, 1, 0, 0, rank=0, processes=4)))
