"""Spec-Bench's numbers by hand: from two answers files alone, with nothing of specwave's, the figures of results.json.

What is read of a line, and how it is summed, is what Spec-Bench's `evaluation/speed.py` reads and does, written anew:

    figure                  of the method's file                              of plain decoding's
    #Mean accepted tokens   mean of all accept_lengths of choices[0]
    Tokens per second       mean over questions of Σ new_tokens / Σ wall_time   the same, but with its tokens counted by
                                                                              tokenising choices[0].turns again
    Speedup ratio           quotient of the two means over questions

for "overall", "mt_bench" (8 categories) and each other category. Plain decoding's tokens are here those of new_tokens.
"""

import json

import pytest
from made_up import METHODS, questions, run_folder

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
TASKS = ("overall", "mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_task(lines, task):
    if task == "overall":
        return lines
    return [line for line in lines if line["category"] in (MT_BENCH if task == "mt_bench" else (task,))]


def first(lines, key):
    return [line["choices"][0][key] for line in lines]


def rates(lines):
    """A question's tokens per second."""
    pairs = zip(first(lines, "new_tokens"), first(lines, "wall_time"), strict=True)
    return [sum(tokens) / sum(seconds) for tokens, seconds in pairs]


def mean(values):
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A baseline and three methods on 39 questions; the second method failed at one."""
    return run_folder(tmp_path_factory.mktemp("made") / "run", questions(3))


def pair(folder, label):
    """The lines of a method's file and of the baseline's, over the questions that both answered."""
    ours, plain = read(folder / label / "answers.jsonl"), read(folder / "baseline" / "answers.jsonl")
    answered = {line["question_id"] for line in ours if line["choices"]}
    both = answered & {line["question_id"] for line in plain if line["choices"]}
    return [[line for line in lines if line["question_id"] in both] for lines in (ours, plain)]


def block(folder, label, task):
    content = json.loads((folder / label / "results.json").read_text(encoding="utf-8"))
    return content["overall"] if task == "overall" else content["subtasks"][task]


@pytest.mark.parametrize("label", list(METHODS))
@pytest.mark.parametrize("task", TASKS)
def test_spec_bench_s_figures(folder, label, task):
    ours, plain = (of_task(lines, task) for lines in pair(folder, label))
    found = block(folder, label, task)
    lengths = [length for own in first(ours, "accept_lengths") for length in own]
    assert found["questions"] == len(ours) == len(plain)
    assert found["tau"] == pytest.approx(mean(lengths), rel=1e-12)
    assert found["tokens_per_second_per_question"] == pytest.approx(mean(rates(ours)), rel=1e-12)
    assert found["speedup_per_question"] == pytest.approx(mean(rates(ours)) / mean(rates(plain)), rel=1e-12)


@pytest.mark.parametrize("label", list(METHODS))
@pytest.mark.parametrize("task", TASKS)
def test_our_own_figures(folder, label, task):
    """Sums over questions divided, and the questions' own τ averaged."""
    ours, plain = (of_task(lines, task) for lines in pair(folder, label))
    found = block(folder, label, task)
    tokens, seconds, rounds, theirs, slow = (
        sum(value for own in values for value in own)
        for values in (
            first(ours, "new_tokens"),
            first(ours, "wall_time"),
            first(ours, "decoding_steps"),
            first(plain, "new_tokens"),
            first(plain, "wall_time"),
        )
    )
    assert (found["tokens"], found["rounds"]) == (tokens, rounds)
    assert found["tau"] == pytest.approx(tokens / rounds, rel=1e-12)  # every committed token belongs to a round
    assert found["tau_per_question"] == pytest.approx(mean([mean(own) for own in first(ours, "accept_lengths")]))
    assert found["tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-12)
    assert found["seconds_per_token"] == pytest.approx(seconds / tokens, rel=1e-12)
    assert found["speedup"] == pytest.approx((tokens / seconds) / (theirs / slow), rel=1e-12)


def test_repetitions_are_choices_and_spec_bench_sees_the_first(tmp_path):
    """With `repeat` our sums are over all choices; Spec-Bench's are over choices[0]."""
    run_folder(tmp_path, questions(1), {"a": ([7], None, 0.5, 0)}, repeat=3)
    lines = read(tmp_path / "a" / "answers.jsonl")
    assert all([choice["index"] for choice in line["choices"]] == [0, 1, 2] for line in lines)
    every = [choice for line in lines for choice in line["choices"]]
    found = block(tmp_path, "a", "overall")
    assert found["tokens"] == sum(sum(choice["new_tokens"]) for choice in every)
    assert found["tau"] == pytest.approx(mean([length for choice in every for length in choice["accept_lengths"]]))
    totals = [[sum(map(sum, (line["choices"][at][key] for line in lines))) for key in ("new_tokens", "wall_time")]
              for at in range(3)]  # fmt: skip
    assert found["repetitions"]["tokens_per_second"] == pytest.approx([tokens / wall for tokens, wall in totals])


def test_speed_py_finds_all_it_reads(folder):
    """Its keys and types, a number per turn, and sums that it can divide by."""
    for path in folder.glob("*/answers.jsonl"):
        for line in read(path):
            assert {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"} <= line.keys()
            assert isinstance(line["category"], str)
            if "error" in line["specwave"]:
                continue
            choice = line["choices"][0]
            turns = 2 if line["category"] in MT_BENCH else 1
            for key, kind in (("turns", str), ("decoding_steps", int), ("new_tokens", int), ("wall_time", float)):
                assert len(choice[key]) == turns
                assert all(type(value) is kind for value in choice[key])
            assert all(type(length) is int and length >= 1 for length in choice["accept_lengths"])
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
            assert sum(choice["wall_time"]) > 0


def test_a_failed_question_is_no_number_to_speed_py(folder):
    """It has no choices[0], so `speed.py` stops there: it can neither take the question for an answer nor count the
    numbers of the one before."""
    lost = [line for line in read(folder / "L29" / "answers.jsonl") if "error" in line["specwave"]]
    assert len(lost) == 1
    with pytest.raises(IndexError):
        rates(lost)
    assert block(folder, "L29", "overall")["failed"] == 1
