"""The study of criteria end to end on a tiny target: kept sets, what is foretold, going on after a kill, its tables."""

import csv
import json
import sys

import pytest

from specwave.skipping.measure import latency


@pytest.fixture(scope="module")
def benchmark(script):
    return script("skipping")


def run(benchmark, monkeypatch, tiny, *words):
    monkeypatch.setattr(sys, "argv", ["skipping.py", *words])
    monkeypatch.setattr(benchmark, "load_target", lambda *_, **__: tiny)
    benchmark.main()


STUDY = ("--contexts", "16", "32", "--plans", "4", "--gamma", "2", "--questions", "1", "--new-tokens", "6")


def test_a_study_that_was_killed_goes_on_and_ends_with_its_tables(benchmark, monkeypatch, tiny, tmp_path, capsys):
    run(benchmark, monkeypatch, tiny, "study", "--out", str(tmp_path), *STUDY)
    whole = (tmp_path / "plans.jsonl").read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["origin"] for row in rows] == ["search"] * 2 + ["drawn"] * 2
    assert len({row["kept"] for row in rows}) == 4
    for row in rows:
        assert len(row["kept"]) == 2 * tiny.num_layers
        assert row["kept"].count("1") == row["attentions"] + row["mlps"]
        assert 0 <= row["agreement"] <= 1 <= row["tau"] <= 3
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["plain"])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [line.split()[1] for line in table] == ["criterion", "TPT", "TPL", "agreement"]
    assert (tmp_path / "plans.png").stat().st_size > 5000

    lines = whole.splitlines(keepends=True)
    (tmp_path / "plans.jsonl").write_text("".join(lines[:2]) + lines[2][:40])  # killed within the third row
    run(benchmark, monkeypatch, tiny, "study", "--out", str(tmp_path), *STUDY)
    again = (tmp_path / "plans.jsonl").read_text().splitlines(keepends=True)
    assert again[:2] == lines[:2]
    assert [json.loads(line)["kept"] for line in again] == [row["kept"] for row in rows]
    with open(tmp_path / "plans.csv", newline="") as stream:
        assert [row["kept"] for row in csv.DictReader(stream)] == [row["kept"] for row in rows]

    with pytest.raises(SystemExit, match="a study under other settings"):
        run(benchmark, monkeypatch, tiny, "study", "--out", str(tmp_path), *STUDY, "--seed", "1")


def test_the_whole_target_is_foretold_to_agree_everywhere_and_nothing_kept_hardly_ever(benchmark, tiny):
    prompts = benchmark.prompts_of(tiny, 2)
    answers = [benchmark.generate(tiny, None, prompt, max_new_tokens=8, eos_ids=()).tokens for prompt in prompts]
    costs = latency(tiny, [16, 32])
    everything, nothing = ((flag,) * (2 * tiny.num_layers) for flag in (True, False))
    whole, none = (benchmark.foretold(tiny, costs, kept, 2, 24, prompts, answers) for kept in (everything, nothing))
    assert whole["agreement"] == 1.0
    assert none["agreement"] < 0.5
    assert whole["TPT"] == pytest.approx(3 / (2 * costs.t_draft(everything, 24) + costs.t_target(3, 24)))


def test_costs_are_printed_for_every_share(benchmark, monkeypatch, tiny, capsys):
    run(benchmark, monkeypatch, tiny, "costs", "--contexts", "16", "32", "--questions", "1")
    printed = capsys.readouterr().out
    shares = [line.split() for line in printed.splitlines() if line.startswith("      16") and len(line.split()) == 6]
    assert [int(words[1]) for words in shares] == [16, 12, 8, 4, 0]
    assert float(shares[0][3]) == float(shares[0][5]) == 1.0
    assert "plans whenever due: " in printed


def test_a_study_needs_a_folder(benchmark, monkeypatch, tiny, capsys):
    with pytest.raises(SystemExit) as ended:
        run(benchmark, monkeypatch, tiny, "study")
    assert ended.value.code == 2
    assert "--out" in capsys.readouterr().err
