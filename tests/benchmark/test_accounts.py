"""Who drafted: sums by hand, the two tables, and accounts that are none."""

import copy

import pytest
from made_up import answers, questions, run_folder

from specwave.artifacts import UserError
from specwave.benchmark.accounts import by_source, by_subtask, tables
from specwave.benchmark.answers import AnswerFile, read_answers
from specwave.benchmark.interop import load_all
from specwave.benchmark.measures import sources
from specwave.benchmark.results import Baseline, build_results, save_results


def tally(rounds, hits, drafted, accepted, draft_seconds, seconds):
    return {
        "rounds": rounds, "hits": hits, "drafted": drafted, "accepted": accepted, "draft_seconds": draft_seconds,
        "seconds": seconds, "why": {},
    }  # fmt: skip


def answer(*turns):
    """A row whose turns have these accounts."""
    choice = {"index": 0, "new_tokens": [1] * len(turns), "wall_time": [1.0] * len(turns), "accept_lengths": [1]}
    return {"question_id": 1, "category": "qa", "choices": [choice], "specwave": {"sources": list(turns)}}


COPY, NEURAL, UNUSED = tally(3, 1, 30, 6, 0.25, 1.5), tally(6, 5, 12, 9, 0.5, 2.5), tally(0, 0, 0, 0, 0.125, 0.0)


def test_sums_by_hand():
    rows = [answer({"copy": COPY}, {"copy": UNUSED, "neural": NEURAL}), answer({"copy": tally(1, 0, 2, 0, 0.25, 0.5)})]
    assert sources(rows) == {
        "copy": {
            "rounds": 4, "hits": 1, "drafted": 32, "accepted": 6, "draft_seconds": 0.625, "seconds": 2.0,
            "share": 0.4, "in_vain": 0.75, "drafted_a_round": 8.0, "accepted_a_round": 1.5,
        },
        "neural": {
            "rounds": 6, "hits": 5, "drafted": 12, "accepted": 9, "draft_seconds": 0.5, "seconds": 2.5,
            "share": 0.6, "in_vain": pytest.approx(1 / 6), "drafted_a_round": 2.0, "accepted_a_round": 1.5,
        },
    }  # fmt: skip
    assert sources([answer({"copy": UNUSED})]) is None
    assert sources([]) is None
    plain = answer()
    del plain["specwave"]["sources"]
    assert sources([plain]) is None


def with_accounts(folder, label, account):
    """Results of one method of a run folder, whose turns all have this account."""
    asked = questions(1)
    plain = read_answers(folder / "baseline" / "answers.jsonl", "report")
    rows = copy.deepcopy(read_answers(folder / label / "answers.jsonl", "report"))
    for row in rows:
        row["specwave"]["sources"] = [account] * len(row["choices"][0]["turns"])
    assert len(rows) == len(asked)
    made = build_results(
        label=label, method="switchsd", rows=rows, baseline=Baseline(plain), verdicts=None, divergences=[], settings={}
    )
    save_results(folder / label, made)


@pytest.fixture
def results(tmp_path):
    """Plain decoding, a drafter alone, and a method with two sources."""
    methods = dict.fromkeys(("a", "b"), (None, None, 0.6, 0))
    with_accounts(run_folder(tmp_path / "run", questions(1), methods), "b", {"copy": COPY, "neural": NEURAL})
    return load_all([str(tmp_path / "run")])


def test_who_drafted_over_all_questions(results):
    table = by_source(results, ["plain", "a", "b"])
    assert table.rows == [
        ["b", "copy", "33 %", "67 %", 10.0, 2.0, "37.5 %", "6.2 %"],
        ["b", "neural", "67 %", "17 %", 2.0, 1.5, "62.5 %", "12.5 %"],
    ]
    assert all(len(row) == len(table.header) for row in table.rows)


def test_subtasks_with_who_drafted(results):
    table = by_subtask(results, ["plain", "a", "b"])
    assert list(table.blocks.values()) == [
        "all questions", "mt bench", "translation", "summarization", "qa", "math reasoning", "rag",
        "mt bench: coding",
    ]  # fmt: skip
    assert list(table.blocks) == [0, 3, 6, 9, 12, 15, 18, 21]
    plain, alone, both = table.rows[:3]
    assert (plain[0], plain[2], plain[4], plain[5]) == ("plain", "1.00 [1.00, 1.00]", None, None)
    assert (alone[0], alone[4]) == ("a", None)
    assert both[4:] == ["copy 33 %, neural 67 %", "copy 2.00, neural 1.50"]
    low, high = results[2].content["subtasks"]["mt_bench"]["intervals"]["tokens_per_second"]
    rate = results[2].content["subtasks"]["mt_bench"]["tokens_per_second"]
    assert table.rows[5][1] == f"{rate:.1f} [{low:.1f}, {high:.1f}]"
    assert table.rows[8][1].count("[") == 0  # a single question has no interval


def test_without_accounts_there_are_no_such_tables(results):
    assert tables(results[:2], ["plain", "a"]) == []
    assert len(tables(results, ["plain", "a", "b"])) == 2


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ([], "an account for every turn"),
        ({}, "an account for every turn"),
        ([None, {}], "must have numbers for rounds, hits"),
        ([{"copy": None}, {}], "must have numbers for rounds, hits"),
        ([{"copy": COPY | {"hits": "1"}}, {}], "must have numbers for rounds, hits"),
        ([{"copy": COPY | {"seconds": -1}}, {}], "must have numbers for rounds, hits"),
    ],
)
def test_damaged_accounts_are_named(damaged, words, tmp_path):
    rows = answers(tmp_path, questions(1)[:1], 2).rows
    rows[0]["specwave"]["sources"] = damaged
    (tmp_path / "answers.jsonl").unlink()
    file = AnswerFile(tmp_path, {})
    file.add(rows[0])
    file.close()
    with pytest.raises(UserError, match=words):
        read_answers(tmp_path / "answers.jsonl", "report")


def test_a_baseline_that_runs_share_is_shown_once(tmp_path):
    """Two runs, the second with the first one's plain decoding; a third measured its own."""
    method = {"a": (None, None, 0.6, 0)}
    first = run_folder(tmp_path / "first", questions(1), method)
    second = run_folder(tmp_path / "second", questions(1), {"b": (None, None, 0.5, 0)})
    third = run_folder(tmp_path / "third", questions(2), {"c": (None, None, 0.5, 0)})
    (second / "baseline/results.json").write_bytes((first / "baseline/results.json").read_bytes())
    found = load_all(list(map(str, (first, second, third))))
    assert [result.label for result in found] == ["plain", "a", "b", "plain", "c"]
