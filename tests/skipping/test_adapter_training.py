"""Kangaroo's adapter from data to answers on a tiny target: it learns, goes on where it was killed, is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file

from specwave.app import config as configs
from specwave.app.distributed import DdpConfig
from specwave.app.evaluate import EvaluateConfig
from specwave.app.evaluate import main as evaluate
from specwave.app.kangaroo import check_adapter
from specwave.app.run import Run
from specwave.app.train import TrainConfig, main
from specwave.app.trainer import TrainerConfig, read_metrics
from specwave.artifacts import UserError, assets_dir
from specwave.benchmark import Benchmark
from specwave.benchmark.drafters import builtin_drafter, find_drafters
from specwave.data.samples import BuiltinData
from specwave.decoding import Autoregressive, generate
from specwave.eagle.export import Export
from specwave.eagle.offline import StatesConfig
from specwave.eagle.targets import Online
from specwave.skipping import KangarooDecoding
from specwave.skipping.adapter_folder import read_adapter
from specwave.skipping.kangaroo import DoubleExit
from specwave.skipping.options import Kangaroo
from specwave.target import ModelConfig

HERE = Path(__file__).resolve().parent


def run_of(folder, resume=False):
    noted: dict = {}
    said: list[str] = []
    quiet = {"say": said.append, "note": lambda **facts: noted.update(facts), "said": said, "noted": noted}
    return SimpleNamespace(folder=folder, resume=resume, main=True, **quiet)


def training(folder, **more):
    steps = {"max_steps": 12, "save_every": 4, "validate_every": 6, "log_every": 3, "decode": 2}
    given = {
        "model": ModelConfig("tiny", str(folder), dtype="float32", device="cpu"),
        "data": BuiltinData(limit=30, validation=4, max_new_tokens=16, batch_size=4),
        "drafter": Kangaroo(exit=0.4, export_dtype="float32"),
        "trainer": TrainerConfig(**steps),
        "logger": lambda save_dir: pl.loggers.CSVLogger(save_dir, name="", version="", flush_logs_every_n_steps=1),
    }
    return TrainConfig(**(given | more))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path_factory.getbasetemp() / "adapter-cache"))


@pytest.fixture(scope="module")
def trained(mild_folders, tmp_path_factory):
    """A finished run: (folder, what it said, what it noted)."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECWAVE_CACHE", str(tmp_path_factory.getbasetemp() / "adapter-cache"))
        run = run_of(folder)
        main(training(mild_folders["llama"]), run)
    return folder, run.said, run.noted


# ---------------------------------------------------------------- what comes out


def test_it_learns(mild_folders, tmp_path):
    steps = TrainerConfig(max_steps=40, save_every=40, validate_every=20, log_every=1, decode=0)
    main(training(mild_folders["llama"], trainer=steps, drafter=Kangaroo(exit=3, lr=5e-3)), run_of(tmp_path))
    losses = [row["kangaroo/loss"] for row in read_metrics(tmp_path) if "kangaroo/loss" in row]
    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])


def test_what_a_run_leaves(trained, mild_folders, mild):
    folder, said, noted = trained
    for kind in ("drafters", "last"):
        adapter, card = read_adapter(folder / kind / "kangaroo")
        assert adapter.config.exit == card["exit"] == noted["exit"] == 3  # 0.4 of 8
        assert card["target"] == {"name": "tiny", "fingerprint": mild["llama"].fingerprint, "num_layers": 8}
        assert {"samples", "tokens", "source", "contamination", "seed"} <= card["data"].keys()
        assert card["pictures"] == ["curves.png"]
    assert card["training"]["step"] == card["training"]["validated_at"] == 12
    figures = card["training"]["validation"]
    assert figures == noted["figures"]["kangaroo"]
    assert {"loss", "a_0", "a_5", "tau_hat", "tau"} == figures.keys() - {"a_1", "a_2", "a_3", "a_4"}
    assert 1 <= figures["tau_hat"] <= 7
    assert 1 <= figures["tau"] <= 7
    assert any(line.startswith("on held-out prompts: tau_hat ") for line in said)
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(name.startswith("drafters.kangaroo.") for name in checkpoint["state_dict"])  # nothing of the target's
    assert (folder / "curves.png").is_file()


