"""Files between the doors: whole or absent, and damaged ones named in one line."""

import errno
import json
import os
from types import SimpleNamespace

import pytest
import torch

from specwave import artifacts
from specwave.artifacts import Selection, UserError, check_layers, read_json, read_jsonl, reading, write_json

SELECTION = {
    "schema": 1,
    "model": "m",
    "fingerprint": "f",
    "num_layers": 8,
    "selector": "elsi",
    "m": 2,
    "layers": [1, 3],
    "entropy": 0.5,
    "beam": [{"layers": [1, 3], "entropy": 0.5}, {"layers": [2, 3], "entropy": 0.4}],
    "layer_entropy": [0.1] * 8,
    "transitions": [0.1] * 7,
    "layer_convention": "block_output",
    "calibration": {},
}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"n": 1})

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(artifacts.os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"n": 2})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"n": float("nan")})
    assert json.loads(path.read_text()) == {"n": 1}
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(("free", "error"), [(100, OSError), (10**9, RuntimeError)])
def test_a_full_disk_is_one_whoever_writes(tmp_path, monkeypatch, free, error):
    """torch and safetensors fail with errors of their own, which do not say why."""

    def broken(content, name):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0")

    monkeypatch.setattr(torch, "save", broken)
    monkeypatch.setattr(artifacts.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(error) as failed:
        artifacts.write_torch(tmp_path / "last.ckpt", {})
    if error is OSError:
        assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, str(tmp_path / "last.ckpt"))
    assert os.listdir(tmp_path) == []


def test_a_torn_last_line_is_cut(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3')
    artifacts.drop_torn_line(path)
    assert [row["n"] for _, row in read_jsonl(path, "k")] == [1, 2]
    artifacts.drop_torn_line(path)
    assert path.read_text().count("\n") == 2


def test_tensors_that_share_memory_are_written(tmp_path):
    whole = torch.arange(6.0)
    artifacts.write_tensors(tmp_path / "t.safetensors", {"a": whole[:3], "b": whole[2:], "c": whole.view(2, 3).T})
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "t.safetensors")["c"], whole.view(2, 3).T)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        ("", "not JSON"),
        ('{"a": 1', "line 1 is not JSON"),
        ("[1]", "a JSON object is expected"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5000, "not JSON"),
    ],
)
def test_json_that_is_none(tmp_path, content, words):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=words):
        read_json(path, "selection")


@pytest.mark.parametrize(
    ("content", "where", "words"),
    [
        ("", "", "empty"),
        ("\n \n", "", "empty"),
        ('{"a": 1}\n{b}\n', ":2", "not JSON"),
        ('\n{"a": 1}\n3\n', ":3", "object"),
    ],
)
def test_json_lines_that_are_none(tmp_path, content, where, words):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=words) as error:
        list(read_jsonl(path, "data.path"))
    assert str(error.value).startswith(f"data.path={path}{where}: ")


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "at least one"),
        ([8], "layers 0 to 7"),
        ([-1], "layers 0 to 7"),
        ([1, 1], "twice"),
        ([True], "whole"),
        ([1.0], "whole"),
    ],
)
def test_layers_that_cannot_be(layers, words):
    with pytest.raises(UserError, match=words):
        check_layers(layers, 8, "groups")


def test_a_selection_round_trip(tmp_path):
    write_json(tmp_path / "selection.json", SELECTION)
    for path in (tmp_path, tmp_path / "selection.json"):
        assert Selection.load(path).groups(2) == [(1, 3), (2, 3)]
    Selection.load(tmp_path).save(tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert {name: again[name] for name in SELECTION} == SELECTION


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": None},
        {"layers": 3},
        {"layers": ["1"]},
        {"num_layers": "8"},
        {"beam": None},
        {"beam": [1, 2]},
        {"beam": [{"x": 1}]},
        {"beam": [{"layers": [99]}]},
        {"schema": 9},
        {"layer_convention": "block_input"},
    ],
)
def test_a_damaged_selection_is_a_users_mistake(tmp_path, changes):
    write_json(tmp_path / "selection.json", SELECTION | changes)
    with pytest.raises(UserError, match="selection"):
        Selection.load(tmp_path)


def test_reading_names_the_file_and_lets_other_errors_pass():
    def read(error, **more):
        with reading("k", "x.json", "begin anew", **more):
            raise error

    with pytest.raises(UserError, match=r"k=x\.json: the file is damaged or of another kind .*KeyError.*; begin anew"):
        read(KeyError("a"))
    with pytest.raises(UserError, match="as it was"):
        read(UserError("a", "b", "as it was"))
    with pytest.raises(ZeroDivisionError):
        read(ZeroDivisionError())
    with pytest.raises(UserError, match="ZeroDivisionError"):
        read(ZeroDivisionError(), also=(ZeroDivisionError,))
