"""Sweeps: what an app prepares once for all jobs, and real ones in processes of their own, with both launchers."""

import csv
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from specwave.app import config as configs
from specwave.app.command import first_choices, job_overrides
from specwave.artifacts import UserError

ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- preparation


@pytest.fixture
def prepared(toy, monkeypatch):
    """The configs that the toy's `prepare` was given, one list for each call."""
    calls = []

    def prepare(wanted, say):
        calls.append(wanted)
        say(f"{len(wanted)} prepared, {len(toy.CALLS)} begun")

    monkeypatch.setattr(toy, "prepare", prepare, raising=False)
    toy.CALLS.clear()
    return calls


def test_an_app_prepares_all_jobs_before_the_first_one(prepared, run_toy):
    code, out, err = run_toy("-m", "part.m=2,3", "part.rate=0.5,1", "hydra.sweep.dir=all")
    assert (code, err) == (0, "")
    assert "4 prepared, 0 begun" in out
    assert [[(config.part.m, config.part.rate) for config in call] for call in prepared] == [
        [(2, 0.5), (2, 1.0), (3, 0.5), (3, 1.0)]
    ]


def test_only_what_is_still_to_do_is_prepared(prepared, run_toy):
    assert run_toy("-m", "part.m=2,3", "hydra.sweep.dir=all")[0] == 0
    assert run_toy("-m", "part.m=2,3,4", "hydra.sweep.dir=all")[0] == 0
    assert run_toy("-m", "part.m=2,3,4", "hydra.sweep.dir=all")[0] == 0
    assert [[config.part.m for config in call] for call in prepared] == [[2, 3], [4]]


def test_jobs_of_one_config_are_prepared_once_and_wrong_ones_not_at_all(prepared, run_toy):
    code, _, err = run_toy("-m", "part.m=2,02,0,two,3")
    assert [[config.part.m for config in call] for call in prepared] == [[2, 3]]
    assert code == 2
    assert "part.m=0: must be at least 1" in err  # the job's own words


def test_a_mistake_found_in_preparation_stops_the_sweep(toy, run_toy, monkeypatch):
    def prepare(wanted, say):
        raise UserError("part.note", "x", "no prompts there")

    monkeypatch.setattr(toy, "prepare", prepare, raising=False)
    toy.CALLS.clear()
    code, _, err = run_toy("-m", "part.m=2,3")
    assert (code, err) == (2, "error: part.note=x: no prompts there\n")
    assert toy.CALLS == []


def test_an_interruption_of_the_preparation_is_one(toy, run_toy, monkeypatch):
    def prepare(wanted, say):
        raise KeyboardInterrupt

    monkeypatch.setattr(toy, "prepare", prepare, raising=False)
    assert run_toy("-m", "part.m=2,3")[::2] == (130, "interrupted\n")


def test_a_run_by_itself_prepares_nothing(prepared, run_toy):
    assert run_toy("part.m=2")[0] == 0
    assert prepared == []


def test_params_of_the_sweeper_are_swept_too(toy):
    """`hydra.sweeper.params`, as the file of an experiment may have them."""
    overrides = ["hydra.job.name=toy", "part.m=2,3", "seed=7"]
    composed = configs.compose("toy", first_choices(overrides))
    composed.hydra.sweeper.params = {"part.rate": "0.5,1"}
    assert job_overrides(overrides, composed) == [
        ["hydra.job.name=toy", "part.rate=0.5", "part.m=2", "seed=7"],
        ["hydra.job.name=toy", "part.rate=0.5", "part.m=3", "seed=7"],
        ["hydra.job.name=toy", "part.rate=1", "part.m=2", "seed=7"],
        ["hydra.job.name=toy", "part.rate=1", "part.m=3", "seed=7"],
    ]


def test_another_sweeper_chooses_its_jobs_itself(toy):
    composed = configs.compose("toy", ["hydra.sweeper._target_=somebody.Sweeper"])
    assert job_overrides(["part.m=2,3"], composed) == []


