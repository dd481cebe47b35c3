"""KnapSpec in the loop: nothing changes but the speed; when plans are made, on what, and within which share of time."""

import itertools
import json
from dataclasses import asdict, replace

import pytest
import torch
import yaml

from specwave.app.evaluate import EvaluateConfig, main
from specwave.app.run import Run
from specwave.artifacts import UserError, conf_dir
from specwave.benchmark import Benchmark
from specwave.decoding import Sampling, generate, stream
from specwave.skipping import KnapSpec, KnapSpecDecoding, SelfSpeculation, measure, planner
from specwave.skipping.plans import Plan
from specwave.skipping.stops import Below
from specwave.target import ModelConfig, Wants

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4, 8], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17], [9] * 5]
FREE = KnapSpecDecoding(plan_share=None, window=3, every=8, stop=0.0)
NAMES = ["greedy", "nucleus", "penalty"]
SAMPLINGS = [Sampling(), Sampling(0.7, seed=11, top_p=0.9), Sampling(1.1, 3, repetition_penalty=1.2)]


def proposer(target, costs, settings=FREE, fixed=None, kind=KnapSpec, **more):
    return SelfSpeculation(target, settings, kind(target, settings, costs(**more), fixed), Below(settings.stop))


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "four"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
def test_output_is_the_targets(family, prompts, sampling, mild, costs):
    stop = 0.4 if family in ("mistral", "qwen3") else 0.0
    target, method = mild[family], proposer(mild[family], costs, replace(FREE, stop=stop))
    plain = generate(target, None, prompts, max_new_tokens=40, sampling=sampling)
    drafted = generate(target, method, prompts, max_new_tokens=40, sampling=sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.rounds < plain.rounds  # some drafts were accepted
    assert any(not all(row["kept"]) for row in method.source.log)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=NAMES[:2])
def test_any_kept_set_leaves_the_output_alone(family, sampling, mild, costs):
    target, draw = mild[family], torch.Generator().manual_seed(5)
    plain = generate(target, None, PROMPTS, max_new_tokens=24, sampling=sampling)
    for _ in range(2):
        kept = tuple((torch.rand(16, generator=draw) < torch.rand(1, generator=draw)).tolist())
        method = proposer(target, costs, fixed=Plan(kept, 5))
        assert generate(target, method, PROMPTS, max_new_tokens=24, sampling=sampling).tokens == plain.tokens
        assert method.source.log == []


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize("gamma", [1, 4])
def test_the_full_set_drafts_what_the_target_says(sampling, gamma, tiny, costs):
    """Coupled draws: when sampling too, a draft of the whole target is always right."""
    limit = 3 * (gamma + 1)
    plain = generate(tiny, None, PROMPTS, max_new_tokens=limit, sampling=sampling, eos_ids=())
    method = proposer(tiny, costs, fixed=Plan((True,) * 16, gamma))
    drafted = generate(tiny, method, PROMPTS, max_new_tokens=limit, sampling=sampling, eos_ids=())
    assert drafted.tokens == plain.tokens
    assert drafted.accept_lengths == [[gamma + 1] * 3] * 4


def test_rows_that_end_leave_the_others_alone(mild, costs):
    target = mild["llama"]
    plain = generate(target, None, PROMPTS, max_new_tokens=40, eos_ids=()).tokens
    ends = tuple({plain[0][2], plain[1][9], plain[2][17]})
    expected = generate(target, None, PROMPTS, max_new_tokens=40, eos_ids=ends).tokens
    assert len({len(row) for row in expected}) > 2
    assert generate(target, proposer(target, costs), PROMPTS, max_new_tokens=40, eos_ids=ends).tokens == expected


def test_batch_invariant_decoding(mild_folders, costs):
    """In bfloat16 too, every token is plain decoding's; where linear layers round by their shape it is refused."""
    from specwave.target import load_target

    half = load_target(mild_folders["llama"], dtype="bfloat16", device="cpu")
    if half.least_rows is None:
        with pytest.raises(UserError, match="batch_invariant"):
            generate(half, None, PROMPTS, max_new_tokens=24, batch_invariant=True)
        return
    plain = generate(half, None, PROMPTS, max_new_tokens=24, batch_invariant=True)
    method = proposer(half, costs, replace(FREE, batch_invariant=True))
    assert generate(half, method, PROMPTS, max_new_tokens=24, batch_invariant=True).tokens == plain.tokens
    assert method.source.log


# ---------------------------------------------------------------- when plans are made


