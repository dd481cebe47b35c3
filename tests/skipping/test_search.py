"""The programme over hidden states against a dictionary of cells, a branch at a time; what every kept set must hold."""

import pytest
import torch
import torch.nn.functional as F

from specwave.skipping.search import forced_ends, largest_batches, search
from specwave.skipping.windows import every_sub_layer
from specwave.target.sublayers import Window

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
# The same sums in another order: float32, 8 blocks.
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def cosine(state, target):
    return float(F.cosine_similarity(state, target, dim=-1).mean())


def reference(step, target, weights, limit, forced, prune):
    """The recurrence as it is written: cells {skipped weight: (cosine, kept, state)}, every sub-layer run alone."""
    cells = {0: (1.0, (), target[0])}
    for i, weight in enumerate(weights):
        following = {}
        for saved, (_, kept, state) in sorted(cells.items()):
            ran = step(i, state)
            options = [(saved, (*kept, True), ran)]
            if not forced[i] and saved + weight <= limit:
                options.append((saved + weight, (*kept, False), state))
            for where, flags, after in options:
                value = cosine(after, target[i + 1])
                held = following.get(where)
                if held is None or value > held[0] or (value == held[0] and flags[-1] and not held[1][-1]):
                    following[where] = (value, flags, after)
        cells = {where: cell for where, cell in following.items() if where == 0 or cell[0] >= prune}
    return {where: cells[where] for where in sorted(cells)}


def evidence(session, prompts, length, draw):
    """A committed window of `length` random tokens behind each row: (windows, the target's states at every depth)."""
    target = session.target
    tokens = torch.randint(3, 512, (len(prompts), length), generator=draw)
    starts = session.mark()
    output = session.forward(tokens, wants=every_sub_layer(8))
    session.advance([length] * len(prompts))
    states = [target.embed(tokens).flatten(0, 1)]
    for layer in range(8):
        states += [output.attentions[layer].flatten(0, 1), output.blocks[layer].flatten(0, 1)]
    return [Window(row, start, length) for row, start in enumerate(starts)], states, tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("pair", "prune"), [((1, 3), -1.0), ((2, 1), -1.0), ((1, 1), 0.5), ((5, 1), 0.8)])
def test_the_search_is_the_recurrence(family, pair, prune, mild, opened):
    session, prompts = opened(mild[family], (14, 9), seed=1)
    windows, states, _ = evidence(session, prompts, 4, torch.Generator().manual_seed(2))
    weights, forced = [*pair] * 8, forced_ends(8)
    limit = sum(weights) // 2
    trial, sizes = session.trial(windows), []

    def run(i, hidden):
        sizes.append(len(hidden))
        return trial.run(i, hidden)

    found, final = search(run, states, weights, limit, forced, prune)
    alone = reference(lambda i, state: trial.run(i, state[None])[0], states, weights, limit, forced, prune)
    assert [one.saved for one in found] == list(alone)
    for one, state in zip(found, final, strict=True):
        value, kept, expected = alone[one.saved]
        assert one.kept == kept
        assert one.cosine == pytest.approx(value, abs=1e-5)
        torch.testing.assert_close(state, expected, **CLOSE)
    assert len(sizes) == 16  # one batch per depth
    assert all(size <= most for size, most in zip(sizes, largest_batches(weights, limit, forced), strict=True))
    if prune == -1.0:
        assert sizes == largest_batches(weights, limit, forced)
    assert len(found) > 3


@pytest.mark.parametrize("prune", [-1.0, 0.5])
@pytest.mark.parametrize("pair", [(1, 3), (3, 1), (1, 1)])
def test_what_every_kept_set_holds(pair, prune, mild, opened):
    target = mild["llama"]
    session, prompts = opened(target, (14,), seed=3)
    windows, states, tokens = evidence(session, prompts, 6, torch.Generator().manual_seed(4))
    weights, forced = [*pair] * 8, forced_ends(8)
    found, final = search(session.trial(windows).run, states, weights, sum(weights) // 2, forced, prune)
    assert found[0].kept == (True,) * 16
    assert found[0].cosine == pytest.approx(1.0, abs=1e-5)
    assert [one.saved for one in found] == sorted({one.saved for one in found})
    back = [windows[0].prefix]
    for one, state in zip(found, final, strict=True):
        assert one.kept[:2] == one.kept[-2:] == (True, True)
        assert one.saved == sum(weight for weight, flag in zip(weights, one.kept, strict=True) if not flag)
        assert one.saved <= sum(weights) // 2
        assert one.cosine >= prune
        # The state is what a forward with this kept set gives behind the same prefix, the oracle of the whole search.
        session.rollback(back)
        torch.testing.assert_close(session.forward(tokens, plan=one.kept).hidden[0], state, **CLOSE)


def test_a_single_skip_is_the_best_of_all(mild, opened):
    """With room for one sub-layer the programme is exhaustive: try every one of them."""
    target = mild["qwen3"]
    session, prompts = opened(target, (14,), seed=5)
    windows, states, tokens = evidence(session, prompts, 5, torch.Generator().manual_seed(6))
    forced = forced_ends(8)
    found, _ = search(session.trial(windows).run, states, [1] * 16, 1, forced, -1.0)
    assert [one.saved for one in found] == [0, 1]
    values = {}
    for skipped in range(2, 14):
        session.rollback([windows[0].prefix])
        kept = [place != skipped for place in range(16)]
        values[tuple(kept)] = cosine(session.forward(tokens, plan=kept).hidden[0], states[-1])
    best = max(values, key=values.get)
    assert found[1].cosine <= values[best] + 1e-5
    assert values[found[1].kept] == pytest.approx(found[1].cosine, abs=1e-5)


def test_branches_are_pruned_but_never_the_full_set():
    """Made-up sub-layers that turn every state away from the target's: nothing but the full set is left."""
    target = [torch.randn(3, 8) for _ in range(9)]
    found, final = search(lambda i, hidden: -target[i + 1].expand_as(hidden), target, [1] * 8, 4, [False] * 8, 0.99)
    assert [one.kept for one in found] == [(True,) * 8]
    assert found[0].cosine == pytest.approx(-1.0)
    assert torch.equal(final[0], -target[8])


def test_between_equal_states_the_one_that_runs_stays():
    """Sub-layers that do nothing: every cell can be reached in many ways, all with cosine 1."""
    target = [torch.ones(2, 4)] * 5
    found, _ = search(lambda i, hidden: hidden, target, [1, 1, 1, 1], 2, [False] * 4, 0.5)
    assert [one.saved for one in found] == [0, 1, 2]
    assert found[1].kept == (False, True, True, True)
    assert found[2].kept == (False, False, True, True)


def test_how_many_branches_there_are():
    forced = forced_ends(4)
    assert forced == [True, True, False, False, False, False, True, True]
    assert largest_batches([1, 3] * 4, 8, forced) == [1, 1, 1, 2, 4, 6, 9, 9]
    assert largest_batches([1, 3] * 4, 0, forced) == [1] * 8
