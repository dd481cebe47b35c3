"""KnapSpec's rivals in the loop: nothing changes but the speed. Settings; how sources and stop rules compose."""

import json
from dataclasses import asdict

import pytest
import yaml

from specwave.app import command
from specwave.app import config as configs
from specwave.app.evaluate import EvaluateConfig, main
from specwave.app.run import Run
from specwave.artifacts import UserError, conf_dir
from specwave.benchmark import Benchmark
from specwave.benchmark.settings import method_settings
from specwave.decoding import Sampling, generate
from specwave.skipping import measure
from specwave.skipping.asd import AsdDecoding
from specwave.skipping.clasp import ClaspDecoding
from specwave.skipping.draft_verify import DraftVerifyDecoding, Fixed
from specwave.skipping.knapspec import KnapSpecDecoding
from specwave.skipping.midway import Midway
from specwave.skipping.plans import Plan, skipping_blocks
from specwave.skipping.stops import Adaptive, Below
from specwave.skipping.swift import SwiftDecoding
from specwave.target import ModelConfig, load_target

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4, 8], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17], [9] * 5]
NAMES = ["greedy", "nucleus", "penalty"]
SAMPLINGS = [Sampling(), Sampling(0.7, seed=11, top_p=0.9), Sampling(1.1, 3, repetition_penalty=1.2)]
EVERY = {
    "draft_verify": DraftVerifyDecoding,
    "swift": SwiftDecoding,
    "clasp": ClaspDecoding,
    "asd": AsdDecoding,
    "knapspec": KnapSpecDecoding,
}
RIVALS = {
    "draft_verify": DraftVerifyDecoding(gamma=4, stop=Adaptive(first=0.1)),
    "swift": SwiftDecoding(gamma=4, stop=0.0, window=4, bayes=3),
    "clasp": ClaspDecoding(gamma=4, stop=0.05),
    "asd": AsdDecoding(gamma=4, threshold=0.9, window=2, every=6, stop=Adaptive(first=0.1)),
}


def proposer(name, target):
    """The method; Draft & Verify with a plan as its search might find it."""
    if name == "draft_verify":
        return RIVALS[name].compose(target, Fixed(Plan(skipping_blocks(8, [2, 4, 5]), 4)))
    return RIVALS[name].build(target)


@pytest.fixture(scope="module")
def plain(mild):
    """Plain decoding's answers, made once per family and sampling."""
    made = {}

    def find(family, sampling, prompts):
        key = family, sampling, len(prompts)
        if key not in made:
            made[key] = generate(mild[family], None, prompts, max_new_tokens=24, sampling=sampling)
        return made[key]

    return find


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
def test_output_is_the_targets(name, family, sampling, mild, plain):
    expected = plain(family, sampling, PROMPTS)
    made = generate(mild[family], proposer(name, mild[family]), PROMPTS, max_new_tokens=24, sampling=sampling)
    assert made.tokens == expected.tokens
    assert made.rounds < expected.rounds  # some drafts were accepted


@pytest.mark.parametrize("name", RIVALS)
def test_output_of_one_prompt(name, mild, plain):
    expected = plain("llama", Sampling(), PROMPTS[:1])
    made = generate(mild["llama"], proposer(name, mild["llama"]), PROMPTS[:1], max_new_tokens=24)
    assert made.tokens == expected.tokens
    assert made.rounds < expected.rounds


@pytest.mark.parametrize("name", RIVALS)
def test_rows_that_end_leave_the_others_alone(name, mild):
    target = mild["llama"]
    free = generate(target, None, PROMPTS, max_new_tokens=24, eos_ids=()).tokens
    ends = tuple({free[0][2], free[1][9], free[2][17]})
    expected = generate(target, None, PROMPTS, max_new_tokens=24, eos_ids=ends).tokens
    assert len({len(row) for row in expected}) > 2
    assert generate(target, proposer(name, target), PROMPTS, max_new_tokens=24, eos_ids=ends).tokens == expected


@pytest.mark.parametrize("name", ["clasp", "asd"])
def test_a_new_decoding_begins_without_a_plan(name, mild):
    method = proposer(name, mild["llama"])
    made = [generate(mild["llama"], method, PROMPTS[0], max_new_tokens=20) for _ in range(2)]
    assert made[0].tokens == made[1].tokens
    assert made[0].accept_lengths == made[1].accept_lengths
    assert method.scope == "sequence"
    assert [row["round"] for row in method.source.log].count(method.source.log[0]["round"]) == 2


