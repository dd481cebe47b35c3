"""The evaluate door with the copying methods: composed as on the command line, from questions to results.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specwave.app import config as configs
from specwave.app.evaluate import main
from specwave.app.run import Run
from specwave.artifacts import UserError
from specwave.eagle.export import TargetFacts, write_drafter
from specwave.target import load_target

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("model=tiny", "model.dtype=float32", "limit=2", "max_new_tokens=24")


def evaluate(folder, *overrides):
    content = configs.check("evaluate", configs.compose("evaluate", [*SMALL, *overrides]))
    folder.mkdir()
    main(configs.build("evaluate", content), Run(folder))
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return json.loads((folder / "results.json").read_text()), rows


@pytest.fixture(scope="module")
def checkpoint(drafter_of, tmp_path_factory):
    """A drafter of model=tiny."""
    target = load_target("tiny", dtype="float32")
    folder = tmp_path_factory.mktemp("drafters") / "d"
    facts = TargetFacts(target.name, target.fingerprint, target.num_layers)
    write_drafter(folder, drafter_of(target), facts, dtype=torch.float32)
    return folder


@pytest.mark.parametrize("method", ["pld", "suffix", "copyspec", "banditspec", "oracle"])
def test_without_a_checkpoint(method, tmp_path):
    results, rows = evaluate(tmp_path / "run", f"decoding={method}")
    assert results["method"] == results["label"] == method
    assert results["overall"]["exact_match_rate"] == 1.0
    assert results["settings"]["decoding"]["name"] == method
    assert results["settings"]["checkpoint"] is None
    own = {"banditspec": {"copy_4", "copy_10", "plain"}, "oracle": {"copy", "copy_48", "plain"}}
    named = own.get(method, {"copy", "plain"})
    for row in rows:
        sources = row["specwave"]["sources"]
        assert len(sources) == len(row["choices"][0]["turns"])
        assert {name for turn in sources for name in turn} <= named
        for turn, steps in zip(sources, row["choices"][0]["decoding_steps"], strict=True):
            assert sum(tally["rounds"] for tally in turn.values()) == steps


@pytest.mark.parametrize(
    ("method", "sources"),
    [
        ("copyspec", {"copy", "neural", "plain"}),
        ("banditspec", {"copy_4", "copy_10", "neural_2", "neural_4", "plain"}),
        ("oracle", {"copy", "copy_48", "neural", "plain"}),
    ],
)
def test_with_a_checkpoint(method, sources, checkpoint, tmp_path):
    results, rows = evaluate(tmp_path / "run", f"decoding={method}", f"checkpoint={checkpoint}")
    assert results["method"] == method
    assert results["overall"]["exact_match_rate"] == 1.0
    assert results["settings"]["checkpoint"] == str(checkpoint)
    met = {name for row in rows for turn in row["specwave"]["sources"] for name in turn}
    assert met <= sources
    assert any("neural" in name for name in met) or method == "oracle"  # which takes nothing that is drafted in vain


def test_results_and_tables_say_who_drafted(tmp_path):
    results, rows = evaluate(tmp_path / "run", "decoding=pld")
    tallies = [tally for row in rows for turn in row["specwave"]["sources"] for tally in turn.items()]
    found = results["overall"]["sources"]
    assert {source: own["rounds"] for source, own in found.items()} == {
        source: sum(tally["rounds"] for name, tally in tallies if name == source) for source in found
    }
    assert sum(own["rounds"] for own in found.values()) == results["overall"]["rounds"]
    assert sum(own["accepted"] for own in found.values()) == results["overall"]["tokens"] - results["overall"]["rounds"]
    table = (tmp_path / "run/table.md").read_text()
    share = f"{100 * found['copy']['share']:.0f} %"
    assert f"| pld | copy | {share} |" in table.replace("  ", " ")
    assert f"copy {share}" in table.partition("Subtasks: speed and who drafted")[2]
    assert "Who drafted" in (tmp_path / "run/report.html").read_text()


def test_plain_decoding_has_no_sources(tmp_path):
    _, rows = evaluate(tmp_path / "run")
    assert not any("sources" in row["specwave"] for row in rows)


def test_settings_name_the_methods_within(checkpoint, tmp_path):
    results, _ = evaluate(
        tmp_path / "run", "decoding=banditspec", f"checkpoint={checkpoint}", "decoding.arms.copy_10=null",
        "decoding.arms.neural_4.levels=3", "decoding.policy=exp3", "decoding.reward=modelled",
    )  # fmt: skip
    found = results["settings"]["decoding"]
    assert (found["name"], found["policy"], found["seed"]) == ("banditspec", "exp3", 0)
    assert list(found["arms"]) == ["copy_4", "neural_2", "neural_4"]
    assert found["arms"]["copy_4"] == {"name": "pld", "n": 3, "length": 4, "occurrence": "first"}
    assert (found["arms"]["neural_4"]["name"], found["arms"]["neural_4"]["levels"]) == ("eagle3", 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["decoding=pld", "checkpoint=HERE"], "checkpoint=.*: decoding=pld reads no drafter: give null"),
        (["decoding=suffix", "checkpoint=HERE"], "decoding=suffix reads no drafter"),
        (["decoding=copyspec", "decoding.neural=null", "checkpoint=HERE"], "decoding=copyspec reads no drafter"),
        (
            ["decoding=banditspec", "decoding.arms.neural_2=null", "decoding.arms.neural_4=null", "checkpoint=HERE"],
            "decoding=banditspec reads no drafter",
        ),
        (["decoding=banditspec", "decoding.arms.copy_4=null"], "without a checkpoint there is only copy_10"),
        (["decoding=banditspec", "decoding.arms.copy_4.lenght=2"], "did you mean decoding.arms.copy_4.length?"),
        (
            ["decoding=oracle", "decoding.sources.copy=null", "decoding.sources.copy_48=null"],
            "^decoding.sources=.*they all need a drafter: give its che",
        ),
        (
            ["decoding=oracle", *(f"decoding.sources.{name}=null" for name in ("copy", "copy_48", "neural"))],
            "^decoding.sources=.*: give at least one decoding method",
        ),
        (["decoding=oracle", "decoding.sources.copy=7"], "^decoding.sources.copy=7: a decoding method is expected"),
        (["decoding=pld", "decoding.occurrence=last"], "choose one of first, recent"),
        (["decoding=copyspec", "decoding.neural._target_=os.system"], "only specwave"),
        (["decoding=copyspec", "decoding.neural.levels=0"], "^decoding.neural.levels=0: must be 1 to 64"),
    ],
)
def test_mistakes_are_user_errors(overrides, words, checkpoint, tmp_path):
    with pytest.raises(UserError, match=words):
        evaluate(tmp_path / "run", *(override.replace("HERE", str(checkpoint)) for override in overrides))


def test_the_command_line(tmp_path):
    """In a process of its own: exit code 0 and a table; a bandit with one arm is one line and exit code 2."""

    def door(*argv):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, ROOT / "evaluate.py", *argv]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    done = door("model=tiny", "decoding=pld", "limit=1", "max_new_tokens=4", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/results.json").read_text())["method"] == "pld"
    refused = door("model=tiny", "decoding=banditspec", "decoding.arms.copy_4=null")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1), refused.stderr
