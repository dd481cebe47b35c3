"""Oracles of the filter, block means, reservoir and Gram options."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specwave.layers.blocks import Reservoir, block_means, keep_positions, prepare_grams
from specwave.layers.entropy import matrix_entropy


def brute(entropy, rho, skip_first):
    rest = range(skip_first, len(entropy))
    count = max(1, math.ceil(rho * len(rest)))
    return sorted(sorted(rest, key=lambda t: (-entropy[t], t))[:count]) if rest else []


def test_worked_table():
    assert keep_positions(torch.tensor([9.0, 0.5, 2.0, 0.1, 2.0, 2.0]), 0.4).tolist() == [2, 4]


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5]), min_size=0, max_size=40),
    st.floats(0.01, 1.0),
    st.integers(0, 3),
)
def test_keep_positions_is_the_sorted_head(entropy, rho, skip_first):
    """Few distinct values, so that nearly every case has ties."""
    assert keep_positions(torch.tensor(entropy), rho, skip_first).tolist() == brute(entropy, rho, skip_first)


def test_ties_go_to_the_lower_index_at_every_length():
    for length in (2, 17, 300, 5000):  # sort changes its algorithm with the length
        assert keep_positions(torch.ones(length), 0.3, 0).tolist() == list(range(math.ceil(0.3 * length)))


@pytest.mark.parametrize("rho", [0.0, -0.1, 1.01, math.nan])
def test_rho_out_of_range(rho):
    with pytest.raises(ValueError, match="rho"):
        keep_positions(torch.ones(4), rho)


def test_block_means():
    hidden = torch.arange(14.0).view(7, 2)
    assert block_means(hidden, 3).tolist() == [[2, 3], [8, 9]]  # rows 0-2, 3-5; row 6 is the ragged tail
    assert block_means(hidden, 8).shape == (0, 2)
    assert torch.equal(block_means(hidden, 1), hidden)
    layers = torch.randn(3, 7, 2)
    assert torch.equal(block_means(layers, 3)[1], block_means(layers[1], 3))


def test_block_means_of_half_precision_are_averaged_in_float32():
    hidden = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    assert block_means(hidden, 4).item() == 259 / 4


def test_reservoir_keeps_everything_that_fits_in_order():
    rows = torch.arange(12.0).view(6, 2)
    kept = Reservoir(6, seed=3)
    for part in rows.split(4):
        kept.offer(part)
    assert torch.equal(kept.stack(), rows)
    assert kept.seen == 6


def test_reservoir_does_not_depend_on_portions_and_repeats_with_its_seed():
    rows = torch.arange(100.0).view(100, 1)

    def run(seed, portion):
        kept = Reservoir(10, seed)
        for part in rows.split(portion):
            kept.offer(part)
        return kept.stack().flatten().tolist()

    assert run(0, 1) == run(0, 33)
    assert run(0, 1) != run(1, 1)
    assert len(set(run(0, 1))) == 10


def test_reservoir_is_uniform():
    hits = torch.zeros(20)
    rows = torch.arange(20).view(20, 1)
    for seed in range(4000):
        kept = Reservoir(5, seed)
        kept.offer(rows)
        hits[kept.stack().flatten()] += 1
    # Each row is expected 1000 times with a deviation of √(4000·¼·¾) = 27; 5 deviations.
    assert (hits - 1000).abs().max() < 140


def test_reservoir_copies_what_it_keeps():
    rows = torch.zeros(2, 1)
    kept = Reservoir(2)
    kept.offer(rows)
    rows += 1
    assert kept.stack().sum() == 0


def test_gram_options_equal_the_operations_on_states():
    z = torch.randn(4, 9, 5, dtype=torch.float64) + 3
    centred = z - z.mean(1, keepdim=True)
    unit = centred / centred.flatten(1).norm(dim=1)[:, None, None]
    torch.testing.assert_close(prepare_grams(z @ z.mT, centre=True), centred @ centred.mT)
    torch.testing.assert_close(prepare_grams(z @ z.mT, "frobenius", centre=True), unit @ unit.mT)
    assert torch.equal(prepare_grams(z @ z.mT), z @ z.mT)


def test_frobenius_keeps_a_layers_entropy_but_not_a_groups():
    z = torch.randn(2, 8, 5, dtype=torch.float64) * torch.tensor([1.0, 100.0])[:, None, None]
    raw, unit = z @ z.mT, prepare_grams(z @ z.mT, "frobenius")
    torch.testing.assert_close(matrix_entropy(raw), matrix_entropy(unit))
    assert not torch.isclose(matrix_entropy(raw.sum(0)), matrix_entropy(unit.sum(0)), atol=1e-3)
    assert torch.equal(prepare_grams(torch.zeros(1, 3, 3), "frobenius"), torch.zeros(1, 3, 3).double())