class Watched(KnapSpec):
    """Keeps what every forward was asked to hand out, and the evidence of every plan with the tokens so far."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked, self.seen = [], []

    def wants(self, contexts):
        wanted = super().wants(contexts)
        self.asked.append(wanted)
        return wanted

    def _replan(self, contexts):
        self.seen.append((self.watch.evidence(contexts), [list(context.tokens) for context in contexts]))
        super()._replan(contexts)


def test_plans_come_every_so_many_rounds_and_states_only_before_them(mild, costs):
    settings = replace(FREE, growth=99.0)
    method = proposer(mild["llama"], costs, settings, kind=Watched)
    made = generate(mild["llama"], method, PROMPTS[:2], max_new_tokens=60, eos_ids=())
    assert [row["round"] for row in method.source.log] == list(range(3, made.rounds, 8))
    assert len(method.source.log) > 2
    rounds = [bool(wanted.blocks) for wanted in method.source.asked]
    assert len(rounds) == made.rounds  # none for the prefill
    for plan in range(3, made.rounds, 8):
        assert rounds[plan - 3 : plan] == [True] * 3
        assert not any(rounds[plan : plan + 5])
    assert all(wanted in (Wants(), Wants(tuple(range(8)), tuple(range(8)))) for wanted in method.source.asked)


def test_a_context_that_has_grown_is_planned_anew(mild, costs):
    settings = replace(FREE, every=1000, growth=0.5)
    method = proposer(mild["llama"], costs, settings)
    generate(mild["llama"], method, PROMPTS[0], max_new_tokens=90, eos_ids=())
    lengths = [row["context"] for row in method.source.log]
    assert len(lengths) > 2
    for before, after in itertools.pairwise(lengths):
        assert 1.5 * before <= after <= 1.5 * before + 4 * 9  # three rounds are watched, each commits 9 at most


def test_without_adaptation_the_first_plan_stays(mild, costs):
    method = proposer(mild["llama"], costs, replace(FREE, adapt=False))
    generate(mild["llama"], method, PROMPTS[0], max_new_tokens=60, eos_ids=())
    assert [row["round"] for row in method.source.log] == [3]


def test_a_plan_waits_until_it_can_be_afforded(mild, costs):
    settings = replace(FREE, plan_share=0.05)
    method = proposer(mild["llama"], costs, settings)
    made = generate(mild["llama"], method, PROMPTS[0], max_new_tokens=250, eos_ids=())
    assert 2 <= len(method.source.log) < (made.rounds - 3) // 8
    spent = 0.0
    for row in method.source.log:
        spent += row["expected_seconds"]
        assert spent <= 0.05 * row["decoded_seconds"] + 1e-9
    poor = proposer(mild["llama"], costs, replace(FREE, plan_share=1e-6))
    generate(mild["llama"], poor, PROMPTS[0], max_new_tokens=20)
    assert poor.source.log == []


def test_the_same_costs_make_the_same_plans(mild, costs):
    logs = []
    for _ in range(2):
        method = proposer(mild["qwen2"], costs, replace(FREE, plan_share=0.5))
        generate(mild["qwen2"], method, PROMPTS, max_new_tokens=60, eos_ids=())
        logs.append([{key: value for key, value in row.items() if key != "seconds"} for row in method.source.log])
    assert logs[0] == logs[1] != []


def test_a_new_decoding_begins_without_a_plan(mild, costs):
    method = proposer(mild["llama"], costs)
    made = [generate(mild["llama"], method, PROMPTS[0], max_new_tokens=30) for _ in range(2)]
    assert made[0].tokens == made[1].tokens
    assert made[0].accept_lengths == made[1].accept_lengths
    assert [row["round"] for row in method.source.log].count(3) == 2


def test_one_decoding_at_a_time(mild, costs):
    method = proposer(mild["llama"], costs)
    first = stream(mild["llama"], method, PROMPTS[2], max_new_tokens=12, skip_special_tokens=False)
    next(first)
    generate(mild["llama"], method, PROMPTS[0], max_new_tokens=4)
    with pytest.raises(ValueError, match="has begun another decoding since"):
        list(first)


# ---------------------------------------------------------------- on what, and what comes out


def test_the_window_is_of_the_last_rounds_however_long_nobody_asks(mild, costs):
    """As within a composite, while copies are drafted: memory holds a window, and the plan is made on that one."""
    target = mild["llama"]

    class Shy(KnapSpec):
        def plan(self, contexts):
            return super().plan(contexts) if self.rounds == 12 else self.present

    method = proposer(target, costs, kind=type("Seen", (Shy, Watched), {}))
    generate(target, method, PROMPTS[0], max_new_tokens=40, eos_ids=())
    (evidence, rows), *_ = method.source.seen
    assert method.source.settings.window == 3
    assert (len(rows[0]) - len(PROMPTS[0]), evidence.windows[0].length) == (12, 3)  # decoded plainly till then


@pytest.mark.parametrize("sampling", SAMPLINGS[::2], ids=NAMES[::2])
def test_evidence_is_what_the_target_did(sampling, mild, costs):
    target = mild["qwen3"]
    method = proposer(target, costs, kind=Watched)
    generate(target, method, PROMPTS, max_new_tokens=30, sampling=sampling, eos_ids=())
    assert len(method.source.seen) > 1
    for evidence, rows in method.source.seen:
        assert evidence.windows[0].length >= 3
        start = 0
        for row, window in enumerate(evidence.windows):
            own, end = slice(start, start + window.length), window.prefix + window.length
            tokens = rows[row]
            assert end == len(tokens) - 1
            whole = target.states(torch.tensor([tokens]), list(range(8)))
            close = {"atol": 1e-3, "rtol": 1e-3}  # float32, other shapes of the same sums, 8 blocks
            assert torch.equal(evidence.states[0][own], target.embed(torch.tensor(tokens[window.prefix : end])))
            for layer in range(8):
                torch.testing.assert_close(
                    evidence.states[2 * layer + 2][own], whole[layer][0, window.prefix : end], **close
                )
                through = target.blocks[layer].mlp(evidence.states[2 * layer + 1][own][None])[0]
                torch.testing.assert_close(through, evidence.states[2 * layer + 2][own], **close)
            assert evidence.tokens[own].tolist() == tokens[window.prefix + 1 :]
            assert evidence.positions[own].tolist() == list(range(window.prefix + 1, end + 1))
            assert evidence.sequences[own].tolist() == [row] * window.length
            if sampling.penalised:
                for place in range(window.length):
                    seen = set(evidence.seen[start + place].nonzero()[:, 0].tolist())
                    assert seen == set(tokens[: window.prefix + place + 1])
            start += window.length
        assert (evidence.seen is None) == (not sampling.penalised)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
def test_the_full_set_agrees_with_itself(sampling, mild, costs, monkeypatch):
    """α of the full set on the window is 1, when sampling too; the rest of stage 2 is `fastest`'s."""
    given = []
    chosen = planner.fastest

    def fastest(alphas, *more):
        given.append(alphas)
        return chosen(alphas, *more)

    monkeypatch.setattr(planner, "fastest", fastest)
    method = proposer(mild["llama"], costs)
    generate(mild["llama"], method, PROMPTS, max_new_tokens=30, sampling=sampling, eos_ids=())
    assert len(given) > 1
    assert all(alphas[0] == 1.0 for alphas in given)
    assert all(0.0 <= alpha <= 1.0 for alphas in given for alpha in alphas)


