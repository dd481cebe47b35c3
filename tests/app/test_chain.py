"""chain.py: what is run, re-used and refused. Most tests put in the doors' place what they leave."""

import dataclasses
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from specwave.app import chain, steps
from specwave.app.door import run_door
from specwave.artifacts import UserError, conf_dir

EXPERIMENT = """# @package _global_
# python chain.py experiment=two
# Two sets of layers, from selection to a table
all:
  model: tiny
steps:
  select:
    selector.m: 1,2
  train:
    selection: "[{select:jobs}]"
    groups: [eagle3]
    trainer.max_steps: 5
  evaluate:
    checkpoint: "{train}"
    limit: 2
  evaluate_tables:
    report: "[{evaluate}]"
"""
CHAINS = [
    path.stem for path in sorted((conf_dir() / "experiment").glob("*.yaml")) if "# python chain.py" in path.read_text()
]


class Doors:
    """In the place of processes: every unfinished job gets the run.yaml of one that ended as `ends` says."""

    def __init__(self):
        self.ran: list[tuple[str, list[str]]] = []
        self.ends: dict[str, str] = {}  # an override of a job, or a step → its status

    def __call__(self, step):
        codes = [0]
        for number, job in enumerate(step.jobs):
            place = step.folder / str(number) if step.several else step.folder
            if job.finished:
                continue
            own = [entry for entry in job.overrides if entry not in step.overrides]
            self.ran.append((step.name, own))
            status = next((self.ends[entry] for entry in [step.name, *own] if entry in self.ends), "finished")
            place.mkdir(parents=True, exist_ok=True)
            if status == "not begun":
                record = {"app": step.door, "status": "failed", "overrides": job.overrides, "error": "no rows"}
                (place / "run.yaml").write_text(yaml.safe_dump(record | {"config": None}))
                codes.append(2)
                continue
            (place / "result").write_text("x")
            record = {"app": step.door, "status": status, "overrides": job.overrides, "config": job.content}
            (place / "run.yaml").write_text(yaml.safe_dump(record | {"wall_seconds": 1.5, "entropy": 0.5 + number}))
            codes.append({"failed": 2, "crashed": -9}.get(status, 0))
        return next((code for code in codes if code), 0)

    def taken(self):
        """What ran since last asked."""
        ran, self.ran = self.ran, []
        return ran


