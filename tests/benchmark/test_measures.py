"""Acceptance by position, time, latency, repetitions and intervals: worked examples, brute force, closed forms."""

import itertools
import math

import numpy as np
import pytest

from specwave.benchmark.bootstrap import RESAMPLES, draws, interval, mean_interval, ratio_interval, resampled
from specwave.benchmark.measures import PHASES, acceptance, latency, per_question, repeated, time_split
from specwave.benchmark.metrics import block


def answer(name, *choices, category="qa"):
    """A row; a choice is (accept_lengths, draft_levels, wall seconds, prefill, draft, verify, accept) of one turn."""
    made, noted = [], []
    for index, (lengths, levels, wall, prefill, draft, verify, accept) in enumerate(choices):
        made.append(
            {
                "index": index,
                "turns": ["…"],
                "decoding_steps": [len(lengths)],
                "new_tokens": [sum(lengths)],
                "wall_time": [wall],
                "accept_lengths": lengths,
            }
        )
        own = {"tokens": [[0] * sum(lengths)], "prefill_seconds": [prefill], "draft_seconds": [draft]}
        own |= {"verify_seconds": [verify], "accept_seconds": [accept]} | ({"draft_levels": levels} if levels else {})
        noted.append(own)
    more = {"repetitions": noted[1:]} if len(noted) > 1 else {}
    return {"question_id": name, "category": category, "choices": made, "specwave": noted[0] | more}


# rounds    accepted drafts   levels    position 0      1       2
# 3 of 3    2                 3         kept            kept    not
# 1         0                 3         not             –       –
# 4         3                 3         kept            kept    kept
# 2         1                 1         kept            (not drafted)
# 1         0                 0         nothing was drafted
EXAMPLE = answer("x", ([3, 1, 4, 2, 1], [3, 3, 3, 1, 0], 2.0, 0.25, 0.5, 1.0, 0.125))


def test_acceptance_by_position_by_hand():
    found = acceptance([EXAMPLE])
    assert found["reached"] == [4, 2, 2]
    assert found["conditional"] == [3 / 4, 2 / 2, 1 / 2]
    assert found["drafts"] == 4
    assert found["vllm"] == [3 / 4, 2 / 4, 1 / 4]
    assert found["rate"] == 6 / 10


def test_vllm_s_rates_give_its_mean_acceptance_length():
    """vLLM's mean acceptance length, 1 + Σ over positions, is τ over the rounds that drafted."""
    drafted = [length for length, levels in zip([3, 1, 4, 2, 1], [3, 3, 3, 1, 0], strict=True) if levels]
    assert 1 + sum(acceptance([EXAMPLE])["vllm"]) == pytest.approx(sum(drafted) / len(drafted))


def test_acceptance_is_not_guessed():
    assert acceptance([EXAMPLE, answer("y", ([1], None, 1.0, 0, 0, 1.0, 0))]) is None  # a file that tells no levels
    assert acceptance([answer("y", ([1, 1], [0, 0], 1.0, 0, 0, 1.0, 0))]) is None  # plain decoding
    assert acceptance([]) is None


def test_phases_add_up_to_the_wall_time():
    found = time_split([EXAMPLE, answer("y", ([1], [0], 1.0, 0.5, 0.0, 0.25, 0.125))])
    assert tuple(found) == PHASES
    assert found == {"prefill": 0.75, "draft": 0.5, "verify": 1.0, "accept": 0.25, "other": 0.5}
    assert sum(found.values()) == 3.0


def test_latency_percentiles():
    rows = [answer(n, ([2], [1], float(n), 0.5, 0, 0, 0)) for n in range(1, 102)]
    found = latency(rows)
    assert found["turn"] == {"p50": 51.0, "p90": 91.0, "p99": 100.0}
    assert found["prefill"] == {"p50": 0.5, "p90": 0.5, "p99": 0.5}
    assert found["round"]["p50"] == 50.5
    assert found["token"]["p50"] == 25.5
    assert latency([])["turn"] is None


def test_per_question_carries_plain_decoding_s_sums():
    plain = answer("x", ([1] * 11, [0] * 11, 4.0, 0, 0, 0, 0))
    (one,) = per_question([EXAMPLE], {"x": plain})
    assert (one["tau"], one["tokens"], one["seconds"]) == (11 / 5, 11, 2.0)
    assert (one["plain_tokens"], one["plain_seconds"]) == (11, 4.0)
    assert per_question([EXAMPLE], {})[0]["plain_seconds"] is None