def test_where_drafting_cannot_pay_decoding_is_plain(mild, costs):
    """Draft steps as dear as the target's own: the full set wins, which is plain decoding."""
    method = proposer(mild["llama"], costs, attention=1e-4, mlp=1e-4, rest=1.0)
    plain = generate(mild["llama"], None, PROMPTS[0], max_new_tokens=30, eos_ids=())
    made = generate(mild["llama"], method, PROMPTS[0], max_new_tokens=30, eos_ids=())
    assert made.rounds == plain.rounds == 30
    assert [(row["gamma"], all(row["kept"])) for row in method.source.log] == [(0, True)] * len(method.source.log)
    assert method.source.log
    assert all(row["rate"] == pytest.approx(row["plain_rate"]) for row in method.source.log)


def test_weights_follow_the_context(mild, costs):
    """Attention of 1 ms + 10 µs per cached token beside an MLP of 5 ms."""
    method = proposer(mild["llama"], costs, attention=0.001, mlp=0.005, slope=1e-5)
    assert method.source.planner.weights(16)[:4] == [1, 4, 1, 4]
    assert method.source.planner.weights(400)[:4] == [1, 1, 1, 1]
    assert method.source.planner.weights(1400)[:4] == [3, 1, 3, 1]
    assert method.source.planner.weights(9000)[:4] == [5, 1, 5, 1]


def test_a_fixed_gamma_is_used(mild, costs):
    method = proposer(mild["llama"], costs, replace(FREE, gamma=5, fixed_gamma=True))
    generate(mild["llama"], method, PROMPTS[0], max_new_tokens=40, eos_ids=())
    assert {row["gamma"] for row in method.source.log} <= {0, 5}
    assert any(row["gamma"] == 5 for row in method.source.log)


def test_a_report_holds_every_plan_once(mild, costs, tmp_path):
    method = proposer(mild["llama"], costs)
    for count in (1, 2):
        generate(mild["llama"], method, PROMPTS[0], max_new_tokens=30)
        method.report(tmp_path)
        rows = [json.loads(line) for line in (tmp_path / "plans.jsonl").read_text().splitlines()]
        assert rows == method.source.log
        assert len(rows) % count == 0
    assert len(json.loads((tmp_path / "latency.json").read_text())["contexts"]) == 3


