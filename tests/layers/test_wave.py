"""A made "activation wave" whose right answer is known: directions rise and fall over depth like a travelling pulse.

Layer l holds the block means Z_l = Σ_k g(l − c_k) A_k, with compartments k centred at c_k, a bell g that overlaps the
neighbours, and orthogonal patterns A_k of equal weight. Every layer spans the compartment it lies in; the set that
spans all directions most evenly takes one layer from each compartment's middle.
"""

import math

import pytest
import torch

from specwave.layers.cka import borders, cka_matrix, transitions
from specwave.layers.ranking import Ranking
from specwave.layers.selectors import Elsi, ElsiC, Exhaustive

CENTRES, LAYERS, WIDTH = (3, 10, 17), 21, 1.6


def wave(noise=1e-3, rows=30, rank=3):
    draw = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(rows, rank * len(CENTRES), dtype=torch.float64, generator=draw)).Q
    patterns = basis.split(rank, 1)
    states = []
    for layer in range(LAYERS):
        weights = [math.exp(-((layer - centre) ** 2) / (2 * WIDTH**2)) for centre in CENTRES]
        z = torch.cat([weight * pattern for weight, pattern in zip(weights, patterns, strict=True)], 1)
        z = z / z.norm()  # every layer weighs the same, as with scale=frobenius
        states.append(z + noise * torch.randn(z.shape, dtype=torch.float64, generator=draw))
    z = torch.stack(states)
    return z @ z.mT


@pytest.mark.parametrize("selector", [Elsi(), ElsiC(), Exhaustive()])
def test_a_layer_of_each_compartment_is_chosen(selector):
    grams = wave()
    best = selector.select(grams).groups[0]
    nearest = [min(range(3), key=lambda place: abs(CENTRES[place] - layer)) for layer in best.layers]
    assert nearest == [0, 1, 2]
    assert best.entropy == pytest.approx(math.log(9), abs=0.02)  # nine orthogonal directions, evenly


def test_the_fixed_middle_is_far_from_it():
    ranking = Ranking(wave(), 3)
    assert ranking.rank((9, 10, 11)) > 1000
    assert ranking.top(1)[0].entropy - ranking.entropy[ranking._place((9, 10, 11))] > 1.0


def test_the_borders_lie_between_the_compartments():
    """Two changes of compartment, half-way between the centres: 6|7 and 13|14."""
    found = borders(transitions(cka_matrix(wave())))
    assert len(found) == 2
    assert all(abs(border + 0.5 - middle) <= 1 for border, middle in zip(found, (6.5, 13.5), strict=True))
