"""benchmarks/knapspec_table.py on written answers: every figure by hand, methods told apart, the training's cost."""

import csv
import json
import sys

import pytest
import yaml

from specwave.benchmark.answering import sequence_id
from specwave.benchmark.questions import Question

# of a results file, which the table reads none of
FIGURES = ("tau", "tokens", "rounds", "tokens_per_second", "speedup", "exact_match_rate", "near_ties")


@pytest.fixture(scope="module")
def benchmark(script):
    return script("knapspec_table")


def answer(name, category, tokens, wall, prefill, lengths, levels):
    choice = {"turns": ["-"], "new_tokens": [tokens], "wall_time": [wall], "accept_lengths": lengths}
    return {"question_id": name, "category": category, "choices": [choice],
            "specwave": {"prefill_seconds": [prefill], "draft_levels": levels}}  # fmt: skip


def evaluation(folder, method, rows, base, plans=None, **decoding):
    block = dict.fromkeys(FIGURES)
    blocks = {"overall": block, "subtasks": {}, "categories": {}, "baseline": block}
    settings = {"decoding": decoding, "sampling": {"temperature": 0.0}}
    (folder / "baseline").mkdir(parents=True)
    content = {"schema": 1, "method": method, "label": method, "settings": settings, **blocks}
    (folder / "results.json").write_text(json.dumps(content))
    (folder / "run.yaml").write_text(yaml.safe_dump({"app": "evaluate", "status": "finished", "config": {}}))
    for place, lines in ((folder, rows), (folder / "baseline", base)):
        (place / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    if isinstance(plans, dict):
        (folder / "plan.json").write_text(json.dumps(plans))
    else:
        (folder / "plans.jsonl").write_text("".join(json.dumps(plan) + "\n" for plan in plans))


def plan(name, kept, gamma, seconds, **more):
    where = [sequence_id(Question(name, "-", ()), 0)]
    return {"sequences": where, "kept": kept, "gamma": gamma, "seconds": seconds, **more}


PLAIN = [
    answer("a", "summarization_128", 8, 5.0, 1.0, [1] * 8, [0] * 8),
    answer("b", "summarization_128", 8, 5.0, 1.0, [1] * 8, [0] * 8),
    answer("c", "summarization_4k", 8, 14.0, 10.0, [1] * 8, [0] * 8),
]
DRAFTED = [
    answer("a", "summarization_128", 8, 3.0, 1.0, [3, 2, 3], [2, 4, 2]),  # 5 of 8 drafts, 8 tokens in 2 s
    answer("b", "summarization_128", 8, 7.0, 1.0, [1] * 8, [0] * 8),
    answer("c", "summarization_4k", 8, 12.0, 10.0, [4, 4], [3, 3]),
]


@pytest.fixture
def chain(tmp_path):
    skipping = [1, 1, 0, 1, 0, 0, 1, 1]
    full = {"plan_share": 0.05, "fixed_gamma": False, "adapt": True}
    plans = [plan("a", skipping, 2, 0.4), plan("b", [1] * 8, 0, 0.4), plan("other", [0] * 8, 9, 99.0)]
    evaluation(tmp_path / "evaluate/1", "knapspec", DRAFTED, PLAIN, plans, **full)
    evaluation(
        tmp_path / "evaluate/2", "knapspec", DRAFTED, PLAIN, plans, plan_share=None, fixed_gamma=True, adapt=False
    )
    evaluation(tmp_path / "evaluate/3", "layerskip", DRAFTED[:2], PLAIN[:2], {"kept": [1] * 4 + [0] * 4, "gamma": 3})
    tried = [plan("a", skipping, 8, 0.1, taken=True), plan("a", [1] * 7 + [0], 8, 0.1, taken=False)]
    evaluation(tmp_path / "evaluate/4", "swift", DRAFTED, PLAIN, tried)
    (tmp_path / "train/5").mkdir(parents=True)
    record = {"app": "train", "status": "finished", "config": {}, "exit": 2, "parameters": 884736, "tokens": 307200,
              "training_seconds": 412.3, "wall_seconds": 540.0}  # fmt: skip
    (tmp_path / "train/5/run.yaml").write_text(yaml.safe_dump(record))
    evaluation(tmp_path / "evaluate/6", "swift", DRAFTED, PLAIN, tried)  # of earlier settings: named no more
    evaluation(tmp_path / "evaluate/7", "clasp", DRAFTED, PLAIN, [])
    (tmp_path / "evaluate/7/run.yaml").write_text(yaml.safe_dump({"app": "evaluate", "status": "failed", "config": {}}))
    steps = [
        {"step": "train", "command": "-", "jobs": ["train/5"]},
        {"step": "evaluate_rivals", "command": "-", "jobs": ["evaluate/4", "evaluate/7", "evaluate/3"]},
        {"step": "evaluate", "command": "-", "jobs": ["evaluate/2", "evaluate/1"]},
    ]
    (tmp_path / "chain.yaml").write_text(yaml.safe_dump(steps))
    return tmp_path


def test_the_table(benchmark, chain, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["knapspec_table.py", str(chain)])
    benchmark.main()
    with open(chain / "by_context.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    variant = "KnapSpec, plans whenever due, fixed γ, no adaptation"
    names = ["plain decoding", "KnapSpec", variant, "SWIFT", "LayerSkip"]
    assert [(row["questions"], row["method"]) for row in rows] == [
        *(("summarization_128", name) for name in names),
        *(("summarization_4k", name) for name in names if name != "LayerSkip"),
    ]
    plain, knapspec, _, swift, layerskip = rows[:5]
    assert float(plain["tokens/s"]) == 2.0  # 16 tokens in 8 s: without the prompts
    assert float(knapspec["tokens/s"]) == 2.0  # 16 in 2 + 6
    assert (float(knapspec["low"]), float(knapspec["high"])) == pytest.approx((8 / 6, 4.0))
    assert float(knapspec["speedup"]) == 1.0
    assert float(knapspec["τ"]) == pytest.approx(16 / 11)
    assert float(knapspec["α"]) == pytest.approx(5 / 8)
    assert float(knapspec["γ"]) == pytest.approx(8 / 3)
    assert (float(knapspec["attentions"]), float(knapspec["MLPs"])) == (2.0, 3.0)  # of the plan that drafts
    assert (knapspec["plans"], float(knapspec["plan time"])) == ("2", pytest.approx(0.1))
    assert [float(layerskip[name]) for name in ("attentions", "MLPs", "plan time")] == [2.0, 2.0, 0.0]
    assert (swift["plans"], float(swift["attentions"])) == ("2", 2.0)
    alone = rows[6]
    assert (float(alone["tokens/s"]), float(alone["speedup"]), alone["low"], alone["attentions"]) == (4.0, 2.0, "", "")
    page = (chain / "by_context.md").read_text()
    assert page == capsys.readouterr().out
    assert (
        "| summarization_128 | KnapSpec | 2.0 [1.3, 4.0] | 1.00 [0.67, 2.00] | 1.45 | 0.62 | 2.7 | 2.0 | 3.0 | 10.0% |"
        in page
    )
    assert "884,736 parameters behind 2 blocks, taught on 307,200 tokens in 412 s of training (540 s with" in page


def test_a_folder_without_evaluations_is_named(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["knapspec_table.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert "no evaluation of a chain has finished there" in capsys.readouterr().err
