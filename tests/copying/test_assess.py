"""Labels of answers, intervals over prompts, the play-through behind a threshold, figures of the rule: by counting."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from specwave.artifacts import UserError
from specwave.copying.answers import Answer, Labelled
from specwave.copying.assess import f1_threshold, rule_figures, trigger_rows
from specwave.copying.judge import auc
from specwave.copying.match import LastN, continuation
from specwave.copying.resample import auc_intervals, draws, won
from specwave.copying.simulate import (
    GRID,
    LENGTHS,
    Rounds,
    best_length,
    best_threshold,
    copies,
    copy_lengths,
    seconds,
)

# ---------------------------------------------------------------- labels


def test_labels_of_the_worked_example():
    """n = 3, a prompt of 4: a b c x | a b c a b."""
    data = Labelled([Answer([1, 2, 3, 9, 1, 2, 3, 1, 2], 4), Answer([5, 6, 7], 2)], 3)
    assert data.all_copied.tolist() == [True, True, True, False, False, False]
    assert data.all_repeated.tolist() == [True, True, True, True, True, False]
    assert data.prompt_of.tolist() == [0, 0, 0, 0, 0, 1]
    assert (data.tokens, data.both) == (6, True)


def test_every_copied_token_is_repeated():
    draw = random.Random(0)
    for _ in range(100):
        ids = [draw.randrange(4) for _ in range(draw.randrange(2, 40))]
        data = Labelled([Answer(ids, draw.randrange(1, len(ids)))], draw.randrange(1, 6))
        assert not bool((data.all_copied & ~data.all_repeated).any())


@pytest.mark.parametrize(
    ("answers", "n", "words"),
    [
        ([Answer([1, 2, 3, 4], 2)], 5, "probe.n_train=5: none of the 1 things has so many tokens, the longest 4"),
        ([], 5, "none of the 0 things"),
        ([Answer([1, 2, 3, 4], 2)], 2, "of the 2 tokens of 1 things none is copied"),
        ([Answer([1, 1, 1, 1], 2)], 1, "of the 2 tokens of 1 things all are copied"),
    ],
)
def test_what_nothing_can_be_learnt_from(answers, n, words):
    with pytest.raises(UserError, match=words):
        Labelled(answers, n).check("things")


def test_only_some_kinds():
    data = Labelled([Answer([1, 1], 1, "a", "x"), Answer([2, 2], 1, "b", "x"), Answer([3, 3], 1, "c", "y")], 1)
    assert [one.kind for one in data.only(["x"]).answers] == ["a", "b"]
    assert [one.kind for one in data.only(["b", "y"]).answers] == ["b", "c"]


def test_a_domain_is_no_kind_of_the_same_name():
    """A file of prompts may have kinds called as a domain is; the transfer table is of domains."""
    data = Labelled([Answer([1, 1], 1, "code", "prose"), Answer([2, 2], 1, "x", "code")], 1)
    assert [one.ids for one in data.of("code").answers] == [[2, 2]]


def test_prompts_of_one_template_are_drawn_together():
    made = [Answer([1, 1], 1, template="a"), Answer([2, 2], 1, template="b"), Answer([3, 3, 3], 1, template="a")]
    assert Labelled(made, 1).template_of.tolist() == [0, 1, 0, 0]
    assert Labelled([Answer([1, 1], 1), Answer([2, 2], 1)], 1).template_of.tolist() == [0, 1]


# ---------------------------------------------------------------- intervals


def drawn(prompts, seed):
    draw = torch.Generator().manual_seed(seed)
    owner = torch.arange(prompts).repeat_interleave(torch.randint(1, 7, (prompts,), generator=draw))
    scores = torch.randint(0, 9, (2, len(owner)), generator=draw).float()  # many ties
    labels = torch.rand(len(owner), generator=draw) < 0.2 + 0.07 * scores[0]
    return scores, labels, owner


@pytest.mark.parametrize("seed", range(5))
def test_intervals_are_those_of_tokens_written_down_as_often_as_they_were_drawn(seed):
    scores, labels, owner = drawn(8, seed)
    found = auc_intervals(scores, labels, owner, 60, seed)
    each = []
    for counts in draws(8, 60, seed):
        places = torch.arange(len(owner)).repeat_interleave(counts[owner].long())
        each.append(auc(scores[:, places], labels[places]))
    areas = torch.stack(each)
    for place in range(2):
        some = areas[:, place][~areas[:, place].isnan()]
        assert float(found[0][place]) == pytest.approx(float(some.quantile(0.025)), abs=1e-12)
        assert float(found[1][place]) == pytest.approx(float(some.quantile(0.975)), abs=1e-12)
    whole = won(scores[0], labels, owner, 8).sum() / (labels.sum() * (~labels).sum())
    assert float(whole) == pytest.approx(float(auc(scores[0], labels)), abs=1e-12)


def test_resamples_draw_as_many_prompts():
    counts = draws(11, 50, 3)
    assert counts.sum(1).tolist() == [11.0] * 50
    assert torch.equal(counts, draws(11, 50, 3))
    assert not torch.equal(counts, draws(11, 50, 4))


def test_no_interval_without_two_classes():
    scores, _, owner = drawn(5, 0)
    low, high = auc_intervals(scores, torch.ones(len(owner), dtype=torch.bool), owner, 20)
    assert low.isnan().all()
    assert high.isnan().all()


# ---------------------------------------------------------------- the play-through


def forward(tokens):
    return 1.0 + 0.03 * tokens


def texts(count, seed):
    draw = random.Random(seed)
    for number in range(count):
        ids = [draw.randrange(5) for _ in range(draw.randrange(20, 40))]
        yield Answer(ids, draw.randrange(1, 6), id=f"a{number}")


def played(answer, probabilities, threshold, rounds, tau):
    """Round after round, as decoding goes: τ a whole number."""
    done, total = 0, 0.0
    while done < answer.tokens:
        text = answer.ids[: answer.start + done]
        index = LastN(8, 1, "recent")
        index.extend(text)
        match, left = index.find(), answer.ids[len(text) :]
        room = min(rounds.length, len(left) - 1)
        if done and match is not None and room > 0 and probabilities[done - 1] >= threshold:
            drafts = continuation(text, match.start, room, overlap=True)
            right = sum(
                1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, left, strict=False))
            )
            total += forward(1 + len(drafts))
            done += right + 1
        else:
            total += forward(1 + rounds.neural_drafts) + rounds.neural_seconds
            done += tau
    return total


@pytest.mark.parametrize("tau", [1, 3])
def test_seconds_are_those_of_decoding_round_after_round(tau):
    rounds, thresholds = Rounds(6, float(tau), tau, 0.1), torch.tensor([0.01, 0.3, 0.6, 0.99])
    draw = torch.Generator().manual_seed(1)
    for answer in texts(12, 2):
        chances = torch.rand(answer.tokens, generator=draw)
        found = seconds(chances, copies(answer, 6), thresholds, rounds, forward)
        wanted = [played(answer, chances.tolist(), float(one), rounds, tau) for one in thresholds]
        assert found.tolist() == pytest.approx(wanted)


def test_a_fractional_tau_lies_between():
    answer = next(texts(1, 5))
    never = torch.zeros(answer.tokens)
    low, mid, high = (
        float(seconds(never, copies(answer, 6), torch.tensor([0.5]), Rounds(6, tau, 0), forward)) for tau in (2, 2.5, 3)
    )
    assert high < mid < low


def test_the_best_threshold_lets_copies_through_where_they_pay():
    """Tokens of a loop get 0.8, of a text whose repeats are accidents 0.4: what is fastest lies between."""
    loops = [Answer([7, *[1, 2, 3, 4] * 8], 4), Answer([*range(10, 40), 99, 10, 98, 96, 11, 97, 95, 12, 94], 30)]
    chances = torch.cat([torch.full((loops[0].tokens,), 0.8), torch.full((loops[1].tokens,), 0.4)])
    best, rates = best_threshold(chances, loops, Rounds(10, 2.0, 2, 0.0), forward)
    assert 0.4 < best <= 0.8
    assert len(rates) == len(GRID)
    assert float(rates.max()) == pytest.approx(float(rates[GRID.index(best)]))
    assert float(rates[0]) < float(rates.max())
    assert float(rates[-1]) < float(rates.max())


def test_what_copies_of_every_length_bring():
    """Against answers played through at each length, round after round, with copies made anew."""
    answers, draw = list(texts(8, 3)), torch.Generator().manual_seed(2)
    chances = torch.rand(sum(one.tokens for one in answers), generator=draw)
    rows = {row["length"]: row for row in copy_lengths(chances, answers, 0.3)}
    assert tuple(rows) == LENGTHS
    for length in (2, 6, 48):
        made, others = [], 0
        for own, one in zip(chances.split([one.tokens for one in answers]), answers, strict=True):
            done = 0
            while done < one.tokens:
                text, left = one.ids[: one.start + done], one.ids[one.start + done :]
                index = LastN(8, 1, "recent")
                index.extend(text)
                match, room = index.find(), min(length, len(left) - 1)
                if done and own[done - 1] >= 0.3 and match is not None and room:
                    drafts = continuation(text, match.start, room, overlap=True)
                    right = next(
                        (n for n, pair in enumerate(zip(drafts, left, strict=False)) if pair[0] != pair[1]), room
                    )
                    made.append((room, right))
                    done += right + 1
                else:
                    others, done = others + 1, done + 1
        assert (rows[length]["copies"], rows[length]["others"]) == (len(made), others)
        assert len(made) > 9
        assert rows[length]["drafted"] == pytest.approx(sum(drafts for drafts, _ in made) / len(made))
        assert rows[length]["accepted"] == pytest.approx(sum(right for _, right in made) / len(made))
    assert copy_lengths(torch.zeros(len(chances)), answers, 0.3) == []


def test_the_length_under_which_all_rounds_take_least():
    """In 100 tokens behind which 12 more are copied at most."""
    rows = [
        {"length": length, "copies": 10, "drafted": float(length), "accepted": right, "others": 100 - 10 * (right + 1)}
        for length, right in ((4, 3), (8, 6), (48, 7))
    ]
    assert best_length(rows, forward) == 8  # 1.27 × 10 + 1.03 × 30
    assert best_length(rows, lambda tokens: 1.0) == 48
    assert best_length(rows, lambda tokens: float(tokens)) == 4


@pytest.mark.parametrize(("key", "value"), [("length", 0), ("neural_tokens", 0.5), ("neural_seconds", math.inf)])
def test_rounds_that_cannot_be(key, value):
    with pytest.raises(UserError, match=f"probe.rounds.{key}={value}"):
        Rounds(**{key: value})


# ---------------------------------------------------------------- the rule


def test_figures_of_the_rule_are_counted():
    """A token triggers when it stood before and its probability reaches the threshold."""
    data = Labelled([Answer([1, 2, 3, 9, 1, 2, 3, 1, 8], 4, "k", "code"), Answer([5, 5, 6], 1, "m", "prose")], 3)
    assert data.all_copied.tolist() == [True, True, True, False, False, False, False]
    assert data.all_repeated.tolist() == [True, True, True, True, False, True, False]
    chances = torch.tensor([0.9, 0.2, 0.7, 0.8, 0.99, 0.6, 0.99])
    found = rule_figures(chances.logit(), data, 0.65)
    assert found == {"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3}
    assert rule_figures(chances.logit(), data, 0.999) == {"precision": None, "recall": 0.0, "f1": 0.0}
    best, f1 = f1_threshold(chances.logit(), data)
    each = {one: rule_figures(chances.logit(), data, one)["f1"] for one in [0.19, 0.59, 0.65, 0.75, 0.85]}
    assert f1 == pytest.approx(max(each.values()))
    assert rule_figures(chances.logit(), data, best)["f1"] == pytest.approx(f1)

    rows = trigger_rows(data, data, data.all_repeated & (chances >= 0.65))
    by = {(row["part"], row["domain"], row["kind"]): row for row in rows}
    assert set(by) == {
        (part, *group)
        for part in ("all", "test")
        for group in (("all", "all"), ("code", "all"), ("prose", "all"), ("code", "k"), ("prose", "m"))
    }
    whole, code, prose = by["test", "all", "all"], by["test", "code", "all"], by["test", "prose", "m"]
    assert (whole["tokens"], whole["repeated"], whole["copied"]) == (7, 5, 3)
    assert whole["accidental"] == pytest.approx(2 / 5)
    assert (code["probe_precision"], code["probe_recall"]) == (2 / 3, 2 / 3)
    assert (prose["accidental"], prose["probe_rate"], prose["probe_precision"]) == (1.0, 0.0, None)
    assert by["all", "all", "all"]["probe_precision"] is None


def test_test_prompts_may_all_have_been_passed_over():
    data, nothing = Labelled([Answer([1, 1, 2], 1, "k", "code")], 1), Labelled([], 1)
    rows = trigger_rows(data, nothing, torch.zeros(0, dtype=torch.bool))
    (row,) = (row for row in rows if row["part"] == "test")
    assert (row["prompts"], row["tokens"], row["trigger_rate"], row["probe_f1"]) == (0, 0, None, None)
    assert auc(torch.zeros(2, 0), torch.zeros(0, dtype=torch.bool)).isnan().all()


def test_a_threshold_stays_between_0_and_1():
    data = Labelled([Answer([1, 1, 1, 1], 1)], 1)
    best, _ = f1_threshold(torch.full((3,), 99.0), data)
    assert 0 < best < 1
