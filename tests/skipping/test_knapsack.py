"""The additive knapsack against enumeration; weights by hand."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specwave.skipping.knapsack import integer_weights, solve


def worth(values, weights, mask):
    """(value, weight) of a selection, added in the order of the items: floating-point sums depend on it."""
    value = weight = 0
    for one, more, taken in zip(values, weights, mask, strict=True):
        value, weight = value + one * taken, weight + more * taken
    return value, weight


def enumerated(values, weights, budget):
    """The largest value of any selection that fits, and the least weight that has it."""
    best = (0, 0)
    for mask in itertools.product((False, True), repeat=len(values)):
        value, weight = worth(values, weights, mask)
        if weight <= budget and (value, -weight) > (best[0], -best[1]):
            best = (value, weight)
    return best


whole = st.lists(st.tuples(st.integers(-5, 30), st.integers(0, 5)), max_size=12)
real = st.lists(st.tuples(st.floats(-1, 9), st.floats(0, 5)), max_size=9)


@given(whole, st.integers(-2, 40))
@settings(deadline=None, max_examples=150)
def test_whole_numbers_are_solved_exactly(items, budget):
    values, weights = [item[0] for item in items], [item[1] for item in items]
    mask = solve(values, weights, budget)
    assert len(mask) == len(items)
    assert all(type(flag) is bool for flag in mask)
    if budget < 0:
        assert not any(mask)
    else:
        assert worth(values, weights, mask) == enumerated(values, weights, budget)


@given(real, st.floats(0, 20))
@settings(deadline=None, max_examples=100)
def test_real_numbers_are_solved_exactly(items, budget):
    values, weights = [item[0] for item in items], [item[1] for item in items]
    value, weight = worth(values, weights, solve(values, weights, budget))
    assert weight <= budget
    assert value == enumerated(values, weights, budget)[0]


def test_nothing_fits():
    assert solve([3, 4], [2, 5], 1) == [False, False]
    assert solve([3], [1], -1) == [False]
    assert solve([], [], 10) == []


def test_of_equal_values_the_lighter_and_then_the_earlier():
    assert solve([5, 5, 5], [3, 2, 2], 3) == [False, True, False]
    assert solve([0, -1], [0, 0], 9) == [False, False]
    assert solve([1, 1], [math.inf, 1], math.inf) == [True, True]


def test_sixty_sub_layers():
    """2⁶⁰ subsets: no enumeration, but never worse than filling by value per weight, nor better than filling parts."""
    values, weights = [math.sin(i) + 1 for i in range(60)], [1, 3] * 30
    value, weight = worth(values, weights, solve(values, weights, 60))
    greedy, parts, room = 0.0, 0.0, 60
    for item in sorted(range(60), key=lambda i: values[i] / weights[i], reverse=True):
        share = min(1.0, room / weights[item])
        parts += share * values[item]
        greedy += values[item] * (share == 1.0)
        room -= share * weights[item]
    assert weight <= 60
    assert greedy - 1e-9 <= value <= parts + 1e-9


@pytest.mark.parametrize("wrong", [([1], [1, 2], 3), ([1], [-1], 3), ([math.nan], [1], 3), ([1], [1], math.nan)])
def test_what_is_no_knapsack_is_refused(wrong):
    with pytest.raises(ValueError, match=r"weights|numbers"):
        solve(*wrong)


@pytest.mark.parametrize(
    ("times", "resolution", "weights"),
    [
        ((1.0, 3.1), 1, (1, 3)),
        ((3.1, 1.0), 1, (3, 1)),
        ((1.0, 1.0), 1, (1, 1)),
        ((1.0, 1.4), 1, (1, 1)),
        ((1.0, 9.0), 1, (1, 5)),  # at most 5
        ((9.0, 1.0), 2, (10, 2)),
        ((1.0, 1.4), 5, (5, 7)),
    ],
)
def test_weights_are_rounded_ratios(times, resolution, weights):
    assert integer_weights(*times, resolution) == weights


def test_a_free_sub_layer_has_no_weight():
    with pytest.raises(ValueError, match="positive"):
        integer_weights(0.0, 1.0)
