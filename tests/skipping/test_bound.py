"""benchmarks/bound.py on a tiny target: what kept sets are worth by hand-set costs, going on, its table and picture."""

import csv
import sys

import pytest
import torch

from specwave.decoding import generate
from specwave.skipping.tpt import tokens_per_time


@pytest.fixture(scope="module")
def benchmark(script):
    return script("bound")


FULL, HALF = (True,) * 16, (True, False) * 8


def test_what_a_set_is_worth(benchmark, costs):
    """A forward takes 1 + 0.01·k s; a step is scaled so that the full set takes 1.01 s: half of 16 equal sub-layers and
    a t_0 as large as one of them cost 9/17 of that."""
    made = costs()
    found = benchmark.worth(made, HALF, 16, 0.8)
    draft = 1.01 * 9 / 17
    rates = {gamma: tokens_per_time(0.8, gamma, draft, 1.01 + 0.01 * gamma) * 1.01 for gamma in range(1, 9)}
    assert found["cost"] == pytest.approx(9 / 17)
    assert found["speedup"] == pytest.approx(max(rates.values()))
    assert rates[found["gamma"]] == max(rates.values())
    assert found["bound"] == pytest.approx(9 / (8 * draft + 1.09) * 1.01)
    even = benchmark.worth(made, HALF, 16, found["break_even"])
    assert even["speedup"] == pytest.approx(1.0, abs=1e-6)
    assert benchmark.worth(made, HALF, 16, found["break_even"] - 0.01)["speedup"] < 1


def test_the_whole_target_never_pays(benchmark, costs):
    found = benchmark.worth(costs(), FULL, 16, 1.0)
    assert found["cost"] == pytest.approx(1.0)
    assert found["bound"] < 1
    assert found["break_even"] is None


def test_sets_are_looked_at_on_the_whole_answer(benchmark, mild, costs):
    looking = benchmark.Looking(mild["llama"], costs(), 6, 0.5)
    prompt = [5, 9, 200, 31, 7, 7, 80]
    plain = generate(mild["llama"], None, prompt, max_new_tokens=6, eos_ids=())
    made = generate(mild["llama"], looking, prompt, max_new_tokens=6, eos_ids=())
    assert made.tokens == plain.tokens
    searched, exits = ([row for row in looking.found if row["kind"] == kind] for kind in ("search", "exit"))
    assert [16 - row["attentions"] - row["MLPs"] for row in searched] == list(range(1, 9))  # up to half of them
    assert [(row["attentions"], row["MLPs"]) for row in exits] == [(block, block) for block in range(1, 8)]
    assert all(row["alpha"] * 6 == pytest.approx(round(row["alpha"] * 6)) for row in looking.found)
    assert all((row["states"], row["violations"]) == (6, 0) and 0 <= row["above"] <= 6 for row in looking.found)
    assert searched[0]["alpha"] > 0.5  # a block in the middle that hardly writes anything
    states = mild["llama"].states(torch.tensor([[*prompt, *made.tokens]]), [2])[2][0]
    drafted = mild["llama"].logits(states[len(prompt) - 1 : -1]).argmax(-1)  # by the first three blocks
    assert exits[2]["alpha"] == pytest.approx(float((drafted == torch.tensor(made.tokens)).float().mean()))


WORDS = ("--contexts", "512", "640", "--questions", "1", "--new-tokens", "4")


def test_a_run_goes_on_and_ends_in_table_and_picture(benchmark, mild, costs, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "load_target", lambda *_, **__: mild["llama"])
    monkeypatch.setattr(benchmark, "latency", lambda _: costs())

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["bound.py", "--out", str(tmp_path), *words])
        assert benchmark.main() == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]

    assert [line.split()[1] for line in run(*WORDS)] == ["context", "512", "640"] * 2  # searched, early exits
    whole = (tmp_path / "sets.jsonl").read_text()
    (tmp_path / "sets.jsonl").write_text(whole[: len(whole) * 3 // 4])  # killed within the second question
    run(*WORDS)
    assert (tmp_path / "sets.jsonl").read_text() == whole
    with open(tmp_path / "sets.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["context"], row["kind"]) for row in rows] == [
        (context, kind) for context in ("512", "640") for kind in ["search"] * 8 + ["exit"] * 7
    ]
    assert (tmp_path / "bound.png").stat().st_size > 10_000
    assert "attention's share" in (tmp_path / "bound.svg").read_text()
    (tmp_path / "sets.jsonl").write_text(whole.replace('"violations": 0', '"violations": 1'))
    assert benchmark.main() == 1
    with pytest.raises(SystemExit, match="it holds sets under other settings"):
        run(*WORDS, "--budget", "0.3")
