"""Slopes and rank correlations on data whose truth is known: values, signs, and how often intervals hold it."""

import math

import numpy as np
import pytest

from specwave.benchmark import association as room
from specwave.benchmark import bootstrap
from specwave.benchmark.association import Measured, associate
from specwave.benchmark.bootstrap import draws, student
from specwave.skipping.correlation import pearson, spearman

SIZES = [1] * 9 + [2] * 9 + [3] * 10


@pytest.fixture
def few_resamples(monkeypatch):
    """400 of them: percentiles of 2,000 move the coverage by less than can be counted here."""
    for module in (room, bootstrap):
        monkeypatch.setattr(module, "RESAMPLES", 400)
    draws.cache_clear()
    yield
    draws.cache_clear()


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("slope", [0.7, -0.3])
@pytest.mark.parametrize("within", [True, False])
def test_a_line_is_found(slope, within):
    x = np.random.default_rng(0).normal(size=28)
    found = associate(x, Measured.of(1.6 + slope * x), SIZES, within)
    assert found.groups == 28
    assert found.slope.value == pytest.approx(slope)
    assert found.slope.interval == pytest.approx([slope, slope])
    assert found.spearman.value == pytest.approx(math.copysign(1, slope))
    assert found.pearson.value == pytest.approx(math.copysign(1, slope))
    assert found.slope.sign == found.spearman.sign == math.copysign(1, slope)


def test_values_are_those_of_textbooks():
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=28).round(1), draw.normal(size=28).round(1)  # with ties
    found = associate(x, Measured.of(y), SIZES, within=False)
    assert found.slope.value == pytest.approx(np.polyfit(x, y, 1)[0])
    assert found.spearman.value == pytest.approx(spearman(x.tolist(), y.tolist()))
    assert found.pearson.value == pytest.approx(pearson(x.tolist(), y.tolist()))
    columns = np.stack([x, *(np.equal(SIZES, size) for size in (1, 2, 3))], 1).astype(float)
    by_dummies = np.linalg.lstsq(columns, y, rcond=None)[0][0]
    assert associate(x, Measured.of(y), SIZES, within=True).slope.value == pytest.approx(by_dummies)


def test_one_size_apart_from_all_sizes():
    """Within each size more is better, yet larger sets have more and are worse: two questions, two signs."""
    draw = np.random.default_rng(2)
    x = draw.normal(size=28) * 0.1 + np.array(SIZES)
    y = 2 + 0.5 * (x - np.array(SIZES)) - 0.3 * np.array(SIZES)
    within, across = (associate(x, Measured.of(y), SIZES, same) for same in (True, False))
    assert within.slope.value == pytest.approx(0.5)
    assert within.spearman.value == pytest.approx(1)
    assert across.slope.sign == across.spearman.sign == -1


def test_the_order_of_groups_changes_nothing():
    draw = np.random.default_rng(3)
    x, y, order = draw.normal(size=28), draw.normal(size=28), draw.permutation(28)
    first = associate(x, Measured.of(y), SIZES, True)
    again = associate(x[order], Measured.of(y[order]), np.array(SIZES)[order].tolist(), True)
    assert again.slope.value == pytest.approx(first.slope.value)
    assert again.spearman.value == pytest.approx(first.spearman.value)
    assert np.allclose(again.slope.interval, first.slope.interval, rtol=0.2, atol=0.05)  # other draws


def test_tau_is_a_ratio_of_sums():
    """Not a mean of ratios: a question of many rounds weighs more."""
    rounds = np.tile([10.0, 90.0], (8, 1))
    x = np.arange(8.0)
    accepted = rounds * np.stack([np.full(8, 1.0), 1 + 0.1 * x], 1)
    assert associate(x, Measured(accepted, rounds), [1] * 8, True).slope.value == pytest.approx(0.09)


def test_too_little_is_nothing():
    few = np.arange(5.0)
    assert associate(few, Measured.of(few), [1] * 5, True) is None
    assert associate(np.ones(9), Measured.of(np.arange(9.0)), [1] * 9, True) is None
    assert associate(np.repeat([1.0, 2, 3], 4), Measured.of(np.arange(12.0)), [1] * 4 + [2] * 4 + [3] * 4, True) is None


# ---------------------------------------------------------------- intervals


def held(make, within, truth, sizes=SIZES, times=120):
    """The share of `times` data sets whose interval holds the slope; the share whose sign is the wrong one."""
    draw, inside, wrong = np.random.default_rng(4), 0, 0
    for _ in range(times):
        x = draw.normal(size=len(sizes)) * 0.4
        found = associate(x, make(draw, x), sizes, within).slope
        inside += found.interval[0] <= truth <= found.interval[1]
        wrong += found.sign * truth < 0
    return inside / times, wrong / times


@pytest.mark.parametrize("truth", [0.0, -0.05])
@pytest.mark.parametrize("sizes", [SIZES, [1] * 9])
def test_intervals_hold_the_truth(few_resamples, truth, sizes):
    """95 % asked. Of 120 draws at 95 % fewer than 108 (90 %) come about once in a hundred times."""

    def make(draw, x):
        return Measured.of(1.6 + truth * x + 0.03 * draw.normal(size=len(x)))

    inside, wrong = held(make, True, truth, sizes)
    assert inside >= 0.9
    assert wrong == 0


def test_uneven_noise_is_no_excuse(few_resamples):
    def make(draw, x):
        return Measured.of(1.6 - 0.05 * x + 0.1 * (0.2 + np.abs(x)) * draw.normal(size=len(x)))

    assert held(make, True, -0.05)[0] >= 0.9


def test_questions_are_part_of_the_doubt(few_resamples):
    """The slope differs by question: over groups alone, the questions at hand would pass for all there are."""

    def make(draw, x):
        slopes, easy = -0.05 + 0.2 * draw.normal(size=39), 1.6 + 0.3 * draw.normal(size=39)
        rounds = np.full((len(x), 39), 25.0)
        tau = easy + np.outer(x, slopes) + 0.02 * draw.normal(size=(len(x), 39))
        return Measured(tau * rounds, rounds)

    assert held(make, True, -0.05, times=60)[0] >= 0.9
    alone = held(lambda draw, x: Measured.of(make(draw, x).values), True, -0.05, times=60)[0]
    assert alone < 0.7


def test_students_t():
    """Tables of Student's t, two-sided 95 %; other levels; between whole degrees of freedom."""
    for freedom, value in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (7, 2.3646), (15, 2.1314), (24, 2.0639)):
        assert student(freedom) == pytest.approx(value, abs=1e-4)
    assert student(10_000) == pytest.approx(1.96, abs=1e-3)
    assert student(10, 0.9) == pytest.approx(1.8125, abs=1e-4)
    assert student(2) > student(2.5) > student(3)
