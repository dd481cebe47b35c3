"""How kept positions become rows: worked tables, explicit means, the two readings of blocks and of aggregation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specwave.artifacts import UserError
from specwave.layers.blocks import Averages, averaging, block_means, block_sizes
from specwave.layers.rows import Collector, Rows, keep_in_set


@pytest.mark.parametrize(
    ("count", "blocks", "tail", "expected"),
    [
        (11, "tokens", "drop", [4, 4]),
        (11, "tokens", "keep", [4, 4, 3]),
        (11, "rows", "drop", [3, 3, 3, 2]),
        (8, "rows", "drop", [2, 2, 2, 2]),
        (3, "tokens", "drop", []),
        (3, "tokens", "keep", [3]),
        (3, "rows", "drop", []),
        (3, "rows", "keep", [1, 1, 1]),
        (0, "tokens", "keep", []),
        (0, "rows", "keep", []),
    ],
)
def test_block_sizes(count, blocks, tail, expected):
    assert block_sizes(count, 4, blocks, tail) == expected


@given(st.integers(0, 60), st.integers(1, 9), st.sampled_from(["tokens", "rows"]), st.sampled_from(["drop", "keep"]))
def test_the_averaging_matrix_takes_means_of_the_kept_positions(count, size, blocks, tail):
    draw = torch.Generator().manual_seed(count * 10 + size)
    length = count + 5
    kept = torch.randperm(length, generator=draw)[:count].sort().values
    states = torch.randn(length, 3, generator=draw)
    sizes = block_sizes(count, size, blocks, tail)
    expected = [states[part].mean(0) for part in kept[: sum(sizes)].split(sizes)] if sizes else []
    means = averaging(kept, sizes, length) @ states
    torch.testing.assert_close(means, torch.stack(expected) if expected else torch.empty(0, 3))
    if blocks == "tokens" and tail == "drop":
        torch.testing.assert_close(means, block_means(states[kept], size))


def test_averages_over_prompts_of_different_length():
    """Rows 0 and 1 of three prompts, row 2 of the longest alone."""
    store = Averages(100)
    for rows in ([[1.0], [10.0]], [[3.0]], [[5.0], [20.0], [7.0]], []):
        store.offer(torch.tensor(rows).view(-1, 1))
    assert store.stack().tolist() == [[3.0], [15.0], [7.0]]
    assert (store.seen, store.labels) == (6, [-1, -1, -1])


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=0, max_size=12), min_size=1, max_size=5),
       st.floats(0.05, 1.0), st.integers(0, 2))  # fmt: skip
def test_keep_in_set_is_the_head_of_all_positions(rows, rho, skip):
    listed = sorted(
        (
            (-value, prompt, place)
            for prompt, row in enumerate(rows)
            for place, value in enumerate(row)
            if place >= skip
        ),
    )
    count = max(1, math.ceil(round(rho * len(listed), 9)))
    expected = {(prompt, place) for _, prompt, place in listed[:count]}
    kept = keep_in_set([torch.tensor(row) for row in rows], rho, skip)
    assert {(prompt, place) for prompt, own in enumerate(kept) for place in own.tolist()} == expected


def test_random_positions_are_as_many_and_repeat_with_the_seed():
    entropy = torch.arange(50.0)
    by_entropy, control = Rows(rho=0.2), Rows(rho=0.2, keep="random")
    assert len(control.kept(entropy, 3)) == len(by_entropy.kept(entropy, 3)) == 10
    assert torch.equal(control.kept(entropy, 3), control.kept(-entropy, 3))  # the entropies play no part
    assert not torch.equal(control.kept(entropy, 3), control.kept(entropy, 4))
    assert not torch.equal(control.kept(entropy, 3), Rows(rho=0.2, keep="random", seed=1).kept(entropy, 3))
    assert 0 not in control.kept(entropy, 3)


def test_grams_are_those_of_the_rows():
    draw = torch.Generator().manual_seed(0)
    collector = Collector(Rows(max_rows=100))
    parts = [torch.randn(4, size, 6, generator=draw) for size in (3, 0, 2)]  # N = 4
    for prompt, rows_NRD in enumerate(parts):
        collector.take(rows_NRD, prompt)
    z = torch.cat(parts, 1).double()
    torch.testing.assert_close(collector.grams(), z @ z.mT)
    assert collector.store.labels == [0, 0, 0, 2, 2]


def test_random_positions_over_the_whole_set_are_refused():
    with pytest.raises(UserError, match=r"calibration\.filter_scope=set"):
        Rows(keep="random", filter_scope="set")


def test_averages_are_thinned_out_to_max_rows():
    rows = torch.arange(20.0).view(20, 1)
    few, again, other = Averages(5), Averages(5), Averages(5, seed=1)
    for store in (few, again, other):
        store.offer(rows)
    kept = few.stack().flatten().tolist()
    assert len(few) == len(few.labels) == len(kept) == 5
    assert kept == sorted(kept) == again.stack().flatten().tolist()
    assert kept != other.stack().flatten().tolist()


def test_a_huge_reservoir_costs_what_it_holds():
    collector = Collector(Rows(max_rows=10**9))
    for prompt in range(3):
        collector.take(torch.full((2, 400, 3), float(prompt)), prompt)
    assert collector.grams().shape == (2, 1200, 1200)
    assert collector.store.stack()[:, 0, 0].tolist() == [0.0] * 400 + [1.0] * 400 + [2.0] * 400