def test_the_held_out_figures_are_those_of_decoding(mild, trained):
    """On texts that the target wrote, greedily: a_0 is the share of right drafts where a round has one."""
    target, folder = mild["llama"], trained[0] / "last" / "kangaroo"
    data = training("x").data.prepared(target)
    adapter, card = read_adapter(folder)

    class Asked(DoubleExit):
        """Drafts one token each round, and knows whether it was right."""

        hits: tuple = ()

        def observe(self, verdicts):
            super().observe(verdicts)
            self.hits += tuple(len(one.path) > 1 for one in verdicts if len(one.tree))

    right = total = 0
    for sample in data.validation:
        start = sample.answer.index(True)
        text = sample.ids
        for place in range(start, len(text)):  # each token of the answer by a decoding of its own
            asked = Asked(target, adapter, KangarooDecoding(gamma=1, stop=0.0))
            generate(target, asked, text[:place], max_new_tokens=2, eos_ids=())
            right, total = right + asked.hits[0], total + 1
    assert card["training"]["validation"]["a_0"] == pytest.approx(right / total)


def test_trained_then_evaluated(trained, mild_folders, tmp_path):
    """By its own method, also where none is named; the output is plain decoding's."""
    model = ModelConfig("tiny", str(mild_folders["llama"]), dtype="float32")
    for number, decoding in enumerate((KangarooDecoding(stop=0.0), Autoregressive())):
        (tmp_path / str(number)).mkdir()
        config = EvaluateConfig(
            model=model,
            benchmark=Benchmark(),
            decoding=decoding,
            limit=1,
            max_new_tokens=12,
            checkpoint=str(trained[0]),
        )
        evaluate(config, Run(tmp_path / str(number)))
        results = json.loads((tmp_path / str(number) / "results.json").read_text())
        assert results["method"] == "kangaroo"
        assert results["label"] == "kangaroo"
        assert results["overall"]["exact_match_rate"] == 1.0
    (one,) = find_drafters(str(trained[0]))
    assert (one.label, one.method) == ("kangaroo", "kangaroo")


def test_no_checkpoint_is_refused_before_anything_is_computed(mild_folders, tmp_path):
    model = ModelConfig("tiny", str(mild_folders["llama"]), dtype="float32")
    config = EvaluateConfig(model=model, benchmark=Benchmark(), decoding=KangarooDecoding(), limit=1)
    with pytest.raises(
        UserError, match=r"checkpoint=null: decoding=kangaroo needs a drafter.*train\.py drafter=kangaroo"
    ):
        evaluate(config, Run(tmp_path))


def test_the_drafter_that_comes_along_is_no_adapter():
    (path,) = assets_dir().glob("*/card.json")
    whose = json.loads(path.read_text(encoding="utf-8"))["target"]["fingerprint"]
    assert builtin_drafter(whose) == str(path.parent)
    assert builtin_drafter(whose, "kangaroo") is None


# ---------------------------------------------------------------- other ways to the same


