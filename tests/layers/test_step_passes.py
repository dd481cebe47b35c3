"""The cache of drafting steps: what is re-used, and a file that belongs to another target or setting."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specwave.artifacts import UserError
from specwave.layers.step_passes import stepped
from specwave.layers.steps import Sampling
from specwave.target import ModelConfig
from specwave.target.tiny import make_tiny

SMALL = Sampling(width=4, token_width=4)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))
    return ModelConfig("tiny", str(make_tiny(tmp_path / "model")), dtype="float32", device="cpu")


@pytest.fixture
def loads(monkeypatch):
    """Counts the loads of the target."""
    counted, load = [], ModelConfig.load
    monkeypatch.setattr(ModelConfig, "load", lambda self: counted.append(1) or load(self))
    return counted


def files(tmp_path):
    return sorted((tmp_path / "cache" / "steps").iterdir())


def test_the_second_time_nothing_is_loaded(model, loads, given, tmp_path):
    said = []
    first = stepped(model, given(), SMALL, said.append)
    again = stepped(model, given(rho=1.0, scale="frobenius", batch_size=1), SMALL, said.append)
    assert said == ["drafting steps: one pass", "drafting steps: re-used from the cache"]
    assert (len(loads), first.cached, again.cached) == (1, False, True)
    for name in ("inputs", "states", "tokens", "conversations", "vocabulary", "head"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert (again.width, again.token_width, again.seen) == (4, 4, first.seen)
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("change", ["sampling", "conversations"])
def test_other_steps_are_another_pass(change, model, loads, given, tmp_path):
    stepped(model, given(), SMALL)
    if change == "sampling":
        stepped(model, given(), Sampling(width=5, token_width=4))
    else:
        stepped(model, given(limit=3), SMALL)
    assert len(loads) == len(files(tmp_path)) == 2


def test_a_proxy_of_another_target_is_refused(model, given, tmp_path):
    """Weights that are replaced are another target, whose pass has another name; a file under a wrong one is named."""
    stepped(model, given(), SMALL)
    (path,) = files(tmp_path)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    stepped(model, given(), SMALL)
    (other,) = set(files(tmp_path)) - {path}
    shutil.copy(path, other)
    with safe_open(path, framework="pt") as stored:
        first = json.loads(stored.metadata()["facts"])["fingerprint"]
    match = rf"of another model.*\(fingerprint {first}, this target's is {model.identify().fingerprint}\): delete it"
    with pytest.raises(UserError, match=match) as caught:
        stepped(model, given(), SMALL)
    assert caught.value.key == "cache"


def test_a_file_of_another_setting_is_refused(model, given, tmp_path):
    stepped(model, given(), SMALL)
    (path,) = files(tmp_path)
    stepped(model, given(), Sampling(width=3, token_width=4))
    (other,) = set(files(tmp_path)) - {path}
    shutil.copy(other, path)
    with pytest.raises(UserError, match="setting or other conversations"):
        stepped(model, given(), SMALL)


def test_a_damaged_file_is_named(model, given, tmp_path):
    stepped(model, given(), SMALL)
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged") as caught:
        stepped(model, given(), SMALL)
    assert str(path) in str(caught.value)


def test_a_cache_that_cannot_be_written_loses_nothing(model, given, tmp_path):
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "steps").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match="SPECWAVE_CACHE=.*the pass is not kept"):
        assert stepped(model, given(), SMALL).seen > 0
