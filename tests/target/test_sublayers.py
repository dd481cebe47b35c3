"""Kept sets and sub-layers on trial: the full set is the target to the bit, no set leaves a trace."""

import pytest
import torch

from specwave.target import Wants
from specwave.target.sublayers import QUERIES, Window

FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen3"]
# The same sums in another order: float32, 8 random blocks.
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def opened(target, lengths, seed=0, room=24):
    """A session with committed rows of these lengths."""
    draw = torch.Generator().manual_seed(seed)
    session = target.session(len(lengths), max(lengths) + room)
    session.forward(torch.randint(512, (len(lengths), max(lengths)), generator=draw))
    session.advance(list(lengths))
    return session


def some_kept(draw, share=0.6):
    return (torch.rand(16, generator=draw) < share).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(9,), (9, 9, 9), (4, 13, 7)])
@pytest.mark.parametrize("new", [1, 5])
def test_the_full_set_is_the_target(family, lengths, new, families):
    target = families[family]
    session, tokens = opened(target, lengths), torch.randint(512, (len(lengths), new))
    whole = session.forward(tokens, wants=Wants((0, 7), (3,)))
    kept = session.forward(tokens, plan=[True] * 16, wants=Wants((0, 7), (3,)))
    assert torch.equal(kept.logits, whole.logits)
    assert torch.equal(kept.hidden, whole.hidden)
    assert all(torch.equal(kept.blocks[layer], whole.blocks[layer]) for layer in (0, 7))
    assert torch.equal(kept.attentions[3], whole.attentions[3])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(9,), (4, 13, 7)])
def test_no_kept_set_changes_a_later_verification(family, lengths, families):
    """Chains of different sets, drafted and rolled back: the next forward, and all it writes, to the last bit."""
    target, draw = families[family], torch.Generator().manual_seed(2)
    rows, tokens = len(lengths), torch.randint(512, (len(lengths), 6))
    fresh = opened(target, lengths)
    expected = fresh.forward(tokens)
    session = opened(target, lengths)
    committed = [store[layer].clone() for store in (session.cache.keys, session.cache.values) for layer in range(8)]
    for share in (0.0, 0.3, 0.6, 1.0):
        mark, kept = session.mark(), some_kept(draw, share)
        for _ in range(5):
            session.forward(torch.randint(512, (rows, 1)), plan=kept)
            session.advance([1] * rows)
        session.rollback(mark)
        assert session.mark() == list(lengths)
    found = session.forward(tokens)
    assert torch.equal(found.logits, expected.logits)
    after = [store[layer] for store in (session.cache.keys, session.cache.values) for layer in range(8)]
    for before, now in zip(committed, after, strict=True):
        for row, length in enumerate(lengths):
            assert torch.equal(before[row, :, :length], now[row, :, :length])
    session.advance([6] * rows)
    fresh.advance([6] * rows)
    step = torch.randint(512, (rows, 1))
    assert torch.equal(session.forward(step).logits, fresh.forward(step).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafting_token_by_token_is_drafting_at_once(family, families):
    """What a kept set wrote past the mark is what its own next tokens see."""
    target, draw = families[family], torch.Generator().manual_seed(3)
    session, tokens = opened(target, (4, 13)), torch.randint(512, (2, 5))
    for _ in range(3):
        kept, mark = some_kept(draw), session.mark()
        at_once = session.forward(tokens, plan=kept).logits
        for place in range(5):
            step = session.forward(tokens[:, place : place + 1], plan=kept).logits[:, 0]
            torch.testing.assert_close(step, at_once[:, place], **CLOSE)
            session.advance([1, 1])
        session.rollback(mark)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trial_of_a_kept_set_is_a_forward_with_it(family, families):
    """Every branch of every window, run sub-layer by sub-layer, against a forward of its own from the prefix on."""
    target, draw = families[family], torch.Generator().manual_seed(4)
    session, lengths = opened(target, (12, 21, 9)), (4, 7, 1)
    windows = [Window(slot, session.lengths[slot] - length, length) for slot, length in ((1, 7), (0, 4), (2, 1))]
    branches = QUERIES // 4 + 3  # more than attend at once in the longest windows
    tokens = torch.randint(512, (branches, sum(lengths)), generator=draw)
    trial, hidden = session.trial(windows), target.embed(tokens)
    kept = [some_kept(draw) for _ in range(3)]
    found = []
    for flags in kept:
        state = hidden
        for sub_layer in range(16):
            state = trial.run(sub_layer, state) if flags[sub_layer] else state
        found.append(state)
    committed = session.mark()
    for flags, states in zip(kept, found, strict=True):
        start = 0
        for window in windows:
            back = list(committed)
            back[window.slot] = window.prefix
            for branch in (0, branches // 2, branches - 1):
                rows = torch.zeros(3, window.length, dtype=torch.int64)
                rows[window.slot] = tokens[branch, start : start + window.length]
                whole = opened(target, (12, 21, 9))
                whole.rollback(back)
                expected = whole.forward(rows, plan=flags).hidden[window.slot]
                torch.testing.assert_close(states[branch, start : start + window.length], expected, **CLOSE)
            start += window.length


def test_a_trial_writes_nothing(tiny):
    session = opened(tiny, (12, 21))
    kept = [store[layer].clone() for store in (session.cache.keys, session.cache.values) for layer in range(8)]
    trial, hidden = session.trial([Window(1, 15, 6), Window(0, 0, 3)]), tiny.embed(torch.randint(512, (5, 9)))
    for sub_layer in range(16):
        hidden = trial.run(sub_layer, hidden)
    after = [store[layer] for store in (session.cache.keys, session.cache.values) for layer in range(8)]
    assert all(torch.equal(before, now) for before, now in zip(kept, after, strict=True))
    assert session.lengths == [12, 21]


def test_branches_do_not_see_each_other(tiny):
    session, draw = opened(tiny, (12,)), torch.Generator().manual_seed(5)
    trial = session.trial([Window(0, 8, 4)])
    hidden = tiny.embed(torch.randint(512, (7, 4), generator=draw))
    together = trial.attention(3, hidden)
    others = hidden.clone()
    others[1:] = others[1:].flip(0)
    assert torch.equal(trial.attention(3, others)[0], together[0])
    for branch in range(7):
        torch.testing.assert_close(trial.attention(3, hidden[branch : branch + 1])[0], together[branch], **CLOSE)


@pytest.mark.parametrize(
    "window", [Window(0, 13, 1), Window(0, -1, 3), Window(0, 4, 0)], ids=["beyond", "negative", "empty"]
)
def test_what_is_no_window_is_refused(window, tiny):
    with pytest.raises(ValueError, match="no window behind 12"):
        opened(tiny, (12,)).trial([window])


def test_a_plan_for_another_depth_is_refused(tiny):
    with pytest.raises(ValueError, match="each of 16 sub-layers, got 14"):
        opened(tiny, (4,)).forward(torch.tensor([[5]]), plan=[True] * 14)


@pytest.mark.parametrize("family", FAMILIES)
def test_going_on_from_a_block_with_a_plan(family, families):
    """Blocks 0 … 2 by a plan, the rest from their output: the same as all of it by one plan."""
    target, draw = families[family], torch.Generator().manual_seed(6)
    session, tokens = opened(target, (9, 9)), torch.randint(512, (2, 4))
    kept = some_kept(draw)
    whole = session.forward(tokens, plan=kept, wants=Wants((2,)))
    resumed = session.forward(None, start_block=3, hidden=whole.blocks[2], plan=kept)
    assert torch.equal(resumed.logits, whole.logits)
