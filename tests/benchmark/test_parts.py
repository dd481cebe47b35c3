"""An evaluation in parts: it stops for time between questions, goes on, also on another machine, and says so."""

import itertools
import json

import pytest

from specwave.app.evaluate import EvaluateConfig, main, meet_other_machines
from specwave.app.run import HARMLESS, Run
from specwave.artifacts import UserError
from specwave.benchmark import Benchmark, evaluator
from specwave.benchmark.answering import Answerer, Method
from specwave.benchmark.answers import AnswerFile, read_answers
from specwave.benchmark.drafters import find_drafters
from specwave.benchmark.evaluator import Evaluator, predict
from specwave.benchmark.questions import Question
from specwave.benchmark.results import Baseline, build_results
from specwave.benchmark.rows import machine_of_row
from specwave.benchmark.settings import machine_of
from specwave.decoding import Autoregressive, BaseProposer, Sampling, Tree
from specwave.target import ModelConfig

QUESTIONS = [Question(number, "qa", (f"Why is {number} odd?",)) for number in range(1, 5)]
IDS = [question.id for question in QUESTIONS]


class Sevens(BaseProposer):
    def propose_row(self, context):
        return Tree.chain([7])


class Failing(BaseProposer):
    def begin(self, contexts):
        raise RuntimeError("out of luck")


def answerer(tiny, machine=None):
    made = Answerer(tiny, 4, Sampling())
    made.machine = machine or made.machine
    return made


def methods(folder, second=None):
    """Plain decoding and a drafter, as a run in this folder finds them."""
    pair = {"plain": None, "sevens": second or Sevens()}
    return [Method(label, label, proposer, AnswerFile(folder / label, {})) for label, proposer in pair.items()]


def ids(method):
    lines = (method.answers.folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["question_id"] for line in lines]


# ---------------------------------------------------------------- time


def test_when_time_is_up_no_further_question_is_begun(tiny, tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(evaluator, "monotonic", lambda: next(clock))  # a question a second
    some = methods(tmp_path)
    part = Evaluator(answerer(tiny), some, QUESTIONS, end=1.5)
    predict(part)
    assert [ids(method) for method in some] == [IDS[:2]] * 2  # whole questions: of all methods
    assert len(part.waiting()) == 2
    again = methods(tmp_path)
    predict(Evaluator(answerer(tiny), again, QUESTIONS))
    assert [ids(method) for method in again] == [IDS] * 2


def test_a_run_that_stops_says_where_and_goes_on(tmp_path, family_folders, capsys):
    model = ModelConfig("small", str(family_folders["llama"]), dtype="float32")
    keys = {"model": model, "benchmark": Benchmark(), "decoding": Autoregressive(), "limit": 3, "max_new_tokens": 4}
    first = Run(tmp_path)
    main(EvaluateConfig(**keys, minutes=1e-9), first)
    assert (first.status, first.facts) == ("stopped", {"answered": 0})
    assert f"0 of 3 questions answered: go on with resume=true hydra.run.dir={tmp_path}" in capsys.readouterr().out
    assert not (tmp_path / "results.json").exists()
    last = Run(tmp_path, resume=True)
    main(EvaluateConfig(**keys, minutes=60), last)
    assert last.status == "finished"
    assert json.loads((tmp_path / "results.json").read_text())["overall"]["questions"] == 3
    assert "minutes" in HARMLESS  # another number of them is no other run


@pytest.mark.parametrize("minutes", [0, -1.0, float("nan"), float("inf")])
def test_minutes_that_are_none(minutes):
    with pytest.raises(UserError, match="minutes="):
        EvaluateConfig(None, None, None, minutes=minutes)


# ---------------------------------------------------------------- machines


def test_a_machine_is_known_by_name_and_device(tiny, monkeypatch):
    here = machine_of(tiny.device)
    assert here == machine_of(tiny.device) == answerer(tiny).machine
    assert len(here) == 8
    monkeypatch.setattr("platform.node", lambda: "another")
    assert machine_of(tiny.device) != here


def test_another_machine_s_half_answered_question_is_begun_anew(tiny, tmp_path, capsys):
    """Killed between two methods at question 2; question 3 failed for one of them there."""
    first = methods(tmp_path)
    one = answerer(tiny, "1111aaaa")
    predict(Evaluator(one, first, QUESTIONS[:1]))
    plain, drafted = methods(tmp_path)
    one.answer_all([plain], QUESTIONS[1], 1)
    drafted.proposer = Failing()
    one.answer_all([plain, drafted], QUESTIONS[2], 2)
    for method in (plain, drafted):
        method.answers.close()

    second, two = methods(tmp_path), answerer(tiny, "2222bbbb")
    assert two.unpaired(second) == {2, 3}
    meet_other_machines(two, second, Run(tmp_path))
    assert [ids(method) for method in second] == [[1], [1]]
    assert "other machines (1111aaaa; this one is 2222bbbb)" in capsys.readouterr().out
    predict(Evaluator(two, second, QUESTIONS))
    for method in second:
        rows = read_answers(method.answers.folder / "answers.jsonl", "x")
        assert [(row["question_id"], machine_of_row(row)) for row in rows] == [
            (1, "1111aaaa"), (2, "2222bbbb"), (3, "2222bbbb"), (4, "2222bbbb"),
        ]  # fmt: skip
    content = build_results(
        label="sevens", method="sevens", rows=second[1].answers.rows, baseline=Baseline(second[0].answers.rows),
        verdicts=None, divergences=[], settings={},
    )  # fmt: skip
    assert content["machines"] == content["baseline"]["machines"] == ["1111aaaa", "2222bbbb"]


def test_on_one_machine_a_half_answered_question_is_gone_on_with(tiny, tmp_path, capsys):
    plain, drafted = methods(tmp_path)
    answerer(tiny).answer_all([plain], QUESTIONS[0], 0)
    for method in (plain, drafted):
        method.answers.close()
    again = methods(tmp_path)
    meet_other_machines(answerer(tiny), again, Run(tmp_path))
    assert [ids(method) for method in again] == [[1], []]
    assert capsys.readouterr().out == ""


def test_answers_of_before_machines_were_noted_are_gone_on_with(tiny, tmp_path):
    plain, drafted = methods(tmp_path)
    answerer(tiny).answer_all([plain], QUESTIONS[0], 0)
    row = plain.answers.rows[0]
    del row["specwave"]["machine"]
    (tmp_path / "plain" / "answers.jsonl").write_text(json.dumps(row) + "\n")
    for method in (plain, drafted):
        method.answers.close()
    assert answerer(tiny).unpaired(methods(tmp_path)) == set()


# ---------------------------------------------------------------- answers of another run


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"question_id": 99}, "question 99 is not asked by this run"),
        ({"category": "rag"}, r"question 2 is another one there \(category or number of turns\)"),
        ({"turns": 2}, r"question 2 is another one there \(category or number of turns\)"),
        ({"times": 2}, "question 2 was answered 2 times, not 1"),
        ({"model_id": "vicuna-plain"}, "they are answers of 'vicuna-plain', this run is '.*-plain'"),
    ],
)
def test_answers_put_there_from_another_run_are_refused(tiny, tmp_path, change, words):
    """A file with the right settings beside it: nothing but what it holds gives it away."""
    one, some = answerer(tiny), methods(tmp_path)
    predict(Evaluator(one, some, QUESTIONS[:2]))
    path = tmp_path / "plain" / "answers.jsonl"
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    choice, own = second["choices"][0], second["specwave"]
    if change.pop("turns", 1) == 2:
        for holder in (choice, own):
            holder |= {name: value * 2 for name, value in holder.items() if isinstance(value, list)}
    if change.pop("times", 1) == 2:
        second["choices"], own["repetitions"] = [choice, choice], [dict(own)]
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, second | change)), encoding="utf-8")
    with pytest.raises(UserError, match=words) as caught:
        one.check_answers(methods(tmp_path)[0], QUESTIONS)
    assert (caught.value.key, caught.value.value) == ("resume", path)