def test_what_a_killed_run_left_half_written_is_dropped(mild, costs, tmp_path):
    method = proposer(mild["llama"], costs)
    generate(mild["llama"], method, PROMPTS[0], max_new_tokens=30)
    method.flush(tmp_path)
    whole = (tmp_path / "plans.jsonl").read_text()
    (tmp_path / "plans.jsonl").write_text(whole + whole[:40])
    again = proposer(mild["llama"], costs)
    again.take_up(tmp_path)
    generate(mild["llama"], again, PROMPTS[1], max_new_tokens=30)
    again.report(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "plans.jsonl").read_text().splitlines()]
    assert rows == [*method.source.log, *again.source.log]


# ---------------------------------------------------------------- settings


def test_the_yaml_repeats_the_defaults():
    content = yaml.safe_load((conf_dir() / "decoding/knapspec.yaml").read_text(encoding="utf-8"))
    assert content.pop("_target_") == "specwave.skipping.KnapSpecDecoding"
    assert content == asdict(KnapSpecDecoding())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gamma": 0}, "decoding.gamma=0: must be 1 to 64"),
        ({"gamma": 65}, "decoding.gamma=65: must be 1 to 64"),
        ({"stop": 1.5}, "decoding.stop=1.5: is a probability"),
        ({"stop": -0.1}, "decoding.stop=-0.1: is a probability"),
        ({"window": 0}, "decoding.window=0: a plan is made on at least 1"),
        ({"every": 4}, "decoding.every=4: must be at least decoding.window=5"),
        ({"growth": 0.0}, "decoding.growth=0.0: is a share"),
        ({"growth": float("nan")}, "decoding.growth=nan: is a share"),
        ({"plan_share": 0.0}, "decoding.plan_share=0.0: is a share"),
        ({"budget": 1.0}, "decoding.budget=1.0: the share of all weight"),
        ({"budget": 0.0}, "decoding.budget=0.0: the share of all weight"),
        ({"prune": 1.0}, "decoding.prune=1.0: is a cosine"),
        ({"resolution": 0}, "decoding.resolution=0: must be 1"),
        ({"latency": "x", "contexts": [128]}, "decoding.contexts=[128]: decoding.latency names"),
    ],
)
def test_bad_settings_are_user_errors(settings, words):
    with pytest.raises(UserError) as caught:
        KnapSpecDecoding(**settings)
    assert str(caught.value).startswith(words)


def test_what_does_not_fit_the_target_is_a_user_error(tiny, costs, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_measure", lambda *_: costs())
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"decoding\.budget=0\.01: is less than one"):
        KnapSpecDecoding(budget=0.01).build(tiny)
    with pytest.raises(UserError, match=r"decoding\.contexts=\[3000\]"):
        KnapSpecDecoding(contexts=[3000]).build(tiny)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"kept": [1] * 60}))
    with pytest.raises(UserError, match=r"decoding\.plan=60 sub-layers: it is a plan for another depth"):
        KnapSpecDecoding(plan=str(plan)).build(tiny)
    plan.write_text(json.dumps({"kept": [1] * 16, "gamma": 99}))
    with pytest.raises(UserError, match="its gamma is 99: one round verifies 64"):
        KnapSpecDecoding(plan=str(plan)).build(tiny)
    costs(facts={"node": "elsewhere"}).save(tmp_path / "latency.json")
    with pytest.raises(UserError, match=r"decoding\.latency=.*measured elsewhere"):
        KnapSpecDecoding(latency=str(tmp_path / "latency.json")).build(tiny)
    assert KnapSpecDecoding().build(tiny).settings == KnapSpecDecoding()


def test_a_target_of_two_blocks_decodes_plainly(five, costs):
    """Its first and last block are all there is."""
    plain = generate(five, None, [1, 2], max_new_tokens=15)
    method = proposer(five, costs)
    assert generate(five, method, [1, 2], max_new_tokens=15).tokens == plain.tokens
    assert all(row["gamma"] == 0 for row in method.source.log)


def test_evaluated_by_the_door(mild_folders, costs, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_measure", lambda *_: costs())
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))
    model = ModelConfig("mild", str(mild_folders["llama"]), dtype="float32")
    config = EvaluateConfig(model=model, benchmark=Benchmark(), decoding=FREE, limit=2, max_new_tokens=24)
    (tmp_path / "run").mkdir()
    main(config, Run(tmp_path / "run"))
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["method"] == "knapspec"
    assert results["overall"]["exact_match_rate"] == 1.0
    assert results["overall"]["tau"] > 1.0
    assert results["settings"]["decoding"]["window"] == 3
    plans = [json.loads(line) for line in (tmp_path / "run/plans.jsonl").read_text().splitlines()]
    assert plans
    assert all(len(row["kept"]) == 16 for row in plans)
    assert (tmp_path / "run/latency.json").is_file()
