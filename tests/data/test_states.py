"""Shards on disk: round trip, what goes into which, room, and files that are not what the index says."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from specwave.artifacts import UserError
from specwave.data import states
from specwave.data.filling import passes
from specwave.data.states import Column, Index, Plan, Reader, alone, check_room, damaged, digest, name_of, write_shard

SAMPLES = [[7, 8, 9, 10, 11], [1, 2], [3, 4, 5, 6], [1, 2], [1, 2, 3], [9, 9, 9]]
COLUMNS = {"half": Column(4, "bfloat16"), "whole": Column(3, "float32"), "ids": Column(2, "int32")}


def numbers(ids: list[int]) -> dict[str, torch.Tensor]:
    """What is kept of a sample: a function of its tokens."""
    x = torch.tensor(ids, dtype=torch.float32)[:, None]
    return {
        "half": (x + torch.arange(4) / 7).bfloat16(),
        "whole": x * torch.tensor([0.1, 1.0, -3.7]),
        "ids": torch.cat([x, 5 - x], -1).int(),
    }


def written(folder, only=None) -> tuple[Plan, Index]:
    plan = Plan(SAMPLES)
    shards = plan.shards(6)
    index = Index({"of": "a test"}, COLUMNS, plan.sha256, 6, len(shards))
    with alone(folder, "states.path"):
        for number, rows in enumerate(shards):
            if only is None or number in only:
                kept = [numbers(SAMPLES[plan.places[row]]) for row in rows]
                columns = {name: torch.cat([one[name] for one in kept]) for name in COLUMNS}
                write_shard(folder, index, number, [(plan.digests[row], plan.lengths[row]) for row in rows], columns)
    return plan, index


def test_a_plan_takes_every_sample_once_and_in_one_order():
    plan = Plan(SAMPLES)
    assert plan.lengths == [2, 3, 3, 4, 5]
    assert [len(SAMPLES[place]) for place in plan.places] == plan.lengths
    assert plan.places[0] == 1  # the first of the two
    assert plan.tokens == 17
    assert [[plan.lengths[row] for row in rows] for rows in plan.shards(6)] == [[2, 3], [3], [4], [5]]
    assert [len(rows) for rows in plan.shards(1)] == [1] * 5
    assert [len(rows) for rows in plan.shards(99)] == [5]
    assert Plan(SAMPLES[::-1]).sha256 == plan.sha256
    assert Plan(SAMPLES[1:]).sha256 != plan.sha256


def test_round_trip(tmp_path):
    written(tmp_path / "s")
    index = Index.load(tmp_path / "s", "states.path")
    assert index.facts == {"of": "a test"}
    assert index.columns == COLUMNS
    assert index.complete
    assert not damaged(tmp_path / "s", index, checksums=True)
    reader = Reader(tmp_path / "s", index, "states.path")
    for ids in SAMPLES:
        assert digest(ids) in reader
        for name, expected in numbers(ids).items():
            got = reader.rows(name, digest(ids))
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected), (name, ids)
    assert digest([1]) not in reader
    with pytest.raises(KeyError):
        reader.rows("half", digest([2, 1]))


def test_bytes_are_as_announced(tmp_path):
    plan, index = written(tmp_path / "s")
    assert index.bytes_per_token == 4 * 2 + 3 * 4 + 2 * 4
    counts = [(len(rows), sum(plan.lengths[row] for row in rows)) for rows in plan.shards(6)]
    said = states.size(COLUMNS.values(), counts)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "s").glob("*.safetensors"))
    assert on_disk <= said <= on_disk + index.total * states._HEADER


def test_room_is_looked_at_before_the_folder_is_made(tmp_path, monkeypatch):
    asked = []

    def disk_usage(path):
        asked.append(path)
        return shutil._ntuple_diskusage(1000, 0, 1000)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    check_room(tmp_path / "a" / "b", 1000, "states.path")
    with pytest.raises(UserError, match=r"states.path=.*/a/b: 1001 bytes are needed and 1000 are free: make room"):
        check_room(tmp_path / "a" / "b", 1001, "states.path")
    assert asked == [tmp_path] * 2
    assert not list(tmp_path.iterdir())


def test_an_unfinished_folder_says_so(tmp_path):
    written(tmp_path, only=[0, 2])
    index = Index.load(tmp_path, "states.path")
    assert not index.complete
    assert set(index.shards) == {0, 2}


def test_damaged_shards_are_named(tmp_path):
    _, index = written(tmp_path)
    (tmp_path / name_of(0)).unlink()
    with open(tmp_path / name_of(1), "ab") as stream:
        stream.write(b"more")
    path = tmp_path / name_of(2)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert set(damaged(tmp_path, index, checksums=False)) == {0, 1}
    found = damaged(tmp_path, index, checksums=True)
    assert set(found) == {0, 1, 2}
    assert found[0] == "it is missing"
    assert "bytes instead of" in found[1]
    assert "sha256" in found[2]


def test_a_shard_that_is_none_is_refused_by_name(tmp_path):
    _, index = written(tmp_path)
    path = tmp_path / name_of(3)
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(UserError, match=r"shard-00003\.safetensors: the file is damaged.*delete this shard"):
        Reader(tmp_path, index, "states.path")


def test_a_shard_of_another_size_than_its_samples_is_refused(tmp_path):
    plan, index = written(tmp_path)
    samples = [(plan.digests[row], plan.lengths[row] + 1) for row in plan.shards(6)[0]]
    one = numbers([1] * 5)
    write_shard(tmp_path, index, 0, samples, one)
    with pytest.raises(UserError, match=r"shard-00000.*another size than the samples"):
        Reader(tmp_path, index, "states.path")


@pytest.mark.parametrize("change", [{"schema": 9}, {"columns": {"half": 3}}, {"shards": {"x": {}}}, {"total": None}])
def test_a_damaged_index_is_refused_by_name(tmp_path, change):
    written(tmp_path)
    path = tmp_path / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=r"states.path=.*index\.json: the file is damaged"):
        Index.load(tmp_path, "states.path")


def test_parts_of_a_killed_writer_are_removed(tmp_path):
    written(tmp_path, only=[0])
    part = tmp_path / ".shard-00001.safetensors.abc.part"
    part.write_bytes(b"half")
    with alone(tmp_path, "states.path"):
        assert not part.exists()
    assert (tmp_path / name_of(0)).exists()


def test_a_full_disk_is_the_users_to_mend(tmp_path):
    with (
        pytest.raises(UserError, match=r"cannot be written \(No space left on device\); finished shards are kept"),
        alone(tmp_path, "states.path"),
    ):
        raise OSError(28, "No space left on device")


def test_sequences_that_are_forwarded_together_fit_with_their_padding():
    lengths = [2, 3, 3, 4, 9, 30]
    assert list(passes(lengths, 12)) == [range(3), range(3, 4), range(4, 5), range(5, 6)]
    assert list(passes(lengths, 10**6)) == [range(6)]
    assert list(passes([], 12)) == []
