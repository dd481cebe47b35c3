"""Oracles of the entropies: closed forms, limits and invariances."""

import math

import pytest
import torch

from specwave.layers.entropy import matrix_entropy, predictive_entropy

TIGHT = 1e-10  # float64 eigenvalues of matrices of at most 12 rows


def gram_of(rows, columns, seed=0):
    x = torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x @ x.T


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, math.inf])
def test_orthonormal_rows_give_the_logarithm_of_their_number(alpha):
    x = torch.linalg.qr(torch.randn(40, 12, dtype=torch.float64)).Q.T
    assert matrix_entropy(x @ x.T, alpha).item() == pytest.approx(math.log(12), abs=TIGHT)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, math.inf])
def test_rank_one_and_zero_give_zero(alpha):
    row = torch.arange(1.0, 9.0, dtype=torch.float64)
    assert matrix_entropy(torch.outer(row, row), alpha).item() == pytest.approx(0, abs=1e-7 if alpha < 1 else TIGHT)
    assert matrix_entropy(torch.zeros(8, 8), alpha).item() == 0


def test_known_spectrum():
    gram = torch.diag(torch.tensor([4.0, 2.0, 1.0, 1.0]))  # shares ½, ¼, ⅛, ⅛
    ln2 = math.log(2)
    assert matrix_entropy(gram).item() == pytest.approx(1.75 * ln2)
    assert matrix_entropy(gram, 2.0).item() == pytest.approx(-math.log(1 / 4 + 1 / 16 + 2 / 64))
    assert matrix_entropy(gram, math.inf).item() == pytest.approx(ln2)


def test_shannon_is_the_limit_and_entropy_falls_with_alpha():
    gram = gram_of(10, 6)
    shannon = matrix_entropy(gram).item()
    # The error of the limit is (α−1)/2 times the variance of ln p, a few nats².
    for near in (1 - 1e-5, 1 + 1e-5):
        assert matrix_entropy(gram, near).item() == pytest.approx(shannon, abs=5e-5)
    values = [matrix_entropy(gram, alpha).item() for alpha in (0.3, 0.9, 1.0, 1.1, 3.0, math.inf)]
    assert values == sorted(values, reverse=True)


def test_rotation_and_scale_change_nothing_and_batches_are_single_ones():
    x = torch.randn(9, 20, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64)).Q
    expected = matrix_entropy(x @ x.T).item()
    turned = x @ turn
    assert matrix_entropy(turned @ turned.T).item() == pytest.approx(expected, abs=TIGHT)
    assert matrix_entropy(1e6 * x @ x.T).item() == pytest.approx(expected, abs=TIGHT)
    batch = torch.stack([gram_of(7, 3, seed) for seed in range(6)]).view(2, 3, 7, 7)
    torch.testing.assert_close(matrix_entropy(batch)[1, 2], matrix_entropy(batch[1, 2]), rtol=0, atol=TIGHT)


def test_rounding_below_the_rank_does_not_count():
    """A rank-2 Gram of 40 rows has 38 eigenvalues of rounding; α = 0.05 would magnify them to nats."""
    assert matrix_entropy(gram_of(40, 2), 0.05).item() <= math.log(2) + 1e-9


def test_alpha_must_be_positive():
    for alpha in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="alpha"):
            matrix_entropy(torch.eye(3), alpha)


def test_predictive_entropy():
    uniform, certain = torch.zeros(5), torch.tensor([0.0, -math.inf, -math.inf, -math.inf, -math.inf])
    half = torch.tensor([7.0, 7.0, -math.inf, -math.inf, -math.inf])
    found = predictive_entropy(torch.stack([uniform, certain, half]))
    assert found.tolist() == pytest.approx([math.log(5), 0, math.log(2)])
