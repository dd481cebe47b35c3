"""The three doors as a user meets them: in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specwave.app.command import read_command_line
from specwave.artifacts import UserError, conf_dir

ROOT = Path(__file__).resolve().parents[2]
DOORS = ("select", "train", "evaluate")
TYPO = {"select": "selector.k_bem=3", "train": "trainer=cpuu", "evaluate": "max_new_token=3"}


def start(door, *argv, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, ROOT / f"{door}.py", *argv],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_typo_at_each_door_is_one_line_and_exit_code_2(tmp_path):
    running = {door: start(door, TYPO[door], cwd=tmp_path) for door in DOORS}
    for door, process in running.items():
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (2, ""), err
        assert err.startswith(f"error: {TYPO[door]}: there is no such")
        assert "did you mean" in err
        assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("door", DOORS)
def test_doors_are_thin(door):
    assert len((ROOT / f"{door}.py").read_text().splitlines()) <= 40


def test_help_lists_choices_and_keys_with_their_comments(run_toy):
    code, out, err = run_toy("--help")
    assert (code, err) == (0, "")
    assert "  part   open plain*" in out
    assert "  act: none  # what main does" in out
    assert "  part.m: 3  # how many" in out
    assert "  resume: false  # true:" in out
    assert "hydra:" not in out
    code, out, _ = run_toy("part=open", "--help")
    assert "open* plain" in out
    assert "part.m: ???" in out
    assert run_toy("part=opne", "--help")[0] == 2


@pytest.mark.parametrize("door", DOORS)
def test_help_of_the_doors(door):
    from specwave.app.usage import usage

    text = usage(door, [])
    assert text.startswith(f"python {door}.py")
    assert "model.source" in text
    assert "# of every random draw" in text


def test_hydra_answers_its_own_flags(run_toy):
    code, out, _ = run_toy("part.m=9", "--cfg", "job")
    assert code == 0
    assert "m: 9" in out
    code, out, err = run_toy("--cfg", "job", "part.k_bem=9")
    assert (code, out) == (2, "")
    assert "did you mean part.k_beam?" in err
    assert run_toy("--info", "defaults")[0] == 0


@pytest.mark.parametrize("argv", [["--bogus"], ["--cfg", "nothing"], ["--config-dir", "nowhere"], ["-x"]])
def test_flags_nobody_knows(run_toy, argv):
    code, out, err = run_toy(*argv)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_overrides_and_flags_mix():
    request = read_command_line("toy", ["a=1", "-m", "b=2,3", "+c=1"])
    assert request.overrides[1:] == ["a=1", "b=2,3", "+c=1"]
    assert request.multirun
    with pytest.raises(UserError):
        read_command_line("toy", ["-cd"])


def test_options_of_a_folder_of_ones_own(toy, run_toy, tmp_path):
    (tmp_path / "mine/part").mkdir(parents=True)
    (tmp_path / "mine/part/own.yaml").write_text("_target_: specwave.app.toy.Part\nm: 11\n")
    assert run_toy("-cd", "mine", "part=own")[0] == 0
    assert toy.CALLS[-1][0].part.m == 11


def test_every_door_has_its_config():
    assert all((conf_dir() / f"{door}.yaml").is_file() for door in DOORS)
