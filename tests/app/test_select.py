"""select.py from the inside: the contract of its files, defaults, and mistakes in selector and calibration."""

import inspect
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from specwave.app.select import SelectConfig, main
from specwave.artifacts import Selection, UserError
from specwave.data.conversations import Sample
from specwave.layers import cka_matrix, elsi, exhaustive, keep_positions, matrix_entropy, transitions
from specwave.layers.calibrate import Calibration
from specwave.layers.selectors import Elsi, Fixed
from specwave.target import ModelConfig
from specwave.target.tiny import make_tiny

CONF = Path(__file__).resolve().parents[2] / "conf"


class Given(Calibration):
    """Random conversations instead of answers."""

    def samples(self, target):
        draw = torch.Generator().manual_seed(0)
        return [
            Sample(torch.randint(3, 259, (length,), generator=draw).tolist(), [True] * length, f"q{length}")
            for length in range(30, 80, 9)
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig("tiny", str(make_tiny(tmp_path_factory.mktemp("tiny"))), dtype="float32", device="cpu")


def run_in(folder):
    said, noted = [], {}
    return SimpleNamespace(folder=folder, resume=False, say=said.append, note=noted.update, said=said, noted=noted)


@pytest.mark.parametrize("selector", [Elsi(m=2, k_beam=4), Fixed("eagle3")])
def test_the_files_keep_the_contract(selector, model, tmp_path):
    run = run_in(tmp_path)
    main(SelectConfig(model, Given(rho=0.5, block_size=8), selector), run)
    names = {"selection.json", "grams.safetensors", "entropy.png", "entropy.svg", "cka.png", "cka.svg"}
    assert {path.name for path in tmp_path.iterdir()} == names
    grams = load_file(tmp_path / "grams.safetensors")["grams"]
    found = json.loads((tmp_path / "selection.json").read_text())

    assert (found["schema"], found["layer_convention"], found["num_layers"]) == (1, "block_output", 8)
    assert found["selector"] == selector.name
    assert found["layers"] == found["beam"][0]["layers"] == sorted(found["layers"])
    assert found["m"] == len(found["layers"])
    assert [entry["layers"] for entry in found["beam"]] == [list(group.layers) for group in selector.select(grams)]
    assert found["entropy"] == pytest.approx(matrix_entropy(grams[found["layers"]].sum(0)).item())
    assert found["layer_entropy"] == pytest.approx(matrix_entropy(grams).tolist())
    assert found["transitions"] == pytest.approx(transitions(cka_matrix(grams)).tolist())
    calibration = found["calibration"]
    assert calibration["rows"] == grams.shape[-1]
    assert calibration["fingerprint"] == found["fingerprint"] == model.load().fingerprint
    assert calibration["tokens_seen"] == sum(range(30, 80, 9))
    assert (calibration["rho"], calibration["prompts_dropped"]) == (0.5, 0)
    assert found["settings"]["selector"] == asdict(selector)

    loaded = Selection.load(tmp_path)
    assert loaded.groups(1) == [tuple(found["layers"])]
    assert run.noted["layers"] == found["layers"]
    table = "\n".join(run.said)
    assert "eagle3" in table
    assert f"{selector.name} (chosen)" in table


def test_a_mistake_is_found_before_anything_is_answered(model, tmp_path):
    class Never(Calibration):
        def samples(self, target):
            raise AssertionError("the answers take minutes: check first")

    for selector, key in ((Elsi(m=9), "selector.m"), (Fixed(layers=[8]), "selector.layers")):
        with pytest.raises(UserError) as caught:
            main(SelectConfig(model, Never(), selector), run_in(tmp_path))
        assert caught.value.key == key
    assert not list(tmp_path.iterdir())


def test_no_block_left_leaves_no_file(model, tmp_path):
    with pytest.raises(UserError, match=r"smaller calibration\.block_size"):
        main(SelectConfig(model, Given(block_size=64), Elsi()), run_in(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rho": 0.0}, "calibration.rho"),
        ({"rho": 1.5}, "calibration.rho"),
        ({"rho": float("nan")}, "calibration.rho"),
        ({"block_size": 0}, "calibration.block_size"),
        ({"skip_first": -1}, "calibration.skip_first"),
        ({"max_rows": 1}, "calibration.max_rows"),
        ({"limit": 0}, "calibration.limit"),
        ({"max_new_tokens": 0}, "calibration.max_new_tokens"),
        ({"batch_size": 0}, "calibration.batch_size"),
        ({"scale": "unit"}, "calibration.scale"),
    ],
)
def test_calibration_out_of_range(settings, key):
    with pytest.raises(UserError) as caught:
        Calibration(**settings)
    assert caught.value.key == key
    assert caught.value.remedy


def content(name):
    return {key: value for key, value in yaml.safe_load((CONF / name).read_text()).items() if key != "_target_"}


def test_defaults_are_the_same_in_yaml_settings_and_functions():
    assert content("selector/elsi.yaml") == asdict(Elsi())
    assert content("selector/fixed.yaml") == asdict(Fixed())
    assert content("calibration/builtin.yaml") == asdict(Calibration()) | {"seed": "${seed}"}

    def default(function, name):
        return inspect.signature(function).parameters[name].default

    for name in ("k_beam", "k_expand", "alpha"):
        assert default(elsi, name) == getattr(Elsi(), name)
    assert default(exhaustive, "alpha") == default(matrix_entropy, "alpha") == Elsi().alpha
    assert default(keep_positions, "skip_first") == Calibration().skip_first
