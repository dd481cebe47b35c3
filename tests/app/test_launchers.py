"""Other ways to run the jobs of a sweep: submitit's launchers, optuna's suggestions, further processes of one job."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from specwave.app import config as configs
from specwave.app.collate import rows
from specwave.app.job import follow
from specwave.app.run import Run
from specwave.artifacts import UserError, conf_dir

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "model=tiny",
    "calibration.limit=2",
    "calibration.max_new_tokens=4",
    "calibration.block_size=2",
    "analysis=none",
)


@pytest.fixture
def door(tmp_path, monkeypatch):
    """Starts a door in a process of its own, in an empty folder."""
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(app, *argv):
        return subprocess.Popen(
            [sys.executable, ROOT / f"{app}.py", *argv],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return start


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


# ---------------------------------------------------------------- a sweep that is killed


def test_twelve_jobs_killed_in_the_middle_are_one_table_and_nothing_runs_twice(door, tmp_path):
    argv = ["-m", *TINY, "selector.m=1,2,3", "selector.k_beam=1,2,3,4", "hydra.sweep.dir=sweep"]
    folder = tmp_path / "sweep"

    def finished():
        found = {}
        for path in folder.glob("*/run.yaml"):
            record = yaml.safe_load(path.read_text())
            if record["status"] == "finished":
                found[path.parent.name] = record["started"], path.stat().st_mtime_ns
        return found

    process = door("select", *argv)
    while len(finished()) < 4 and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    before = finished()
    assert 4 <= len(before) < 12
    code, out, err = finish(door("select", *argv))
    assert (code, err) == (0, "")
    after = finished()
    assert len(after) == 12
    assert {job: after[job] for job in before} == before  # their files were not touched
    assert out.count("finished earlier, skipped") == len(before)
    table = rows(folder)
    assert [row["status"] for row in table] == ["finished"] * 12
    assert len({(row["selector.m"], row["selector.k_beam"]) for row in table}) == 12
    assert len((folder / "sweep.csv").read_text().splitlines()) == 13


# ---------------------------------------------------------------- submitit


def test_a_cluster_job_has_a_task_for_each_gpu():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs specwave[slurm]")
    found = configs.compose("train", ["hydra/launcher=slurm", "hydra.launcher.nodes=2", "trainer=deepspeed"])
    launcher = found.hydra.launcher
    assert launcher._target_.endswith(".SlurmLauncher")
    assert (launcher.nodes, launcher.tasks_per_node, launcher.gpus_per_node) == (2, 8, 8)
    assert found.trainer.devices == launcher.tasks_per_node
    assert configs.compose("select", ["hydra/launcher=slurm_local"]).hydra.launcher.tasks_per_node == 1


def test_without_submitit_its_extra_is_named(monkeypatch):
    try:
        importlib.import_module("hydra_plugins.hydra_submitit_launcher")
    except ImportError:
        with pytest.raises(UserError, match=r"pip install 'specwave\[slurm\]'"):
            configs.compose("train", ["hydra/launcher=slurm"])


def test_jobs_of_submitits_local_launcher(door, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs specwave[slurm]")
    argv = ["-m", *TINY, "selector.m=1,99", "hydra.sweep.dir=sweep", "hydra/launcher=slurm_local"]
    code, out, err = finish(door("select", *argv))
    assert code == 2, err
    assert out.splitlines()[-1] == "2 jobs, 1 failed"
    assert [row["status"] for row in rows(tmp_path / "sweep")] == ["finished", "failed"]
    before = (tmp_path / "sweep/0/run.yaml").read_bytes()
    assert finish(door("select", *argv))[0] == 2
    assert (tmp_path / "sweep/0/run.yaml").read_bytes() == before


# ---------------------------------------------------------------- further processes of a job


@pytest.mark.parametrize(
    ("status", "setting", "skipped", "resumed"),
    [("finished", 1, True, True), ("finished", 2, False, True), ("failed", 1, False, True), (None, 1, False, False)],
)
def test_a_further_process_does_what_the_first_one_does(tmp_path, status, setting, skipped, resumed):
    if status is not None:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"app": "toy", "status": status, "config": {"m": 1}}))
        (tmp_path / "result").write_text("")
    run = Run(tmp_path, main=False)
    assert follow(run, {"m": setting}, "hydra.sweep.dir") == skipped
    assert run.resume == resumed


def test_a_further_process_of_a_job_writes_nothing(toy, run_toy, tmp_path, monkeypatch):
    assert run_toy("-m", "part.m=2,3", "hydra.sweep.dir=all")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "all").glob("*/*")}
    monkeypatch.setenv("SLURM_PROCID", "1")
    toy.CALLS.clear()
    code, out, err = run_toy("-m", "part.m=2,3", "hydra.sweep.dir=all")
    assert (code, err, toy.CALLS) == (0, "", [])
    assert "job" not in out.replace("jobs", "")  # the first process says it
    assert {path: path.read_bytes() for path in (tmp_path / "all").glob("*/*")} == before


# ---------------------------------------------------------------- optuna


SEARCH = ("hydra/sweeper=optuna", "hydra.sweep.dir=all")


@pytest.fixture
def searching(toy, toy_folder):
    """The toy door with the sweeper's file in its conf/; what it returns is part.m, or nan."""
    pytest.importorskip("optuna", reason="needs specwave[bayes]")
    place = toy_folder / "conf" / "hydra" / "sweeper"
    place.mkdir(parents=True, exist_ok=True)
    (place / "optuna.yaml").write_text((conf_dir() / "hydra" / "sweeper" / "optuna.yaml").read_text())
    toy.CALLS.clear()
    return toy


