"""A question set on two CPU processes: each its own questions, one answers file in the end, resumed after a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import pytest

from specwave.app.evaluate import EvaluateConfig
from specwave.app.run import read_yaml
from specwave.artifacts import UserError
from specwave.benchmark import Benchmark
from specwave.benchmark.answers import AnswerFile, read_answers
from specwave.benchmark.settings import default_settings, method_settings
from specwave.copying.switch import SwitchSdDecoding
from specwave.decoding import Sampling
from specwave.eagle import Eagle3Decoding

ROOT = Path(__file__).resolve().parents[2]
KEYS = ("model=tiny", "model.dtype=float32", "limit=13", "max_new_tokens=24", "devices=2")


def start(folder, *more):
    command = [sys.executable, str(ROOT / "evaluate.py"), *KEYS, f"hydra.run.dir={folder}", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(path):
    return path.read_text().count("\n") if path.exists() else 0


def ids(rows):
    return [row["question_id"] for row in rows]


def test_two_processes_share_the_questions_and_resume_after_a_kill(tmp_path):
    folder = tmp_path / "run"
    child = start(folder)
    parts = [folder / f"answers.{part}.jsonl" for part in (0, 1)]
    deadline = time.monotonic() + 300
    while not all(lines(path) for path in parts):
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    child.send_signal(signal.SIGTERM)  # it tells the other process
    _, err = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM, err
    assert not (folder / "results.json").exists()
    left = [read_answers(path, "x") for path in parts if path.read_text().endswith("\n")]
    kept = {row["answer_id"] for rows in left for row in rows}
    assert {place for rows in left for place in ids(rows)} < set(range(1, 53))
    time.sleep(0.5)  # the other process is gone
    counts = [lines(path) for path in parts]
    time.sleep(0.5)
    assert [lines(path) for path in parts] == counts

    again = start(folder, "resume=true")
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert out.count("run folder:") == 1  # the second process says nothing
    assert not list(folder.glob("answers.*.jsonl"))
    rows = read_answers(folder / "answers.jsonl", "x")
    assert kept <= {row["answer_id"] for row in rows}
    expected = [question.id for question in Benchmark().questions(13)]
    assert ids(rows) == expected  # in the order of the questions, each once
    record = read_yaml(folder / "run.yaml")
    assert (record["status"], record["attempts"]) == ("finished", 2)
    content = json.loads((folder / "results.json").read_text())
    assert (content["overall"]["questions"], content["overall"]["failed"]) == (13, 0)
    assert content["settings"]["devices"] == 2
    assert content["settings"]["threads"] == 1

    alone = start(tmp_path / "alone", "devices=1")
    assert alone.wait(300) == 0
    single = read_answers(tmp_path / "alone" / "answers.jsonl", "x")
    assert [row["specwave"]["tokens"] for row in rows] == [row["specwave"]["tokens"] for row in single]


# ---------------------------------------------------------------- the files of the devices

CHOICE = {"index": 0, "turns": ["a"], "new_tokens": [1], "wall_time": [0.1], "accept_lengths": [1]}


def answer(number, failed=False):
    row = {"question_id": number, "category": "qa", "choices": [], "specwave": {"error": "no"}}
    return row if failed else row | {"choices": [CHOICE], "specwave": {"tokens": [[1]]}}


def file(folder, part=None, **settings):
    return AnswerFile(folder, {"limit": 3} | settings, part)


def test_each_device_writes_a_file_of_its_own_and_the_first_merges(tmp_path):
    first, second = file(tmp_path, 0), file(tmp_path, 1)
    for number in (4, 0, 2):
        first.add(answer(number))
    for number in (3, 1):
        second.add(answer(number, failed=number == 1))
    for each in (first, second):
        each.close()
    first.merge([0, 1, 2, 3, 4])
    assert ids(first.rows) == ids(read_answers(tmp_path / "answers.jsonl", "x")) == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "settings.json"]


def test_what_a_killed_run_left_is_taken_up_once(tmp_path):
    first, second = file(tmp_path, 0), file(tmp_path, 1)
    first.add(answer(0))
    second.add(answer(1))
    second.add(answer(3, failed=True))
    for each in (first, second):
        each.close()
    with open(tmp_path / "answers.1.jsonl", "a") as stream:
        stream.write('{"question_id": 5, "cat')
    (tmp_path / "answers.7.jsonl").write_text(json.dumps(answer(0)) + "\n")  # merged before, not yet removed
    again, other = file(tmp_path, 0), file(tmp_path, 1)
    assert ids(again.rows) == ids(other.rows) == [0, 1]
    assert again.done == {0, 1}
    other.add(answer(3))
    other.close()
    again.merge([3, 1, 0])
    assert ids(again.rows) == [3, 1, 0]


def test_one_device_goes_on_where_two_stopped(tmp_path):
    second = file(tmp_path, 1)
    (tmp_path / "settings.json").write_text('{"limit": 3}')
    second.add(answer(8))
    second.close()
    one = file(tmp_path)
    assert ids(one.rows) == [8]
    one.add(answer(9))
    one.close()
    assert ids(read_answers(tmp_path / "answers.jsonl", "x")) == [8, 9]


def test_parts_under_other_settings_are_refused(tmp_path):
    first = file(tmp_path, 0)
    first.add(answer(0))
    first.close()
    for part in (None, 0, 1):
        with pytest.raises(UserError, match=r"limit \(3, now 4\)"):
            file(tmp_path, part, limit=4)
    assert lines(tmp_path / "answers.0.jsonl") == 1


def test_more_gpus_than_there_are_are_refused(tmp_path, monkeypatch):
    import torch

    from specwave.app.evaluate import own_target
    from specwave.app.run import Run
    from specwave.target.load import Identity

    class Model:
        device = "auto"

        def identify(self):
            return Identity("x", "f", 8, torch.float32, torch.device("cuda"), None, ())

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EvaluateConfig(model=Model(), benchmark=None, decoding=None, devices=3)
    with pytest.raises(UserError, match="devices=3: there are 2 GPUs"), own_target(config, Run(tmp_path)):
        pass


def test_devices_and_repeat_are_at_least_one():
    for key in ("devices", "repeat"):
        with pytest.raises(UserError, match=f"{key}=0"):
            EvaluateConfig(model=None, benchmark=None, decoding=None, **{key: 0})


def test_answers_made_before_a_setting_existed_were_made_with_its_default(tmp_path):
    sampling, method = Sampling(0.5), SwitchSdDecoding(neural=Eagle3Decoding(levels=4), n=6)
    now = method_settings({"sampling": asdict(sampling), "batch_invariant": False}, method, None)
    earlier = deepcopy(now)
    del earlier["sampling"]["min_p"], earlier["batch_invariant"]
    del earlier["decoding"]["n"], earlier["decoding"]["occurrence"], earlier["decoding"]["neural"]["tree"]
    made = AnswerFile(tmp_path, earlier)
    made.add(answer(0))
    made.close()
    with pytest.raises(UserError, match=r"other settings: .*decoding\.n \(8, now 6\)$"):
        AnswerFile(tmp_path, now, defaults=default_settings(method, sampling))
    now["decoding"]["n"] = 8
    again = AnswerFile(tmp_path, now, defaults=default_settings(method, sampling))
    assert ids(again.rows) == [0]
    assert json.loads((tmp_path / "settings.json").read_text()) == now
