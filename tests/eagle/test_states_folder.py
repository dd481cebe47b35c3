"""The folder of offline states: room, what is refused, damage, and capture through kills."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kept import captured, hashes, prepared, samples, small_shards

from specwave.artifacts import UserError
from specwave.data import filling
from specwave.data.states import Index, name_of
from specwave.eagle import offline as room
from specwave.eagle.offline import StatesConfig
from specwave.target import load_target
from specwave.target.load import Target
from specwave.target.tiny import make_tiny

HERE = Path(__file__).resolve().parent

# ---------------------------------------------------------------- room


def test_the_bytes_of_a_token(tiny):
    """2·H_t·(|U| + [N−1 ∉ U]) in bf16."""

    def each(layers, **changes):
        columns = room.wanted_columns(tiny, layers, StatesConfig("offline", **changes))
        return sum(column.bytes for column in columns.values())

    assert each((2, 4, 5)) == 2 * 64 * 4
    assert each((2, 7, 2)) == 2 * 64 * 2
    assert each((2, 4, 5), dtype="float32") == 4 * 64 * 4
    assert each((2, 4, 5), targets="top_k", k=10) == 2 * 64 * 3 + 80
    assert each((7,), targets="top_k", k=10) == 2 * 64 + 80
    with pytest.raises(UserError, match=r"states.k=513: must be ≤ 512"):
        each((7,), targets="top_k", k=513)


def test_too_little_room_is_said_before_anything_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12345))
    said: list[str] = []
    tokens = sum(len(sample.ids) for sample in samples())
    with pytest.raises(UserError, match=r"states.path=.*: (\d+) bytes are needed and 12345 are free") as caught:
        captured(tiny, tmp_path / "states", said=said)
    needed = int(str(caught.value).split(": ")[1].split()[0])
    assert tokens * 4 * 64 * 4 < needed < tokens * 4 * 64 * 4 + 5000
    assert f"{tokens:,} tokens of 1,024 bytes (layers 2, 4, 5, 7)" in said[0]
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- what the folder holds


def test_states_of_another_target(tiny, tmp_path):
    captured(tiny, tmp_path / "states")
    other = load_target(make_tiny(tmp_path / "other", seed=1), dtype="float32")
    with pytest.raises(UserError, match=rf"holds states of .*{tiny.fingerprint}.*name another folder"):
        captured(other, tmp_path / "states")


def test_a_layer_that_is_not_there(tiny, tmp_path):
    captured(tiny, tmp_path)
    captured(tiny, tmp_path, [(4, 5)])
    message = r"lacks layer 3 of group \[3, 5\], it holds layers 2, 4, 5, 7: train groups of these, or name another"
    with pytest.raises(UserError, match=message):
        captured(tiny, tmp_path, [(2,), (3, 5)])


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({}, {"dtype": "bfloat16"}, "were kept in float32, not bfloat16: set states.dtype=float32"),
        ({}, {"targets": "top_k"}, "lacks what states.targets=top_k states.k=64 reads: set states.targets=recompute"),
        (
            {"targets": "top_k", "k": 5},
            {"targets": "top_k", "k": 6},
            "lacks what states.targets=top_k states.k=6 reads: set states.targets=top_k states.k=5",
        ),
        ({"targets": "top_k", "k": 5}, {}, "lacks what states.targets=recompute reads: set states.targets=top_k"),
    ],
)
def test_states_kept_in_another_way(tiny, tmp_path, first, then, message):
    captured(tiny, tmp_path, [(2, 4)], **first)
    with pytest.raises(UserError, match=message):
        captured(tiny, tmp_path, [(2, 4)], **then)


def test_states_computed_in_another_precision(family_folders, tmp_path):
    captured(load_target(family_folders["llama"], dtype="bfloat16", device="cpu"), tmp_path)
    with pytest.raises(UserError, match=r"were computed in bfloat16, not float32: set model.dtype=bfloat16, or name"):
        captured(load_target(family_folders["llama"], dtype="float32", device="cpu"), tmp_path)


def test_fewer_samples_are_served_and_others_refused(tiny, tmp_path):
    captured(tiny, tmp_path)
    captured(tiny, tmp_path, data=prepared(10))
    with pytest.raises(UserError, match=r"lacks 2 of 16 samples, 's7' among them: name another folder"):
        captured(tiny, tmp_path, data=prepared(16))


def broken_off(tiny, folder, monkeypatch, shards: int) -> None:
    """A capture that ends after so many shards."""
    write = filling.write_shard

    def breaking(folder, index, *given):
        if len(index.shards) == shards:
            raise KeyboardInterrupt
        write(folder, index, *given)

    with monkeypatch.context() as patched:
        patched.setattr(filling, "write_shard", breaking)
        with pytest.raises(KeyboardInterrupt):
            captured(tiny, folder)


def test_an_unfinished_capture_goes_on_and_serves_nobody_else(tiny, tmp_path, monkeypatch):
    small_shards(monkeypatch)
    captured(tiny, tmp_path / "whole")
    broken_off(tiny, tmp_path / "states", monkeypatch, shards=3)
    with pytest.raises(UserError, match=r"never finished \(3 of \d+ shards are there\): finish or delete it"):
        captured(tiny, tmp_path / "states", data=prepared(10))
    path = tmp_path / "states" / name_of(1)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of its size: only a checksum tells
    said: list[str] = []
    captured(tiny, tmp_path / "states", said=said)
    assert f"{name_of(1)} is damaged (its sha256" in said[0]
    assert hashes(tmp_path / "states") == hashes(tmp_path / "whole")


def test_what_another_run_made_while_this_one_waited_is_taken(tiny, tmp_path, monkeypatch):
    small_shards(monkeypatch)
    lock, written = filling.alone, []

    @contextlib.contextmanager
    def taken(*given):
        with monkeypatch.context() as patched:
            patched.setattr(filling, "alone", lock)
            captured(tiny, tmp_path)
            written.append({path: path.stat().st_mtime_ns for path in tmp_path.glob("shard*")})
        with lock(*given):
            yield

    monkeypatch.setattr(filling, "alone", taken)
    captured(tiny, tmp_path)
    assert len(written[0]) > 3
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard*")} == written[0]


@pytest.mark.parametrize("verify", [False, True])
def test_a_damaged_shard_is_named_and_made_again(tiny, tmp_path, monkeypatch, verify):
    small_shards(monkeypatch)
    captured(tiny, tmp_path)
    before, path = hashes(tmp_path), tmp_path / name_of(2)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if verify else content[:-1])
    with pytest.raises(UserError, match=rf"{name_of(2)} is damaged: .*samples and layers it was captured for"):
        captured(tiny, tmp_path, [(2,)], verify=verify)
    said: list[str] = []
    captured(tiny, tmp_path, said=said, verify=verify)
    assert f"{name_of(2)} is damaged" in said[0]
    assert "1 of " in said[1]
    assert hashes(tmp_path) == before


def test_a_damaged_shard_is_struck_off_before_it_is_made_again(tiny, tmp_path, monkeypatch):
    """A run killed meanwhile must not leave it listed: the next may look at sizes only."""
    small_shards(monkeypatch)
    captured(tiny, tmp_path)
    path = tmp_path / name_of(2)
    path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.setattr(filling, "write_shard", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        captured(tiny, tmp_path, verify=True)
    index = Index.load(tmp_path, "states.path")
    assert set(range(index.total)) - set(index.shards) == {2}


def test_a_state_that_is_no_number_is_named(tiny, tmp_path, monkeypatch):
    states, bad = Target.states, samples()[3].ids

    def poisoned(self, ids, layers):
        found = {layer: state.clone() for layer, state in states(self, ids, layers).items()}
        for row in (ids[:, : len(bad)] == torch.tensor(bad)).all(-1).nonzero().flatten():
            found[4][row, 2, 5] = float("inf")
        return found

    monkeypatch.setattr(Target, "states", poisoned)
    with pytest.raises(UserError, match=r"data=s1: layer 4 of the target is not finite on this sample"):
        captured(tiny, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_killed_at_seven_moments_and_resumed(family_folders, tmp_path):
    """kill -9 in forwards, in half-written shards, between a file and the index: the bytes of a capture left alone."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "captured.py"), str(family_folders["llama"]), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("killed by 9") == 2 * 7, done.stdout
    assert done.stdout.count("exit 0") == 2 * 2, done.stdout
    assert "damaged" not in done.stdout
    for targets in ("recompute", "top_k"):
        whole, killed = hashes(tmp_path / f"{targets}-whole"), hashes(tmp_path / f"{targets}-killed")
        assert len(whole) >= 7
        assert killed == whole
