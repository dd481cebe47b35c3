"""Oracles of CKA: closed forms, invariances, literal formulas, and concatenations that are really made."""

import pytest
import torch

from specwave.layers.cka import (
    borders,
    cka_matrix,
    conditional_cka,
    inner_products,
    linear_cka,
    transitions,
)

EXACT = 1e-10  # float64


def states(layers, rows, columns, seed=0, shift=0.0):
    made = torch.randn(layers, rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made + shift


def gram(x):
    return x @ x.mT


def literal(k, other, unbiased):
    """The estimators as printed, from traces."""
    n = len(k)
    ones = torch.ones(n, 1, dtype=k.dtype)
    h = torch.eye(n, dtype=k.dtype) - ones @ ones.T / n

    def hsic(a, b):
        if not unbiased:
            return (h @ a @ h @ (h @ b @ h)).trace()
        a, b = a - a.diag().diag(), b - b.diag().diag()
        inner = (ones.T @ a @ ones) * (ones.T @ b @ ones) / ((n - 1) * (n - 2))
        return ((a @ b).trace() + inner - 2 / (n - 2) * (ones.T @ a @ b @ ones)).item() / (n * (n - 3))

    return float(hsic(k, other)) / float(hsic(k, k) * hsic(other, other)) ** 0.5


@pytest.mark.parametrize("unbiased", [False, True])
def test_equals_the_printed_formula(unbiased):
    grams = gram(states(3, 11, 5, shift=2.0))  # a mean far from 0: without the centring this fails
    for i in range(3):
        for j in range(3):
            expected = literal(grams[i], grams[j], unbiased)
            assert linear_cka(grams[i], grams[j], unbiased).item() == pytest.approx(expected, abs=EXACT)
            assert cka_matrix(grams, unbiased)[i, j].item() == pytest.approx(expected, abs=EXACT)


def test_closed_forms():
    x = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).double()
    y = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).double()
    assert linear_cka(gram(x), gram(y)).item() == pytest.approx(0, abs=EXACT)  # uncorrelated columns
    assert linear_cka(gram(x), gram(-3 * x)).item() == pytest.approx(1, abs=EXACT)
    assert linear_cka(gram(x), gram(torch.cat([x, y], 1))).item() == pytest.approx(0.5**0.5, abs=EXACT)
    assert linear_cka(gram(x), gram(x + 10)).item() == pytest.approx(1, abs=EXACT)  # the mean is no signal


@pytest.mark.parametrize("unbiased", [False, True])
def test_rotation_scale_and_shift_change_nothing(unbiased):
    x, y = states(2, 12, 7)
    turn = torch.linalg.qr(states(1, 7, 7, seed=1)[0]).Q
    expected = linear_cka(gram(x), gram(y), unbiased).item()
    moved = 5 * x @ turn + torch.arange(7.0).double()
    assert linear_cka(gram(moved), gram(y), unbiased).item() == pytest.approx(expected, abs=EXACT)


def test_bias_on_independent_gaussians():
    """R = 32, D = 2560: the biased value is 0.988 for unrelated layers, the unbiased one near 0."""
    x, y = states(2, 32, 2560)
    assert linear_cka(gram(x), gram(y)).item() == pytest.approx(0.988, abs=0.003)
    assert abs(linear_cka(gram(x), gram(y), unbiased=True).item()) < 0.15  # its deviation is about 1/R = 0.03


def test_a_constant_layer_resembles_nothing():
    constant = gram(torch.full((6, 3), 1.7).double())
    other = gram(states(1, 6, 3)[0])
    for unbiased in (False, True):
        assert linear_cka(constant, other, unbiased).item() == 0
        assert linear_cka(constant, constant, unbiased).item() == 0


def test_unbiased_needs_four_rows():
    with pytest.raises(ValueError, match="at least 4 rows, got 3"):
        cka_matrix(gram(states(2, 3, 5)), unbiased=True)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("group", [[0], [1, 4], [0, 2, 5], list(range(6))])
def test_conditional_equals_materialised_concatenations(group, unbiased):
    layers = states(6, 9, 4, seed=3, shift=1.0)
    found = conditional_cka(gram(layers), group, unbiased)
    for i in range(6):
        for j in range(6):
            left, right = (
                torch.cat([layers[layer] for layer in sorted({*group, extra})], 1) for extra in (i, j)
            )  # fmt: skip
            expected = literal(gram(left), gram(right), unbiased)
            assert found[i, j].item() == pytest.approx(expected, abs=EXACT)


def test_nothing_chosen_is_plain_cka():
    grams = gram(states(5, 8, 3))
    torch.testing.assert_close(conditional_cka(grams, []), cka_matrix(grams), rtol=0, atol=EXACT)


def test_hsic_table_is_the_product_of_centred_states():
    layers = states(4, 10, 3, shift=5.0)
    centred = layers - layers.mean(1, keepdim=True)
    expected = torch.einsum("ird,jre->ijde", centred, centred).square().sum((-1, -2))  # ‖XᵀY‖²_F
    torch.testing.assert_close(inner_products(gram(layers)), expected)


def test_transitions_and_borders_of_three_compartments():
    sizes = (3, 4, 2)
    parts = states(3, 20, 6, seed=2)
    layers = torch.cat([parts[part].expand(size, -1, -1) for part, size in enumerate(sizes)])
    layers = layers + 0.01 * states(9, 20, 6, seed=4)
    cka = cka_matrix(gram(layers), unbiased=True)
    delta = transitions(cka)
    assert delta.shape == (8,)
    assert delta[2].item() == pytest.approx(sum((cka[3, k] - cka[2, k]).item() ** 2 for k in range(9)))
    assert borders(delta) == [2, 6]


def test_borders_of_a_flat_or_tiny_curve():
    assert borders(torch.full((7,), 0.3)) == []
    assert borders(torch.tensor([1.0])) == []
    assert borders(torch.tensor([9.0, 0.0, 0.0, 0.0])) == [0]
    assert borders(torch.tensor([0.0, 9.0, 9.0, 0, 0, 0, 0, 0])) == [1]  # a plateau is one border