@pytest.fixture
def doors(monkeypatch):
    doors = Doors()
    monkeypatch.setattr(chain, "run_step", doors)
    return doors


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """(exit code, stdout, stderr) of chain.py with the experiment above, in an empty folder."""
    folder = tmp_path / "mine" / "experiment"
    folder.mkdir(parents=True)
    (folder / "two.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = run_door("chain", ["--config-dir", "mine", "experiment=two", *argv])
        return code, *capsys.readouterr()

    return run


ALL = [
    ("select", ["selector.m=1"]),
    ("select", ["selector.m=2"]),
    ("train", []),
    ("evaluate", []),
    ("evaluate_tables", []),
]


def test_steps_run_in_order_and_once(run, doors, tmp_path):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert doors.taken() == ALL
    root = tmp_path / "runs" / "two"
    noted = yaml.safe_load((root / "chain.yaml").read_text())
    assert [entry["step"] for entry in noted] == ["select", "train", "evaluate", "evaluate_tables"]
    for entry in noted:
        for job in entry["jobs"]:
            assert yaml.safe_load((root / job / "run.yaml").read_text())["status"] == "finished"
    selected, trained = noted[0]["jobs"], noted[1]["jobs"][0]
    config = yaml.safe_load((root / trained / "run.yaml").read_text())["config"]
    assert config["selection"] == [str(root / job) for job in selected]
    assert yaml.safe_load((root / noted[2]["jobs"][0] / "run.yaml").read_text())["config"]["checkpoint"] == str(
        root / trained
    )
    assert (root / "select.md").read_text().startswith("# select: 2 jobs")
    code, out, err = run()
    assert (code, err, doors.taken()) == (0, "", [])
    assert out.count("finished earlier, re-used") == 4


def test_a_changed_setting_runs_what_depends_on_it_and_no_more(run, doors):
    run()
    doors.taken()
    run("evaluate.limit=3")
    assert doors.taken() == [("evaluate", []), ("evaluate_tables", [])]
    run("train.trainer.max_steps=6")
    assert doors.taken() == [("train", []), ("evaluate", []), ("evaluate_tables", [])]
    run("all.seed=1")
    assert doors.taken() == ALL
    run()  # back: all of it is there
    assert doors.taken() == []


def test_a_sweep_that_grows_keeps_what_it_has(run, doors, tmp_path):
    run()
    doors.taken()
    run("select.selector.m=1,3,2")
    assert doors.taken()[0] == ("select", ["selector.m=3"])
    links = next(path for path in (tmp_path / "runs/two/select").glob("sweep-*") if (path / "2").exists())
    typed = [yaml.safe_load((links / str(number) / "run.yaml").read_text())["overrides"] for number in range(3)]
    assert [job[-1] for job in typed] == ["selector.m=1", "selector.m=3", "selector.m=2"]


def test_a_file_is_known_by_its_content(run, doors, tmp_path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"prompt": "a"}\n')
    again = ("train.data=jsonl", "train.data.path=chats.jsonl")
    run(*again)
    doors.taken()
    chats.touch()
    run(*again)
    assert doors.taken() == []
    chats.write_text('{"prompt": "b"}\n')
    run(*again)
    assert [name for name, _ in doors.taken()] == ["train", "evaluate", "evaluate_tables"]


def test_failed_jobs_of_a_sweep_are_left_out_and_tried_again(run, doors, tmp_path):
    doors.ends = {"selector.m=2": "failed"}
    code, out, _ = run()
    assert code == 2
    assert "1 of 2 jobs failed, the others count" in out
    assert "select: 2 jobs, 1 failed" in (tmp_path / "runs/two/select.md").read_text()
    noted = yaml.safe_load((tmp_path / "runs/two/chain.yaml").read_text())
    trained = yaml.safe_load((tmp_path / "runs/two" / noted[1]["jobs"][0] / "run.yaml").read_text())
    assert trained["config"]["selection"] == [str(tmp_path / "runs/two" / noted[0]["jobs"][0])]
    assert doors.taken() == ALL
    doors.ends = {}
    assert run()[0] == 0
    assert doors.taken() == ALL[1:]  # now with both sets: another training


def test_a_job_that_failed_before_it_wrote_anything_is_a_row_too(run, doors, tmp_path):
    doors.ends = {"selector.m=2": "not begun"}
    code, out, _ = run()
    assert code == 2
    assert "1 of 2 jobs failed, the others count" in out
    table = (tmp_path / "runs/two/select.md").read_text()
    assert table.startswith("# select: 2 jobs, 1 failed")
    assert "no rows" in table


def test_a_sweep_of_which_jobs_failed_and_stopped_has_more_to_do(run, doors):
    doors.ends = {"selector.m=1": "stopped", "selector.m=2": "failed"}
    code, out, _ = run()
    assert code == 2
    assert "1 of 2 jobs failed" in out
    assert "step select has more to do" in out
    assert doors.taken() == ALL[:2]


def test_tables_are_of_the_jobs_as_they_were_last_run(run, doors, tmp_path):
    run()
    assert (tmp_path / "runs/two/select.csv").is_file()
    run("select.selector.m=2")
    assert list((tmp_path / "runs/two").glob("select.*")) == []
    doors.ends = {"train": "crashed"}
    assert run("select.selector.m=1,2,3", "train.seed=9")[0] == 1
    assert (tmp_path / "runs/two/select.md").read_text().startswith("# select: 3 jobs")


@pytest.mark.parametrize(("status", "code"), [("failed", 2), ("crashed", 1)])
def test_a_failed_step_ends_the_chain(run, doors, status, code):
    doors.ends = {"train": status}
    found, _, err = run()
    assert found == code
    assert err == "step train failed: the same command goes on there\n"
    assert doors.taken() == ALL[:3]
    doors.ends = {}
    assert run()[0] == 0
    assert doors.taken() == ALL[2:]


def test_a_training_that_stops_for_time_is_gone_on_with(run, doors):
    doors.ends = {"train": "stopped"}
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "step train has more to do: the same command goes on there\n" in out
    doors.taken()
    doors.ends = {}
    run()
    assert doors.taken() == ALL[2:]


def test_a_dry_run_says_everything_and_does_nothing(run, doors, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run("dry_run=true")
    assert (code, err, doors.taken()) == (0, "", [])
    assert sorted(tmp_path.rglob("*")) == before
    assert "selector.m=1 (to run), in select/" in out
    assert "3 drafters from one pass of tiny: 5 steps" in out  # those of the two selections to come are stood in for
    assert "2 questions × 4 methods, plain decoding among them" in out
    assert out.endswith("4 steps, 5 jobs: 0 re-used, 5 to run; nothing was run\n")
    run()
    assert "selector.m=1 (re-used, took 2 s)" in run("dry_run=true", "train.seed=4")[1]
    assert run("dry_run=true")[1].endswith("5 re-used, 0 to run; nothing was run\n")


MISTAKES = {
    "train.trainer.max_step=3": "train.trainer.max_step=3: there is no such key; did you mean trainer.max_steps?",
    "training.seed=3": "training.seed=3: there is no such step; choose one of all, select, train, evaluate",
    "model=tiny": "model=tiny: the steps make this choice: all.model=tiny is for each, <step>.model=… for one",
    "foldr=x": "foldr=x: there is no such key; did you mean folder?",
    "select.selector.m=0": "select.selector.m=0",
    "~train.seed": "~train.seed=: the step train does not set seed",
    "train.seed": "override=train.seed: a step's setting is written <step>.<key>=<value>",
    "train.groups=[[1": "train.groups=[[1: this value cannot be read",
    "select.model={train}": "{train}: no step comes before it",
    "train.selection={select}": "train.selection={select}: select is a sweep: its jobs' folders are [{select:jobs}]",
    "train.selection={evaluate}": "train.selection={evaluate}: it names no earlier step; there are select",
    "steps.compare={}": "there is no such key",
    "+steps.compare={}": "steps=compare: a step's name begins with its door's: select, train, evaluate",
    "-m": "a chain is no sweep",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_anywhere_is_one_line_before_anything_runs(run, doors, tmp_path, word):
    code, _, err = run(word)
    assert code == 2
    assert MISTAKES[word] in err
    assert len(err.splitlines()) == 1
    assert doors.taken() == []
    assert not (tmp_path / "runs").exists()


def test_an_experiment_without_steps_is_refused(capsys):
    assert run_door("chain", []) == 2
    assert "experiment=null: it lists no steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([], {"model": "a", "seed": "1"}),
        (["all.model=b"], {"model": "b", "seed": "1"}),
        (["train.model=c"], {"model": "c", "seed": "1"}),
        (["all.seed=2"], {"model": "a", "seed": "2"}),  # stronger than the step's own
        (["all.seed=2", "train.seed=3"], {"model": "a", "seed": "3"}),
        (["train.groups=[[1,2],eagle2]"], {"model": "a", "seed": "1", "groups": "[[1,2],eagle2]"}),
        (["+train.decoding.arms.x=1"], {"model": "a", "seed": "1", "+decoding.arms.x": "1"}),
        (["~train.seed"], {"model": "a"}),
        (["~all.model"], {"seed": "1"}),
        (["train.selection={select}"], {"model": "a", "seed": "1", "selection": "{select}"}),
    ],
)
def test_settings_of_a_step(changes, found):
    listed = {"train": {"seed": 1}, "evaluate": None}
    assert steps.settings_of(listed, {"model": "a"}, changes) == {"train": found}


def test_a_door_s_name_stands_for_all_its_steps():
    listed = {"train": {"seed": 1}, "evaluate_a": {"limit": 2}, "evaluate_b": {}}
    changes = ["evaluate.limit=5", "evaluate_b.limit=6", "train.seed=4", "~evaluate.seed"]
    with pytest.raises(UserError, match="the step evaluate does not set seed"):
        steps.settings_of(listed, {}, changes)
    found = steps.settings_of(listed, {}, changes[:3])
    assert found == {"train": {"seed": "4"}, "evaluate_a": {"limit": "5"}, "evaluate_b": {"limit": "6"}}
    assert steps.settings_of(listed, {}, ["~evaluate.limit"])["evaluate_a"] == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (1.0, "1.0"), ("1,2", "1,2"), ([[1, None], "x"], "[[1,null],x]"),
     ([{"layers": "eagle3", "fc_norm": True}], "[{layers:eagle3,fc_norm:true}]")],
)  # fmt: skip
def test_values_in_the_grammar_of_overrides(value, text):
    assert steps.as_text(value) == text


