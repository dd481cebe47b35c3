"""The table of training runs: what of the cards goes where, and how far seeds lie apart."""

import json
import sys

import pytest


@pytest.fixture(scope="module")
def groups(script):
    return script("groups")


def write(run, layers, tau_hat, seed, **held):
    folder = run / "drafters" / f"L{'-'.join(map(str, layers))}"
    folder.mkdir(parents=True)
    held = {"loss": 6.25, "a_0": 0.4, "a_1": 0.25, "tau_hat": tau_hat} | held
    training = {"rule": "eagle2" if layers == [7] else None, "step": 300, "steps": 2, "validation": held}
    card = {"layers": layers, "target": {"num_layers": 8}, "data": {"seed": seed}, "training": training}
    (folder / "card.json").write_text(json.dumps(card))


def test_best_first_and_seeds_beside_it(groups, tmp_path, monkeypatch, capsys):
    write(tmp_path / "a", [7], 1.4, 0, tau=1.375)
    write(tmp_path / "a", [1, 2, 3], 1.5, 0)
    write(tmp_path / "b", [7], 1.4321, 1)
    monkeypatch.setattr(sys, "argv", ["groups.py", str(tmp_path / "a"), str(tmp_path / "b")])
    groups.main()
    assert capsys.readouterr().out.splitlines() == [
        "| drafter | rule | step | loss | a_0 | a_1 | τ̂ | τ | τ̂, seed 1 | between seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| L1-2-3 |  | 300 | 6.250 | 0.400 | 0.250 | 1.500 |  |  |  |",
        "| L7 | eagle2 | 300 | 6.250 | 0.400 | 0.250 | 1.400 | 1.375 | 1.432 | 0.032 |",
    ]


def test_a_folder_without_drafters_is_named(groups, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["groups.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        groups.main()
    assert ended.value.code == 2
    assert "neither a drafter folder" in capsys.readouterr().err
