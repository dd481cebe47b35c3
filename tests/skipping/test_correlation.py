"""Correlations against known ones, and intervals that hold the truth as often as they say."""

import math
import random

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwave.skipping.correlation import bootstrap, pearson, spearman

pairs = st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=3, max_size=20)


@given(pairs)
def test_pearson_is_numpys(points):
    x, y = zip(*points, strict=True)
    found = pearson(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(numpy.corrcoef(x, y)[0, 1], abs=1e-9)


@given(pairs)
def test_spearman_sees_the_order_only(points):
    x, y = zip(*points, strict=True)
    found = spearman(x, y)
    again = spearman([a**3 for a in x], [2 * b + 1 for b in y])
    assert (math.isnan(found) and math.isnan(again)) or found == pytest.approx(again)


def test_ties_share_their_ranks():
    """Ranks 0.5, 0.5, 2, 3 beside 0, 1, 2, 3."""
    assert spearman([1, 1, 2, 3], [5, 6, 7, 8]) == pytest.approx(pearson([0.5, 0.5, 2, 3], [0, 1, 2, 3]))
    assert spearman([1, 2, 3], [10, 100, 1000]) == pytest.approx(1.0)
    assert pearson([1, 2, 3], [10, 100, 1000]) < 0.95
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)


def test_intervals_hold_the_truth_as_often_as_they_say():
    draw, held = random.Random(1), 0
    for trial in range(100):
        x = [draw.gauss(0, 1) for _ in range(40)]
        y = [0.6 * a + 0.8 * draw.gauss(0, 1) for a in x]
        found = bootstrap(pearson, x, y, replicates=200, seed=trial)
        assert found.low <= found.value <= found.high
        held += found.low <= 0.6 <= found.high
    assert 85 <= held <= 100


def test_an_interval_is_the_same_for_the_same_seed():
    x, y = [1, 2, 3, 4, 5], [2, 1, 4, 3, 5]
    assert bootstrap(spearman, x, y) == bootstrap(spearman, x, y)
    alike = bootstrap(pearson, [1, 1, 1], [1, 2, 3], replicates=10)
    assert all(map(math.isnan, (alike.value, alike.low, alike.high)))
    with pytest.raises(ValueError, match="3 values beside 2"):
        pearson([1, 2, 3], [1, 2])