def test_a_fingerprint_is_of_what_matters(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    base = {"a": 1, "selection": f"{one}/select/abc", "resume": False, "b": None}
    mark = steps.fingerprint("train", base, one)
    assert steps.fingerprint("train", {**base, "selection": f"{two}/select/abc"}, two) == mark  # the chain was moved
    assert steps.fingerprint("train", {**base, "resume": True}, one) == mark
    assert steps.fingerprint("train", {**base, "trainer": {}}, one) == steps.fingerprint(
        "train", {**base, "trainer": {"minutes": 5}}, one
    )
    assert steps.fingerprint("train", {**base, "new": None}, one) == mark
    assert steps.fingerprint("train", {**base, "a": 2}, one) != mark
    assert steps.fingerprint("train", {**base, "selection": f"{one}/select/abd"}, one) != mark
    assert steps.fingerprint("select", base, one) != mark


def test_a_folder_is_known_by_its_files(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "a").write_text("x")
    content = {"model": {"source": str(folder)}}
    mark = steps.fingerprint("select", content, tmp_path / "root")
    assert steps.fingerprint("select", content, tmp_path / "root") == mark
    (folder / "b").write_text("")
    assert steps.fingerprint("select", content, tmp_path / "root") != mark


def test_which_files_and_folders_are_read(tmp_path, monkeypatch):
    """What lies in the chain's folder counts unless an earlier job made it; words that are folders by chance do not."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "root"
    for place in ("root/select/abc", "root/states", "mymodel", "wandb"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "file").write_text("x")
    (root / "prompts.jsonl").write_text("x")
    content = {
        "selection": [str(root / "select/abc")],
        "checkpoint": str(root / "select/abc/file"),
        "calibration": {"path": "root/prompts.jsonl"},
        "model": {"source": "mymodel"},
        "logger": {"kind": "wandb"},
        "states": {"path": "root/states"},
    }
    found = steps.outside(content, [root / "select/abc"])
    assert list(map(str, found)) == ["root/prompts.jsonl", "mymodel"]


def test_paths_are_quoted_where_they_must_be():
    assert steps.as_path("/a-b/c.d") == "/a-b/c.d"
    assert steps.as_path("/a b/c=d") == "'/a b/c=d'"


# ---------------------------------------------------------------- the experiments


@pytest.mark.parametrize("name", CHAINS)
def test_every_experiment_dry_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specwave.app.preflight.product_rate", lambda *_: 1e12)
    assert run_door("chain", [f"experiment={name}", "dry_run=true"]) == 0
    out = capsys.readouterr().out
    count = int(re.search(r"(\d+) jobs: 0 re-used", out)[1])
    assert out.count("(to run), in ") == count > 0
    assert "not known" not in out
    assert ("an adapter from one pass of" in out) == name.startswith("knapspec_table")
    assert list(tmp_path.iterdir()) == []
    assert f"{name}_smollm2" in CHAINS or "smollm2" in name


def test_the_experiments_of_the_issue_are_there():
    wanted = ("qwen3_table1", "llama31_table1", "qwen3_table2", "llama31_table3", "figures_3_to_7", "rho_block_beam",
              "switchsd_table", "knapspec_table")  # fmt: skip
    assert set(CHAINS) >= {name + end for name in wanted for end in ("", "_smollm2")}


def test_the_four_blocks_of_spec_bench(tmp_path):
    """480 questions at 30 nodes and T = 0, 130 in the other blocks; four drafters, a row for each of six rules."""
    settings, root, _ = chain.read(
        ["experiment=smollm2_spec_bench", "all.benchmark.path=q.jsonl", f"folder={tmp_path}"]
    )
    *measured, report = chain.planned(settings, root)
    found = []
    for step in measured:
        (job,) = step.jobs
        content, decoding = job.content, job.content["decoding"]
        assert (decoding["levels"], decoding["top_k"], content["max_new_tokens"]) == (6, 10, 128)
        assert (content["baseline"], content["benchmark"]["path"], content["minutes"]) == ("auto", "q.jsonl", 110)
        labels = [Path(entry).name for entry in content["checkpoint"]]
        assert labels == list(content["rules"]) == ["L29", "L0-29", "L0-1-29", "L2-15-27"]
        found.append((decoding["total_token"], content["sampling"]["temperature"], content["limit"]))
    assert found == [(30, 0.0, None), (60, 0.0, 130), (30, 1.0, 130), (60, 1.0, 130)]
    assert report.jobs[0].content["report"] == [str(step.folder) for step in measured]


def test_a_twin_differs_in_no_step():
    """It has the steps of the large one; what it leaves out it says, as `null`."""
    for name in CHAINS:
        if name.endswith("_smollm2"):
            settings, *_ = chain.read([f"experiment={name}"])
            large, *_ = chain.read([f"experiment={name.removesuffix('_smollm2')}"])
            left_out = set(large) - set(settings)
            assert left_out <= {"train", "evaluate_plain"}  # the drafter that comes along; plain beside each
            assert set(settings) <= set(large)


# ---------------------------------------------------------------- a real one


def test_real_doors(run, tmp_path):
    """Selections with random weights, then a step that reads them; again: nothing."""
    (tmp_path / "mine/experiment/two.yaml").write_text(
        EXPERIMENT.partition("  train:")[0].replace(
            "selector.m: 1,2", "selector.m: 1,2\n    analysis: none\n    calibration.limit: 2\n    "
            "calibration.max_new_tokens: 4\n    calibration.block_size: 2"
        )
    )  # fmt: skip
    code, _, err = run()
    assert (code, err) == (0, "")
    folders = sorted((tmp_path / "runs/two/select").glob("[!s]*"))
    assert len(folders) == 2
    times = [(folder / "run.yaml").stat().st_mtime_ns for folder in folders]
    assert (tmp_path / "runs/two/select.csv").read_text().count("finished") == 2
    assert run()[0] == 0
    assert [(folder / "run.yaml").stat().st_mtime_ns for folder in folders] == times


def test_a_step_is_what_one_would_type(tmp_path):
    step = steps.make_step("select", {"model": "tiny"}, tmp_path, [])
    assert step.command == f"python select.py model=tiny hydra.run.dir={tmp_path}/select/{step.folder.name} resume=true"
    several = steps.make_step("select_more", {"model": "tiny", "selector.m": "1,2"}, tmp_path, [step])
    assert several.arguments == ["model=tiny", "selector.m=1,2", f"hydra.sweep.dir={several.folder}", "-m"]
    assert [field.name for field in dataclasses.fields(step)][:2] == ["name", "door"]
    with pytest.raises(UserError, match=r"select.hydra/sweeper"):
        steps.make_step("select", {"model": "tiny", "hydra/sweeper": "optuna"}, tmp_path, [])


def test_the_door_of_a_chain_is_thin():
    assert len((Path(__file__).resolve().parents[2] / "chain.py").read_text().splitlines()) <= 40


def test_a_terminated_chain_leaves_no_door_behind(tmp_path, monkeypatch):
    """The door terminates the chain, which hands that back to it; left alone it would sleep on."""
    script = tmp_path / "train.py"
    script.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)\n")
    monkeypatch.setattr(chain, "door_script", lambda door: script)
    before = signal.getsignal(signal.SIGTERM)
    assert chain.run_step(SimpleNamespace(door="train", arguments=[])) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