def test_batch_invariant_decoding(mild_folders):
    """In bfloat16 too, every token is plain decoding's, where the device allows it."""
    half = load_target(mild_folders["llama"], dtype="bfloat16", device="cpu")
    if half.least_rows is None:
        with pytest.raises(UserError, match="batch_invariant"):
            generate(half, None, PROMPTS, max_new_tokens=12, batch_invariant=True)
        return
    expected = generate(half, None, PROMPTS, max_new_tokens=12, batch_invariant=True).tokens
    for name in RIVALS:
        made = generate(half, proposer(name, half), PROMPTS, max_new_tokens=12, batch_invariant=True)
        assert made.tokens == expected


@pytest.mark.parametrize("name", ["swift", "clasp", "asd"])
def test_defaults_fit_the_smallest_target(name, tiny):
    made = generate(tiny, EVERY[name]().build(tiny), PROMPTS[0], max_new_tokens=6)
    assert made.tokens == generate(tiny, None, PROMPTS[0], max_new_tokens=6).tokens


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("name", EVERY)
def test_the_yaml_repeats_the_defaults(name):
    content = yaml.safe_load((conf_dir() / f"decoding/{name}.yaml").read_text(encoding="utf-8"))
    assert content.pop("_target_") == f"specwave.skipping.{EVERY[name].__name__}"
    assert content.pop("seed", "${seed}") == "${seed}"
    assert content == {key: value for key, value in asdict(EVERY[name]()).items() if key != "seed"}
    assert EVERY[name].label == name


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("swift", {"gamma": 0}, "decoding.gamma=0: must be 1 to 64"),
        ("swift", {"skip": 0.0}, "decoding.skip=0.0: is the share"),
        ("swift", {"skip": 1.0}, "decoding.skip=1.0: is the share"),
        ("swift", {"skip": float("nan")}, "decoding.skip=nan: is the share"),
        ("swift", {"window": 0}, "decoding.window=0: candidates are tried on"),
        ("swift", {"every": 0}, "decoding.every=0: is a number of rounds"),
        ("swift", {"bayes": 0}, "decoding.bayes=0: is a number of candidates"),
        ("swift", {"patience": 0}, "decoding.patience=0: is a number of candidates"),
        ("swift", {"trials": 0}, "decoding.trials=0: is a number of candidates"),
        ("swift", {"enough": 1.1}, "decoding.enough=1.1: is a share"),
        ("swift", {"seed": -1}, "decoding.seed=-1: must be in 0"),
        ("swift", {"stop": None}, "decoding.stop=null: a probability"),
        ("clasp", {"gamma": 65}, "decoding.gamma=65: must be 1 to 64"),
        ("clasp", {"skip": 0.0}, "decoding.skip=0.0: is the share"),
        ("clasp", {"skip": 1.5}, "decoding.skip=1.5: is the share"),
        ("clasp", {"blocks": 0}, "decoding.blocks=0: is the number"),
        ("clasp", {"every": 0}, "decoding.every=0: is a number of rounds"),
        ("clasp", {"stop": 2}, "decoding.stop=2: is a probability"),
        ("asd", {"threshold": 1.0}, "decoding.threshold=1.0: is a cosine"),
        ("asd", {"threshold": float("nan")}, "decoding.threshold=nan: is a cosine"),
        ("asd", {"window": 0}, "decoding.window=0: cosines"),
        ("asd", {"every": 4}, "decoding.every=4: must be at least decoding.window=5"),
        ("asd", {"stop": "never"}, "decoding.stop=never: a probability"),
        ("draft_verify", {"trials": 0}, "decoding.trials=0: is a number of candidates"),
        ("draft_verify", {"limit": 0}, "decoding.limit=0: candidates are valued"),
        ("draft_verify", {"max_new_tokens": 0}, "decoding.max_new_tokens=0: answers"),
        ("draft_verify", {"seed": 2**32}, "decoding.seed=4294967296: must be in 0"),
        ("draft_verify", {"latency": "x", "contexts": [128]}, "decoding.contexts=[128]: decoding.latency names"),
    ],
)
def test_bad_settings_are_user_errors(method, settings, words):
    with pytest.raises(UserError) as caught:
        EVERY[method](**settings)
    assert str(caught.value).startswith(words)


