"""The sampling keys of evaluate.py: checked, recorded, part of what must be equal when a run is taken up."""

import json

import pytest

from specwave.app import config as configs
from specwave.app.evaluate import EvaluateConfig, main
from specwave.app.run import Run
from specwave.artifacts import UserError
from specwave.benchmark import Benchmark
from specwave.decoding import Autoregressive, Sampling
from specwave.target import ModelConfig

KEYS = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 3}


def evaluate(folder, source, **keys):
    folder.mkdir(parents=True, exist_ok=True)
    model = ModelConfig("small", str(source), dtype="float32")
    keys = {"decoding": Autoregressive(), "benchmark": Benchmark(), "limit": 2, "max_new_tokens": 5} | keys
    main(EvaluateConfig(model=model, **keys), Run(folder))
    return json.loads((folder / "results.json").read_text())


def built(*overrides):
    content = configs.check("evaluate", configs.compose("evaluate", ["model=tiny", *overrides]))
    return configs.build("evaluate", content).sampling


def test_every_key_reaches_the_decoder():
    assert built("seed=5") == Sampling(seed=5)
    assert built(*(f"sampling.{key}={value}" for key, value in KEYS.items())) == Sampling(**KEYS)
    assert built("sampling.top_k=null") == Sampling()


@pytest.mark.parametrize("override", ["sampling=3", "sampling=null", "sampling._target_=torch.nn.Linear"])
def test_something_else_in_its_place_is_refused(override):
    with pytest.raises(UserError, match="sampling"):
        built(override)


@pytest.mark.parametrize(
    "override",
    [
        "sampling.temperature=-1",
        "sampling.top_k=-1",
        "sampling.top_p=0",
        "sampling.top_p=1.5",
        "sampling.min_p=1",
        "sampling.repetition_penalty=0",
    ],
)
def test_a_value_out_of_range_is_named_with_its_key(override):
    key = override.partition("=")[0]
    with pytest.raises(UserError) as caught:
        built(override)
    assert caught.value.key == key
    assert "must be" in caught.value.remedy


def test_settings_are_recorded_and_a_sampled_run_says_nothing_of_exactness(tmp_path, family_folders):
    content = evaluate(tmp_path, family_folders["llama"], sampling=Sampling(**KEYS))
    assert content["settings"]["sampling"] == KEYS
    assert content["overall"]["exact_match_rate"] is None
    assert content["overall"]["near_ties"] is None
    assert "null when sampling" in content["definitions"]["exact_match_rate"]


def test_greedy_with_a_penalty_is_compared_with_the_targets_own_output(tmp_path, family_folders):
    content = evaluate(tmp_path, family_folders["llama"], sampling=Sampling(repetition_penalty=1.3))
    assert content["overall"]["exact_match_rate"] == 1.0


@pytest.mark.parametrize("key", KEYS)
def test_a_run_is_not_taken_up_under_another_setting(key, tmp_path, family_folders):
    evaluate(tmp_path, family_folders["llama"], sampling=Sampling(**KEYS))
    off = Sampling(**{name: value for name, value in KEYS.items() if name != key})
    with pytest.raises(UserError, match=rf"sampling\.{key} \({KEYS[key]}, now "):
        evaluate(tmp_path, family_folders["llama"], sampling=off)
