"""Weights & Biases offline: what lies in the run directory that `wandb sync` would send."""

from __future__ import annotations

import csv
import json
import socket
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

from specwave.app.run import Run
from specwave.app.select_report import show
from specwave.app.services import tracking
from specwave.app.tracking import NOTE, Tracker, sweep_of
from specwave.app.train import TrainConfig
from specwave.app.train import main as train
from specwave.app.trainer import TrainerConfig
from specwave.artifacts import Selection, UserError
from specwave.data.samples import BuiltinData
from specwave.eagle.module import GroupTraining
from specwave.eagle.options import Eagle3
from specwave.target import ModelConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmark"))  # made_up.py


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """No network, and nothing in the user's folders."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))

    def refused(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refused)


def messages(content: bytes):
    """The records of a .wandb file, a log as LevelDB writes it: blocks of 32 KiB after a head of 7 bytes; each part has
    a checksum (4 bytes), a length (2) and a kind (1): whole, first, middle or last."""
    place, parts = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # too little for a part: padding
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        if place + 7 + length > len(content):  # its writer, another process, is at it
            return
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def records(folder):
    """Every record of the ended offline runs below a folder, in order; waits for their writer, another process."""
    for _ in range(300):
        paths = sorted(Path(folder).rglob("run-*.wandb"))
        found = [read(path) for path in paths]
        if paths and all(any(record.WhichOneof("record_type") == "exit" for record in run) for run in found):
            return [record for run in found for record in run]
        time.sleep(0.1)
    raise AssertionError(f"no ended run below {folder}")


def read(path):
    from wandb.proto import wandb_internal_pb2

    found = []
    for message in messages(path.read_bytes()):
        found.append(wandb_internal_pb2.Record())
        found[-1].ParseFromString(message)
    return found


def rows(folder):
    """history rows, as the server would show them."""
    found = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def run_of(folder):
    return next(record.run for record in records(folder) if record.WhichOneof("record_type") == "run")


def test_the_run_directory_holds_rows_config_table_and_artefacts(tmp_path):
    folder = tmp_path / "job"
    drafter = folder / "drafters" / "L2-5"
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text("{}")
    (folder / "run.yaml").write_text(yaml.safe_dump({"config": {"seed": 3, "trainer": {"max_steps": 4}}}))
    tracker = Tracker(str(folder), project="specs", mode="offline", tags=["a", "b"], job_type="distil", group="g")
    tracker.log_metrics({"tokens": 10, "L2-5/loss": 2.5}, 2)
    tracker.log_metrics({"tokens": 20, "L2-5/loss": 1.5}, 4)
    tracker.report({"L2-5": {"tau_hat": 2.0, "a_0": 0.5}}, {"L2-5": drafter})
    tracker.close()
    with open(folder / "metrics.csv", newline="") as stream:
        assert [float(row["L2-5/loss"]) for row in csv.DictReader(stream)] == [2.5, 1.5]
    logged = [row for row in rows(folder) if "L2-5/loss" in row]
    assert [(row["_step"], row["tokens"], row["L2-5/loss"]) for row in logged] == [(2, 10, 2.5), (4, 20, 1.5)]
    run = run_of(folder)
    assert (run.project, run.run_group, run.job_type, run.display_name) == ("specs", "g", "distil", "job")
    assert list(run.tags) == ["a", "b"]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["seed"] == 3
    assert config["trainer"] == {"max_steps": 4}
    (table,) = (row for row in rows(folder) if "drafters/ncols" in row)
    content = json.loads(next(path for path in folder.rglob("drafters*.table.json")).read_text())
    assert (table["drafters/ncols"], table["drafters/nrows"], table["drafters/_type"]) == (3, 1, "table-file")
    assert content["data"] == [["L2-5", 2.0, 0.5]]
    kinds = [record.WhichOneof("record_type") for record in records(folder)]
    assert "exit" in kinds  # ended: nothing of the next job is added
    assert any(artifact.type == "drafter" and artifact.name.startswith("L2-5-") for artifact in artefacts(folder))


def a_training(family_folders, folder, steps, resume=False):
    """`train.py logger=wandb logger.mode=offline` on a tiny target, by its main."""
    config = TrainConfig(
        model=ModelConfig("tiny", str(family_folders["llama"]), dtype="float32", device="cpu"),
        data=BuiltinData(limit=8, validation=2, max_new_tokens=8, batch_size=2),
        drafter=Eagle3(steps=2, draft_vocab_size=64),
        trainer=TrainerConfig(max_steps=4, save_every=2, validate_every=2, log_every=1, decode=0),
        logger=partial(Tracker, mode="offline"),
        groups=[[2, 5], {"layers": [7], "fc_norm": True}],
    )
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump({"app": "train", "config": {"seed": 0}}))
    step = GroupTraining.training_step

    def interrupted(self, batch, batch_idx):
        if self.global_step == steps:
            raise KeyboardInterrupt
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GroupTraining, "training_step", interrupted)
        train(config, Run(folder, resume=resume))


def test_a_training_shows_its_rows_and_drafters_and_goes_on_as_the_same_run(family_folders, tmp_path):
    """Interrupted behind the checkpoint of step 2; then to its end."""
    folder = tmp_path / "job"
    with pytest.raises(KeyboardInterrupt):
        a_training(family_folders, folder, steps=3)
    a_training(family_folders, folder, steps=99, resume=True)
    assert {record.run.run_id for record in records(folder) if record.WhichOneof("record_type") == "run"} == {
        json.loads((folder / NOTE).read_text())["id"]
    }
    assert run_of(folder).job_type == "train"
    codes = [record.exit.exit_code for record in records(folder) if record.WhichOneof("record_type") == "exit"]
    assert sorted(codes) == [0, 1]  # the interrupted part, and the one that came to the end
    shown = {row["_step"]: row for row in rows(folder) if "L2-5/loss" in row}
    with open(folder / "metrics.csv", newline="") as stream:
        kept = {int(row["step"]): row for row in csv.DictReader(stream) if row["L2-5/loss"]}
    assert sorted(shown) == sorted(kept) == [1, 2, 3, 4]
    for step, row in kept.items():
        for key in ("L2-5/loss", "L7+fc_norm/tau_hat", "L7+fc_norm/grad_norm", "lr", "tokens"):
            assert shown[step][key] == pytest.approx(float(row[key])), (step, key)
    drafters = [made for made in artefacts(folder) if made.type == "drafter"]
    assert sorted(made.name.rpartition("-")[0] for made in drafters) == ["L2-5", "L7_fc_norm"]
    for made in drafters:
        assert {"card.json", "config.json", "model.safetensors", "README.md"} <= {
            entry.path for entry in made.manifest.contents
        }
    (path,) = folder.rglob("drafters*.table.json")
    assert [row[0] for row in json.loads(path.read_text())["data"]] == ["L2-5", "L7+fc_norm"]


def artefacts(folder):
    made = [record.artifact for record in records(folder) if record.WhichOneof("record_type") == "artifact"]
    made += [
        record.request.log_artifact.artifact
        for record in records(folder)
        if record.WhichOneof("record_type") == "request" and record.request.WhichOneof("request_type") == "log_artifact"
    ]
    return made


def test_an_evaluation_shows_its_tables_plots_and_report(tmp_path):
    """Through the evaluation's own last step, over results that its writers made."""
    from made_up import METHODS, questions, run_folder

    from specwave.app.evaluate import EvaluateConfig, main

    made = run_folder(tmp_path / "made", questions(1))
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump({"app": "evaluate", "config": {"report": [str(made)]}}))
    config = EvaluateConfig(None, None, None, report=[str(made)], logger=partial(Tracker, mode="offline"))
    main(config, Run(folder))
    run = run_of(folder)
    assert run.job_type == "evaluate"
    assert {item.key for item in run.config.update} >= {"report"}

    def table(name):
        (path,) = folder.rglob(f"{name}_*.table.json")
        content = json.loads(path.read_text())
        return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]

    results = {label: json.loads((made / label / "results.json").read_text()) for label in ("baseline", *METHODS)}
    summary = {row["label"]: row for row in table("evaluation")}
    assert list(summary) == ["plain", *METHODS]
    for label in METHODS:
        for figure in ("tau", "tokens_per_second", "speedup", "exact_match_rate", "failed"):
            assert summary[label][figure] == results[label]["overall"][figure]
    categories = {(row["label"], row["category"]): row for row in table("categories")}
    assert len(categories) == 4 * 13 - 1  # the one question of L29's first category failed
    assert categories["L4-17-29", "qa"]["tau"] == results["L4-17-29"]["categories"]["qa"]["tau"]
    (logged,) = rows(folder)
    plots = [name.split("/")[1] for name in logged if name.startswith("plots/") and name.endswith("/_type")]
    assert sorted(plots) == [
        "Acceptance by draft position", "Cost and gain by number of layers", "Speedup against tokens per verification",
        "Speedup by category", "Tokens per verification by category", "Where the time of a token goes",
    ]  # fmt: skip
    pages = [path.read_text() for path in folder.rglob("*.html") if "media" in path.parts]
    assert len(pages) == 6
    assert all("--series-0" in page and page.count("<h1>") == 1 for page in pages)
    last = {}
    for record in records(folder):
        if record.WhichOneof("record_type") == "summary":
            last |= {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update
            }
    assert last["L2-15-27/speedup"] == results["L2-15-27"]["overall"]["speedup"]
    (artifact,) = (made for made in artefacts(folder) if made.type == "report")  # W&B makes others of the tables
    assert {entry.path for entry in artifact.manifest.contents} == {
        "report.html", "table.csv", "table.md", "table.tex",
    }  # fmt: skip


PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f00050001ff8999"
    "3d1d0000000049454e44ae426082"
)


def test_a_selection_shows_its_sets_layers_pictures_and_files(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    Selection(
        model="m", fingerprint="f", num_layers=4, selector="elsi", m=2, layers=[0, 3], entropy=1.25,
        beam=[{"layers": [0, 3], "entropy": 1.25}, {"layers": [1, 3], "entropy": 1.0, "score": 0.5}],
        layer_entropy=[0.5, 0.25, 0.125, 1.0], transitions=[0.1, 0.2, 0.3], calibration={}, optimum={"gap": 0.0},
    ).save(folder / "selection.json")  # fmt: skip
    (folder / "entropy.png").write_bytes(PIXEL)
    (folder / "grams.safetensors").write_bytes(b"large")
    (folder / "run.yaml").write_text(yaml.safe_dump({"app": "select", "config": {"selector": {"m": 2}}}))
    with tracking(partial(Tracker, mode="offline"), Run(folder)) as tracker:
        show(tracker, folder)
    assert run_of(folder).job_type == "select"
    tables = {name: json.loads(next(folder.rglob(f"{name}_*.table.json")).read_text()) for name in ("sets", "layers")}
    assert tables["sets"]["columns"] == ["layers", "entropy", "score"]
    assert tables["sets"]["data"] == [["[0, 3]", 1.25, None], ["[1, 3]", 1.0, 0.5]]
    assert tables["layers"]["data"] == [[0, 0.5, True], [1, 0.25, False], [2, 0.125, False], [3, 1.0, True]]
    (logged,) = rows(folder)
    assert logged["plots/entropy/_type"] == "image-file"
    (artifact,) = (made for made in artefacts(folder) if made.type == "selection")
    assert {entry.path for entry in artifact.manifest.contents} == {"selection.json", "entropy.png"}


def test_loggers_that_only_keep_rows_are_nothing_to_an_evaluation(tmp_path):
    from pytorch_lightning.loggers import CSVLogger

    for make in (None, partial(CSVLogger, name="", version="")):
        with tracking(make, Run(tmp_path)) as tracker:
            assert tracker is None
    with tracking(partial(Tracker, mode="sometimes"), Run(tmp_path, main=False)) as tracker:
        assert tracker is None  # the further processes of a run
    assert list(tmp_path.iterdir()) == []


def test_resume_joins_the_same_run(tmp_path):
    first = Tracker(str(tmp_path / "job"), mode="offline")
    first.log_metrics({"loss": 2.0}, 1)
    first.close()
    again = Tracker(str(tmp_path / "job"), mode="offline")
    again.close()
    assert again.run.id == first.run.id == json.loads((tmp_path / "job" / NOTE).read_text())["id"]
    other = Tracker(str(tmp_path / "other"), mode="offline")
    other.close()
    assert other.run.id != first.run.id
    ids = {record.run.run_id for record in records(tmp_path / "job") if record.WhichOneof("record_type") == "run"}
    assert ids == {first.run.id}


def test_jobs_of_a_sweep_are_a_group(tmp_path):
    sweep = tmp_path / "2026-11-30" / "19-45-00"
    (sweep / "3").mkdir(parents=True)
    assert sweep_of(sweep / "3") is None
    (sweep / "multirun.yaml").write_text("")
    assert sweep_of(sweep / "3") == "2026-11-30-19-45-00"
    tracker = Tracker(str(sweep / "3"), mode="offline")
    tracker.close()
    assert (run_of(sweep / "3").run_group, run_of(sweep / "3").display_name) == ("2026-11-30-19-45-00", "3")


def test_a_failure_ends_the_run(tmp_path):
    tracker = Tracker(str(tmp_path / "job"), mode="offline")
    tracker.finalize("failed")
    codes = [record.exit.exit_code for record in records(tmp_path) if record.WhichOneof("record_type") == "exit"]
    assert codes == [1]
    tracker.close()  # once more does nothing


def test_a_mode_that_is_none(tmp_path):
    with pytest.raises(UserError, match=r"logger\.mode=sometimes: must be online or offline"):
        Tracker(str(tmp_path), mode="sometimes")


def test_online_without_a_login_is_said_in_one_line(tmp_path, monkeypatch):
    import wandb

    def nobody(**_):
        raise wandb.errors.UsageError("api_key not configured (no-tty).\nRun wandb login")

    monkeypatch.setattr(wandb, "init", nobody)
    with pytest.raises(UserError, match=r"logger\.mode=online: W&B says: api_key not configured.*logger\.mode=offline"):
        Tracker(str(tmp_path))
