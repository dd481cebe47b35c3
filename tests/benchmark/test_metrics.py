"""Figures: a worked example by hand, sums and not means, nothing counted that failed."""

import json
import math

import pytest

from specwave.benchmark.definitions import DEFINITIONS
from specwave.benchmark.metrics import Verdict, block, blocks
from specwave.benchmark.questions import CATEGORIES, SUBTASKS


def row(name, category, accept, seconds, peak=None):
    """One question; `accept` and `seconds` have an entry per turn."""
    choice = {
        "index": 0,
        "turns": ["…"] * len(accept),
        "decoding_steps": [len(turn) for turn in accept],
        "new_tokens": [sum(turn) for turn in accept],
        "wall_time": seconds,
        "accept_lengths": [length for turn in accept for length in turn],
    }
    return {"question_id": name, "category": category, "choices": [choice], "specwave": {"peak_memory_bytes": peak}}


def lost(name, category):
    return {"question_id": name, "category": category, "choices": [], "specwave": {"error": "ValueError: no"}}


ROWS = [row(1, "writing", [[3, 1], [2, 2, 1]], [0.5, 1.5], 70), row(2, "qa", [[1]], [1.0], 90), lost(3, "rag")]
PLAIN = [
    row(3, "rag", [[1] * 50], [1.0]),  # the method failed here, so this counts nowhere
    row(1, "writing", [[1] * 4, [1] * 5], [2.0, 2.5]),
    row(2, "qa", [[1]], [0.5]),
]


def test_by_hand():
    overall = block(ROWS, PLAIN, {1: Verdict(True, 2), 2: Verdict(False, 0)})
    nested = {
        name: overall.pop(name) for name in ("intervals", "acceptance", "sources", "time", "latency", "repetitions")
    }
    assert (
        nested["acceptance"] is nested["sources"] is nested["time"] is nested["repetitions"] is None
    )  # these rows tell nothing of them
    assert nested["latency"]["turn"]["p50"] == 1.0
    assert overall == {
        "questions": 2,
        "failed": 1,
        "tau": 10 / 6,  # (3+1+2+2+1+1) / 6 rounds; the questions' own τ, 9/5 and 1, would average to 1.4
        "tau_per_question": 1.4,
        "tokens": 10,
        "rounds": 6,
        "tokens_per_second": 10 / 3,
        "tokens_per_second_per_question": (4.5 + 1) / 2,
        "seconds_per_token": 0.3,
        "speedup": (10 / 3) / (10 / 5),
        "speedup_per_question": (4.5 + 1) / (2 + 2),
        "peak_memory_bytes": 90,
        "exact_match_rate": 0.5,
        "near_ties": 2,
    }


def test_plain_decoding_is_its_own_measure():
    overall = block(PLAIN, PLAIN, None)
    assert overall["tau"] == overall["speedup"] == 1.0
    assert overall["exact_match_rate"] is None


def test_speedup_compares_the_same_questions():
    fast = [row(1, "qa", [[2]], [1.0]), row(2, "qa", [[2]], [1.0])]
    plain = [row(1, "qa", [[1, 1]], [2.0]), lost(2, "qa")]
    assert block(fast, plain, None)["speedup"] == 2.0
    assert block(fast, [lost(1, "qa"), lost(2, "qa")], None)["speedup"] is None


def test_all_blocks_are_there_and_add_up():
    found = blocks([*ROWS, row(4, "cooking", [[2]], [1.0])], PLAIN, None)
    assert list(found["subtasks"]) == list(SUBTASKS)
    assert list(found["categories"]) == [*CATEGORIES, "cooking"]
    assert found["subtasks"]["mt_bench"] == found["categories"]["writing"]
    for figure in ("tokens", "rounds", "questions", "failed"):
        assert sum(each[figure] for each in found["categories"].values()) == found["overall"][figure]
    assert found["categories"]["stem"]["tau"] is None
    assert found["categories"]["rag"] == found["categories"]["stem"] | {"failed": 1}


def test_nothing_is_nan_and_everything_is_defined():
    found = blocks([], [], None)
    assert "NaN" not in json.dumps(found, allow_nan=False)
    assert not set(found["overall"]) - set(DEFINITIONS)
    assert {"wall_time", "accept_lengths"} <= set(DEFINITIONS)


def test_rates_of_questions_are_averaged_over_the_same_questions():
    """One without a token has the rate 0, as Spec-Bench counts it; one that took no time on either side has none."""
    ours = [row(1, "qa", [[2]], [1.0]), row(2, "qa", [[]], [0.5]), row(3, "qa", [[9]], [0.0])]
    plain = [row(name, "qa", [[1, 1]], [4.0]) for name in (1, 2, 3)]
    found = block(ours, plain, None)
    assert found["tokens_per_second_per_question"] == (2.0 + 0.0) / 2
    assert found["speedup_per_question"] == 1.0 / 0.5


@pytest.mark.parametrize("seconds", [[0.0], [1e-300]])
def test_no_time_gives_no_infinite_rate(seconds):
    rate = block([row(1, "qa", [[1]], seconds)], [], None)["tokens_per_second"]
    assert rate is None or math.isfinite(rate)
