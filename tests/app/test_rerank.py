"""Candidates of several selectors, trained together, in the order of their τ̂: the three commands on a tiny target."""

from __future__ import annotations

import csv
import json
import shutil

import pytest
import yaml
from safetensors.torch import load_file

from specwave.app.door import run_door
from specwave.app.rerank import KEY, finished_training, in_order, table, trained
from specwave.artifacts import Selection, UserError
from specwave.layers import matrix_entropy

SMALL = ["model=tiny", "model.dtype=float32", "model.device=cpu"]
PROXY = ["width", "token_width"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of the three runs, and of candidates with a set that the training lacks."""
    root = tmp_path_factory.mktemp("rerank")
    candidates, training, decided = (root / name for name in ("candidates", "training", "decided"))
    assert not run_door("select", [
        *SMALL, "selector=union", "selector.top=6", "analysis=none", "calibration.limit=16",
        "calibration.max_new_tokens=24",
        "calibration.rho=1.0", "calibration.block_size=4", *(f"selector.of.proxy.{key}=6" for key in PROXY),
        "selector.of.proxy.exact=12", f"hydra.run.dir={candidates}",
    ])  # fmt: skip
    assert not run_door("train", [
        *SMALL, f"selection={candidates}", "top=4", "groups=[eagle2]", "data.limit=14", "data.validation=3",
        "data.max_new_tokens=16", "data.batch_size=3", "drafter.draft_vocab_size=128", "trainer.max_steps=4",
        "trainer.validate_every=2", "trainer.save_every=2", "trainer.log_every=2", "trainer.decode=0",
        f"hydra.run.dir={training}",
    ])  # fmt: skip
    assert not run_door("select", [*SMALL, "rerank=tau_hat", f"rerank.training={training}", f"hydra.run.dir={decided}"])
    return candidates, training, decided


def cards(training):
    found = {}
    for path in training.glob("drafters/*/card.json"):
        card = json.loads(path.read_text())
        found[tuple(card["layers"])] = card["training"]["validation"]["tau_hat"]
    return found


def test_the_best_trained_set_is_chosen(runs):
    candidates, training, decided = runs
    before, after, tau_hats = Selection.load(candidates), Selection.load(decided), cards(training)
    assert len(tau_hats) == 5
    order = sorted(tau_hats, key=lambda layers: (-tau_hats[layers], layers))
    assert [tuple(entry["layers"]) for entry in after.beam] == order == after.groups(5)
    assert [entry["tau_hat"] for entry in after.beam] == [tau_hats[layers] for layers in order]
    assert (tuple(after.layers), after.score) == (order[0], tau_hats[order[0]])
    assert (after.selector, after.m, after.fingerprint) == ("tau_hat", len(order[0]), before.fingerprint)
    assert after.calibration == before.calibration
    assert after.proxy == before.proxy
    assert after.rerank["candidates"] == "union"
    assert after.rerank["steps"] == 4
    trained_sets = [entry["layers"] for entry in before.beam[:4]]
    assert after.rerank["untrained"] == [entry["layers"] for entry in before.beam[4:] if entry["layers"] != [7]]
    told = {tuple(entry["layers"]): entry for entry in before.beam}
    for entry in after.beam:
        if entry["layers"] in trained_sets:
            own = told[tuple(entry["layers"])]
            assert (entry["entropy"], entry["origin"]) == (own["entropy"], own["origin"])
            assert entry["candidate_score"] == own["score"]
    grams = load_file(decided / "grams.safetensors")["grams"]
    (added,) = [entry for entry in after.beam if entry["layers"] == [7]]
    assert added["entropy"] == pytest.approx(matrix_entropy(grams[7]).item())
    assert added["origin"] == ["training"]


def test_what_is_written(runs):
    _, training, decided = runs
    names = {path.name for path in decided.iterdir()}
    assert names == {
        "selection.json", "grams.safetensors", "candidates.csv", "candidates.png", "candidates.svg", "run.yaml",
    }  # fmt: skip
    with open(decided / "candidates.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["tau_hat"]) for row in rows] == sorted(cards(training).values(), reverse=True)
    noted = yaml.safe_load((decided / "run.yaml").read_text())
    assert noted["tau_hat"] == float(rows[0]["tau_hat"])


def test_what_a_union_leaves_for_it(runs):
    candidates, _, _ = runs
    chosen = Selection.load(candidates)
    origins = {name for entry in chosen.beam for name in entry["origin"]}
    assert origins == {"elsi", "elsi_c", "proxy", "eagle3", "eagle3_release"}
    assert len(chosen.beam) == 6
    assert all(0 <= entry["score"] <= 1 for entry in chosen.beam)


def test_training_goes_on_from_a_reranked_selection(runs):
    """The chosen set is what `train.py selection=` takes."""
    from specwave.app.groups import wanted_groups
    from specwave.app.train import TrainConfig
    from specwave.eagle.options import Eagle3

    _, _, decided = runs
    config = TrainConfig(None, None, Eagle3(), None, None, selection=str(decided))
    (wanted,) = wanted_groups(config, [Selection.load(decided)], 8)
    assert (wanted.layers, wanted.rule) == (Selection.load(decided).groups(1)[0], "tau_hat")


def fails(capsys, *overrides):
    code = run_door("select", [*SMALL, "rerank=tau_hat", *overrides])
    assert code == 2
    return capsys.readouterr().err.strip()


def copied(training, folder):
    shutil.copytree(training, folder, ignore=shutil.ignore_patterns("*.safetensors", "checkpoints", "last"))
    return folder


def test_no_training_is_there(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    candidates, training, _ = runs
    for folder in (tmp_path / "nowhere", candidates):
        assert "no training is here" in fails(capsys, f"rerank.training={folder}")
    part = copied(training, tmp_path / "part")
    record = (part / "run.yaml").read_text()
    (part / "run.yaml").write_text(record.replace("status: finished", "status: stopped"))
    assert f"the training there is stopped: go on with resume=true hydra.run.dir={part}" in fails(
        capsys, f"rerank.training={part}"
    )
    (part / "run.yaml").write_text(record)
    shutil.rmtree(part / "drafters")
    assert "left no drafter" in fails(capsys, f"rerank.training={part}")
    assert "has no value yet" in fails(capsys)


def test_drafters_of_another_target(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    candidates, training, _ = runs
    part = copied(training, tmp_path / "part")
    path = sorted(part.glob("drafters/*/card.json"))[0]
    card = json.loads(path.read_text())
    path.write_text(json.dumps(card | {"target": card["target"] | {"fingerprint": "0" * 32}}))
    said = fails(capsys, f"rerank.training={part}")
    assert said.startswith(f"error: {KEY}={path.parent}: it is of another target than tiny")
    shutil.copytree(candidates, tmp_path / "other")
    content = json.loads((tmp_path / "other" / "selection.json").read_text())
    (tmp_path / "other" / "selection.json").write_text(json.dumps(content | {"fingerprint": "0" * 32}))
    said = fails(capsys, f"rerank.training={training}", f"rerank.selection={tmp_path / 'other'}")
    assert said.startswith(f"error: rerank.selection={tmp_path / 'other'}: it is of another target")


def test_a_drafter_never_validated(runs, tmp_path):
    part = copied(runs[1], tmp_path / "part")
    path = sorted(part.glob("drafters/*/card.json"))[0]
    card = json.loads(path.read_text())
    path.write_text(json.dumps(card | {"training": card["training"] | {"validation": {}}}))
    with pytest.raises(UserError, match="never validated"):
        trained(part)


def test_a_training_of_no_selection_needs_the_candidates_named(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    candidates, training, decided = runs
    part = copied(training, tmp_path / "part")
    record = yaml.safe_load((part / "run.yaml").read_text())
    record["config"]["selection"] = None
    (part / "run.yaml").write_text(yaml.safe_dump(record))
    assert finished_training(part)["config"]["selection"] is None
    assert "name the candidates with rerank.selection" in fails(capsys, f"rerank.training={part}")
    named = [f"rerank.training={part}", f"rerank.selection={candidates}", f"hydra.run.dir={tmp_path / 'again'}"]
    assert run_door("select", [*SMALL, "rerank=tau_hat", *named]) == 0
    assert Selection.load(tmp_path / "again").beam == Selection.load(decided).beam


def test_ties_and_several_drafters_of_a_set(runs):
    candidates = Selection.load(runs[0])
    drafters = trained(runs[1])
    same = [type(one)(one.name, one.layers, one.fingerprint, 1.25) for one in drafters]
    last = max(drafters, key=lambda one: one.layers)  # the order of layers alone would put it behind the others
    better = type(last)("again", last.layers, last.fingerprint, 1.5)
    beam = in_order(candidates, [*same, better], runs[0] / "grams.safetensors")
    assert (beam[0]["drafter"], beam[0]["tau_hat"]) == ("again", 1.5)
    rest = [entry["layers"] for entry in beam[1:]]
    assert rest == sorted(rest)
    assert len(beam) == len({one.layers for one in drafters})
    assert "proposed by" in table(beam)