# ---------------------------------------------------------------- repetitions


def test_repetitions_by_hand():
    rows = [
        answer(1, *(([2, 2], [1, 1], wall, 0, 0, 0, 0) for wall in (1.0, 2.0, 4.0))),
        answer(2, *(([4], [3], wall, 0, 0, 0, 0) for wall in (1.0, 2.0, 4.0))),
    ]
    plain = {n: answer(n, *(([1] * 4, [0] * 4, 4.0, 0, 0, 0, 0) for _ in range(3))) for n in (1, 2)}
    found = repeated(rows, plain)
    assert found["count"] == 3
    assert found["tokens_per_second"] == [4.0, 2.0, 1.0]
    assert found["speedup"] == [4.0, 2.0, 1.0]
    mean, spread = 7 / 3, math.sqrt((25 + 1 + 16) / 9 / 2)
    assert found["speedup_interval"] == pytest.approx(
        [mean - 4.302653 * spread / math.sqrt(3), mean + 4.302653 * spread / math.sqrt(3)]
    )
    assert repeated(rows[:1], {})["speedup"] is None
    assert repeated([EXAMPLE], {}) is None
    assert block(rows, list(plain.values()), None)["speedup"] == 24 / 14


def test_mean_interval_covers_as_often_as_it_says():
    drawn = np.random.default_rng(1).normal(3.0, 2.0, (4000, 4))
    inside = sum(low <= 3.0 <= high for low, high in map(mean_interval, drawn.tolist()))
    assert 0.935 < inside / 4000 < 0.965
    assert mean_interval([1.0]) is None
    assert mean_interval([2.0] * 40) == [2.0, 2.0]


# ---------------------------------------------------------------- the bootstrap


def test_resamples_draw_as_many_with_replacement():
    counts = draws(7)
    assert counts.shape == (RESAMPLES, 7)
    assert (counts.sum(1) == 7).all()
    assert abs(counts.mean() - 1) < 1e-12
    assert abs(counts.var() - 6 / 7) < 0.02  # of a binomial with 7 draws and p = 1/7
    assert draws(7) is counts


def test_a_resampled_ratio_is_that_of_the_sums():
    above, below = [3.0, 5.0, 1.0], [1.0, 2.0, 1.0]
    exact = sorted(
        sum(above[i] for i in pick) / sum(below[i] for i in pick) for pick in itertools.product(range(3), repeat=3)
    )
    found = resampled(above, below)
    assert {round(value, 9) for value in found} <= {round(value, 9) for value in exact}
    assert found.mean() == pytest.approx(np.mean(exact), abs=0.03)
    assert found.std() == pytest.approx(np.std(exact), abs=0.03)


def test_intervals_cover_as_often_as_they_say():
    """Of 200 sets of 60 questions, the interval of a ratio of sums holds the true ratio in about 95 %."""
    rng = np.random.default_rng(5)
    below = rng.integers(10, 60, (200, 60)).astype(float)
    above = below * rng.normal(2.0, 0.5, (200, 60))
    inside = 0
    for one, other in zip(above, below, strict=True):
        low, high = ratio_interval(one, other)
        inside += low <= 2.0 <= high
    assert 0.88 < inside / 200 < 0.99


def test_a_constant_has_no_spread_and_one_question_no_interval():
    assert ratio_interval([4.0, 8.0], [2.0, 4.0]) == [2.0, 2.0]
    assert ratio_interval([4.0], [2.0]) is None
    assert interval(np.full(10, np.nan)) is None


def test_the_interval_of_a_speedup_is_paired():
    """Times that differ from question to question a hundredfold, and alike for both, leave the speedup sure."""
    rows = [answer(n, ([2], [1], 0.5 * 100 ** (n / 20), 0, 0, 0, 0)) for n in range(20)]
    plain = [answer(n, ([1, 1], [0, 0], 1.0 * 100 ** (n / 20), 0, 0, 0, 0)) for n in range(20)]
    found = block(rows, plain, None)
    assert found["intervals"]["speedup"] == pytest.approx([2.0, 2.0])
    low, high = found["intervals"]["tokens_per_second"]
    assert high > 1.5 * low
    assert found["intervals"]["tau"] == [2.0, 2.0]