def tried(toy):
    return [config.part.m for config, _ in toy.CALLS]


def test_a_search_finds_the_best_and_tries_nothing_twice(searching, run_toy, tmp_path):
    code, _, err = run_toy("-m", *SEARCH, "part.m=range(1,13)", "seed=3", "hydra.sweeper.n_trials=40")
    assert (code, err) == (0, "")
    assert sorted(tried(searching)) == sorted(set(tried(searching)))
    assert max(tried(searching)) == 12
    records = [yaml.safe_load(path.read_text()) for path in (tmp_path / "all").glob("*/run.yaml")]
    assert sorted(record["objective"] for record in records) == sorted(map(float, tried(searching)))
    assert {record["seed"] for record in records} == {3}
    assert "objective" not in rows(tmp_path / "all")[0]  # the fact it is stands in a column of its own already


def test_the_same_search_again_runs_nothing_and_suggests_the_same(searching, run_toy):
    argv = ("-m", *SEARCH, "part.m=range(1,50)", "part.rate=interval(0.1,0.9)", "hydra.sweeper.n_trials=12")
    assert run_toy(*argv)[0] == 0
    first = tried(searching)
    assert len(first) == 12
    searching.CALLS.clear()
    code, out, _ = run_toy(*argv)
    assert (code, tried(searching)) == (0, [])
    assert out.count("finished earlier, skipped") == 12
    assert run_toy("-m", *SEARCH, *argv[3:5], "hydra.sweeper.n_trials=14")[0] == 0
    assert len(tried(searching)) == 2


def test_a_killed_search_goes_on_as_if_it_had_not_been(searching, run_toy, tmp_path):
    argv = ("-m", "hydra/sweeper=optuna", "part.m=range(1,50)", "hydra.sweeper.n_trials=14")
    assert run_toy(*argv, "hydra.sweep.dir=whole")[0] == 0
    whole = tried(searching)
    searching.CALLS.clear()
    assert run_toy(*argv[:-1], "hydra.sweeper.n_trials=5", "hydra.sweep.dir=parts")[0] == 0
    assert run_toy(*argv, "hydra.sweep.dir=parts")[0] == 0
    assert tried(searching) == whole


def test_a_failed_job_of_a_search_is_a_row_and_no_end(searching, run_toy, tmp_path):
    code, _, err = run_toy("-m", *SEARCH, "act=odd", "part.m=choice(1,2,3,4)", "hydra.sweeper.n_jobs=2")
    assert code == 2
    assert err.count("the data do not like it") == 2
    assert sorted(row["status"] for row in rows(tmp_path / "all")) == ["failed", "failed", "finished", "finished"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["part.m=3"], "hydra/sweeper=optuna: nothing is to be searched"),
        (["part.m=1,2", "hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials=0: must be ≥ 1"),
        (["part.m=1,2", "hydra.sweeper.direction=up"], "hydra.sweeper.direction=up: must be maximize or minimize"),
    ],
)
def test_a_search_that_cannot_be(searching, run_toy, argv, says):
    code, _, err = run_toy("-m", *SEARCH, *argv)
    assert code == 2
    assert says in err


