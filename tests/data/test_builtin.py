"""The prompts that ship with the package: calibration, training, benchmark.

They must be complete, and no two of the three sets may share text: a drafter
that is tuned on one set must not be measured on a piece of it.
"""

import collections
import functools
import importlib.util
import itertools
import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(importlib.util.find_spec("specwave").origin).parent
CALIBRATION = ROOT / "data" / "builtin" / "calibration.jsonl"
TRAINING = ROOT / "data" / "builtin" / "training.json"
BENCHMARK = ROOT / "benchmark" / "builtin" / "question.jsonl"

TWO_TURNS = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
ONE_TURN = ["translation", "summarization", "qa", "math_reasoning", "rag"]
CATEGORIES = TWO_TURNS + ONE_TURN
GRAM = 8


def read_jsonl(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


@functools.cache
def calibration():
    return read_jsonl(CALIBRATION)


@functools.cache
def templates():
    return json.loads(TRAINING.read_text(encoding="utf-8"))


@functools.cache
def training():
    """(id, category, prompt) of every expanded training prompt."""
    from specwave.data.conversations import builtin_training_prompts

    return [tuple(item) for item in builtin_training_prompts()]


@functools.cache
def benchmark():
    return read_jsonl(BENCHMARK)


def texts(name):
    """(id, text) of all texts of one set."""
    if name == "calibration":
        return [(row["id"], row["prompt"]) for row in calibration()]
    if name == "training":
        return [(ident, prompt) for ident, _, prompt in training()]
    assert name == "benchmark"
    return [
        (f"question {row['question_id']} turn {turn}", text)
        for row in benchmark()
        for turn, text in enumerate(row["turns"], start=1)
    ]


def grams(items, n=GRAM):
    """Map each n-gram of words to the id of the first text that holds it."""
    found = {}
    for ident, text in items:
        words = re.findall(r"\w+", text.lower())
        for start in range(len(words) - n + 1):
            found.setdefault(tuple(words[start : start + n]), ident)
    return found


@functools.cache
def grams_of(name):
    return grams(texts(name))


def assert_disjoint(name_a, grams_a, name_b, grams_b):
    shared = sorted(grams_a.keys() & grams_b.keys())
    shown = "\n".join(
        f"  {' '.join(gram)!r}: {name_a} {grams_a[gram]}, {name_b} {grams_b[gram]}" for gram in shared[:10]
    )
    assert not shared, f"{name_a} and {name_b} share {len(shared)} {GRAM}-grams of words, such as\n{shown}"


# ------------------------------------------------------------ calibration


def test_calibration_schema_and_counts():
    rows = calibration()
    assert len(rows) == 65
    for row in rows:
        assert set(row) == {"id", "category", "prompt"}, row
        assert isinstance(row["prompt"], str), row
        assert row["prompt"].strip() == row["prompt"] != "", row
    expected = [(f"cal-{category}-{n}", category) for category in CATEGORIES for n in range(1, 6)]
    assert [(row["id"], row["category"]) for row in rows] == expected


def test_calibration_prompts_are_unique():
    assert len({row["prompt"] for row in calibration()}) == 65


# --------------------------------------------------------------- training


def test_template_schema():
    assert len(templates()) >= 90
    for index, entry in enumerate(templates()):
        assert set(entry) == {"category", "template", "slots", "pairing"}, index
        assert entry["category"] in CATEGORIES, index
        assert entry["pairing"] in {"zip", "product"}, index
        assert entry["slots"], index
        for name, values in entry["slots"].items():
            assert "{" + name + "}" in entry["template"], (index, name)
            assert values, (index, name)
            assert all(isinstance(value, str) and value.strip() for value in values), (index, name)
        if entry["pairing"] == "zip":
            assert len({len(values) for values in entry["slots"].values()}) == 1, index


def test_templates_are_unique():
    assert len({entry["template"] for entry in templates()}) == len(templates())


def test_training_counts():
    items = training()
    assert len(items) >= 700
    per_category = collections.Counter(category for _, category, _ in items)
    assert set(per_category) == set(CATEGORIES)
    assert min(per_category.values()) >= 40, per_category


def test_training_ids_follow_the_templates():
    per_template = collections.Counter()
    for ident, category, _ in training():
        match = re.fullmatch(r"train-(\d+)-(\d+)", ident)
        assert match, ident
        assert category == templates()[int(match[1])]["category"], ident
        per_template[int(match[1])] += 1
    assert len({ident for ident, _, _ in training()}) == len(training())
    for index, entry in enumerate(templates()):
        lengths = [len(values) for values in entry["slots"].values()]
        expected = functools.reduce(lambda x, y: x * y, lengths) if entry["pairing"] == "product" else lengths[0]
        assert per_template[index] == expected <= 30, index


def test_training_prompts_are_unique():
    first = {}
    for ident, _, prompt in training():
        assert prompt not in first, f"{ident} repeats {first[prompt]}: {prompt[:80]!r}"
        first[prompt] = ident


def test_no_placeholder_is_left():
    names = {name for entry in templates() for name in entry["slots"]}
    for ident, _, prompt in training():
        assert not [name for name in names if "{" + name + "}" in prompt], ident


# -------------------------------------------------------------- benchmark


def test_benchmark_schema_and_counts():
    rows = benchmark()
    assert [row["question_id"] for row in rows] == list(range(1, 53))
    assert [row["category"] for row in rows] == [category for category in CATEGORIES for _ in range(4)]
    for row in rows:
        assert set(row) == {"question_id", "category", "turns"}, row["question_id"]
        assert all(isinstance(turn, str) and turn.strip() == turn != "" for turn in row["turns"]), row["question_id"]


def test_benchmark_turns():
    for row in benchmark():
        assert len(row["turns"]) == (2 if row["category"] in TWO_TURNS else 1), row["question_id"]


def test_benchmark_turns_are_unique():
    turns = [turn for row in benchmark() for turn in row["turns"]]
    assert len(set(turns)) == len(turns)


# ---------------------------------------------------------------- overlap


def test_grams_reports_a_shared_gram():
    one = grams([("a", "One two, three four five six seven eight nine.")])
    other = grams([("b", "zero ONE two three four - five six seven eight")])
    with pytest.raises(AssertionError, match=r"one two three four five six seven eight.*left a, right b"):
        assert_disjoint("left", one, "right", other)


@pytest.mark.parametrize(("left", "right"), list(itertools.combinations(["training", "calibration", "benchmark"], 2)))
def test_sets_share_no_gram(left, right):
    assert_disjoint(left, grams_of(left), right, grams_of(right))


def spec_bench_grams():
    folder = os.environ.get("SPECWAVE_DATA")
    if not folder:
        pytest.skip("SPECWAVE_DATA is not set: no Spec-Bench questions to compare with")
    path = Path(folder) / "spec_bench" / "question.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} does not exist")
    return grams(
        (f"question {row['question_id']} turn {turn}", text)
        for row in read_jsonl(path)
        for turn, text in enumerate(row["turns"], start=1)
    )


@pytest.mark.parametrize("name", ["training", "calibration", "benchmark"])
def test_no_gram_of_spec_bench(name):
    assert_disjoint(name, grams_of(name), "Spec-Bench", spec_bench_grams())
