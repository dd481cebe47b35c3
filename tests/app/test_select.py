"""select.py from the inside: the contract of its files, defaults, and mistakes in selector and calibration."""

import csv
import inspect
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from safetensors.torch import load_file

from specwave.app.select import SelectConfig, main, prepare
from specwave.artifacts import Selection, UserError
from specwave.layers import cka_matrix, elsi, elsi_c, exhaustive, keep_positions, matrix_entropy, transitions
from specwave.layers.analysis import Analysis
from specwave.layers.candidates import Union
from specwave.layers.proxy import Proxy
from specwave.layers.selectors import Elsi, ElsiC, Exhaustive, Fixed
from specwave.layers.settings import HUBS, Calibration, File, Mixed, ShareGpt, UltraChat
from specwave.target import ModelConfig
from specwave.target.tiny import make_tiny

CONF = Path(__file__).resolve().parents[2] / "conf"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig("tiny", str(make_tiny(tmp_path_factory.mktemp("tiny"))), dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path_factory.mktemp("cache")))


def run_in(folder):
    said, noted = [], {}
    return SimpleNamespace(folder=folder, resume=False, say=said.append, note=noted.update, said=said, noted=noted)


@pytest.mark.parametrize("selector", [Elsi(m=2, k_beam=4), ElsiC(), Exhaustive(m=4), Fixed("eagle3")])
def test_the_files_keep_the_contract(selector, model, tmp_path, given):
    run = run_in(tmp_path)
    main(SelectConfig(model, given(), selector, Analysis()), run)
    pictures = ["entropy", "cka", "partners", "ranking"] + ["frontier"] * isinstance(selector, Elsi | ElsiC)
    names = {"selection.json", "grams.safetensors", "analysis.json", "analysis.safetensors"}
    names |= {f"{name}.{kind}" for name in pictures for kind in ("png", "svg")}
    names |= {"ranking.csv"} if isinstance(selector, Exhaustive) else set()
    assert {path.name for path in tmp_path.iterdir()} == names
    grams = load_file(tmp_path / "grams.safetensors")["grams"]
    found = json.loads((tmp_path / "selection.json").read_text())

    assert (found["schema"], found["layer_convention"], found["num_layers"]) == (1, "block_output", 8)
    assert found["selector"] == selector.name
    assert found["layers"] == found["beam"][0]["layers"] == sorted(found["layers"])
    assert found["m"] == len(found["layers"])
    assert [entry["layers"] for entry in found["beam"]] == [
        list(group.layers) for group in selector.select(grams).groups
    ]
    assert found["entropy"] == pytest.approx(matrix_entropy(grams[found["layers"]].sum(0)).item())
    assert found["layer_entropy"] == pytest.approx(matrix_entropy(grams).tolist())
    assert found["transitions"] == pytest.approx(transitions(cka_matrix(grams)).tolist())
    calibration = found["calibration"]
    assert calibration["rows"] == grams.shape[-1]
    assert calibration["fingerprint"] == found["fingerprint"] == model.load().fingerprint
    assert calibration["prompts"] == 6
    optimum = found["optimum"]
    (best,) = exhaustive(grams, found["m"], top=1)
    assert optimum["layers"] == list(best.layers)
    assert optimum["gap"] == pytest.approx(best.entropy - found["entropy"], abs=1e-12)
    assert (calibration["rho"], calibration["prompts_dropped"]) == (0.5, 0)
    assert found["settings"]["selector"] == asdict(selector)

    loaded = Selection.load(tmp_path)
    assert loaded.groups(1) == [tuple(found["layers"])]
    assert run.noted["layers"] == found["layers"]
    table = "\n".join(run.said)
    assert "eagle3" in table
    assert f"{selector.name} (chosen)" in table


SMALL = {"width": 6, "token_width": 6, "m": 2, "exact": 8, "top": 4}