# ---------------------------------------------------------------- sources × stop rules, by YAML


def built(*overrides):
    return configs.build("evaluate", configs.check("evaluate", configs.compose("evaluate", overrides))).decoding


RULE = "decoding.stop={_target_: specwave.skipping.Adaptive, target: 0.85}"


@pytest.mark.parametrize("name", EVERY)
def test_any_plan_with_any_rule_is_one_override(name):
    assert type(built(f"decoding={name}")) is EVERY[name]
    assert built(f"decoding={name}", "decoding.stop=0.8").rule() == Below(0.8)
    assert built(f"decoding={name}", RULE).rule() == Adaptive(target=0.85)


def test_knapspecs_plan_with_swifts_rule(mild, costs, tmp_path, monkeypatch):
    """And with Draft & Verify's, which results name."""
    monkeypatch.setattr(measure, "_measure", lambda *_: costs())
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))
    swifts = built("decoding=swift").build(mild["llama"]).stop
    assert built("decoding=knapspec", "decoding.stop=0.8").build(mild["llama"]).stop == swifts
    moving = built("decoding=knapspec", RULE).build(mild["llama"])
    assert moving.stop.rule == Adaptive(target=0.85)
    named = method_settings({}, moving.settings, None)["decoding"]
    assert named["name"] == "knapspec"
    assert named["stop"] == {
        "name": "adaptive", "first": 0.8, "target": 0.85, "step": 0.01, "keep_rate": 0.5, "keep": 0.9
    }  # fmt: skip
    own = built("decoding=asd").build(mild["llama"])
    assert method_settings({}, own.settings, None)["decoding"]["stop"]["name"] == "adaptive"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "decoding.stop={_target_: specwave.skipping.Adaptive, targt: 1}",
            "decoding.stop.targt=1: there is no such key; did you mean decoding.stop.target?",
        ),
        (
            "decoding.stop={_target_: specwave.skipping.Adaptive, target: 2}",
            "decoding.stop.target=2.0: must be 0 to 1",
        ),
        ("decoding.stop={_target_: specwave.skipping.SwiftDecoding}", "decoding.stop=SwiftDecoding: a probability, 0"),
        ("decoding.stop={_target_: specwave.skipping.Adaptve}", "specwave.skipping has no Adaptve"),
        ("decoding.stop=soon", "decoding.stop=soon: a probability, 0"),
        ("decoding.stop=2", "decoding.stop=2: is a probability"),
    ],
)
def test_what_is_no_rule_is_named(override, words):
    with pytest.raises(UserError) as caught:
        built("decoding=clasp", override)
    assert words in str(caught.value)


def test_the_matrix_is_every_source_with_every_rule():
    overrides = ["experiment=skipping_matrix"]
    jobs = command.job_overrides(overrides, configs.compose("evaluate", overrides))
    composer = configs.Composer("evaluate")
    pairs = []
    for job in jobs:
        decoding = configs.build("evaluate", configs.check("evaluate", composer(job))).decoding
        pairs.append((decoding.label, decoding.rule()))
    rules = [Below(0.0), Below(0.7), Below(0.8), Adaptive(), Midway()]
    names = ["knapspec", "draft_verify", "swift", "clasp", "asd", "layerskip", "del"]
    assert pairs == [(name, rule) for name in names for rule in rules]
    lines = (conf_dir() / "experiment/skipping_matrix.yaml").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith("# python evaluate.py -m experiment=skipping_matrix ")


def test_evaluated_by_the_door(mild_folders, tmp_path):
    model = ModelConfig("mild", str(mild_folders["llama"]), dtype="float32")
    decoding = ClaspDecoding(gamma=3, stop=Adaptive(first=0.1))
    config = EvaluateConfig(model=model, benchmark=Benchmark(), decoding=decoding, limit=1, max_new_tokens=16)
    (tmp_path / "run").mkdir()
    main(config, Run(tmp_path / "run"))
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["method"] == "clasp"
    assert results["overall"]["exact_match_rate"] == 1.0
    assert results["settings"]["decoding"]["stop"]["name"] == "adaptive"
    plans = [json.loads(line) for line in (tmp_path / "run/plans.jsonl").read_text().splitlines()]
    assert all(sum(row["kept"]) == 8 for row in plans)
    assert plans
