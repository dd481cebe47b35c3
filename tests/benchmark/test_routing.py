"""Choosing a drafter per category or question, on made-up answers whose truth is known."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from made_up import questions, run_folder

from specwave.benchmark.questions import BUILTIN, Question, fingerprint
from specwave.benchmark.routing import (
    PIECES,
    Answers,
    best_fixed,
    by_category,
    by_question,
    by_router,
    chance_of_categories,
    chance_of_questions,
    choose,
    hindsight,
    pieces,
    ratio,
    reliability,
)
from specwave.data.conversations import prompt_ids
from specwave.target import load_target

LONG = 120  # tokens of an answer
EXTRA = Question("extra", "qa", ("Not asked?",))


def row(name, lengths, category="qa", **more):
    return {"question_id": name, "category": category, "choices": [{"accept_lengths": lengths}], **more}


def made(chance_DQ, categories=None, seed=0):
    """Answers of LONG tokens; of each round up to 4 drafts are accepted, each with the drafter's chance there."""
    draw, rows = np.random.default_rng(seed), {}
    for drafter, chances in enumerate(chance_DQ):
        rows[f"d{drafter}"] = []
        for place, chance in enumerate(chances):
            lengths, left = [], LONG
            while left:
                lengths.append(min(left, 1 + min(4, int(draw.geometric(1 - chance)) - 1)))
                left -= lengths[-1]
            rows[f"d{drafter}"].append(row(place, lengths, categories[place] if categories else "qa"))
    return Answers.of(rows)


def true_tau(chance):
    """Of rounds of up to 4 drafts: 1 + p + p² + p³ + p⁴."""
    return sum(chance**place for place in range(5))


# ---------------------------------------------------------------- counting


def test_a_round_is_in_the_piece_its_first_token_lies_in():
    # tokens 0 1 2 | 3 | 4 5 6 7 | 8 … 15: of 16, pieces of two; rounds begin at 0, 3, 4 and 8
    tokens, rounds = pieces([3, 1, 4, 8])
    assert tokens.tolist() == [3, 1, 4, 0, 8, 0, 0, 0]
    assert rounds.tolist() == [1, 1, 1, 0, 1, 0, 0, 0]
    assert pieces([5])[1].tolist() == [1] + [0] * (PIECES - 1)


def test_questions_that_not_all_answered_are_left_out():
    lost = row("b", [2], specwave={"error": "out of memory"})
    found = Answers.of(
        {"x": [row("a", [2, 2]), row("b", [3]), row("c", [1])], "y": [row("c", [4]), lost, row("a", [4])]}
    )
    assert found.ids == ["a", "c"]
    assert found.whole.tolist() == [[[4, 1], [4, 4]], [[2, 1], [1, 1]]]


def test_the_best_of_every_question_by_hand():
    """τ of the choice is Σ tokens / Σ rounds, no mean of τ."""
    found = Answers.of({"x": [row(0, [4, 4]), row(1, [1] * 8)], "y": [row(0, [2] * 4), row(1, [2] * 4)]})
    outcome = hindsight(found.whole)
    assert best_fixed(found.whole) == 1  # 8 rounds against 10
    assert choose(found.whole).tolist() == [0, 1]
    assert outcome.tau == 16 / 6
    assert outcome.gain == pytest.approx(16 / 6 - 16 / 8)
    together = hindsight(found.whole, np.array([0, 0]))
    assert together.gain == 0


def test_hindsight_is_the_best_of_all_ways_to_choose():
    found = made(np.random.default_rng(1).uniform(0.2, 0.7, (3, 4)))
    every = np.stack(np.meshgrid(*[np.arange(3)] * 4)).reshape(4, -1).T
    taus = [ratio(found.whole[:, picks, np.arange(4)]) for picks in every]
    assert hindsight(found.whole).tau == pytest.approx(max(taus))


def test_reliability_is_the_share_that_repeats():
    draw = np.random.default_rng(2)
    lead = draw.normal(0, 0.05, (4, 4000))
    one, other = (
        np.stack([np.full((4, 4000), 100.0), 100 * (0.6 + lead + draw.normal(0, 0.05, (4, 4000)))]) for _ in "ab"
    )
    assert reliability(one, other) == pytest.approx(0.5, abs=0.03)
    assert reliability(one[:, :1], other[:, :1]) == 0  # a drafter alone is never ahead