def test_the_proxy_keeps_the_contract_too(model, tmp_path, given):
    run, selector = run_in(tmp_path), Proxy(**SMALL)
    value = main(SelectConfig(model, given(), selector, Analysis()), run)
    pictures = ["entropy", "cka", "partners", "ranking", "proxy"]
    names = {"selection.json", "grams.safetensors", "analysis.json", "analysis.safetensors", "proxy.csv"}
    assert {path.name for path in tmp_path.iterdir()} == names | {
        f"{name}.{kind}" for name in pictures for kind in ("png", "svg")
    }
    grams = load_file(tmp_path / "grams.safetensors")["grams"]
    found = json.loads((tmp_path / "selection.json").read_text())
    assert (found["selector"], found["m"], found["layers"]) == ("proxy", 2, found["beam"][0]["layers"])
    assert found["entropy"] == pytest.approx(matrix_entropy(grams[found["layers"]].sum(0)).item())
    scores = [entry["score"] for entry in found["beam"]]
    assert value == found["score"] == scores[0] == found["proxy"]["agreement"] == run.noted["score"]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 4
    assert found["optimum"]["layers"] == list(exhaustive(grams, 2, top=1)[0].layers)
    assert found["proxy"]["search"]["sets"] == 28
    assert found["settings"]["selector"] == asdict(selector)
    assert Selection.load(tmp_path).groups(2)[0] == tuple(found["layers"])

    with open(tmp_path / "proxy.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 28
    assert rows[0]["layers"] == " ".join(map(str, found["layers"]))
    whole = [float(row["agreement"]) for row in rows if row["agreement"]]
    assert whole == sorted(whole, reverse=True)
    assert whole[:4] == pytest.approx(scores)
    for row in rows:
        layers = [int(layer) for layer in row["layers"].split()]
        assert float(row["entropy"]) == pytest.approx(matrix_entropy(grams[layers].sum(0)).item(), abs=1e-5)
    table = "\n".join(run.said)
    assert "agreement" in table
    assert "proxy (chosen)" in table
    assert "from the next token alone" in table
    assert "chosen less eagle3" in table


def test_the_proxy_says_whether_it_saw_the_benchmark(model, tmp_path, given):
    """Only the calibration is read; what of it stands in a benchmark is counted."""
    run = run_in(tmp_path / "run")
    path = tmp_path / "question.jsonl"
    question = {"question_id": 1, "category": "qa", "turns": ["an answer " * 8]}
    path.write_text(json.dumps(question) + "\n")
    main(SelectConfig(model, given(check_benchmark=str(path)), Proxy(**SMALL), Analysis("never", figures=False)), run)
    assert run.noted["contamination"][str(path)]["questions_hit"] == 1
    assert run.noted["contamination"]["builtin"]["questions_hit"] == 0
    assert any("1 of 1 questions share 13 words in a row with the calibration" in line for line in run.said)
    with pytest.raises(UserError, match=r"^calibration\.check_benchmark=.*none\.jsonl: there is no such file"):
        given(check_benchmark=str(tmp_path / "none.jsonl"))


def test_a_bootstrap_of_grams_leaves_the_proxy_alone(model, tmp_path, given):
    run = run_in(tmp_path)
    analysis = Analysis(resamples=5, figures=False)
    main(SelectConfig(model, given(rho=1.0, block_size=4), Proxy(**SMALL), analysis), run)
    (over, _) = json.loads((tmp_path / "analysis.json").read_text())["stability"]
    assert (over["searched"], over["supported"], over["resamples"]) == (False, False, 5)


def test_too_few_steps_for_the_regression_leave_no_file(model, tmp_path, given):
    with pytest.raises(UserError, match=r"the regression for \{0,1,2\} has 256 unknowns and \d+ rows") as caught:
        main(SelectConfig(model, given(), Proxy(), Analysis()), run_in(tmp_path))
    assert caught.value.key == "selector.width"
    assert not list(tmp_path.iterdir())


def test_a_union_of_selectors(model, tmp_path, given):
    union = Union({"elsi": Elsi(m=2), "proxy": Proxy(**SMALL)}, m=2, top=6, rules=["eagle3", "eagle2"])
    run = run_in(tmp_path)
    value = main(SelectConfig(model, given(), union, Analysis()), run)
    found = json.loads((tmp_path / "selection.json").read_text())
    assert len(found["beam"]) == 6
    assert {name for entry in found["beam"] for name in entry["origin"]} == {"elsi", "proxy", "eagle3", "eagle2"}
    assert found["beam"][0]["origin"][0] == "elsi"
    assert value == found["beam"][0]["score"]
    assert (tmp_path / "proxy.png").exists()


def test_a_mistake_is_found_before_anything_is_answered(model, tmp_path):
    class Never(Calibration):
        def source(self):
            raise AssertionError("the answers take minutes: check first")

    wrong = [
        (Elsi(m=9), Analysis(), "selector.m"),
        (Fixed(layers=[8]), Analysis(), "selector.layers"),
        (Exhaustive(max_sets=10), Analysis(), "selector.m"),
        (Elsi(), Analysis(ranking="always", max_sets=55), "analysis.ranking"),
        (Proxy(), Analysis(sensitivity=True), "analysis.sensitivity"),
        (Proxy(max_sets=55), Analysis(), "selector.m"),
        (Union({"elsi": Elsi()}, rules=["eagle4"]), Analysis(), "selector.rules"),
    ]
    for selector, analysis, key in wrong:
        with pytest.raises(UserError) as caught:
            main(SelectConfig(model, Never(), selector, analysis), run_in(tmp_path))
        assert caught.value.key == key
    assert not list(tmp_path.iterdir())


def test_no_block_left_leaves_no_file(model, tmp_path, given):
    with pytest.raises(UserError, match=r"smaller calibration\.block_size"):
        main(SelectConfig(model, given(block_size=640), Elsi(), Analysis()), run_in(tmp_path))
    assert not list(tmp_path.iterdir())


def test_everything_that_can_be_looked_into(model, tmp_path, given):
    run = run_in(tmp_path)
    analysis = Analysis(ranking="always", resamples=20, sensitivity=True)
    main(SelectConfig(model, given(rho=1.0, block_size=4), Elsi(m=3), analysis), run)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"stability.png", "stability.svg", "sensitivity.csv", "sensitivity.md", "ranking.png"}
    content = json.loads((tmp_path / "analysis.json").read_text())
    assert [entry["over"] for entry in content["stability"]] == ["prompts", "domains"]
    for entry in content["stability"]:
        assert entry["sentence"] in run.said
        assert sum(one["share"] for one in entry["sets"]) == pytest.approx(1)
    assert content["sensitivity"][0]["layers"] == run.noted["layers"]
    assert len(content["partners"]) == 8
    assert [len(beam[0]["layers"]) for beam in content["frontier"]] == [1, 2, 3]
    lines = (tmp_path / "sensitivity.csv").read_text().splitlines()
    assert len(lines) == 1 + len(content["sensitivity"])
    assert lines[0].startswith("option,value,rows,layers,entropy,rank_")


