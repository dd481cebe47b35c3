"""The target's answers to prompts and their cache."""

from __future__ import annotations

import pytest

from specwave.artifacts import UserError
from specwave.data import regenerate
from specwave.data.regenerate import answered
from specwave.decoding import generate

PROMPTS = [(f"p{n}", "toy", [*range(3, 6 + n)]) for n in range(5)]


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """The prompts of every call of `generate`; an empty cache."""
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path))
    calls = []

    def noting(target, proposer, prompts, **options):
        calls.append([list(ids) for ids in prompts])
        return generate(target, proposer, prompts, **options)

    monkeypatch.setattr(regenerate, "generate", noting)
    return calls


def test_an_answer_is_what_generate_says_to_its_prompt(families, counted):
    target = families["llama"]
    found = answered(target, PROMPTS, max_new_tokens=6, batch_size=2)
    assert [sample.id for sample in found] == [f"p{n}" for n in range(5)]
    for (_, category, ids), sample in zip(PROMPTS, found, strict=True):
        tokens = generate(target, None, [ids], max_new_tokens=6).tokens[0]
        assert sample.ids == ids + tokens
        assert sample.answer == [False] * len(ids) + [True] * len(tokens)
        assert sample.category == category
    assert counted == [[PROMPTS[0][2], PROMPTS[1][2]], [PROMPTS[2][2], PROMPTS[3][2]], [PROMPTS[4][2]]]


@pytest.mark.parametrize("lost", [1, 60, 100_000])
def test_a_killed_run_goes_on_at_its_batch(families, counted, tmp_path, lost):
    target = families["llama"]
    whole = answered(target, PROMPTS, max_new_tokens=6, batch_size=2)
    assert answered(target, PROMPTS, max_new_tokens=6, batch_size=2) == whole
    assert len(counted) == 3
    (path,) = tmp_path.glob("answers/*.jsonl")
    content = path.read_bytes()
    path.write_bytes(content[: max(0, len(content) - lost)])
    assert answered(target, PROMPTS, max_new_tokens=6, batch_size=2) == whole
    assert 3 < len(counted) <= 6
    assert set(path.read_bytes().splitlines()) == set(content.splitlines())


def test_what_decides_an_answer_is_in_the_name(families, counted, tmp_path):
    target = families["llama"]
    for changed in (
        {},
        {"max_new_tokens": 5},
        {"temperature": 1.0},
        {"temperature": 1.0, "seed": 1},
        {"seed": 1},  # greedy: the same answers
        {"batch_size": 3},
    ):
        answered(target, PROMPTS, **{"max_new_tokens": 6, "batch_size": 2} | changed)
    answered(families["qwen3"], PROMPTS, max_new_tokens=6, batch_size=2)
    assert len(list(tmp_path.glob("answers/*.jsonl"))) == 6


def test_prompts_without_room(families, counted):
    target = families["llama"]
    long = ("long", "toy", [3] * (target.max_length - 3))
    with pytest.warns(UserWarning, match=r"^data\.max_new_tokens=6: 1 of 6 prompts leave no room"):
        assert len(answered(target, [*PROMPTS, long], max_new_tokens=6)) == 5
    with pytest.raises(UserError, match=r"^data\.max_new_tokens=6: 1 of 1 prompts leave no room.*lower it"):
        answered(target, [long], max_new_tokens=6)
