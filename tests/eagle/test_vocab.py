"""The draft vocabulary against sorting by hand, and the maps that must be refused."""

from __future__ import annotations

import pytest
import torch

from specwave.artifacts import UserError
from specwave.eagle.vocab import build_vocab_map, check_vocab_map, count_tokens, draft_ids


@pytest.mark.parametrize("seed", range(20))
def test_against_brute_force(seed):
    """Counts 0…3 over 30 tokens: ties everywhere."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (30,), generator=generator)
    size = int(torch.randint(1, 31, (), generator=generator))
    ranked = sorted(range(30), key=lambda token: (-int(counts[token]), token))
    chosen = sorted(ranked[:size])
    d2t, t2d = build_vocab_map(counts, size)
    assert d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool
    assert [index + int(shift) for index, shift in enumerate(d2t)] == chosen
    assert t2d.nonzero().flatten().tolist() == chosen
    check_vocab_map(d2t, t2d, 30)


def test_ties_go_to_the_lower_id():
    d2t, t2d = build_vocab_map([5, 1, 5, 5, 9], 3)
    assert draft_ids(d2t).tolist() == [0, 2, 4]
    assert t2d.tolist() == [True, False, True, False, True]
    assert d2t.tolist() == [0, 1, 2]


def test_only_answer_text_is_counted():
    samples = [([3, 3, 1, 2], [False, True, True, True]), ([2, 0], [True, False])]
    assert count_tokens(samples, 5).tolist() == [0, 1, 2, 1, 0]


@pytest.mark.parametrize("size", [0, 6])
def test_size_out_of_range(size):
    with pytest.raises(UserError, match=r"draft_vocab_size=.*must be 1 to 5"):
        build_vocab_map([1, 2, 3, 4, 5], size)


@pytest.mark.parametrize(
    ("d2t", "marked", "vocab", "message"),
    [
        ([0, 1, 2], [0, 2, 4], 6, "t2d has 5 entries"),  # of another vocabulary
        ([0] * 6, [0, 1, 2, 3, 4], 5, "must have 1 to 5"),  # longer than the vocabulary
        ([0, 1, 3], [0, 2, 4], 5, "points outside"),
        ([-1, 1, 2], [0, 2, 4], 5, "points outside"),
        ([2, 1, 2], [0, 2, 4], 5, "once, in ascending order"),
        ([0, 1, 2], [0, 1, 4], 5, "other tokens"),
        ([0, 1, 2], [0, 2], 5, "other tokens"),
    ],
)
def test_a_map_that_does_not_fit(d2t, marked, vocab, message):
    t2d = torch.zeros(5, dtype=torch.bool)
    t2d[marked] = True
    with pytest.raises(UserError, match=message):
        check_vocab_map(torch.tensor(d2t), t2d, vocab)
