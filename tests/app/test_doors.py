"""The three doors as a user meets them: in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specwave.app.command import read_command_line
from specwave.app.complaints import explain
from specwave.app.config import known_keys
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


# ---------------------------------------------------------------- files that options include


@pytest.fixture
def included(toy, toy_folder):
    """`part=wide` and `part=late` share the keys of conf/part/_shared.yaml."""
    files = {
        "_shared": "# shared\nm: 5  # from the shared file\nrate: 0.25  # shared too\ninner:\n  depth: 2  # below\n",
        "wide": "defaults:\n  - _shared\n_target_: specwave.app.toy.Part\nrate: 0.75  # its own\nkind: plain\n",
        "late": "defaults:\n  - _self_\n  - _shared\n_target_: specwave.app.toy.Part\nrate: 0.75  # its own\n",
    }
    paths = {name: toy_folder / f"conf/part/{name}.yaml" for name in files}
    for name, path in paths.items():
        path.write_text(files[name])
    yield
    for path in paths.values():
        path.unlink()


@pytest.mark.parametrize(
    ("option", "lines"),
    [
        (
            "wide",
            [
                "  part.rate: 0.75  # its own", "  part.kind: plain", "  part.m: 5  # from the shared file",
                "  part.inner:", "    depth: 2  # below",
            ],
        ),
        (
            "late",
            [
                "  part.rate: 0.25  # shared too", "  part.m: 5  # from the shared file",
                "  part.inner:", "    depth: 2  # below",
            ],
        ),
    ],
)  # fmt: skip
def test_help_shows_included_keys_as_they_come_out(included, toy, run_toy, option, lines):
    code, out, _ = run_toy(f"part={option}", "--help")
    assert code == 0
    assert out.split(f"part={option}\n")[1].split("\n\n")[0].splitlines() == lines
    assert run_toy(f"part={option}")[0] == 0
    assert f"  part.rate: {toy.CALLS[-1][0].part.rate}" in out  # what Hydra makes of the two files
    assert toy.CALLS[-1][0].part.inner.depth == 2


def test_a_file_that_options_include_is_no_option(included, run_toy):
    assert "  part   late open plain* wide\n" in run_toy("--help")[1]
    for argv in (["part=_shared"], ["-m", "part=plain,_shared"], ["part=_shared", "--help"], ["part=_share"]):
        code, out, err = run_toy(*argv)
        assert (code, out) == (2, "")
        assert "there is no such option" in err
        assert "choose one of late, open, plain, wide" in err


@pytest.mark.parametrize(("app", "wanted"), [("evaluate", "methods"), ("select", "selectors"), ("train", "data")])
def test_list_says_what_a_group_offers(app, wanted, capsys):
    from specwave.app.complaints import options
    from specwave.app.door import run_door

    assert run_door(app, [f"list={wanted}"]) == 0
    group = {"methods": "decoding", "selectors": "selector", "data": "data"}[wanted]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0].rstrip("*") for line in lines] == [f"{group}={name}" for name in options(group)]
    assert sum(line.split()[0].endswith("*") for line in lines) == 1
    assert all(len(line.split(maxsplit=1)[1]) > 10 for line in lines)  # each says what it is


def test_list_of_something_unknown_names_the_closest(capsys):
    from specwave.app.door import run_door

    assert run_door("evaluate", ["list=method"]) == 2
    assert "list=method: there is no such option; did you mean methods? choose one of" in capsys.readouterr().err


def test_an_experiment_of_another_command_is_named(capsys):
    from specwave.app.door import run_door

    assert run_door("evaluate", ["experiment=qwen3_table1"]) == 2
    assert capsys.readouterr().err == (
        "error: experiment=qwen3_table1: it is for another command: python chain.py experiment=qwen3_table1\n"
    )


def test_the_shell_completes_with_hydras_own(run_toy):
    code, out, err = run_toy("-sc", "install=bash")
    assert (code, err) == (0, "")
    assert "COMPREPLY" in out


# ---------------------------------------------------------------- start-up


def test_a_launcher_that_is_not_installed_is_named_with_its_extra():
    from hydra.errors import MissingConfigException

    for options in (None, ["basic"]):
        error = MissingConfigException("?", "hydra/launcher/submitit_slurm", options)
        assert str(explain(error, "select", [], known_keys)).endswith("pip install 'specwave[slurm]'")
    error = MissingConfigException("Could not find 'hydra/launcher/joblib'", "hydra/launcher/joblib", ["basic"])
    assert str(explain(error, "select", [], known_keys)) == (
        "hydra/launcher=joblib: this launcher is a package of its own: pip install 'specwave[sweep]'"
    )


@pytest.mark.parametrize(
    ("argv", "heavy"),
    [
        (["--help"], set()),
        (["selector.k_bem=3"], set()),
        (["--cfg", "job"], set()),
        (["resume=true"], {"torch", "numpy"}),  # checked in full: the config's classes lie beside their maths
    ],
)
def test_what_is_imported_before_a_run_begins(tmp_path, argv, heavy):
    """Libraries that take seconds to import; those of a run arrive when it needs them."""
    script = (
        "import sys; from specwave.app.door import run_door; run_door('select', sys.argv[1:]); "
        "heavy = 'torch numpy transformers pytorch_lightning deepspeed wandb datasets pandas matplotlib'.split(); "
        "print('imported', *(name for name in heavy if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert set(done.stdout.splitlines()[-1].split()[1:]) <= heavy
