"""SWIFT's search: what is tried, on what, when it ends, and that it is carried along the stream."""

from types import SimpleNamespace

import pytest
import torch

from specwave.artifacts import UserError
from specwave.decoding import Sampling, generate
from specwave.skipping.plans import skipping_blocks
from specwave.skipping.search import forced_ends
from specwave.skipping.swift import Swift, SwiftDecoding, neighbours

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4, 8], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17]]
SHORT = SwiftDecoding(gamma=3, stop=0.0, window=5, bayes=4, enough=1.0)


class Spied(Swift):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def _try(self, contexts):
        rows = [list(context.tokens) for context in contexts]
        super()._try(contexts)
        self.seen.append((rows, contexts[0].sampling))


def spied(target, settings=SHORT):
    method = settings.build(target)
    method.source = Spied(target, settings)
    return method


def matched(target, tokens, window, kept):
    """How many of the last tokens a forward with the kept set predicts, behind the target's own cache."""
    start = len(tokens) - window
    session = target.session(1, len(tokens))
    session.forward(torch.tensor([tokens[: start - 1]]), logits=False)
    session.advance([start - 1])
    logits = session.forward(torch.tensor([tokens[start - 1 : -1]]), plan=kept).logits[0]
    return int((logits.argmax(-1) == torch.tensor(tokens[start:])).sum())


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_candidates_are_tried_on_the_last_tokens_of_the_answers(family, mild):
    method = spied(mild[family])
    generate(mild[family], method, PROMPTS, max_new_tokens=16, eos_ids=())
    source = method.source
    assert len(source.seen) == len(source.log) == len(source.tried) > 4
    for (rows, _), row in zip(source.seen, source.log, strict=True):
        kept = [bool(flag) for flag in row["kept"]]
        right = sum(matched(mild[family], tokens, 5, kept) for tokens in rows)
        assert row["alpha"] == pytest.approx(right / (5 * len(rows)))


def test_candidates_skip_their_number_and_never_the_ends(mild):
    method = spied(mild["llama"])
    generate(mild["llama"], method, PROMPTS[0], max_new_tokens=40, eos_ids=())
    always = forced_ends(8)
    for row in method.source.log:
        assert sum(row["kept"]) == 16 - 5  # int(0.45 · 12)
        assert all(flag for flag, runs in zip(row["kept"], always, strict=True) if runs)
    guided = [row["guided"] for row in method.source.log]
    assert guided == [place % 4 == 3 for place in range(len(guided))]
    assert any(guided)


def test_the_best_one_is_drafted_with(mild):
    method = spied(mild["llama"])
    assert method.source.best.kept == skipping_blocks(8, [1, 3, 5])  # as the released code begins
    generate(mild["llama"], method, PROMPTS[0], max_new_tokens=40, eos_ids=())
    best, kept = 0.0, skipping_blocks(8, [1, 3, 5])
    for row in method.source.log:
        assert row["taken"] == (row["alpha"] > best)
        if row["alpha"] > best:
            best, kept = row["alpha"], tuple(map(bool, row["kept"]))
    assert method.source.best.kept == kept
    assert best > 0.0


@pytest.mark.parametrize(("change", "count"), [({"trials": 3}, 3), ({"every": 4}, None), ({"enough": 0.0}, None)])
def test_when_the_search_ends(change, count, mild):
    settings = SwiftDecoding(**{**vars(SHORT), **change})
    method = spied(mild["llama"], settings)
    made = generate(mild["llama"], method, PROMPTS[0], max_new_tokens=40, eos_ids=())
    rounds = [row["round"] for row in method.source.log]
    if count is not None:
        assert len(rounds) == count
        assert not method.source.searching
    elif "every" in change:
        assert all(place % 4 == 0 for place in rounds)
        assert 0 < len(rounds) <= -(-made.rounds // 4)
    else:  # the first that matches anything is enough
        assert [row["taken"] for row in method.source.log] == [False] * (len(rounds) - 1) + [True]
        assert not method.source.searching


def test_patience_ends_the_search(mild):
    method = spied(mild["llama"], SwiftDecoding(**{**vars(SHORT), "patience": 2}))
    generate(mild["llama"], method, PROMPTS[0], max_new_tokens=60, eos_ids=())
    taken = [row["taken"] for row in method.source.log]
    assert not method.source.searching
    assert taken[-2:] == [False, False]
    assert all(any(taken[place : place + 2]) for place in range(len(taken) - 2))


def test_what_was_found_is_carried_along(mild):
    method = spied(mild["llama"])
    assert method.scope == "stream"
    generate(mild["llama"], method, PROMPTS[0], max_new_tokens=12, eos_ids=())
    first, best = len(method.source.tried), method.source.best
    generate(mild["llama"], method, PROMPTS[2], max_new_tokens=12, eos_ids=())
    assert len(method.source.tried) > first > 0
    assert method.source.best.alpha >= best.alpha
    assert method.source.log[first]["round"] > method.source.log[first - 1]["round"]


def test_a_share_is_no_less_for_being_written_in_decimals():
    """27 blocks have 50 sub-layers between first and last: 0.58 of them are 29, not int(28.999…)."""
    assert Swift(SimpleNamespace(num_layers=27), SwiftDecoding(skip=0.58)).count == 29


def test_short_answers_try_nothing(mild):
    method = spied(mild["llama"])
    generate(mild["llama"], method, PROMPTS[0], max_new_tokens=5, eos_ids=())
    assert method.source.log == []


def test_the_same_seed_searches_the_same(mild):
    def search(seed):
        method = SwiftDecoding(**{**vars(SHORT), "seed": seed}).build(mild["qwen2"])
        made = generate(mild["qwen2"], method, PROMPTS, max_new_tokens=16, sampling=Sampling(0.8, 3), eos_ids=())
        return method.source.tried, made.accept_lengths

    assert search(0) == search(0)
    assert search(0)[0] != search(1)[0]


def test_one_swap_away():
    assert sorted(neighbours([True, False, False])) == [(False, False, True), (False, True, False)]
    found = neighbours([True, True, False, False, False])
    assert len(set(found)) == len(found) == 6
    assert all(sum(mask) == 2 for mask in found)


@pytest.mark.parametrize("skip", [0.05, 0.08])
def test_a_share_that_skips_nothing_is_a_user_error(skip, tiny):
    with pytest.raises(UserError, match=rf"decoding\.skip={skip}: skips none of the 12 sub-layers"):
        SwiftDecoding(skip=skip).build(tiny)


def test_a_target_without_a_middle_is_a_user_error(five):
    with pytest.raises(UserError, match=r"decoding\.skip=0\.45: skips none of the 0 sub-layers"):
        SwiftDecoding().build(five)
