"""The algebra of the regressions: blocks of one table against rows really put side by side, all in float64."""

import itertools

import pytest
import torch

from specwave.layers.ridge import Ridge, Sums, affine

N, P, E, S, D = 5, 3, 2, 60, 4


@pytest.fixture
def rows():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(S, E + N * P, dtype=torch.float64, generator=draw) * torch.rand(E + N * P, generator=draw) + 0.7
    return x, torch.randn(S, D, dtype=torch.float64, generator=draw) + x[:, :D] - 3


def columns(layers):
    return torch.tensor([*range(E), *(E + layer * P + place for layer in layers for place in range(P))])


def directly(x, y, damping):
    """Least squares on the concatenation itself, the damping as further rows: (weights, means)."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    x, y = x - mean_x, y - mean_y
    level = damping * x.square().sum(0).mean()
    more = level.sqrt() * torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.lstsq(torch.cat([x, more]), torch.cat([y, y.new_zeros(len(more), y.shape[1])])).solution
    return weights, mean_x, mean_y


@pytest.mark.parametrize("damping", [1e-6, 0.01, 3.0])
@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_blocks_of_the_table_are_the_regression_on_concatenations(m, damping, rows):
    x, y = rows
    fit = Ridge(Sums.of(x, y), damping)
    for layers in itertools.combinations(range(N), m):
        own = columns(layers)
        beside = torch.cat([x[:, :E], *(x[:, E + layer * P : E + (layer + 1) * P] for layer in layers)], 1)
        weights, mean_x, mean_y = directly(beside, y, damping)
        # Both are float64 on systems of condition 1e2: what rounding leaves is far below 1e-9.
        torch.testing.assert_close(fit.weights(own), weights, rtol=1e-9, atol=1e-10)
        expected = mean_y + (beside - mean_x) @ weights
        torch.testing.assert_close(fit.foretell(x, own), expected, rtol=1e-9, atol=1e-10)


def test_sums_add_over_rows_and_a_difference_leaves_rows_out(rows):
    x, y = rows
    parts = [Sums.of(x[own], y[own]) for own in torch.arange(S).split(17)]
    whole = parts[0] + parts[1] + parts[2] + parts[3]
    without = Ridge(whole - parts[1], 0.01)
    rest = torch.cat([torch.arange(17), torch.arange(34, S)])
    directly_without = Ridge(Sums.of(x[rest], y[rest]), 0.01)
    own = columns((0, 3))
    assert without.count == len(rest) == S - 17
    torch.testing.assert_close(without.weights(own), directly_without.weights(own), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(without.foretell(x, own), directly_without.foretell(x, own), rtol=1e-9, atol=1e-10)


def test_a_map_of_the_outputs_commutes_with_the_fit(rows):
    x, y = rows
    head = torch.randn(7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = columns((1, 2))
    fit = Ridge(Sums.of(x, y), 0.1)
    directly_mapped = Ridge(Sums.of(x, y @ head.T), 0.1).foretell(x, own)
    torch.testing.assert_close(fit.mapped(head).foretell(x, own), directly_mapped, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(fit.foretell(x, own) @ head.T, directly_mapped, rtol=1e-9, atol=1e-10)


def test_scale_and_shift_of_all_columns_play_no_part(rows):
    x, y = rows
    own = columns((0, 4))
    expected = Ridge(Sums.of(x, y), 0.1).foretell(x, own)
    other = 1000 * x + 5
    torch.testing.assert_close(Ridge(Sums.of(other, y), 0.1).foretell(other, own), expected, rtol=1e-8, atol=1e-8)


def test_more_layers_never_fit_the_rows_worse(rows):
    x, y = rows
    fit = Ridge(Sums.of(x, y), 1e-9)
    for m in range(1, N):
        for layers in itertools.combinations(range(N), m):
            error = (fit.foretell(x, columns(layers)) - y).square().sum()
            for more in set(range(N)) - set(layers):
                wider = (fit.foretell(x, columns(sorted((*layers, more)))) - y).square().sum()
                assert wider <= error * (1 + 1e-7)  # the damping itself costs 1e-9 of the data's size


def test_without_a_column_and_with_constant_ones_the_mean_is_foretold(rows):
    x, y = rows
    fit = Ridge(Sums.of(x, y), 0.1)
    assert torch.equal(fit.foretell(x, torch.empty(0, dtype=torch.int64)), y.mean(0).expand(S, D))
    still = torch.ones(S, 3, dtype=torch.float64)
    told = Ridge(Sums.of(still, y), 0.1).foretell(still, torch.arange(3))
    torch.testing.assert_close(told, y.mean(0).expand(S, D))


def test_float32_rows_are_told_in_float32(rows):
    x, y = rows
    fit, own = Ridge(Sums.of(x.float(), y.float()), 0.1), columns((2,))
    told = fit.foretell(x.float(), own)
    assert (told.dtype, fit.weights(own).dtype) == (torch.float32, torch.float64)
    expected = affine(x[:, own], fit.mean_F[own], fit.weights(own), fit.mean_D)
    torch.testing.assert_close(told.double(), expected, rtol=1e-5, atol=1e-5)
