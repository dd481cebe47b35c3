"""Offline states: the same losses as online, whole runs, and the likeliest tokens."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import yaml
from kept import FIRST, captured, hashes, prepared, settings_for
from safetensors.torch import load_file

from specwave.app.train import TrainConfig, main
from specwave.app.trainer import TrainerConfig
from specwave.artifacts import UserError, cache_dir
from specwave.data.datamodule import Stream, collate
from specwave.eagle import offline as room
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.export import read_drafter
from specwave.eagle.loss import ttt_loss
from specwave.eagle.module import GroupTraining
from specwave.eagle.offline import StatesConfig, completed, top_k
from specwave.eagle.options import Eagle3
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map
from specwave.target import ModelConfig, load_target
from specwave.target.load import Target

HERE = Path(__file__).resolve().parent


@dataclass
class Given:
    batch_size: int = 3
    max_length: int = 64
    row_length: int | None = None

    def prepared(self, target):
        return prepared(row_length=self.row_length)


# ---------------------------------------------------------------- the same losses


def a_module(target, source=None, groups=FIRST) -> GroupTraining:
    maps = build_vocab_map(torch.arange(512) % 7, 200)
    drafters = {}
    for layers in groups:
        drafter = Eagle3Drafter(DrafterConfig.of_target(target.arch, layers, 200), *maps)
        initialise(drafter, target, "target", seed=0)
        drafters[str(layers[0])] = drafter
    return GroupTraining(target, drafters, Eagle3(steps=3, loss="lk"), 9, 1, source)


def losses_of(module, batch) -> list[torch.Tensor]:
    read = module.read(batch)
    return [ttt_loss(drafter, read, 3, loss="lk").loss for drafter in module.drafters.values()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bit_for_bit_where_the_forwards_have_one_shape(family_folders, tmp_path, monkeypatch, dtype):
    """Each sample a forward of its own, online too: states in the target's own precision come back as they were."""
    monkeypatch.setattr(room, "_TOKENS", 1)
    target, data = load_target(family_folders["llama"], dtype=dtype, device="cpu"), prepared()
    online, other = a_module(target), a_module(target, captured(target, tmp_path, data=data, dtype=dtype))
    for sample in [*data.train, *data.validation]:
        batch = collate([sample])
        expected, got = online.read(batch), other.read(batch)
        assert all(torch.equal(got.states[layer], expected.states[layer]) for layer in (2, 4, 5, 7))
        assert torch.equal(got.target, expected.target)
        assert torch.equal(got.in_vocab, expected.in_vocab)
        assert torch.equal(got.mass, expected.mass)
    for first, second in zip(losses_of(online, batch), losses_of(other, batch), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("row_length", [None, 64])
def test_the_losses_of_padded_and_packed_rows(tiny, tmp_path, row_length):
    """A forward rounds by its shape (states differ by 1e-6 of their size), so to 1e-5; epochs two and three too."""
    data = prepared(row_length=row_length)
    online, other = a_module(tiny), a_module(tiny, captured(tiny, tmp_path, data=data))
    for batch in itertools.islice(Stream(data.train, 2, 0, 0, row_length), 15):
        assert ("documents" in batch) == (row_length is not None)
        for first, second in zip(losses_of(online, batch), losses_of(other, batch), strict=True):
            torch.testing.assert_close(second, first, rtol=1e-5, atol=0)


def test_bf16_states_under_a_float32_target(tiny, tmp_path):
    """Eight bits are kept of a state: the loss moves, and by less than a hundredth."""
    data = prepared()
    batch = collate(data.train[:3])
    source = captured(tiny, tmp_path, data=data, dtype="bfloat16")
    for first, second in zip(losses_of(a_module(tiny), batch), losses_of(a_module(tiny, source), batch), strict=True):
        assert first != second
        torch.testing.assert_close(second, first, rtol=1e-2, atol=0)


# ---------------------------------------------------------------- whole runs


def run_in(folder, resume=False):
    said = []
    own = {"say": said.append, "note": lambda **facts: None, "said": said}
    return SimpleNamespace(folder=folder, resume=resume, main=True, **own)


def a_config(folders, states, **changes) -> TrainConfig:
    config = TrainConfig(
        model=ModelConfig("tiny", str(folders["llama"]), dtype="float32", device="cpu"),
        data=Given(),
        drafter=Eagle3(steps=2, draft_vocab_size=64, export_dtype="float32"),
        trainer=TrainerConfig(max_steps=8, save_every=3, validate_every=4, log_every=2),
        logger=lambda save_dir: pl.loggers.CSVLogger(save_dir, name="", version="", flush_logs_every_n_steps=1),
        groups=[[2, 4, 5], [7]],
        states=states,
    )
    return replace(config, **changes)


@pytest.fixture(scope="module")
def twice(family_folders, tmp_path_factory):
    """A run online, one offline, over two epochs; (their folders, the states')."""
    root = tmp_path_factory.mktemp("twice")
    states = settings_for(root / "states")
    main(a_config(family_folders, StatesConfig()), run_in(root / "online"))
    main(a_config(family_folders, states), run_in(root / "offline"))
    return root


def test_a_run_learns_the_same_offline(twice):
    """Eight steps of AdamW; where a gradient is near zero its sign, and so a step of lr, hangs on rounding."""
    figures = []
    for name in ("online", "offline"):
        card = read_drafter(twice / name / "drafters" / "L2-4-5")[2]
        figures.append(card["training"]["validation"])
        assert card["data"]["states"].startswith(name)
    assert figures[1]["loss"] == pytest.approx(figures[0]["loss"], rel=1e-3)
    assert figures[1]["tau_hat"] == pytest.approx(figures[0]["tau_hat"], abs=0.05)


def test_from_states_that_are_there_the_target_runs_no_more(twice, family_folders, tmp_path, monkeypatch):
    """Not even where one of the groups is trained, and the run is interrupted and resumed."""

    def never(self, *given):
        raise AssertionError("the states are kept")

    monkeypatch.setattr(Target, "states", never)
    before, step = hashes(twice / "states"), GroupTraining.training_step

    def interrupted(self, batch, batch_idx):
        if self.global_step == 4:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    config = a_config(family_folders, settings_for(twice / "states"), groups=[[7]])
    with monkeypatch.context() as patched:
        patched.setattr(GroupTraining, "training_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(config, run_in(tmp_path))
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 3
    again = run_in(tmp_path, resume=True)
    main(config, again)
    assert any("re-used from" in line and "layers 2, 4, 5, 7" in line for line in again.said)
    whole = load_file(twice / "offline" / "drafters" / "L7" / "model.safetensors")
    resumed = load_file(tmp_path / "drafters" / "L7" / "model.safetensors")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())
    assert hashes(twice / "states") == before


def test_without_a_path_states_are_kept_in_the_cache_by_what_they_are(tiny):
    folders = set()
    for groups, changes in ((FIRST, {}), (FIRST, {}), ([(1,)], {}), (FIRST, {"targets": "top_k"})):
        said: list[str] = []
        captured(tiny, None, groups, said=said, **changes)
        folders.add(said[0].rpartition(" in ")[2] if "re-used" not in said[0] else "re-used")
    assert len(folders) == 4  # three and one re-use
    assert all(Path(folder.partition(",")[0]).parent == cache_dir() / "states" for folder in folders - {"re-used"})


def test_mistakes_are_found_before_the_samples_are_made(twice, family_folders, tmp_path):
    class Never(Given):
        def prepared(self, target):
            raise AssertionError("answers take minutes: check first")

    config = a_config(family_folders, settings_for(twice / "states"), data=Never(), groups=[[3]])
    with pytest.raises(UserError, match=r"lacks layer 3 of group \[3\]"):
        main(config, run_in(tmp_path))
    with pytest.raises(UserError, match=r"states.k=513: must be ≤ 512"):
        main(replace(config, states=settings_for(None, targets="top_k", k=513)), run_in(tmp_path))


# ---------------------------------------------------------------- the likeliest tokens


def test_the_rest_is_shared_equally():
    scores = torch.tensor([[3.0, 1.0, 2.0, -1.0, 0.0, -2.0]])
    y = scores.softmax(-1)
    whole = completed(torch.cat(top_k(scores, 2), -1), 6).exp()
    rest = (1 - y[0, 0] - y[0, 2]) / 4
    torch.testing.assert_close(whole, torch.stack([y[0, 0], rest, y[0, 2], rest, rest, rest])[None])


def test_all_tokens_kept_are_the_distribution():
    scores = torch.randn(5, 40) * 3
    whole = completed(torch.cat(top_k(scores, 40), -1), 40)
    torch.testing.assert_close(whole, scores.log_softmax(-1))


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
def test_the_error_is_within_its_bound(scale):
    """Total variation of the restricted distributions ≤ r / (a + r), and it is used up where the rest lies outside."""
    scores = torch.randn(200, 60, dtype=torch.float64) * scale
    draft = torch.arange(0, 60, 3)
    logs, ids = top_k(scores, 8)
    a = torch.where((ids[..., None] == draft).any(-1), logs.exp(), 0.0).sum(-1)
    r = 1 - logs.exp().sum(-1)
    exact, got = scores[:, draft].softmax(-1), completed(torch.cat([logs, ids], -1), 60)[:, draft].softmax(-1)
    error = (exact - got).abs().sum(-1) / 2
    bound = r / (a + r)
    assert (error <= bound + 1e-12).all()  # float64
    assert error.max() > 0.01 * bound.max()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_argmax_is_among_the_k_whatever_the_ties(k):
    scores = torch.tensor([[0.0, 5.0, 1.0, 5.0, 5.0, 5.0], [1.0, 2.0, 3.0, 3.0, 0.0, 3.0]])
    whole = completed(torch.cat(top_k(scores, k), -1), 6)
    assert whole.argmax(-1).tolist() == scores.argmax(-1).tolist()
    kept = top_k(scores, k)[1]
    assert all(len(set(row)) == k for row in kept.tolist())


def test_a_draft_vocabulary_without_any_of_the_k_still_gets_a_distribution():
    scores = torch.tensor([[90.0, 0.0, 0.0, 0.0]])
    got = completed(torch.cat(top_k(scores, 1), -1), 4)[:, 1:].softmax(-1)
    torch.testing.assert_close(got, torch.full((1, 3), 1 / 3))


@pytest.mark.parametrize("row_length", [None, 64])
def test_top_k_in_training(tiny, tmp_path, row_length):
    """With all tokens kept the losses are the online ones; with few, marks and masses of the kept tokens still are."""
    data = prepared(row_length=row_length)
    batch = next(iter(Stream(data.train, 2, 0, 0, row_length)))
    online = a_module(tiny, groups=[(2, 4, 5)])
    expected, losses = online.read(batch), losses_of(online, batch)
    for k in (512, 24):
        source = captured(tiny, tmp_path / str(k), [(2, 4, 5)], data, targets="top_k", k=k)
        assert "block.7" not in source.reader.index.columns
        other = a_module(tiny, source, groups=[(2, 4, 5)])
        got = other.read(batch)
        assert torch.equal(got.in_vocab, expected.in_vocab)
        if k == 512:  # log-probabilities in float32 on both sides
            torch.testing.assert_close(got.target, expected.target, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(losses_of(other, batch)[0], losses[0], rtol=1e-4, atol=0)
        else:
            assert not torch.allclose(got.target, expected.target, rtol=1e-3, atol=1e-5)
            assert (got.target.sum(-1) - 1).abs().max() < 1e-5


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("changes", "key"), [({"k": 0}, "states.k"), ({"shard_mib": 0}, "states.shard_mib"), ({"path": "x"}, "states.path")]
)
def test_ranges(changes, key):
    with pytest.raises(UserError) as caught:
        StatesConfig(**changes)
    assert caught.value.key == key


def test_defaults_are_the_same_in_yaml():
    whole = yaml.safe_load((HERE.parents[1] / "conf" / "train.yaml").read_text())
    assert whole["states"] == asdict(StatesConfig())