# ---------------------------------------------------------------- what can be had


def test_equal_drafters_leave_nothing_but_hindsight():
    found = made(np.full((6, 104), 0.4), ["abcdefgh"[place % 8] for place in range(104)])
    for outcome, chance, held in (
        (hindsight(found.whole), chance_of_questions(found), by_question(found)),
        (hindsight(found.whole, found.category), chance_of_categories(found), by_category(found)),
    ):
        assert outcome.gain > 0.02
        assert outcome.gain == pytest.approx(chance.mean(), rel=0.25)
        assert abs(held.gain) < 0.01


def test_unequal_drafters_that_differ_alike_everywhere_leave_nothing_either():
    """Choosing on noise would lose what the best one is ahead by; a choice that trusts what repeats does not."""
    levels = np.repeat([[0.35], [0.40], [0.45]], 104, 1)
    found = made(levels, ["abcd"[place % 4] for place in range(104)])
    for held in (by_question(found), by_category(found)):
        assert held.trust < 0.25
        assert -0.01 < held.gain < 0.01


def test_drafters_of_different_categories_are_found():
    """Two categories, each of which has a drafter of its own: the truth is the mean of their rounds per token."""
    categories = ["ab"[place % 2] for place in range(100)]
    good = np.array([[0.6 if (name == "a") == (drafter == 0) else 0.4 for name in categories] for drafter in (0, 1)])
    found = made(good, categories)
    fixed = 2 / (1 / true_tau(0.6) + 1 / true_tau(0.4))
    for outcome in (by_category(found), by_question(found), hindsight(found.whole, found.category)):
        assert outcome.tau == pytest.approx(true_tau(0.6), abs=0.06)
        assert outcome.gain == pytest.approx(true_tau(0.6) - fixed, abs=0.09)
        low, high = outcome.gain_interval
        assert 0 < low < outcome.gain < high
    assert (chance_of_categories(found) < outcome.gain / 2).all()


def test_what_can_be_had_lies_between_held_out_and_hindsight():
    """Chances that differ from question to question by a little, less than the noise of one answer."""
    chances = 0.4 + np.random.default_rng(1).normal(0, 0.05, (6, 104))
    found, rounds_DQ = made(chances), 1 / true_tau(chances)
    truth = 1 / rounds_DQ.min(0).mean() - 1 / rounds_DQ.mean(1).min()
    above, below = hindsight(found.whole).gain, by_question(found)
    assert below.gain_interval[0] > 0
    assert truth / 3 < below.gain < truth < above
    assert chance_of_questions(found).max() < above


def test_what_differs_by_question_is_no_category_s():
    draw = np.random.default_rng(3)
    good = np.where(draw.integers(0, 2, 120) == np.array([[0], [1]]), 0.6, 0.3)
    found = made(good, ["abcd"[place % 4] for place in range(120)])
    assert by_question(found).gain > 0.25
    assert by_question(found).trust > 0.6
    assert by_category(found).gain < 0.05


def test_a_router_learns_what_its_features_tell_and_nothing_else():
    draw = np.random.default_rng(4)
    side = draw.integers(0, 2, 120)
    found = made(np.where(side == np.array([[0], [1]]), 0.6, 0.4))
    noise = draw.normal(size=(120, 20))
    told = noise.copy()
    told[:, 7] += 8 * side
    learnt, ceiling = by_router(found, told, repeats=2), by_question(found)
    assert learnt.gain > 0.9 * ceiling.gain
    assert by_router(found, noise, repeats=2).gain < 0.3 * ceiling.gain


def test_a_router_without_anything_to_learn_keeps_to_the_best_one():
    found = made(np.repeat([[0.35], [0.45]], 100, 1))
    outcome = by_router(found, np.random.default_rng(5).normal(size=(100, 20)), repeats=2)
    assert -0.02 < outcome.gain < 0.01


