"""`experiment=entropy_vs_tau_smollm2` from choosing sets to its sentences, on a tiny target; then again: nothing."""

import csv
import json

import pytest

from specwave.app import chain
from specwave.app.door import run_door
from specwave.app.groups import wanted_groups
from specwave.app.train import TrainConfig
from specwave.artifacts import Selection, UserError
from specwave.eagle.options import Eagle3

SMALL = [
    "all.model=tiny", "all.model.dtype=float32", "select.calibration.limit=16", "select.calibration.max_new_tokens=24",
    "select.calibration.rho=1.0", "select.calibration.block_size=4", "select.selector.width=4",
    "select.selector.token_width=4", "select.selector.count=12", "select.selector.extremes=1",
    "train.top=6", "train.skip=0,6", "train_short.top=6", "train_short.skip=0,6", "train_again.top=4",
    "evaluate.limit=6", "evaluate.max_new_tokens=8", "evaluate.devices=1",
]  # fmt: skip
BRIEF = {
    "trainer.max_steps": 2, "trainer.validate_every": 2, "trainer.save_every": 2, "data.limit": 14,
    "data.validation": 3, "data.max_length": 128, "regenerate.max_new_tokens": 12, "drafter.draft_vocab_size": 128,
}  # fmt: skip
TRAININGS = ("train", "train_again", "train_short")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """(its folder, command): the doors run in this process, which has imported everything already."""
    root = tmp_path_factory.mktemp("study")
    lines = [json.dumps({"prompt": f"Tell me about the number {place}, and about boxes."}) for place in range(24)]
    (root / "prompts.jsonl").write_text("\n".join(lines))
    command = ["experiment=entropy_vs_tau_smollm2", f"folder={root / 'runs'}", *SMALL]
    command += [f"{step}.{key}={value}" for step in TRAININGS for key, value in BRIEF.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(chain, "run_step", lambda step: run_door(step.door, step.arguments))
        assert run_door("chain", command) == 0
        yield root / "runs", command


def folder_of(runs, step):
    return next(path for path in sorted((runs / step).iterdir()) if (path / "run.yaml").is_file())


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_all_the_way(study):
    runs, _ = study
    chosen = Selection.load(folder_of(runs, "select"))
    sets = ["-".join(map(str, entry["layers"])) for entry in chosen.beam]
    assert len(set(sets)) == 12
    rows = rows_of(folder_of(runs, "evaluate_worth") / "worth_sets.csv")
    assert {(row["layers"], row["seed"]) for row in rows} == {(one, "0") for one in sets} | {
        (one, "1") for one in sets[:4]
    }
    told = {"-".join(map(str, entry["layers"])): entry["predictors"] for entry in chosen.beam}
    for row in rows:
        assert float(row["entropy_centred"]) == told[row["layers"]]["entropy_centred"]
        assert 1 <= float(row["short"]) <= 4
        assert 1 <= float(row["tau"]) <= 4
    text = (folder_of(runs, "evaluate_worth") / "worth.md").read_text()
    assert "12 sets" in text
    assert "4 of them with 2 seeds; τ on 6 questions" in text
    assert "Differences over seeds" in (folder_of(runs, "evaluate") / "table.md").read_text()


def test_again_nothing_runs(study, capsys):
    _, command = study
    capsys.readouterr()
    assert run_door("chain", command) == 0
    assert capsys.readouterr().out.count("finished earlier, re-used") == 6


def test_two_trainings_share_the_sets(study):
    """No set twice, none left out."""
    runs, _ = study
    chosen = Selection.load(folder_of(runs, "select"))
    parts = [[wanted.layers for wanted in wanted_groups(settings(top=6, skip=skip), [chosen], 8)] for skip in (None, 6)]
    assert parts[0] + parts[1] == [tuple(entry["layers"]) for entry in chosen.beam]


def settings(**more):
    return TrainConfig(None, None, Eagle3(), None, None, **{"selection": "there", **more})


def test_more_sets_than_there_are(study):
    runs, _ = study
    chosen = Selection.load(folder_of(runs, "select"))
    with pytest.raises(UserError, match="holds 12 groups") as caught:
        wanted_groups(settings(top=6, skip=7), [chosen], 8)
    assert caught.value.key == "skip"


@pytest.mark.parametrize("wrong", [{"skip": -1}, {"skip": 1, "selection": None}])
def test_skip_refused(wrong):
    with pytest.raises(UserError) as caught:
        settings(**wrong)
    assert caught.value.key == "skip"


def test_normalised_grams_are_refused(capsys):
    assert run_door("select", ["model=tiny", "selector=spread", "calibration.scale=frobenius"]) == 2
    assert "every normalisation" in capsys.readouterr().err


def test_worth_without_a_report(capsys):
    assert run_door("evaluate", ["model=tiny", "worth={groups: there}"]) == 2
    assert "report" in capsys.readouterr().err
