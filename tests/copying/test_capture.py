"""Captured states against a direct forward, their rows and offsets, capture through kills, and batches of them."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

from specwave.artifacts import UserError
from specwave.copying import capture as room
from specwave.copying.answers import Answer, Labelled
from specwave.copying.batches import batches, logits
from specwave.copying.capture import ProbeStates, all_columns, bytes_per_row, capture
from specwave.copying.probe import Probes
from specwave.data import filling
from specwave.data.states import Index, name_of
from specwave.target import Wants, load_target
from specwave.target.load import Target


def answers(count=20, longest=60):
    """Random ones of several lengths, prompts of 1 to 9 tokens."""
    draw, made = torch.Generator().manual_seed(0), []
    for number in range(count):
        ids = torch.randint(3, 259, (11 + (7 * number) % longest,), generator=draw).tolist()
        made.append(Answer(ids, 1 + number % 9, id=f"a{number}"))
    return made


def whole(path=None, **changes):
    return ProbeStates(None if path is None else str(path), **{"dtype": "float32", "shard_mib": 1, **changes})


def quiet(text):
    pass


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("shard*")}


# ---------------------------------------------------------------- what is captured


def test_rows_and_offsets_of_the_worked_table():
    """A prompt of 3 tokens, an answer of 4: five rows, whose numbers here are the positions they stand for."""
    one = Answer([9, 9, 9, 1, 2, 3, 4], 3)
    reader = SimpleNamespace(rows=lambda name, key: torch.arange(2, 7)[:, None] + 100 * int(name.partition(".")[2]))
    states = room.States(reader, 2, torch.device("cpu"), ["block.0", "block.1"])
    assert states.features(one, 1)[..., 0].tolist() == [[2, 3, 4, 5], [102, 103, 104, 105]]
    assert states.features(one, 0)[..., 0].tolist() == [[3, 4, 5, 6], [103, 104, 105, 106]]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_states_are_those_of_a_direct_forward(family, families, tmp_path):
    """Each answer alone through a session, which knows both sites; captured ones ran in padded batches."""
    target, found = families[family], answers(8)
    states = capture(target, found, whole(tmp_path), quiet)
    every, layers = all_columns(target.num_layers), tuple(range(target.num_layers))
    for one in found:
        session = target.session(1, len(one.ids))
        direct = session.forward(torch.tensor([one.ids]), wants=Wants(layers, layers), logits=False)
        both = {"attention": direct.attentions, "block": direct.blocks}
        for offset, first in ((1, one.start - 1), (0, one.start)):
            features = states.features(one, offset)
            assert features.shape == (2 * target.num_layers, one.tokens, target.hidden_size)
            for name, rows in zip(every, features, strict=True):
                site, _, layer = name.partition(".")
                expected = both[site][int(layer)][0, first : first + one.tokens]
                torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)  # batches add in another order
    assert torch.equal(states.at("block.3", "attention.1").features(found[2], 1)[0], states.features(found[2], 1)[11])


def test_kept_in_bfloat16_they_are_rounded_once(tiny, tmp_path):
    found = answers(3)
    wide = capture(tiny, found, whole(tmp_path / "wide"), quiet)
    narrow = capture(tiny, found, whole(tmp_path / "narrow", dtype="bfloat16"), quiet)
    for one in found:
        assert torch.equal(narrow.features(one, 1), wide.features(one, 1).bfloat16())
    assert bytes_per_row(tiny, whole()) == 2 * bytes_per_row(tiny, whole(dtype="bfloat16")) == 16 * 64 * 4


def test_the_same_tokens_behind_a_shorter_prompt_are_another_answer(tiny, tmp_path):
    one = answers(1)[0]
    other = Answer(one.ids, one.start + 3)
    states = capture(tiny, [one, other], whole(tmp_path), quiet)
    assert states.features(other, 1).shape[1] == states.features(one, 1).shape[1] - 3
    assert torch.equal(states.features(other, 1), states.features(one, 1)[:, 3:])


# ---------------------------------------------------------------- the folder


def test_a_capture_that_was_broken_off_goes_on(tiny, tmp_path, monkeypatch):
    found, said = answers(30), list[str]()
    capture(tiny, found, whole(tmp_path / "whole"), said.append)
    expected = files(tmp_path / "whole")
    assert len(expected) > 3
    write, left = filling.write_shard, [2]

    def dying(*given):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        write(*given)

    monkeypatch.setattr(filling, "write_shard", dying)
    with pytest.raises(KeyboardInterrupt):
        capture(tiny, found, whole(tmp_path / "killed"), quiet)
    monkeypatch.setattr(filling, "write_shard", write)
    assert set(Index.load(tmp_path / "killed", room.KEY).shards) == {0, 1}
    first = tmp_path / "killed" / name_of(0)
    first.write_bytes(first.read_bytes()[:-9])  # a disk that lost the end of a finished one
    second = (tmp_path / "killed" / name_of(1)).stat().st_mtime_ns
    said.clear()
    capture(tiny, found, whole(tmp_path / "killed"), said.append)
    assert f"{name_of(0)} is damaged" in said[0]
    assert f"{len(expected) - 1} of {len(expected)} shards to make" in said[1]
    assert files(tmp_path / "killed") == expected
    assert (tmp_path / "killed" / name_of(1)).stat().st_mtime_ns == second
    said.clear()
    capture(tiny, found, whole(tmp_path / "killed"), said.append)
    assert said == [f"states: re-used from {tmp_path / 'killed'}"]


def test_too_little_room_is_said_before_anything_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12345))
    found, said = answers(), list[str]()
    rows = sum(one.tokens + 1 for one in found)
    with pytest.raises(UserError, match=r"probe.states.path=.*: (\d+) bytes are needed and 12345 are free") as caught:
        capture(tiny, found, whole(tmp_path / "states"), said.append)
    needed = int(str(caught.value).split(": ")[1].split()[0])
    assert rows * 16 * 64 * 4 < needed < rows * 16 * 64 * 4 + 30_000  # headers and keys of five shards
    assert f"{rows:,} tokens of 4,096 bytes (16 sites)" in said[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changed", ["answers", "dtype", "target"])
def test_states_of_something_else_are_refused(changed, tiny, families, tmp_path):
    found = answers(3)
    capture(tiny, found, whole(tmp_path), quiet)
    target, settings = tiny, whole(tmp_path)
    if changed == "answers":
        found = answers(4)
    elif changed == "dtype":
        settings = whole(tmp_path, dtype="bfloat16")
    else:
        target = families["qwen2"]
    with pytest.raises(UserError, match=r"it holds other states .*or those of other answers: name another folder"):
        capture(target, found, settings, quiet)


def test_a_state_that_is_no_number_is_named(family_folders, tmp_path):
    target: Target = load_target(family_folders["llama"], dtype="float32")
    target.blocks[5].input_norm = target.blocks[5].input_norm * torch.nan
    with pytest.raises(UserError, match=r"probe_data=a\d: attention.5 of the target is not finite"):
        capture(target, answers(2), whole(tmp_path), quiet)
    assert not list(tmp_path.glob("shard*"))


# ---------------------------------------------------------------- batches


class Counted:
    """States whose numbers say which answer and token they are of."""

    device, num_layers = torch.device("cpu"), 1

    def features(self, answer, offset):
        own = torch.arange(answer.tokens) + 1000 * int(answer.id[1:]) + offset / 2
        return torch.stack([own, -own])[..., None]


def test_batches_hold_every_token_once_with_its_label():
    texts = [[*[1, 2, 3] * (3 + number % 4), 50 + number] for number in range(9)]  # all copied but the last token
    data = Labelled([Answer(text, 4, id=f"a{number}") for number, text in enumerate(texts)], 3)
    assert data.both
    label_of = {
        1000 * number + place + 0.5: bool(labels[place])
        for number, labels in enumerate(data.copied)
        for place in range(len(labels))
    }
    for size in (1, 4, 7, 1000):
        for seed in (None, 3):
            passes = batches(Counted(), data, 1, size, seed)
            orders = []
            for _ in range(2):
                sizes, seen = [], []
                for states_PBD, labels_B in passes():
                    assert torch.equal(states_PBD[0], -states_PBD[1])
                    sizes.append(len(labels_B))
                    for value, label in zip(states_PBD[0, :, 0].tolist(), labels_B.tolist(), strict=True):
                        assert label_of[value] == label
                        seen.append(value)
                assert sorted(seen) == sorted(label_of)
                assert sizes[:-1] == [min(size, data.tokens)] * (len(sizes) - 1)
                assert 0 < sizes[-1] <= size
                orders.append(seen)
            assert (orders[0] == orders[1]) == (seed is None)


def test_scores_come_in_the_order_of_the_tokens():
    data = Labelled([Answer([1, 2, 3, 4], 1, id="a7"), Answer([1, 2, 3], 2, id="a2")], 1)
    probes = Probes(torch.tensor([[2.0], [1.0]]), torch.zeros(2), torch.zeros(2))
    found = logits(probes, Counted(), data, 0)
    assert found[0].tolist() == [14000, 14002, 14004, 4000]
    assert found[1].tolist() == [-7000, -7001, -7002, -2000]