@pytest.mark.parametrize("each", [3, 4, 9])
def test_a_lead_that_is_of_categories_is_found_with_few_questions_of_each(each):
    """Of two drafters each is ahead in one half of the categories, by far: held out it is nearly what hindsight has."""
    categories = [f"c{place}" for place in range(12) for _ in range(each)]
    chances = [[0.8 if (place // each) % 2 == way else 0.2 for place in range(12 * each)] for way in (0, 1)]
    found = made(np.array(chances), categories)
    assert by_category(found).gain > 0.8 * hindsight(found.whole, found.category).gain > 0.2


def test_few_questions_are_enough_for_every_way():
    found = made(np.full((2, 4), 0.4), ["a", "a", "b", "c"])
    for outcome in (by_category(found), by_question(found), by_router(found, np.full((4, 3), 0.1), repeats=1)):
        assert outcome.gain_interval is not None
        assert np.isfinite(outcome.gain)


# ---------------------------------------------------------------- the script


@pytest.fixture(scope="module")
def program(script):
    return script("routing")


def run(program, monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["routing.py", *map(str, arguments)])
    program.main()
    return capsys.readouterr().out


def test_the_script_tells_of_every_way(program, monkeypatch, capsys, tmp_path):
    out = run(program, monkeypatch, capsys, run_folder(tmp_path))
    assert "3 drafters (L2-15-27 (eagle3); L29 (eagle2); L4-17-29), 25 questions, 13 categories" in out  # one was lost
    found = {line.split("|")[1].strip(): line for line in out.splitlines() if line.startswith("| ")}
    assert list(found)[1:] == [
        "best fixed, L2-15-27 (eagle3)",
        *(
            f"the best of each {group}, {kind}"
            for group in ("category", "question")
            for kind in ("hindsight", "held out")
        ),
    ]
    tau = {name: float(line.split("|")[2].split()[0]) for name, line in list(found.items())[1:]}
    fixed = tau["best fixed, L2-15-27 (eagle3)"]
    assert fixed < tau["the best of each category, hindsight"] < tau["the best of each question, hindsight"]
    assert "The choice by question" in out


def test_the_router_reads_the_prompts_of_the_questions(program, monkeypatch, capsys, tmp_path):
    tiny = load_target("tiny")
    asked = [replace(one, turns=(f"What is {one.id}?", *one.turns[1:])) for one in questions()]
    more = {"target": "tiny", "fingerprint": tiny.fingerprint, "benchmark": {"fingerprint": fingerprint(asked)}}
    folder, file = run_folder(tmp_path / "run", asked, more=more), tmp_path / "question.jsonl"
    lines = ({"question_id": one.id, "category": one.category, "turns": one.turns} for one in [*asked, EXTRA])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(program, "load_target", lambda _: tiny)
    monkeypatch.setattr(program.routing, "by_router", partial(by_router, repeats=1))
    given = [folder, "--router", "--questions", file]
    assert "| a router's of each question, held out |" in run(program, monkeypatch, capsys, *given, "--layer", 3)
    ids = prompt_ids(tiny, [{"role": "user", "content": asked[0].turns[0]}])
    direct = tiny.states(torch.tensor([ids]), [3])[3][0, 1:].float().mean(0)
    assert program.mean_state(tiny, asked[0], 3) == pytest.approx(direct.numpy(), rel=1e-4, abs=1e-6)
    for wrong, said in (
        (["--layer", 8], "--layer=8"),
        (["--questions", BUILTIN], "these are not the questions of"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run(program, monkeypatch, capsys, *given, *wrong)
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err


def test_runs_that_cannot_be_compared_are_refused(program, monkeypatch, capsys, tmp_path):
    one, other = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", more={"max_new_tokens": 32})
    alone = run_folder(tmp_path / "c", methods={"L29": ([29], "eagle2", 0.5, 0)})
    few = run_folder(tmp_path / "d", questions()[:19])
    apart = [Question(place, f"category {place}", ("One?",)) for place in range(20)]
    for folders, said in (
        ([one, other], "other questions, target, limit or sampling"),
        ([alone], "two drafters or more"),
        ([few], "18 questions"),
        ([run_folder(tmp_path / "e", apart, {"x": ([1], None, 0.5, 0), "y": ([2], None, 0.5, 0)})], "has one question"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run(program, monkeypatch, capsys, *folders)
        assert stopped.value.code == 2
        assert said in capsys.readouterr().err
