"""The cache of passes: what is re-used, what is not, and a file that belongs to another target."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specwave.artifacts import UserError
from specwave.layers.passes import calibrated as results
from specwave.layers.settings import File
from specwave.target import ModelConfig
from specwave.target.tiny import make_tiny


def calibrated(model, settings, say=print):
    """Errors raised, as a run does."""
    found = results(model, settings, say)
    for one in found:
        if isinstance(one, UserError) and one.key != "calibration.block_size":
            raise one
    return found


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    make_tiny(folder)
    return ModelConfig("tiny", str(folder), dtype="float32", device="cpu")


@pytest.fixture
def loads(monkeypatch):
    """Counts the loads of the target."""
    counted, load = [], ModelConfig.load
    monkeypatch.setattr(ModelConfig, "load", lambda self: counted.append(1) or load(self))
    return counted


def test_the_second_time_nothing_is_loaded(model, loads, given):
    said = []
    (first,) = calibrated(model, [given()], said.append)
    (again,) = calibrated(model, [given(scale="frobenius", centre=True, batch_size=1)], said.append)
    assert len(loads) == 1
    assert (first.cached, again.cached) == (False, True)
    assert torch.equal(first.grams, again.grams)
    assert torch.equal(first.spread, again.spread)
    assert first.counts() == again.counts()
    assert first.categories == again.categories == ["a", "b"] * 3
    assert said == ["calibration: one pass", "calibration: 1 setting, re-used from the cache"]


def test_several_settings_are_one_pass_and_old_ones_are_kept(model, loads, given):
    said = []
    calibrated(model, [given()], said.append)
    found = calibrated(model, [given(), given(block_size=4), given(rho=1.0), given(block_size=4)], said.append)
    assert len(loads) == 2
    assert said[1] == "calibration: 3 settings, 1 re-used from the cache; one pass for 2"
    assert [one.cached for one in found] == [True, False, False, False]
    assert torch.equal(found[1].grams, found[3].grams)
    calibrated(model, [given(block_size=4), given(rho=1.0)], said.append)
    assert len(loads) == 2


@pytest.mark.parametrize("change", ["limit", "max_length", "answers"])
def test_other_token_ids_are_another_pass(change, model, loads, given):
    calibrated(model, [given()])
    other = {"limit": given(limit=2), "max_length": given(max_length=60), "answers": given(answers="regenerate")}
    try:
        (found,) = calibrated(model, [other[change]])
    except UserError:  # the tiny model's answers may be short
        found = None
    assert len(loads) == 2
    assert found is None or isinstance(found, UserError) or not found.cached


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json", "model.safetensors"])
def test_another_template_tokenizer_or_weight_is_another_pass(file, model, loads, tmp_path, given):
    calibrated(model, [given()])
    folder = tmp_path / "model"
    before = model.identify().fingerprint
    if file == "model.safetensors":
        weights = load_file(folder / file)
        weights["model.norm.weight"] = weights["model.norm.weight"] + 1
        save_file(weights, folder / file, metadata={"format": "pt"})
    elif file == "tokenizer.json":
        content = json.loads((folder / file).read_text())
        content["model"]["vocab"]["specwave_new_token"] = len(content["model"]["vocab"])
        (folder / file).write_text(json.dumps(content))
    else:
        template = folder / "chat_template.jinja"
        if template.exists():
            template.write_text(template.read_text() + "{# changed #}")
        else:
            content = json.loads((folder / file).read_text())
            content["chat_template"] += "{# changed #}"
            (folder / file).write_text(json.dumps(content))
    assert model.identify().fingerprint != before
    calibrated(model, [given()])
    assert len(loads) == 2


def test_a_cached_file_of_another_target_is_refused(model, tmp_path, given):
    calibrated(model, [given()])
    (path,) = (tmp_path / "cache" / "calibration").iterdir()
    with safe_open(path, framework="pt") as stored:
        facts = json.loads(stored.metadata()["facts"])
    facts["fingerprint"] = "0" * 32
    save_file(load_file(path), path, metadata={"facts": json.dumps(facts)})
    with pytest.raises(UserError, match=r"another model, tokenizer, chat template, setting or .*delete it") as caught:
        calibrated(model, [given()])
    assert caught.value.key == "cache"


@pytest.mark.parametrize(("other", "words"), [({"block_size": 4}, "setting"), ({"limit": 4}, "other conversations")])
def test_a_cached_file_of_another_pass_is_refused(other, words, model, tmp_path, given):
    calibrated(model, [given()])
    (path,) = (tmp_path / "cache" / "calibration").iterdir()
    calibrated(model, [given(**other)])
    (file,) = set((tmp_path / "cache" / "calibration").iterdir()) - {path}
    shutil.copy(file, path)
    with pytest.raises(UserError, match=words):
        calibrated(model, [given()])


def test_a_mistake_of_one_setting_leaves_the_others(model, given, tmp_path):
    missing = File(path=str(tmp_path / "none.jsonl"))
    unanswered = tmp_path / "questions.jsonl"
    unanswered.write_text('{"prompt": "a question without an answer"}\n')
    found = results(model, [missing, given(), File(path=str(unanswered), answers="given")])
    assert [isinstance(one, UserError) for one in found] == [True, False, True]
    assert "there is no such file" in str(found[0])
    assert "no answer" in str(found[2])


@pytest.mark.parametrize("change", ["date", "eos"])
def test_what_the_fingerprint_leaves_out_is_part_of_the_key(change, model, loads, given, tmp_path):
    """A template may print the date, and generation_config.json may be given another end token."""
    calibrated(model, [given()])
    if change == "date":
        model = dataclasses.replace(model, date_string="26 July 2024")
    else:
        path = tmp_path / "model" / "generation_config.json"
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | {"eos_token_id": 7}))
    calibrated(model, [given()])
    assert len(loads) == 2


def test_a_cache_that_cannot_be_written_loses_nothing(model, given, tmp_path):
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "calibration").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match="SPECWAVE_CACHE=.*the pass is not kept"):
        (found,) = calibrated(model, [given()])
    assert found.rows > 0


def test_a_damaged_file_is_named(model, tmp_path, given):
    calibrated(model, [given()])
    (path,) = (tmp_path / "cache" / "calibration").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged") as caught:
        calibrated(model, [given()])
    assert str(path) in str(caught.value)


def test_too_few_rows_are_remembered(model, loads, given):
    for _ in range(2):
        (found,) = calibrated(model, [given(block_size=500)])
        assert isinstance(found, UserError)
        assert found.key == "calibration.block_size"
    assert len(loads) == 1


def test_the_fingerprint_is_that_of_the_loaded_target(model, monkeypatch):
    noted = model.identify()
    target = model.load()
    assert (noted.fingerprint, noted.num_layers, noted.dtype) == (target.fingerprint, 8, torch.float32)
    monkeypatch.setattr("specwave.target.identity._take", lambda *_: pytest.fail("noted already"))
    assert model.identify() == noted