def test_without_optuna_its_extra_is_named(searching, run_toy, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = run_toy("-m", *SEARCH, "part.m=1,2")
    assert code == 2
    assert "hydra/sweeper=optuna: it searches with optuna, a package of its own: pip install 'specwave[bayes]'" in err


def test_what_each_kind_of_range_is_drawn_from():
    optuna = pytest.importorskip("optuna", reason="needs specwave[bayes]").distributions
    from hydra_plugins.specwave_optuna.sweeper import distribution
    from specwave.app.complaints import parse

    for text, wanted in {
        "choice(1,3,10)": optuna.CategoricalDistribution(["1", "3", "10"]),
        "a,b": optuna.CategoricalDistribution(["a", "b"]),
        "range(1,9,2)": optuna.IntDistribution(1, 7, step=2),
        "range(9,1,-2)": optuna.IntDistribution(3, 9, step=2),
        "range(0.5,2.0,0.5)": optuna.CategoricalDistribution(["0.5", "1.0", "1.5"]),
        "interval(0.1,1.0)": optuna.FloatDistribution(0.1, 1.0),
        "interval(1,64)": optuna.FloatDistribution(1.0, 64.0),
        "int(interval(1,64))": optuna.IntDistribution(1, 64),
        "tag(log,int(interval(1,64)))": optuna.IntDistribution(1, 64, log=True),
    }.items():
        (override,) = parse([f"key={text}"])
        found = distribution(override)
        assert found == wanted, text


# ---------------------------------------------------------------- selecting within training


def test_a_training_chooses_its_layers_once(tmp_path, monkeypatch):
    from specwave.app.choice import Choice, choose
    from specwave.layers.selectors import Elsi
    from specwave.layers.settings import Calibration
    from specwave.target import ModelConfig

    run = Run(tmp_path)
    choice = Choice(Calibration(limit=2, max_new_tokens=4, block_size=2), Elsi(m=2))
    folder = Path(choose(choice, ModelConfig(name="tiny", source="tiny"), run))
    found = json.loads((folder / "selection.json").read_text())
    assert run.facts["layers"] == found["layers"]
    assert len(found["layers"]) == 2
    monkeypatch.setattr("specwave.app.select.main", None)  # a second call makes nothing
    assert choose(choice, None, Run(tmp_path, main=False)) == str(folder)
    with pytest.raises(UserError, match="one process selects"):
        choose(choice, None, Run(tmp_path / "other", main=False))


def test_a_forecast_counts_the_group_to_come():
    from specwave.app.choice import stand_in

    chosen = ["+calibration@choose.calibration=builtin", "+selector@choose.selector=elsi", "choose.selector.m=2"]
    for groups, wanted in (("null", [[0, 1]]), ("[eagle3]", [[0, 1], "eagle3"])):
        composed = configs.compose("train", ["model=tiny", *chosen, f"groups={groups}"])
        config = stand_in(configs.build("train", configs.check("train", composed)), 8)
        assert (config.groups, config.choose) == (wanted, None)


def test_a_choice_and_a_selection_exclude_each_other():
    composed = configs.compose("train", ["model=tiny", "+calibration@choose.calibration=builtin", "selection=x",
                                         "+selector@choose.selector=elsi"])  # fmt: skip
    with pytest.raises(UserError, match="takes the place of a selection"):
        configs.build("train", configs.check("train", composed))


def test_the_search_for_tau_composes():
    pytest.importorskip("optuna", reason="needs specwave[bayes]")
    composed = configs.compose("train", ["experiment=optuna_tau", "model=tiny"])
    assert composed.hydra.sweeper._target_.endswith("OptunaSweeper")
    config = configs.build("train", configs.check("train", composed))
    swept = {key.rpartition(".")[2] for key in composed.hydra.sweeper.params}
    assert swept == {"m", "k_beam", "rho", "block_size"}
    assert all(hasattr(config.choose.selector, key) or hasattr(config.choose.calibration, key) for key in swept)
