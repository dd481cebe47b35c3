"""The ranking of all sets: screening changes nothing that is asked for, ranks by brute force, ties."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specwave.layers import ranking as room
from specwave.layers.entropy import matrix_entropy
from specwave.layers.groups import all_sets
from specwave.layers.ranking import Ranking, worth_it


def random_grams(layers, rows=6, columns=3, seed=0):
    z = torch.randn(layers, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    z = z * (1 + torch.arange(layers))[:, None, None]
    return z @ z.mT


def brute(grams, m, alpha=1.0):
    sets = list(itertools.combinations(range(len(grams)), m))
    values = [matrix_entropy(grams[list(one)].sum(0), alpha).item() for one in sets]
    return sorted(zip(values, sets, strict=True), key=lambda pair: (-round(pair[0], 12), pair[1]))


@pytest.fixture
def screening(monkeypatch):
    monkeypatch.setattr(room, "_WORTH_SCREENING", 0)
    monkeypatch.setattr(room, "_PART", 7)
    monkeypatch.setattr(room, "_TRIAL", 6)  # of the usual 64 all of these small lists would be scored exactly


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 8), st.data())
def test_screening_finds_the_exact_head_and_ranks(layers, data):
    m = data.draw(st.integers(1, layers))
    grams = random_grams(layers, seed=data.draw(st.integers(0, 1000)))
    before = room._WORTH_SCREENING, room._TRIAL
    room._WORTH_SCREENING, room._TRIAL = 0, 6
    try:
        found = Ranking(grams, m)
    finally:
        room._WORTH_SCREENING, room._TRIAL = before
    expected = brute(grams, m)
    count = data.draw(st.integers(1, len(expected)))
    assert [group.layers for group in found.top(count)] == [layers for _, layers in expected[:count]]
    assert [group.entropy for group in found.top(count)] == pytest.approx([value for value, _ in expected[:count]])
    for place in range(0, len(expected), 3):
        value, one = expected[place]
        assert found.rank(one) == 1 + sum(other > value + 1e-12 for other, _ in expected)


def test_only_what_is_asked_for_is_scored_again(screening):
    found = Ranking(random_grams(12, rows=16, columns=8), 3)
    assert len(found) == math.comb(12, 3)
    before = int(found.exact.sum())
    found.top(1)
    assert before <= int(found.exact.sum()) < len(found) // 2
    assert 0 < found.tolerance < 1e-3


def test_a_rank_among_near_ties_is_exact(screening):
    """Layers that differ by 1e-9 cannot be told apart in float32."""
    z = torch.randn(1, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    noise = torch.randn(9, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    layers = z + 1e-7 * noise
    grams = layers @ layers.mT
    expected = [one for _, one in brute(grams, 2)]
    assert [group.layers for group in Ranking(grams, 2).top(5)] == expected[:5]
    for place, one in enumerate(expected, start=1):
        assert Ranking(grams, 2).rank(one) == place


def test_ties_share_a_rank_and_go_to_the_smallest_set(screening):
    same = random_grams(1).expand(6, -1, -1)
    found = Ranking(same, 3)
    assert found.rank((3, 4, 5)) == found.rank((0, 1, 2)) == 1
    assert found.top(2)[0].layers == (0, 1, 2)
    assert found.top(2)[1].layers == (0, 1, 3)


def test_two_threads_and_other_orders_of_entropy(screening):
    grams, before = random_grams(9), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = Ranking(grams, 3, alpha=2.0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [group.layers for group in found.top(5)] == [one for _, one in brute(grams, 3, 2.0)[:5]]


def test_no_such_set():
    with pytest.raises(ValueError, match="no set of 2"):
        Ranking(random_grams(4), 2).rank((0, 1, 2))
    with pytest.raises(ValueError, match="m must be in 1"):
        Ranking(random_grams(4), 5)


def test_a_long_ranking_tells_its_estimate_first(monkeypatch):
    monkeypatch.setattr(room, "_SLOW", 0.0)
    said = []
    Ranking(random_grams(5), 2, say=said.append)
    assert said[0].startswith("10 sets of 2 layers, 6 rows: about ")


def test_when_a_ranking_is_worth_it():
    small, large = torch.empty(30, 57, 57), torch.empty(36, 512, 512)
    assert worth_it("auto", small, 3)
    assert not worth_it("auto", large, 3)
    assert worth_it("always", large, 3)
    assert not worth_it("never", small, 3)


@pytest.mark.parametrize(("layers", "m"), [(30, 30), (30, 28), (36, 34), (16, 8), (16, 14), (5, 1)])
def test_all_sets_of_every_size(layers, m):
    """Sizes near N and N/2, where a mask of N^m entries would not fit any memory."""
    sets = all_sets(layers, m)
    assert sets.shape == (math.comb(layers, m), m)
    assert sets[0].tolist() == list(range(m))
    assert sets[-1].tolist() == list(range(layers - m, layers))
    assert len({tuple(one) for one in sets.tolist()}) == len(sets)


def test_a_large_m_is_ranked():
    grams = random_grams(30, rows=4)
    found = Ranking(grams, 29)
    assert len(found) == 30
    assert len(found.top(1)[0].layers) == 29