def test_a_bootstrap_that_cannot_be_is_said(model, tmp_path, given):
    run = run_in(tmp_path)
    analysis = Analysis(resamples=5, figures=False)
    main(SelectConfig(model, given(rho=1.0, block_size=4, aggregate="average"), Elsi(m=2), analysis), run)
    assert sum("no bootstrap over" in line for line in run.said) == 2


def test_the_full_ranking_is_a_file(model, tmp_path, given):
    main(SelectConfig(model, given(), Exhaustive(m=3), Analysis(figures=False)), run_in(tmp_path))
    lines = (tmp_path / "ranking.csv").read_text().splitlines()
    assert lines[0] == "rank,layers,entropy,precision"
    assert len(lines) == 1 + 56
    entropies = [float(line.split(",")[2]) for line in lines[1:]]
    assert entropies == sorted(entropies, reverse=True)


def test_a_sweep_is_prepared_by_one_pass(model, tmp_path, monkeypatch, given):
    said, loads, load = [], [], ModelConfig.load
    monkeypatch.setattr(ModelConfig, "load", lambda self: loads.append(1) or load(self))
    configs = [
        SelectConfig(model, given(rho=rho, block_size=size), Elsi(k_beam=k_beam), Analysis(figures=False))
        for rho in (0.5, 1.0)
        for size in (4, 8)
        for k_beam in (1, 10)
    ]
    prepare(configs, said.append)
    assert (said, len(loads)) == (["calibration: 4 settings; one pass for 4"], 1)
    for place, config in enumerate(configs):
        run = run_in(tmp_path / str(place))
        main(config, run)
        assert run.noted["calibration"] == "re-used"
    assert len(loads) == 1


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
        ({"seed": 10**14}, "calibration.seed"),
    ],
)
def test_calibration_out_of_range(settings, key):
    with pytest.raises(UserError) as caught:
        Calibration(**settings)
    assert caught.value.key == key
    assert caught.value.remedy


