"""Draft & Verify: what a kept set is worth, by hand and by brute force; the search; its note in the cache."""

import builtins
import json
import sys
from dataclasses import replace

import pytest
import torch

from specwave.artifacts import UserError
from specwave.data.conversations import Sample
from specwave.decoding import generate
from specwave.skipping import draft_verify, measure
from specwave.skipping.draft_verify import DraftVerifyDecoding, objective, optimise
from specwave.skipping.plans import Plan, skipping_blocks
from specwave.skipping.stops import Adaptive

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4, 8], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17]]
SMALL = DraftVerifyDecoding(gamma=4, trials=15, limit=2, max_new_tokens=8)


def answers(target, count=9):
    made = generate(target, None, PROMPTS, max_new_tokens=count, eos_ids=())
    pairs = zip(PROMPTS, made.tokens, strict=True)
    return [Sample(prompt + new, [False] * len(prompt) + [True] * count) for prompt, new in pairs]


# ---------------------------------------------------------------- what a kept set is worth


def test_the_whole_target_by_hand(mild, costs):
    """α = 1, a draft step costs T(1) = 1.01 s, T(k) = 1 + 0.01·k: with γ = 1 and 2 it is 2 / (1.01 + 1.02) and
    3 / (2·1.01 + 1.03), less than plain decoding's 1/1.01."""
    value, context = objective(mild["llama"], answers(mild["llama"]), costs(), 2)
    assert context == (15 + 10 + 19) // 3
    rate, alpha = value((True,) * 16)
    assert alpha == 1.0
    assert rate == pytest.approx(max(2 / (1.01 + 1.02), 3 / (2 * 1.01 + 1.03)))
    assert value((False,) * 16) == (0.0, 0.0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_alpha_is_what_forwards_agree_on(family, mild, costs):
    target, samples = mild[family], answers(mild[family])
    value, context = objective(target, samples, costs(), 3)
    shares = set()
    few, most = skipping_blocks(8, [2, 5]), skipping_blocks(8, range(1, 7))
    for kept in (few, most, (True, False) * 8, (False, True) * 8):
        right = 0
        for sample in samples:
            start = sample.answer.index(True)
            session = target.session(1, len(sample.ids))
            session.forward(torch.tensor([sample.ids[: start - 1]]), logits=False)
            session.advance([start - 1])
            logits = session.forward(torch.tensor([sample.ids[start - 1 : -1]]), plan=kept).logits[0]
            right += int((logits.argmax(-1) == torch.tensor(sample.ids[start:])).sum())
        rate, alpha = value(kept)
        assert alpha == pytest.approx(right / 27)
        draft = costs().t_draft(kept, context)
        sums = [sum(alpha**i for i in range(gamma + 1)) / (gamma * draft + 1.01 + 0.01 * gamma) for gamma in (1, 2, 3)]
        assert rate == pytest.approx(max(sums))
        shares.add(alpha)
    assert len(shares) > 1


# ---------------------------------------------------------------- the search


def worth(kept):
    """Each of the first five members is worth one, each other costs half."""
    return float(sum(kept[:5]) - 0.5 * sum(kept[5:])), 0.0


def test_the_search_learns_and_repeats_itself():
    tried = optimise(worth, 16, 60, seed=1)
    assert len(tried) == 60
    assert tried == optimise(worth, 16, 60, seed=1)
    assert tried != optimise(worth, 16, 60, seed=2)
    chance = max(rate for _, (rate, _) in tried[:12])
    best = max(rate for _, (rate, _) in tried)
    assert best > chance
    shares = [1 - sum(kept) / 16 for kept, _ in tried[:12]]
    assert sum(shares) / 12 < 0.45  # drawn to skip a quarter on average, not half


def test_a_set_met_again_is_not_valued_again():
    asked = []

    def counted(kept):
        asked.append(kept)
        return worth(kept)

    tried = optimise(counted, 2, 20, seed=0)
    assert len(tried) == 20
    assert len(asked) == len(set(asked)) <= 4


def test_without_optuna_the_extra_is_named(monkeypatch):
    before = builtins.__import__

    def without(name, *more):
        if name == "optuna":
            raise ModuleNotFoundError("No module named 'optuna'", name="optuna")
        return before(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"decoding\.plan=null: .*pip install 'specwave\[bayes\]'"):
        optimise(worth, 4, 3, seed=0)


def test_without_optuna_the_target_answers_nothing(monkeypatch, mild, cached):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(draft_verify, "answered", lambda *_, **__: pytest.fail("answers that nobody can search on"))
    with pytest.raises(UserError, match=r"decoding\.plan=null: .*pip install 'specwave\[bayes\]'"):
        SMALL.build(mild["llama"])


# ---------------------------------------------------------------- build, note and report


@pytest.fixture
def cached(costs, tmp_path, monkeypatch):
    """A cache of its own, made-up costs, and how often a search has run."""
    monkeypatch.setattr(measure, "_measure", lambda *_: costs())
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))
    searched, search = [], draft_verify.optimise

    def counted(*args):
        searched.append(args[1:])
        return search(*args)

    monkeypatch.setattr(draft_verify, "optimise", counted)
    return searched


