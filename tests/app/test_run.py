"""Run folders: unique, announced, recorded, taken up again; sweeps and the processes of one run."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from specwave.app import run as runs
from specwave.app.run import Run, alone, changed_keys, claim, git_state, read_run
from specwave.artifacts import UserError


def record(folder):
    return yaml.safe_load((Path(folder) / "run.yaml").read_text())


# ---------------------------------------------------------------- one run


def test_a_run_is_announced_and_recorded(toy, run_toy, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["toy.py", "part.m=5", "seed=7"])
    code, out, err = run_toy("part.m=5", "seed=7")
    assert (code, err) == (0, "")
    first, *rest = out.splitlines()
    assert first.startswith("run folder: /")
    assert rest == ["at work with 5"]
    folder = Path(first.removeprefix("run folder: "))
    assert folder.parents[2] == Path.cwd() / "runs"
    assert folder.parents[1].name == "toy"
    assert sorted(path.name for path in folder.iterdir()) == ["result", "run.yaml"]

    config, run = toy.CALLS[-1]
    assert (run.folder, run.resume, run.main, config.part.m) == (folder, False, True, 5)
    kept = record(folder)
    assert (kept["app"], kept["status"], kept["exit_code"], kept["seed"], kept["seen"]) == ("toy", "finished", 0, 7, 5)
    assert kept["overrides"] == ["part.m=5", "seed=7"]
    assert kept["command"] == ["toy.py", "part.m=5", "seed=7"]
    assert kept["config"]["part"]["m"] == 5
    assert kept["config"]["part"]["_target_"] == "specwave.app.toy.Part"
    assert kept["peak_memory_bytes"] > 10_000_000
    assert 0 < kept["wall_seconds"] < 60
    assert {"specwave", "python", "torch", "transformers", "pytorch-lightning", "hydra-core"} <= set(kept["versions"])


def test_run_yaml_says_running_while_it_runs(toy, run_toy, monkeypatch):
    seen = {}
    monkeypatch.setattr(toy, "main", lambda config, run: seen.update(record(run.folder)))
    assert run_toy()[0] == 0
    assert seen["status"] == "running"
    assert "exit_code" not in seen


@pytest.mark.parametrize(
    ("act", "code", "error"),
    [
        ("mistake", 2, "part.m=3: the data do not like it"),
        ("crash", 1, "ZeroDivisionError: in the middle"),
        ("stop", 1, "2 of 3 failed"),
        ("interrupt", 130, "interrupted"),
        ("terminate", 143, "terminated"),
        ("full", 2, "hydra.run.dir={}: No space left on device (weights): make room, and go on with resume=true"),
    ],
)
def test_how_a_run_ends_is_its_exit_code_and_its_record(toy, run_toy, act, code, error):
    found, _, err = run_toy(f"act={act}", "hydra.run.dir=here")
    assert found == code
    kept, error = record("here"), error.format(Path.cwd() / "here")
    assert (kept["status"], kept["exit_code"], kept["error"]) == ("failed", code, error)
    if act == "crash":
        assert err.startswith("Traceback")
        assert err.rstrip().endswith("ZeroDivisionError: in the middle")
    else:
        said = {"stop": f"{error}\n", "interrupt": "interrupted\n", "terminate": ""}
        assert err == said.get(act, f"error: {error}\n")


def test_a_disk_too_full_for_the_last_words(toy, run_toy, monkeypatch):
    """One line all the same; run.yaml says running, as after a kill."""
    monkeypatch.setattr(runs.Record, "close", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    code, _, err = run_toy("act=full", "hydra.run.dir=here")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert record("here")["status"] == "running"


def test_a_job_leaves_no_handler_behind(toy, run_toy):
    before = signal.getsignal(signal.SIGTERM)
    assert run_toy()[0] == 0
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_refused_config_leaves_no_folder(toy, run_toy):
    for override in ("part.m=x", "part.m=0", "part=open", "prt=1", "part=nothing"):
        code, out, err = run_toy(override, "hydra.run.dir=here")
        assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert list(Path.cwd().iterdir()) == []


def test_an_explicit_folder_may_have_any_name(toy, run_toy):
    code, out, _ = run_toy("hydra.run.dir='a=b, it\\'s'")
    assert code == 0
    assert out.splitlines()[0] == f"run folder: {Path.cwd()}/a=b, it's"
    assert record("a=b, it's")["status"] == "finished"


def test_the_current_folder_plays_no_part(toy, run_toy, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, out, _ = run_toy()
    assert code == 0
    assert f"{tmp_path}/elsewhere/runs/toy/" in out


def test_a_folder_that_cannot_be_made(toy, run_toy):
    Path("file").write_text("")
    code, _, err = run_toy("hydra.run.dir=file/run")
    assert code == 2
    assert err.startswith("error: hydra.run.dir=")


# ---------------------------------------------------------------- going on


def test_a_folder_that_holds_a_run_is_refused(toy, run_toy):
    assert run_toy("hydra.run.dir=here")[0] == 0
    before = (Path("here") / "run.yaml").read_text()
    code, _, err = run_toy("hydra.run.dir=here")
    assert code == 2
    assert err == f"error: hydra.run.dir={Path.cwd()}/here: this folder holds a run: name another, or add resume=true\n"
    assert (Path("here") / "run.yaml").read_text() == before


def test_resume_goes_on_and_adds_the_times_up(toy, run_toy):
    Path("here").mkdir()
    assert run_toy("hydra.run.dir=here", "act=crash")[0] == 1  # leaves nothing but its run.yaml
    assert run_toy("hydra.run.dir=here")[0] == 0  # so the folder is free
    seconds = record("here")["wall_seconds"]
    assert run_toy("hydra.run.dir=here", "resume=true")[0] == 0
    assert toy.CALLS[-1][1].resume is True
    kept = record("here")
    assert kept["attempts"] == 2
    assert kept["wall_seconds"] > seconds


def test_going_on_sweeps_up_what_a_kill_cut_short(toy, run_toy):
    """A kill in the middle of writing run.yaml, its first time or a later one, leaves a part beside it."""
    for begun in (False, True):
        Path("here").mkdir(exist_ok=True)
        (Path("here") / ".run.yaml.x.part").write_text("app: to")
        (Path("here") / "unlike.part").write_text("mine")
        assert run_toy("hydra.run.dir=here", "resume=true")[0] == 0
        assert not (Path("here") / ".run.yaml.x.part").exists(), begun
        assert (Path("here") / "unlike.part").exists()


def test_resume_refuses_other_settings(toy, run_toy):
    assert run_toy("hydra.run.dir=here", "part.m=4")[0] == 0
    code, _, err = run_toy("hydra.run.dir=here", "resume=true", "part.layers=[1]", "seed=1")
    assert code == 2
    assert "other settings (seed, part.m, part.layers)" in err
    assert run_toy("hydra.run.dir=here", "resume=true", "part.m=4", "allow_targets=[x]")[0] == 0


def without(folder, *keys):
    """Makes a run one of an older version, which had no such keys."""
    content = record(folder)
    for key in keys:
        *path, last = key.split(".")
        node = content["config"]
        for name in path:
            node = node[name]
        del node[last]
    (Path(folder) / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


def test_a_run_begun_before_a_key_existed_had_its_default(toy, run_toy):
    lacking = ("needed", "part.k_beam", "part.inner.depth")
    assert run_toy("hydra.run.dir=here", "part.m=4")[0] == 0
    without("here", *lacking)
    code, _, err = run_toy("hydra.run.dir=here", "resume=true", "part.m=4", "part.k_beam=11", "needed=1")
    assert code == 2
    assert "the run there has other settings (part.k_beam, needed): " in err
    code, _, err = run_toy("hydra.run.dir=here", "resume=true", "part.m=5")
    assert code == 2
    assert "the run there has other settings (part.m): " in err
    assert run_toy("hydra.run.dir=here", "resume=true", "part.m=4")[::2] == (0, "")
    assert record("here")["config"]["part"]["k_beam"] == 10


def test_the_default_is_that_of_the_options_the_run_chose(toy, run_toy):
    """`part=open` has no value for m: what the old run was begun with counts, not what the folder of configs says."""
    chosen = ("part=open", "part.m=7", "part.rate=2")
    assert run_toy("hydra.run.dir=here", *chosen)[0] == 0
    without("here", "part.m")
    assert run_toy("hydra.run.dir=here", "resume=true", *chosen)[0] == 0
    without("here", "part.m")
    assert run_toy("hydra.run.dir=here", "resume=true", "part=open", "part.m=8", "part.rate=2")[0] == 2


def test_a_finished_job_of_an_older_version_is_skipped(toy, run_toy):
    assert run_toy("-m", "part.m=2,3", "hydra.sweep.dir=all")[0] == 0
    for number in "01":
        without(f"all/{number}", "part.k_beam")
    toy.CALLS.clear()
    assert run_toy("-m", "part.m=2,3", "hydra.sweep.dir=all")[0] == 0
    assert toy.CALLS == []


def test_resume_needs_a_named_folder_and_the_same_app(toy, run_toy):
    assert run_toy("resume=true")[::2] == (
        2,
        "error: resume=true: name the folder to go on in: hydra.run.dir=<folder>\n",
    )
    assert run_toy("hydra.run.dir=here")[0] == 0
    other = (Path("here") / "run.yaml").read_text().replace("app: toy", "app: train")
    (Path("here") / "run.yaml").write_text(other)
    code, _, err = run_toy("hydra.run.dir=here", "resume=true")
    assert code == 2
    assert "holds a run of train" in err


def test_resume_where_nothing_was_begun_starts(toy, run_toy):
    assert run_toy("hydra.run.dir=here", "resume=true")[0] == 0


def test_an_unreadable_run_yaml_is_a_mistake(toy, run_toy):
    Path("here").mkdir()
    (Path("here") / "run.yaml").write_text("app: [")
    code, _, err = run_toy("hydra.run.dir=here", "resume=true")
    assert code == 2
    assert "run.yaml cannot be read" in err


def test_changed_keys():
    old = {"a": 1, "b": {"c": [1, 2], "d": None}, "e": 1}
    assert changed_keys(old, {"a": 1, "b": {"c": [1, 3], "d": None}, "f": 2}) == ["b.c", "e", "f"]
    assert changed_keys(old, old) == []


def test_one_process_at_a_time(tmp_path):
    command = (
        "import sys, pathlib; from specwave.app.run import alone\n"
        "with alone(pathlib.Path(sys.argv[1]), 'hydra.run.dir'): print('in', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", command, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"in\n"
        with pytest.raises(UserError, match="another process is at work"), alone(tmp_path, "hydra.run.dir"):
            pass
        holder.kill()  # a dead process holds nothing
        holder.wait()
        with alone(tmp_path, "hydra.run.dir"):
            pass


# ---------------------------------------------------------------- unique folders


def test_claim_counts_upwards(tmp_path):
    wanted = tmp_path / "a/b/12-00-00"
    assert [claim(wanted).name for _ in range(3)] == ["12-00-00", "12-00-00-2", "12-00-00-3"]


def claim_many(folder):
    return [str(claim(Path(folder) / "12-00-00")) for _ in range(20)]


def test_claims_of_processes_in_the_same_second_differ(tmp_path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = [name for names in pool.map(claim_many, [tmp_path] * 4) for name in names]
    assert len(set(found)) == 80


# ---------------------------------------------------------------- sweeps


def test_a_sweep_gives_each_job_a_folder(toy, run_toy):
    code, out, err = run_toy("-m", "part.m=3,4", "seed=1,2", "hydra.sweep.dir=all")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"run folder: {Path.cwd()}/all"
    assert lines[1] == f"job 0: part.m=3 seed=1 in {Path.cwd()}/all/0"
    assert lines[-1] == "4 jobs, all finished"
    found = [(record(f"all/{job}")["config"]["part"]["m"], record(f"all/{job}")["seed"]) for job in range(4)]
    assert found == [(3, 1), (3, 2), (4, 1), (4, 2)]


def test_a_failed_job_stops_no_other(toy, run_toy):
    code, out, err = run_toy("-m", "part.m=3,4,x,0", "act=odd", "hydra.sweep.dir=all")
    assert code == 2
    assert err.splitlines() == [
        "error: part.m=3: the data do not like it",
        "error: part.m=x: a whole number is expected",
        "error: part.m=0: must be at least 1",
    ]
    assert out.splitlines()[-1] == "4 jobs, 3 failed"
    kept = [record(f"all/{job}") for job in range(4)]
    assert [entry["status"] for entry in kept] == ["failed", "finished", "failed", "failed"]
    assert kept[2]["error"] == "part.m=x: a whole number is expected"
    assert kept[2]["overrides"] == ["part.m=x", "act=odd"]
    code, _, _ = run_toy("-m", "act=mistake,crash,none", "hydra.sweep.dir=other")
    assert code == 1  # a crash outweighs mistakes


def test_a_terminated_sweep_begins_no_other_job(toy, run_toy):
    """As Ctrl-C: who ends the sweep does not mean one job of it."""
    code, _, _ = run_toy("-m", "part.m=2,3", "act=terminate", "hydra.sweep.dir=all")
    assert code == 143
    assert [config.part.m for config, _ in toy.CALLS] == [2]
    assert record("all/0")["error"] == "terminated"
    assert not Path("all/1/run.yaml").exists()


def test_a_sweep_started_again_runs_only_what_is_left(toy, run_toy):
    assert run_toy("-m", "part.m=2,3", "act=odd", "hydra.sweep.dir=all")[0] == 2
    toy.CALLS.clear()
    toy_main, toy.main = toy.main, lambda config, run: toy.CALLS.append((config, run))  # the fault is mended
    code, out, _ = run_toy("-m", "part.m=2,3,4", "act=odd", "hydra.sweep.dir=all")
    toy.main = toy_main
    assert code == 0
    assert [config.part.m for config, _ in toy.CALLS] == [3, 4]
    assert f"job 0: {Path.cwd()}/all/0 finished earlier, skipped" in out
    code, _, err = run_toy("-m", "part.m=5,3", "act=odd", "hydra.sweep.dir=all")  # never skipped for another's result
    assert code == 2
    assert "other settings (part.m)" in err
    assert record("all/0")["config"]["part"]["m"] == 2


def test_a_job_that_stopped_before_its_end_goes_on(toy, run_toy):
    def part(config, run):
        toy.CALLS.append((config, run))
        run.status = "stopped" if not run.resume and config.part.m == 3 else "finished"

    toy_main, toy.main = toy.main, part
    codes = [run_toy("-m", "part.m=2,3", "hydra.sweep.dir=all")[0] for _ in range(2)]
    toy.main = toy_main
    assert codes == [0, 0]
    assert [(config.part.m, run.resume) for config, run in toy.CALLS] == [(2, False), (3, False), (3, True)]
    assert [record(f"all/{job}")["status"] for job in range(2)] == ["finished", "finished"]


def test_a_killed_job_of_a_sweep_goes_on(toy, run_toy):
    assert run_toy("-m", "part.m=2,3", "hydra.sweep.dir=all")[0] == 0
    path = Path("all/1/run.yaml")
    path.write_text(path.read_text().replace("status: finished", "status: running"))
    toy.CALLS.clear()
    assert run_toy("-m", "part.m=2,3", "hydra.sweep.dir=all")[0] == 0
    assert [run.resume for _, run in toy.CALLS] == [True]


def test_mistakes_of_the_whole_sweep_stop_it_before_it_begins(toy, run_toy):
    for override, words in [
        ("part.k_bem=1,2", "did you mean part.k_beam?"),
        ("part=plain,plane", "did you mean plain?"),
        ("part=open,plain", "part.m, part.rate=???"),
        ("resume=true", "name the folder to go on in: hydra.sweep.dir"),
    ]:
        code, out, err = run_toy("-m", override)
        assert (code, out) == (2, "")
        assert words in err
    assert list(Path.cwd().iterdir()) == []


def test_a_job_leaves_no_rank_behind(toy, run_toy, monkeypatch):
    monkeypatch.setattr(toy, "main", lambda config, run: os.environ.update(LOCAL_RANK="1", WORLD_SIZE="2"))
    before = dict(os.environ)
    assert run_toy("-m", "seed=1,2")[0] == 0
    assert {key: value for key, value in os.environ.items() if key in ("LOCAL_RANK", "WORLD_SIZE")} == {}
    assert "SPECWAVE_LAUNCH" not in os.environ
    assert set(before) <= set(os.environ)


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize("sweep", [False, True], ids=["run", "sweep"])
def test_every_rank_works_in_the_one_folder(toy_folder, tmp_path, sweep):
    jobs = ["-m", "part.m=4,5"] if sweep else ["part.m=4"]
    done = subprocess.run(
        [sys.executable, toy_folder / "toy.py", *jobs, "act=ranks"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (folder,) = tmp_path.glob("runs/toy/*/*")
    for job in [folder / "0", folder / "1"] if sweep else [folder]:
        m = record(job)["config"]["part"]["m"]
        assert (job / "rank0").read_text() == f"{m} True False"
        assert (job / "rank1").read_text() == f"{m} False False"
    assert done.stdout.count("at work") == (2 if sweep else 1)


def test_ranks_of_another_launcher_need_a_named_folder(toy, run_toy, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    code, _, err = run_toy()
    assert code == 2
    assert "name the folder they share" in err
    assert run_toy("hydra.run.dir=here")[0] == 0
    assert toy.CALLS[-1][1].main is False
    assert not (Path("here") / "run.yaml").exists()  # that is rank 0's


def test_the_launch_note_is_for_children_only(toy, run_toy, monkeypatch):
    monkeypatch.setenv("SPECWAVE_LAUNCH", json.dumps({"pid": 1, "folder": "/nowhere", "resume": False}))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run_toy("hydra.run.dir=here")[0] == 0


# ---------------------------------------------------------------- facts


def test_git_state_of_a_checkout_and_of_an_installation(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "conf_dir", lambda: tmp_path / "conf")
    (tmp_path / "conf").mkdir()
    assert git_state() is None

    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@y", *arguments], check=True)

    git("init", "-q")
    assert git_state() is None  # no commit yet
    (tmp_path / "file").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    clean = git_state()
    assert len(clean["revision"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_state() == {**clean, "dirty": True}
    monkeypatch.setattr(runs, "conf_dir", lambda: tmp_path / "site-packages/specwave/conf")
    (tmp_path / "site-packages/specwave/conf").mkdir(parents=True)
    assert git_state() is None  # somebody else's repository


def test_a_run_by_hand(tmp_path, capsys):
    run = Run(tmp_path)
    run.note(a=1)
    run.note(b=2)
    run.say("once")
    Run(tmp_path, main=False).say("never")
    assert run.facts == {"a": 1, "b": 2}
    assert capsys.readouterr().out == "once\n"
    assert read_run(tmp_path, "hydra.run.dir") is None
