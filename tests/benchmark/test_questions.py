"""Questions: every malformed line is refused by file and line; `limit` is even and deterministic."""

import hashlib
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwave.artifacts import UserError
from specwave.benchmark import Benchmark, Question
from specwave.benchmark.questions import BUILTIN, CATEGORIES, SUBTASKS, choose, fingerprint, read_questions, spread

GOOD = {"question_id": 1, "category": "qa", "turns": ["Why?"]}


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_categories_are_spec_bench_s():
    assert len(CATEGORIES) == len(set(CATEGORIES)) == 13
    assert [len(names) for names in SUBTASKS.values()] == [8, 1, 1, 1, 1, 1]


def test_builtin_set():
    questions = read_questions(BUILTIN)
    counts = Counter(question.category for question in questions)
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 3
    for question in questions:
        assert len(question.turns) == (2 if question.category in SUBTASKS["mt_bench"] else 1)


def test_reads_ids_turns_and_passes_over_other_keys(tmp_path):
    path = write(
        tmp_path / "q.jsonl", {**GOOD, "reference": ["x"]}, "", {**GOOD, "question_id": "b", "turns": ["1", "2"]}
    )
    assert read_questions(path) == [Question(1, "qa", ("Why?",)), Question("b", "qa", ("1", "2"))]


BAD = {
    "not JSON": ("{", "not JSON"),
    "cut off": ('{"question_id": 1, "categ', "not JSON"),
    "a list": ("[1, 2]", "object"),
    "no id": ({"category": "qa", "turns": ["a"]}, "question_id"),
    "no category and turns": ({"question_id": 3}, "category, turns"),
    "id of a wrong type": ({**GOOD, "question_id": 1.5}, "question_id"),
    "id true": ({**GOOD, "question_id": True}, "question_id"),
    "id null": ({**GOOD, "question_id": None}, "question_id"),
    "category of a wrong type": ({**GOOD, "question_id": 2, "category": ["qa"]}, "category"),
    "blank category": ({**GOOD, "question_id": 2, "category": " "}, "category"),
    "turns a text": ({**GOOD, "question_id": 2, "turns": "Why?"}, "turns"),
    "no turn": ({**GOOD, "question_id": 2, "turns": []}, "turns"),
    "a turn of a wrong type": ({**GOOD, "question_id": 2, "turns": ["a", 7]}, "turn"),
    "a blank turn": ({**GOOD, "question_id": 2, "turns": ["a", "\n"]}, "blank"),
    "half a surrogate pair": ('{"question_id": 2, "category": "qa", "turns": ["\\ud800"]}', "surrogate"),
    "duplicate id": ({**GOOD, "category": "math"}, "line 1"),
    "duplicate id as text": ({**GOOD, "question_id": "1"}, "line 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_line_is_named(tmp_path, name):
    line, words = BAD[name]
    path = write(tmp_path / "q.jsonl", GOOD, "", line, {**GOOD, "question_id": 99})
    with pytest.raises(UserError) as caught:
        read_questions(path)
    assert caught.value.key == "benchmark.path"
    assert str(caught.value.value) == f"{path}:3"
    assert words in caught.value.remedy


def test_bad_files(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="empty"):
        read_questions(write(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"question_id": 1, "category": "qa", "turns": ["\xe9"]}\n')
    with pytest.raises(UserError, match=r"latin\.jsonl"):
        read_questions(tmp_path / "latin.jsonl")


def test_sha256(tmp_path):
    path = write(tmp_path / "q.jsonl", GOOD)
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(Benchmark(str(path), right.upper()).questions()) == 1
    with pytest.raises(UserError, match=right):
        Benchmark(str(path), "0" * 64).questions()


def test_categories_filter():
    questions = read_questions(BUILTIN)
    chosen = choose(questions, categories=["qa", "writing"])
    assert {question.category for question in chosen} == {"qa", "writing"}
    assert chosen == [question for question in questions if question.category in ("qa", "writing")]
    with pytest.raises(UserError, match=r"categories=cooking.*writing, roleplay"):
        choose(questions, categories=["qa", "cooking"])
    with pytest.raises(UserError, match="categories"):
        choose(questions, categories=[])


@pytest.mark.parametrize("limit", [0, -3, True])
def test_bad_limit(limit):
    with pytest.raises(UserError, match="limit"):
        choose([Question(1, "qa", ("a",))], limit)


def test_limit_26_takes_two_per_category_and_keeps_the_order():
    questions = read_questions(BUILTIN)
    chosen = choose(questions, 26)
    assert set(Counter(question.category for question in chosen).values()) == {2}
    assert [q for q in questions if q in set(chosen)] == chosen
    assert chosen == choose(questions, 26)
    for category in CATEGORIES:
        of_category = [question for question in questions if question.category == category]
        assert [question for question in chosen if question.category == category] == of_category[:2]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=15), st.integers(1, 200))
def test_spread_is_as_even_as_sizes_allow(sizes, limit):
    taken = spread(sizes, limit)
    assert sum(taken) == min(limit, sum(sizes))
    assert all(0 <= count <= size for count, size in zip(taken, sizes, strict=True))
    full = max(taken)  # whoever has less than the fullest by more than one had no more to give
    assert all(count >= full - 1 or count == size for count, size in zip(taken, sizes, strict=True))


def test_spread_of_a_rest_is_evenly_spaced():
    assert spread([5] * 13, 4) == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 0]


def test_fingerprint_sees_text_and_order():
    a, b = Question(1, "qa", ("x",)), Question(2, "qa", ("y",))
    assert fingerprint([a, b]) == fingerprint([a, b])
    others = [[b, a], [a], [a, Question(2, "qa", ("y ",))], [Question("1", "qa", ("x",)), b]]
    assert len({fingerprint(each) for each in [[a, b], *others]}) == 5


def test_spec_bench_itself(shared_data):
    questions = Benchmark(str(shared_data / "spec_bench" / "question.jsonl")).questions()
    assert len(questions) == 480
    assert set(Counter(question.category for question in choose(questions, 130)).values()) == {10}