def test_a_plan_is_found_once_and_used_again(mild, cached, tmp_path):
    target = mild["llama"]
    first = SMALL.build(target)
    assert cached == [(16, 15, 0)]
    again = SMALL.build(target)
    assert cached == [(16, 15, 0)]
    assert again.source.present == first.source.present
    assert again.source.record == first.source.record
    assert first.source.present.gamma == 4
    assert first.source.present.rate == max(first.source.record["rates"])
    first.report(tmp_path)
    given = replace(SMALL, plan=str(tmp_path / "plan.json")).build(target)
    assert (given.source.present.kept, given.source.present.gamma) == (first.source.present.kept, 4)
    other = replace(SMALL, plan=str(tmp_path / "plan.json"), gamma=2).build(target)
    assert other.source.present.gamma == other.settings.gamma == 4  # the file's, and results say so
    assert len(cached) == 1
    (note,) = (tmp_path / "cache/plans").iterdir()
    note.write_text(note.read_text()[:-20])  # damaged: found again
    assert SMALL.build(target).source.present == first.source.present
    assert len(cached) == 2


@pytest.mark.parametrize("change", [{"seed": 1}, {"gamma": 3}, {"trials": 16}, {"limit": 3}, {"max_new_tokens": 7}])
def test_other_settings_are_searched_anew(change, mild, cached):
    SMALL.build(mild["llama"])
    replace(SMALL, **change).build(mild["llama"])
    assert len(cached) == 2


def test_its_rule_moves_the_threshold_unless_another_is_given(mild, cached, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"kept": [1] * 16}))
    method = replace(SMALL, plan=str(plan)).build(mild["llama"])
    assert method.stop.rule == Adaptive()
    assert method.settings.stop == Adaptive()  # results name it
    assert method.source.present == Plan((True,) * 16, 4)
    other = replace(SMALL, plan=str(plan), stop=0.5).build(mild["llama"])
    assert (other.stop.probability, other.settings.stop) == (0.5, 0.5)
    assert cached == []


def test_prompts_of_ones_own(mild, cached, tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps({"conversations": [{"from": "human", "value": "What is a wave?"}]}) + "\n")
    replace(SMALL, prompts=str(path)).build(mild["llama"])
    path.write_text("")
    with pytest.raises(UserError, match=r"decoding\.prompts="):
        replace(SMALL, prompts=str(path)).build(mild["llama"])
    with pytest.raises(UserError, match=r"decoding\.prompts=.*no such file"):
        replace(SMALL, prompts=str(tmp_path / "none.jsonl")).build(mild["llama"])
    with pytest.raises(UserError, match=r"decoding\.max_new_tokens=2047: leaves 2 of 2 prompts no room"):
        replace(SMALL, max_new_tokens=2047).build(mild["llama"])
    assert len(cached) == 1