def test_the_steps_of_a_sweep_are_prepared_once(model, tmp_path, given):
    said = []
    configs = [
        SelectConfig(model, given(), Proxy(**SMALL, ridge=ridge), Analysis("never", figures=False))
        for ridge in (0.01, 0.1)
    ]
    prepare(configs, said.append)
    assert said == ["calibration: one pass", "drafting steps: one pass"]
    for place, config in enumerate(configs):
        run = run_in(tmp_path / str(place))
        main(config, run)
        assert "drafting steps: re-used from the cache" in run.said


def test_a_sweep_over_mixtures_is_prepared_too(model):
    said = []
    settings = [Mixed(limit=3, max_new_tokens=8, rho=1.0, block_size=size) for size in (2, 4)]
    prepare([SelectConfig(model, own, Elsi(), Analysis()) for own in settings], said.append)
    assert said == ["calibration: 2 settings; one pass for 2"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [([0.5, 0.6], "1.1"), ([1.0], "weights"), ([1.5, -0.5], "weights")],
)
def test_weights_that_do_not_add_up(weights, message):
    with pytest.raises(UserError, match=message) as caught:
        Mixed(sources=["builtin", "x.jsonl"], weights=weights)
    assert caught.value.key == "calibration.weights"


def test_a_mixture_takes_its_shares(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"id": f"m{place}", "prompt": f"text {place}"}) + "\n" for place in range(40)))
    found = Mixed(sources=["builtin", str(path)], weights=[0.25, 0.75], limit=40).conversations()
    assert len(found) == 40
    assert sum("text" in conversation.messages[0][1] for conversation in found) == 30


def content(name):
    path = CONF / name
    own = {key: value for key, value in yaml.safe_load(path.read_text()).items() if key not in ("_target_", "defaults")}
    shared = yaml.safe_load((path.parent / "_rows.yaml").read_text()) if path.parent.name == "calibration" else {}
    return shared | own


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("selector/elsi.yaml", Elsi()),
        ("selector/elsi_c.yaml", ElsiC()),
        ("selector/exhaustive.yaml", Exhaustive()),
        ("selector/fixed.yaml", Fixed()),
        ("selector/proxy.yaml", Proxy()),
        ("calibration/builtin.yaml", Calibration()),
        ("calibration/jsonl.yaml", File()),
        ("calibration/sharegpt.yaml", ShareGpt()),
        ("calibration/ultrachat.yaml", UltraChat()),
        ("calibration/mixed.yaml", Mixed()),
        ("analysis/brief.yaml", Analysis()),
        ("analysis/full.yaml", Analysis(ranking="always", resamples=200, sensitivity=True)),
        ("analysis/none.yaml", Analysis(ranking="never", figures=False)),
    ],
)
def test_defaults_are_the_same_in_yaml_and_settings(name, settings):
    expected = asdict(settings)
    assert content(name) == expected | ({"seed": "${seed}"} if "seed" in expected else {})


def test_defaults_are_the_same_in_settings_and_functions():
    def default(function, name):
        return inspect.signature(function).parameters[name].default

    for name in ("k_beam", "k_expand", "alpha"):
        assert default(elsi, name) == getattr(Elsi(), name)
    for name in ("k_beam", "k_pool", "alpha", "right_neighbour", "unbiased"):
        assert default(elsi_c, name) == getattr(ElsiC(), name)
    assert default(exhaustive, "alpha") == default(matrix_entropy, "alpha") == Elsi().alpha
    assert default(exhaustive, "top") == Exhaustive().top
    assert default(keep_positions, "skip_first") == Calibration().skip_first


def test_a_local_copy_of_a_public_set(tmp_path):
    """Public dumps hold conversations without an answer: passed over, with a warning, where answers are given."""
    path = tmp_path / "dump.json"
    turns = [
        [{"from": "human", "value": f"q{place}"}, {"from": "gpt", "value": "a"}][: 1 + place % 2] for place in range(6)
    ]
    path.write_text(json.dumps([{"id": f"c{place}", "conversations": turn} for place, turn in enumerate(turns)]))
    with pytest.warns(UserWarning, match="3 of 6 conversations have no answer"):
        found = ShareGpt(path=str(path)).conversations()
    assert [one.id for one in found] == ["c1", "c3", "c5"]
    assert len(UltraChat(path=str(path), answers="regenerate").conversations()) == 6


def test_a_mixture_names_the_options():
    for name, made in HUBS.items():
        own = content(f"calibration/{name}.yaml")
        assert (own["path"], own["split"]) == (made.path, made.split)