def test_offline_states_teach_the_same(trained, mild_folders, tmp_path):
    states = StatesConfig(mode="offline", path=str(tmp_path / "states"), dtype="float32")
    run = run_of(tmp_path / "run")
    main(training(mild_folders["llama"], states=states), run)
    losses = [
        read_adapter(place / "last" / "kangaroo")[1]["training"]["validation"]["loss"]
        for place in (trained[0], tmp_path / "run")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # float32, batches of other shapes, 12 steps of Adam
    assert any("val_tau is left out" in line for line in run.said)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_targets_in_bfloat16(precision, mild_folders, tmp_path):
    """The adapter's weights stay float32; its file is bfloat16, and reads as the target's dtype."""
    model = ModelConfig("tiny", str(mild_folders["llama"]), dtype="bfloat16", device="cpu")
    steps = TrainerConfig(precision=precision, max_steps=2, save_every=2, validate_every=2, log_every=1, decode=1)
    main(training(mild_folders["llama"], model=model, trainer=steps, drafter=Kangaroo(exit=2)), run_of(tmp_path))
    adapter, card = read_adapter(tmp_path / "last" / "kangaroo")
    assert 0 < card["training"]["validation"]["loss"] < 20
    assert load_file(tmp_path / "last/kangaroo/model.safetensors")["norm.weight"].dtype == torch.bfloat16
    kept = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert float(adapter.self_attn["o_proj"].weight.detach().abs().max()) > 0  # it has learnt something


def test_packed_rows(mild_folders, tmp_path):
    packed = BuiltinData(limit=30, validation=4, max_new_tokens=16, batch_size=2, packing=True, max_length=128)
    main(training(mild_folders["llama"], data=packed), run_of(tmp_path))
    _, card = read_adapter(tmp_path / "last" / "kangaroo")
    assert card["training"]["validation"]["loss"] > 0


# ---------------------------------------------------------------- interrupted


def test_killed_twice_it_ends_as_if_never_killed(mild_folders, trained, tmp_path):
    """Once within a step, once while the adapter is written: the files of the whole run, bit for bit."""
    command = [sys.executable, str(HERE / "killed_adapter.py"), str(mild_folders["llama"]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["-9", "-9", "0"]
    for name in ("drafters", "last"):
        mine, other = (place / name / "kangaroo" for place in (trained[0], tmp_path))
        assert (mine / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
        assert (mine / "card.json").read_text() == (other / "card.json").read_text()
    tables = [
        [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in read_metrics(place)]
        for place in (trained[0], tmp_path)
    ]
    assert tables[0] == tables[1]


def test_a_run_goes_on_with_what_it_began_with(mild_folders, trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    longer = TrainerConfig(max_steps=20, save_every=4, validate_every=6, log_every=3)
    for change, words in (
        ({"drafter": Kangaroo(exit=2, export_dtype="float32")}, "the exit 3, this run 2"),
        ({"data": BuiltinData(limit=29, validation=4, max_new_tokens=16, batch_size=4)}, "the training data"),
        ({"data": BuiltinData(limit=30, validation=4, max_new_tokens=16, batch_size=2)}, "the rows of a step 4"),
    ):
        with pytest.raises(UserError, match=words):
            main(training(mild_folders["llama"], trainer=longer, **change), run_of(tmp_path / "run", resume=True))


def test_a_loss_that_is_no_number_ends_the_run(mild_folders, tmp_path, monkeypatch):
    read = Online.read

    def broken(self, batch):
        states, last, logits = read(self, batch)
        return states, last, lambda rows: logits(rows) * torch.nan

    monkeypatch.setattr(Online, "read", broken)
    with pytest.raises(
        UserError, match=r"training=nan: the loss is not finite at step 0 in the batch of .*drafter\.lr"
    ):
        main(training(mild_folders["llama"]), run_of(tmp_path))
    assert not (tmp_path / "last").exists()


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": [[2, 4]]}, "groups=[[2, 4]]: chooses the layers that an EAGLE-3 drafter reads"),
        ({"selection": "x.json"}, "selection=x.json: chooses the layers"),
        ({"dry_run": True, "groups": [[2, 4]]}, "groups=[[2, 4]]: chooses the layers"),
        ({"dry_run": True, "trainer": DdpConfig(devices=2)}, "trainer=DdpConfig: an adapter is trained in one process"),
        ({"export": Export(format="speculators")}, "export.format=speculators: no engine serves an adapter"),
        ({"export": Export(push_to_hub="me/x")}, "export.push_to_hub=me/x: sends EAGLE-3 drafters"),
        ({"trainer": DdpConfig(devices=2)}, "trainer=DdpConfig: an adapter is trained in one process"),
        ({"drafter": Kangaroo(exit=8)}, "drafter.exit=8: an exit leaves out a block at least: 1 to 7 of 8 may run"),
    ],
)
def test_what_an_adapter_has_no_use_for_is_refused(change, words, mild_folders, tmp_path):
    with pytest.raises(UserError) as caught:
        main(training(mild_folders["llama"], **change), run_of(tmp_path))
    assert str(caught.value).startswith(words)
    assert not list(tmp_path.iterdir())


def test_by_the_command_line():
    built = configs.build("train", configs.check("train", configs.compose("train", ["model=tiny", "drafter=kangaroo"])))
    assert built.drafter == Kangaroo()
    check_adapter(built)
    with pytest.raises(UserError, match=r"drafter\.steps"):
        configs.check("train", configs.compose("train", ["drafter=kangaroo", "drafter.steps=3"]))