@pytest.mark.parametrize(
    "jobs",
    [
        [["part.m=2"], ["part.m=3"], ["part.m=null"], ["seed=3", "part.inner.depth=2"]],
        [["part=open", "part.m=1", "part.rate=2"], ["part.m=1", "part=open"], ["part=plain"]],
        [["part.note=${act}", "act=x"], ["part.note='a=b, c'", "needed=3"], ["part.layers=[1,2]"], ["part.layers=[]"]],
        [["part.inner={depth:7}", "part.inner.depth=8"], ["part.inner.depth=8", "part.inner={window:[1]}"]],
        [["+part.extra=1"], ["~part.rate"], ["part.m=1", "++part.m=2"], ["other=nested", "other.plain=[3]"]],
        [["hydra.sweep.dir=x", "part.m=4"], ["part.m=${seed}", "seed=5"]],
    ],
)
def test_a_composer_composes_as_hydra_does(toy, jobs):
    composer = configs.Composer("toy")
    for job in jobs * 2:
        found, expected = composer(job), configs.compose("toy", job)
        assert configs._own(found) == configs._own(expected)


@pytest.mark.parametrize("job", [["part.k_bem=1"], ["part=plane", "part.m=1"], ["prt.m=1"], ["part.m.x=1"]])
def test_a_composer_complains_as_hydra_does(toy, job):
    composer = configs.Composer("toy")
    composer(["part.m=2"])
    with pytest.raises(UserError) as found:
        composer(job)
    with pytest.raises(UserError) as expected:
        configs.compose("toy", job)
    assert str(found.value) == str(expected.value)


# ---------------------------------------------------------------- real ones


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECWAVE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def sweep(folder, *more):
    """A 2×2 sweep of select.py with random weights: (exit code, stdout, stderr)."""
    argv = ["-m", "model=tiny", "calibration.limit=3", "calibration.max_new_tokens=4", "calibration.block_size=2",
            "selector.m=2,3", "selector.k_beam=1,9", f"hydra.sweep.dir={folder}", *more]  # fmt: skip
    return door("select", folder, argv)


