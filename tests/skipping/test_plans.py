"""Plans: what they say of themselves, and files that are none."""

import json

import pytest

from specwave.artifacts import UserError
from specwave.skipping.plans import Plan, check_kept, read_plan


def test_what_a_plan_says_of_itself():
    plan = Plan((True, True, False, True, False, False, True, True), 3, 0.5, 0.9, 12.0)
    assert (plan.attentions, plan.mlps) == (2, 3)
    assert plan.skipped_attention_share == pytest.approx(2 / 3)
    assert Plan.full(4).skipped_attention_share is None
    assert Plan.full(4) == Plan((True,) * 8, 0)
    with pytest.raises(ValueError, match="two flags per block"):
        Plan((True,), 1)


def test_a_plan_survives_its_file(tmp_path):
    plan = Plan((True, False, True, True), 3, 0.5, 0.9, 12.0)
    (tmp_path / "plan.json").write_text(json.dumps(plan.describe()))
    found = read_plan(tmp_path / "plan.json", 2, gamma=8)
    assert (found.kept, found.gamma) == (plan.kept, 3)
    (tmp_path / "plan.json").write_text(json.dumps({"kept": [1, 0, 1, 1]}))
    assert read_plan(tmp_path / "plan.json", 2, gamma=8) == Plan(plan.kept, 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"kept": [1, 1]}, "it is a plan for another depth: this target has 2 blocks, 4 sub-layers"),
        ({"kept": [1] * 6}, "another depth"),
        ({"kept": [0] * 4}, "nothing kept: keep at least one"),
        ({"kept": [1, 1, 2, 1]}, "0 or 1 for every sub-layer"),
        ({"kept": [1, 1, "x", 1]}, "0 or 1 for every sub-layer"),
        ({"kept": 4}, "it is no plan"),
        ({}, "it is no plan"),
        ({"kept": [1] * 4, "gamma": 0}, "its gamma is 0"),
        ({"kept": [1] * 4, "gamma": "many"}, "damaged"),
    ],
)
def test_what_is_no_plan_is_refused(content, words, tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=words) as caught:
        read_plan(tmp_path / "plan.json", 2, gamma=8)
    assert caught.value.key == "decoding.plan"


def test_flags_become_booleans():
    assert check_kept([1, 0, True, False], 2, "plan") == (True, False, True, False)
