"""Early exits and going on from them: what the first blocks did once need not be done again."""

import gc

import pytest
import torch

from specwave.target import Wants

FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen3"]
# The same sums in another order: float32, 8 random blocks.
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
WANTED = Wants((1, 2, 4, 7), (3,))


def opened(target, lengths, room=24):
    """A session with committed rows of these lengths."""
    draw = torch.Generator().manual_seed(0)
    session = target.session(len(lengths), max(lengths) + room)
    session.forward(torch.randint(512, (len(lengths), max(lengths)), generator=draw), logits=False)
    session.advance(list(lengths))
    return session


def cached(session):
    """Keys and values of each row's committed tokens, all layers."""
    stores = session.cache.keys, session.cache.values
    return [
        torch.stack([store[layer][row, :, :length] for store in stores for layer in range(8)])
        for row, length in enumerate(session.lengths)
    ]


def stepped(session, tokens, block, wants=None):
    """Outputs of the first blocks, token by token as a draft runs them, rolled back."""
    mark, found = session.mark(), []
    for place in range(tokens.shape[1]):
        found.append(session.forward(tokens[:, place : place + 1], end_block=block, wants=wants))
        session.advance([1] * len(tokens))
    session.rollback(mark)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [1, 3, 7])
def test_an_exit_is_a_plan_of_the_first_blocks(family, block, families):
    session, tokens = opened(families[family], (9, 4)), torch.randint(512, (2, 5))
    exited = session.forward(tokens, end_block=block)
    planned = session.forward(tokens, plan=[layer < block for layer in range(8) for _ in range(2)])
    assert torch.equal(exited.logits, planned.logits)
    assert torch.equal(exited.hidden, planned.hidden)
    assert torch.equal(exited.logits, session.early_logits(exited.hidden))
    whole = session.forward(tokens, wants=Wants((block - 1,)))
    assert torch.equal(exited.hidden, whole.blocks[block - 1])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(9,), (9, 9), (4, 13, 7)])
@pytest.mark.parametrize("block", [1, 4, 7])
def test_going_on_from_drafted_states_is_a_fresh_forward(family, lengths, block, families):
    """Drafted token by token, verified at once: logits, states, what is committed, and what the next token sees."""
    target, tokens = families[family], torch.randint(512, (len(lengths), 5))
    fresh, session = opened(target, lengths), opened(target, lengths)
    expected = fresh.forward(tokens, wants=WANTED)
    steps = stepped(session, tokens, block, Wants((0, 1)))
    assert session.mark() == list(lengths)
    hidden = torch.cat([step.hidden for step in steps], 1)
    found = session.forward(None, start_block=block, hidden=hidden, wants=WANTED)
    torch.testing.assert_close(found.logits, expected.logits, **CLOSE)
    assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
    for layer in WANTED.blocks:
        if layer >= block:
            torch.testing.assert_close(found.blocks[layer], expected.blocks[layer], **CLOSE)
    if block > 1:
        torch.testing.assert_close(torch.cat([step.blocks[1] for step in steps], 1), expected.blocks[1], **CLOSE)
    kept = [[0, 1, 2], [0], [0, 1, 2, 3, 4]][: len(lengths)]
    for one in (fresh, session):
        one.keep_paths(kept)
    for ours, theirs in zip(cached(session), cached(fresh), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    step = torch.randint(512, (len(lengths), 1))
    torch.testing.assert_close(session.forward(step).logits, fresh.forward(step).logits, **CLOSE)


def test_batch_invariant_states_are_the_same_to_the_bit(tiny):
    """Drafted alone, verified among others: with sums that do not depend on shapes nothing at all differs."""
    tokens = torch.randint(512, (1, 5))
    sessions = [tiny.session(1, 32, True) for _ in range(2)]
    for session in sessions:
        session.forward(torch.arange(9)[None], logits=False)
        session.advance([9])
    expected = sessions[0].forward(tokens)
    hidden = torch.cat([step.hidden for step in stepped(sessions[1], tokens, 3)], 1)
    found = sessions[1].forward(None, start_block=3, hidden=hidden)
    assert torch.equal(found.logits, expected.logits)
    for session in sessions:
        session.advance([5])
    assert torch.equal(cached(sessions[1])[0], cached(sessions[0])[0])


def test_recorded_exits_and_what_follows_them_are_the_eager_ones(recording, tiny):
    ours, theirs = opened(recording, (9, 4)), opened(tiny, (9, 4))
    wants = Wants((0, 5))
    for _ in range(3):
        tokens, made = torch.randint(512, (2, 4)), []
        for session in (ours, theirs):
            hidden = torch.cat([step.hidden for step in stepped(session, tokens, 3, wants)], 1)
            unscored = session.forward(tokens[:, :1], end_block=3, logits=False)
            assert unscored.logits is None
            made.append((session.forward(None, start_block=3, hidden=hidden, wants=wants), unscored))
        (found, exited), (expected, known) = made
        torch.testing.assert_close(found.logits, expected.logits, **CLOSE)  # sums over more slots, all masked
        torch.testing.assert_close(found.blocks[5], expected.blocks[5], **CLOSE)
        torch.testing.assert_close(exited.hidden, known.hidden, **CLOSE)
        for session in (ours, theirs):
            session.keep_paths([[0, 1], [0, 1, 2]])
    assert len(ours.programs) == 3  # the exit with and without logits, and what follows it
    place = ours.programs
    del ours, session
    gc.collect()
    assert opened(recording, (9, 4)).programs is place  # for later sessions too


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"start_block": 2}, "needs tokens, or hidden"),
        ({"end_block": 9}, "blocks 0 to 9 of a target that has 8"),
        ({"end_block": -1}, "blocks 0 to -1"),
        ({"start_block": 5, "end_block": 4, "hidden": torch.zeros(1, 1, 64)}, "blocks 5 to 4"),
    ],
)
def test_blocks_that_are_none_are_refused(how, words, tiny):
    with pytest.raises(ValueError, match=words):
        opened(tiny, (4,)).forward(torch.tensor([[5]]), **how)