def door(app, folder, argv):
    done = subprocess.run(
        [sys.executable, ROOT / f"{app}.py", *argv],
        cwd=folder.parent, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def table(folder):
    with open(folder / "sweep.csv", newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def settled(rows):
    """Rows without what differs from one minute to the next; `calibration` says whether the pass was re-used."""
    passing = ("wall_seconds", "peak_memory_bytes", "calibration")
    return [{key: value for key, value in row.items() if key not in passing} for row in rows]


@pytest.fixture(scope="module")
def basic(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("basic") / "sweep"
    return folder, sweep(folder)


def test_a_sweep_ends_with_one_table_and_one_picture(basic):
    folder, (code, out, err) = basic
    assert (code, err) == (0, "")
    rows = table(folder)
    assert [(row["job"], row["selector.m"], row["selector.k_beam"], row["status"]) for row in rows] == [
        ("0", "2", "1", "finished"),
        ("1", "2", "9", "finished"),
        ("2", "3", "1", "finished"),
        ("3", "3", "9", "finished"),
    ]
    for row in rows:
        record = yaml.safe_load((folder / row["job"] / "run.yaml").read_text())
        assert yaml.safe_load(row["layers"]) == record["layers"]
        assert len(record["layers"]) == int(row["selector.m"])
        assert float(row["entropy"]) == record["entropy"]
        assert float(row["wall_seconds"]) == record["wall_seconds"]
    text = (folder / "sweep.md").read_text()
    printed = out.split("| job")[1].split("written:")[0].strip()
    assert printed in text
    assert out.splitlines()[-1] == "4 jobs, all finished"
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "sweep.svg").is_file()
    assert not (folder / ".exit_codes").exists()


def test_the_same_sweep_again_skips_all_jobs_and_writes_the_same_table(basic):
    folder, _ = basic
    before = {name: (folder / name).read_bytes() for name in ("sweep.csv", "sweep.md", "sweep.png", "sweep.svg")}
    for name in before:
        (folder / name).unlink()
    code, out, err = sweep(folder)
    assert (code, err) == (0, "")
    assert out.count("finished earlier, skipped") == 4
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_jobs_side_by_side_give_the_same_table(basic, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs specwave[sweep]")
    folder = tmp_path / "sweep"
    joblib = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    code, out, err = sweep(folder, *joblib)
    assert (code, err) == (0, "")
    assert settled(table(folder)) == settled(table(basic[0]))
    assert out.splitlines()[-1] == "4 jobs, all finished"
    code, out, err = sweep(folder, *joblib, "selector.m=2", "selector.alpha=2")  # refused by what lies in their folders
    assert code == 2
    assert err.count("the run there has other settings (selector.alpha)") == 2
    assert out.splitlines()[-1] == "2 jobs, 2 failed"
    assert not (folder / ".exit_codes").exists()


@pytest.mark.parametrize("given", [None, "3"])
def test_jobs_side_by_side_share_the_cores(given, monkeypatch):
    """What the docs promise and joblib does: cores ÷ n_jobs threads, unless the user says how many."""
    pytest.importorskip("joblib", reason="needs specwave[sweep]")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    script = "import joblib, os; ask = joblib.delayed(os.getenv)('OMP_NUM_THREADS'); cores = joblib.cpu_count(); "
    script += "print(*joblib.Parallel(n_jobs=2)([ask, ask]), max(1, cores // 2))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    first, second, share = found.stdout.split()
    assert first == second == (given or share)


def test_a_failed_job_is_a_row(tmp_path, cache):
    folder = tmp_path / "sweep"
    code, out, err = sweep(folder, "selector.m=2,99", "selector.k_beam=1")
    assert code == 2
    first, second = table(folder)
    assert (first["status"], second["status"], second["selector.m"]) == ("finished", "failed", "99")
    assert second["error"].startswith("selector.m=99: ")
    assert (second["layers"], second["entropy"]) == ("", "")
    assert "selector.k_beam" not in first  # one value only: not swept
    assert second["error"] in err
    assert out.splitlines()[-1] == "2 jobs, 1 failed"


def test_the_matrix_of_plans_and_stop_rules_ends_in_one_heat_map(tmp_path, cache):
    """The experiment with fewer sources and rules; one of them is refused by every source."""
    folder = tmp_path / "sweep"
    rules = "0,7,{_target_:specwave.skipping.Adaptive}"
    argv = ["-m", "experiment=skipping_matrix", "model=tiny", "limit=1", "max_new_tokens=4"]
    argv += ["decoding=layerskip,clasp", f"decoding.stop={rules}", f"hydra.sweep.dir={folder}"]
    code, out, _ = door("evaluate", folder, argv)
    assert (code, out.splitlines()[-1]) == (2, "6 jobs, 2 failed")
    rows = table(folder)
    assert [(row["decoding"], row["decoding.stop"]) for row in rows] == [
        (source, rule) for source in ("layerskip", "clasp") for rule in rules.split(",")
    ]
    for row in rows:
        if row["decoding.stop"] == "7":
            assert (row["status"], row["tau"], row["speedup"]) == ("failed", "", "")
            assert row["error"].startswith("decoding.stop=7: ")
            continue
        overall = json.loads((folder / row["job"] / "results.json").read_text())["overall"]
        for name in ("tau", "tokens_per_second", "speedup"):
            assert float(row[name]) == overall[name]
    drawn = [node.text for node in ElementTree.parse(folder / "sweep.svg").iter() if node.tag.endswith("text")]
    assert drawn.count("✕ failed") == 6  # two cells of three panels
    assert {"layerskip", "clasp", "Adaptive", "speedup over plain decoding", "evaluate: 6 jobs, 2 failed"} <= set(drawn)
