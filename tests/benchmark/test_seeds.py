"""Noise between seeds taken apart, and methods compared over seeds: closed forms, and how often intervals hold."""

import math

import numpy as np
import pytest

from specwave.benchmark.bootstrap import student
from specwave.benchmark.seeds import over_seeds, seed_noise


def test_noise_by_hand():
    """Two seeds: half the variance of the differences, what all groups have in common left out."""
    table = np.array([[1.50, 1.60], [1.40, 1.52], [1.70, 1.78]])
    found = seed_noise(table)
    gaps = table[:, 1] - table[:, 0]
    assert found.deviation == pytest.approx(math.sqrt(gaps.var(ddof=1) / 2))
    assert found.shift == pytest.approx([0, gaps.mean()])
    assert found.apart == pytest.approx(student(2) * math.sqrt(2) * found.deviation)


def test_noise_is_found_again():
    draw = np.random.default_rng(0)
    made = [draw.normal(size=(8, 1)) + [0, 0.3] + 0.02 * draw.normal(size=(8, 2)) for _ in range(200)]
    assert math.sqrt(np.mean([seed_noise(one).deviation ** 2 for one in made])) == pytest.approx(0.02, rel=0.1)


def test_seeds_that_agree_leave_no_noise():
    found = seed_noise([[1.5, 1.6], [1.7, 1.8]])
    assert found.deviation == pytest.approx(0, abs=1e-12)
    assert found.told_apart([1.5, 1.5, 1.7]) == (2, 3)
    assert found.reliability(0.02) == pytest.approx(1)


def test_what_is_told_apart():
    """Of noise alone about 5 of 100 pairs are; of groups far apart all."""
    draw = np.random.default_rng(1)
    shares = []
    for _ in range(200):
        table = 1.6 + 0.02 * draw.normal(size=(8, 2))
        apart, pairs = seed_noise(table).told_apart((1.6 + 0.02 * draw.normal(size=28)).tolist())
        shares.append(apart / pairs)
    assert 0.03 < np.mean(shares) < 0.08
    noise = seed_noise(1.6 + 0.02 * draw.normal(size=(8, 2)))
    assert noise.told_apart([1, 2, 3, 4]) == (6, 6)
    assert noise.reliability(1.7) > 0.99
    assert noise.reliability(0.0) == 0
    assert noise.reliability(noise.deviation**2 / 2) == 0


@pytest.mark.parametrize("table", [[[1.0, 2.0]], [[1.0], [2.0]], []])
def test_too_little_for_noise(table):
    assert seed_noise(table) is None


def contrast(draw, seeds, between_seeds, between_questions, truth=0.05, questions=39):
    easy, peculiar = 1.7 + 0.3 * draw.normal(size=questions), between_questions * draw.normal(size=questions)
    rounds = np.full((seeds, questions), 25.0)
    first, second = (
        easy + between_seeds * draw.normal(size=(seeds, 1)) + 0.03 * draw.normal(size=(seeds, questions))
        for _ in range(2)
    )
    return over_seeds(((first + truth + peculiar) * rounds, second * rounds), (rounds, rounds))


@pytest.mark.parametrize(("between_seeds", "between_questions"), [(0.03, 0.0), (0.0, 0.2), (0.03, 0.2)])
def test_three_seeds_hold_the_truth(between_seeds, between_questions):
    """Of 150 draws at 95 % fewer than 135 (90 %) come less than once in a hundred times."""
    draw = np.random.default_rng(2)
    found = [contrast(draw, 3, between_seeds, between_questions) for _ in range(150)]
    assert np.mean([one.interval[0] <= 0.05 <= one.interval[1] for one in found]) >= 0.9
    assert np.mean([one.tau for one in found]) == pytest.approx(0.05, abs=0.02)


def test_questions_alone_miss_the_seeds():
    draw = np.random.default_rng(3)
    found = [contrast(draw, 3, 0.03, 0.0) for _ in range(100)]
    assert np.mean([one.questions[0] <= 0.05 <= one.questions[1] for one in found]) < 0.8


def test_pairs_by_hand():
    accepted, rounds = np.array([[30.0, 10.0], [32.0, 12.0]]), np.array([[20.0, 5.0], [20.0, 5.0]])
    found = over_seeds((accepted, accepted[::-1]), (rounds, rounds))
    assert found.each == pytest.approx([(40 - 44) / 25, (44 - 40) / 25])
    assert found.tau == pytest.approx(0)
    again = over_seeds((accepted + rounds, accepted), (rounds, rounds))
    assert again.each == pytest.approx([1, 1])
    assert again.interval == pytest.approx([1, 1])


def test_one_seed_has_no_interval_over_seeds():
    accepted, rounds = np.array([[30.0, 10.0, 9.0]]), np.array([[20.0, 5.0, 6.0]])
    found = over_seeds((accepted, accepted - 1), (rounds, rounds))
    assert found.interval is None
    assert found.questions is not None
