"""Oracles of the searches: concatenations really made, brute force, ties."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specwave.layers.cka import conditional_cka
from specwave.layers.entropy import matrix_entropy
from specwave.layers.groups import Group, best, score
from specwave.layers.search import elsi, elsi_c, exhaustive


def states(layers, rows=8, columns=3, seed=0):
    return torch.randn(layers, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def brute(z, m):
    """Every set by singular values of its concatenation: no Grams, no batches."""
    found = []
    for layers in itertools.combinations(range(len(z)), m):
        share = torch.linalg.svdvals(torch.cat([z[layer] for layer in layers], 1)).square()
        share = share / share.sum()
        found.append((-(torch.special.xlogy(share, share)).sum().item(), layers))
    return sorted(found, key=lambda pair: (-pair[0], pair[1]))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.data())
def test_full_beam_is_exhaustive_is_brute_force(count, data):
    m = data.draw(st.integers(1, count))
    z = states(count, seed=data.draw(st.integers(0, 10_000))) * (1 + torch.arange(count))[:, None, None]
    exact = exhaustive(z @ z.mT, m, top=None)
    assert len(exact) == math.comb(count, m)
    expected = brute(z, m)
    assert [group.layers for group in exact] == [layers for _, layers in expected]
    assert [group.entropy for group in exact] == pytest.approx([value for value, _ in expected], abs=1e-10)
    wide = math.comb(count, count // 2)  # the largest layer of the lattice
    for found in (elsi(z @ z.mT, m, wide, count), elsi_c(z @ z.mT, m, wide, count)):
        assert [group.layers for group in found] == [group.layers for group in exact]


def test_narrow_beam_follows_the_algorithm():
    """k_beam = k_expand = 1 is the greedy choice, step by step."""
    grams = (z := states(9, seed=5)) @ z.mT
    chosen = []
    for _ in range(4):
        rest = [layer for layer in range(9) if layer not in chosen]
        chosen.append(max(rest, key=lambda layer: matrix_entropy(grams[[*chosen, layer]].sum(0)).item()))
    (only,) = elsi(grams, 4, k_beam=1, k_expand=1)
    assert only.layers == tuple(sorted(chosen))


def test_k_expand_bounds_the_children_of_each_parent():
    grams = (z := states(6, seed=8)) @ z.mT
    pairs = elsi(grams, 2, k_beam=100, k_expand=1)
    expected = set()
    for parent in range(6):
        partner = max(set(range(6)) - {parent}, key=lambda layer: matrix_entropy(grams[[parent, layer]].sum(0)).item())
        expected.add(tuple(sorted((parent, partner))))
    assert {group.layers for group in pairs} == expected


def test_elsi_c_pools_by_conditional_transitions():
    grams = (z := states(7, seed=2)) @ z.mT
    first = best(score(grams, [(layer,) for layer in range(7)]), 1)[0].layers
    m_l = conditional_cka(grams, first)
    delta = [0.0] + [(m_l[r] - m_l[r - 1]).square().sum().item() for r in range(1, 7)]
    pool = sorted((r for r in range(7) if r not in first), key=lambda r: -delta[r])[:2]
    found = elsi_c(grams, 2, k_beam=1, k_pool=2)
    expected = max(pool, key=lambda r: matrix_entropy(grams[[*first, r]].sum(0)).item())
    assert found[0].layers == tuple(sorted((*first, expected)))


def test_the_order_is_by_entropy_then_lexicographic():
    groups = [Group((1, 5), 0.7), Group((0, 9), 0.7 - 1e-14), Group((2, 3), 0.7), Group((4, 6), 0.9)]
    assert [group.layers for group in best(groups, 3)] == [(4, 6), (0, 9), (1, 5)]


@pytest.mark.parametrize("search", [elsi, elsi_c, exhaustive])
def test_ties_go_to_the_smallest_set(search):
    """Eight equal layers: every set ties. Then twins, whose sums differ only in their order of addition."""
    same = (z := states(1)) @ z.mT
    assert search(same.expand(8, -1, -1), 3)[0].layers == (0, 1, 2)
    twins = (z := states(3, seed=1)[[0, 1, 2, 0, 1, 2]]) @ z.mT
    top = search(twins, 3)[0]
    kinds = sorted(layer % 3 for layer in top.layers)
    tied = [one for one in itertools.combinations(range(6), 3) if sorted(layer % 3 for layer in one) == kinds]
    assert len(tied) > 1
    assert top.layers == min(tied)


def test_the_entropy_of_a_set_is_that_of_the_concatenation_near_collinear_layers_too():
    base = states(1, rows=20, columns=6)[0]
    z = torch.stack([base + 1e-6 * noise for noise in states(4, 20, 6, seed=9)])
    for value, layers in brute(z, 2):
        (group,) = score(z @ z.mT, [layers])
        assert group.entropy == pytest.approx(value, abs=1e-9)


def test_many_sets_in_chunks_equal_one_by_one():
    grams = (z := states(5, rows=1200, columns=2)) @ z.mT  # two sets to a chunk
    sets = list(itertools.combinations(range(5), 3))[:3]
    single = [score(grams, [one])[0].entropy for one in sets]
    assert [group.layers for group in score(grams, sets)] == sets
    assert [group.entropy for group in score(grams, sets)] == pytest.approx(single, abs=1e-12)


def test_the_wave_is_found():
    """Three compartments, each with its own two directions: one layer of each spans all six."""
    rows, sizes = 24, (4, 5, 3)
    basis = torch.linalg.qr(states(1, rows, 6)[0]).Q
    z = torch.cat([basis[:, 2 * part : 2 * part + 2].expand(size, -1, -1) for part, size in enumerate(sizes)])
    z = z + 1e-3 * states(12, rows, 2, seed=6)
    top = elsi(z @ z.mT, 3)[0]
    assert [layer < 4 for layer in top.layers] == [True, False, False]
    assert [layer >= 9 for layer in top.layers] == [False, False, True]
    assert top.entropy == pytest.approx(math.log(6), abs=1e-3)


@pytest.mark.parametrize("m", [0, 4])
def test_m_outside_the_model(m):
    for search in (elsi, elsi_c, exhaustive):
        with pytest.raises(ValueError, match="m must be in 1"):
            search(torch.eye(3).expand(3, 3, 3), m)


def test_layer_0_takes_the_transition_of_layer_1_with_right_neighbour():
    """A stack that changes only from layer 0 to 1: δ(1) is largest, and with the option δ(0) equals it, a tie that the
    lower layer wins."""
    z = states(6, seed=4)
    z[2:] = z[1] + 1e-3 * states(4, seed=5)
    grams = z @ z.mT
    pairs = {
        option: {group.layers for group in elsi_c(grams, 2, k_beam=6, k_pool=1, right_neighbour=option)}
        for option in (False, True)
    }
    for seed in range(2, 6):
        assert (1, seed) in pairs[False]
        assert (0, seed) not in pairs[False]
        assert (0, seed) in pairs[True]


def test_steps_hold_the_beam_of_every_size():
    grams = (z := states(6, seed=1)) @ z.mT
    for search in (elsi, elsi_c):
        steps = []
        found = search(grams, 4, k_beam=3, steps=steps)
        assert [len(beam[0].layers) for beam in steps] == [1, 2, 3, 4]
        assert steps[-1] == found
        for before, after in itertools.pairwise(steps):
            for group in after:  # each child widens a set of the beam before it
                assert any(set(parent.layers) < set(group.layers) for parent in before)