def test_answers_of_this_run_are_taken_up(tiny, tmp_path):
    one = answerer(tiny)
    predict(Evaluator(one, methods(tmp_path), QUESTIONS[:2]))
    for method in methods(tmp_path):
        one.check_answers(method, QUESTIONS)


# ---------------------------------------------------------------- rules


@pytest.fixture
def drafters(tmp_path):
    for layers in ([29], [0, 1, 29]):
        folder = tmp_path / "drafters" / f"L{'-'.join(map(str, layers))}"
        folder.mkdir(parents=True)
        (folder / "card.json").write_text(json.dumps({"layers": layers, "target": {"num_layers": 30}}))
    return str(tmp_path)


def test_rules_are_those_of_the_card_or_those_given(drafters):
    assert [one.rules for one in find_drafters(drafters)] == [("low_entropy",), ("eagle2",)]
    given = find_drafters(drafters, {"L29": ["eagle2", "elsi"]})
    assert [(one.label, one.rules) for one in given] == [("L0-1-29", ("low_entropy",)), ("L29", ("eagle2", "elsi"))]
    assert find_drafters(drafters, {"L29": "mine"})[1].rules == ("mine",)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"L7": "elsi"}, "rules=L7: no drafter has this label; there are L0-1-29, L29"),
        ({"L29": []}, r"rules\.L29=\[\]: give the name of a rule"),
        ({"L29": ["elsi", 3]}, r"rules\.L29=.*: give the name of a rule"),
        ({"L29": ""}, r"rules\.L29=.*: give the name of a rule"),
    ],
)
def test_rules_that_are_none(drafters, rules, words):
    with pytest.raises(UserError, match=words):
        find_drafters(drafters, rules)


def test_rules_need_drafters():
    with pytest.raises(UserError, match="rules=L29: no drafter has this label; checkpoint names none"):
        find_drafters(None, {"L29": "elsi"})
