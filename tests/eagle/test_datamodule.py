"""Batches by number, padding, the split, and samples that must be refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from specwave.artifacts import UserError
from specwave.data import Sample
from specwave.eagle.datamodule import DrafterData, Stream, collate, epoch_plan
from specwave.eagle.samples import BuiltinData, prepare


def sample(name: str, prompt: int, answer: int) -> Sample:
    ids = [hash_of(name, place) for place in range(prompt + answer)]
    return Sample(ids, [False] * prompt + [True] * answer, name, "qa")


def hash_of(name: str, place: int) -> int:
    return (sum(map(ord, name)) * 31 + place * 7) % 500


def decode(ids):
    return f"<{len(ids)} tokens>"


SAMPLES = [sample(f"p{index}", 3 + index % 5, 4 + index % 7) for index in range(23)]


def names(stream, count):
    return [batch["names"] for batch in itertools.islice(stream, count)]


def test_a_stream_can_begin_at_any_batch():
    whole = names(Stream(SAMPLES, 4, seed=3, first=0), 40)
    for first in (1, 4, 5, 6, 23, 39):
        assert names(Stream(SAMPLES, 4, seed=3, first=first), 40 - first) == whole[first:]


def test_an_epoch_takes_every_sample_once():
    lengths = [len(entry.ids) for entry in SAMPLES]
    seen = set()
    for epoch in range(3):
        plan = epoch_plan(lengths, 4, seed=0, epoch=epoch)
        rows = [row for batch in plan for row in batch]
        assert len(rows) == len(set(rows)) == 20  # 23 samples make 5 whole batches of 4
        seen.add(str(plan))
    assert len(seen) == 3
    assert epoch_plan(lengths, 4, seed=1, epoch=0) != epoch_plan(lengths, 4, seed=0, epoch=0)


def test_fewer_samples_than_a_batch():
    assert [sorted(batch) for batch in names(Stream(SAMPLES[:2], 4, seed=0, first=3), 2)] == [["p0", "p1"]] * 2


def test_collate_pads_on_the_right():
    batch = collate([sample("a", 2, 1), sample("b", 2, 3)])
    assert batch["answer"].tolist() == [[False, False, True, False, False], [False, False, True, True, True]]
    assert batch["ids"][0].tolist() == [hash_of("a", 0), hash_of("a", 1), hash_of("a", 2), 0, 0]
    assert (batch["names"], batch["tokens"]) == (["a", "b"], 8)


def test_the_loader_begins_at_the_trainers_step():
    data = DrafterData(prepare(SAMPLES, 64, 3, decode), batch_size=4, seed=3)
    data.trainer = SimpleNamespace(global_step=7)
    got = names(iter(data.train_dataloader()), 5)
    assert got == names(Stream(data.data.train, 4, 3, 0), 12)[7:]
    held = [name for batch in data.val_dataloader() for name in batch["names"]]
    assert sorted(held) == sorted(entry.id for entry in data.data.validation)


def test_the_split_is_by_prompt_and_stays():
    several = [*SAMPLES, sample("p3", 9, 9)]  # a second sample of a prompt goes where the first goes
    for validation in range(1, 6):
        got = prepare(several, 64, validation, decode)
        held = {entry.id for entry in got.validation}
        assert len(held) == validation
        assert not held & {entry.id for entry in got.train}
        assert len(got.train) + len(got.validation) == 24
    assert {entry.id for entry in prepare(SAMPLES[::-1], 64, 5, decode).validation} == held


def test_length_is_enforced():
    got = prepare(
        [sample("long", 3, 40), sample("prompt", 20, 5), sample("ok", 3, 6), sample("v", 3, 6)], 10, 1, decode
    )
    assert (got.cut, got.dropped) == (2, 1)
    assert all(len(entry.ids) == len(entry.answer) <= 10 for entry in got.train + got.validation)
    assert "prompt" not in {entry.id for entry in got.train + got.validation}


def test_an_empty_mask_is_refused_with_its_text():
    with pytest.raises(UserError, match=r"data=bad: no token of this sample is answer text.*<9 tokens>"):
        prepare([*SAMPLES, sample("bad", 9, 0)], 64, 3, decode)


def test_nothing_left_is_refused():
    with pytest.raises(UserError, match=r"nothing is left to train on: of 23 samples 23 have no answer"):
        prepare(SAMPLES, 3, 1, decode)
    with pytest.raises(UserError, match="23 are held out"):
        prepare(SAMPLES, 64, 23, decode)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"batch_size": 0}, "data.batch_size"),
        ({"max_length": 2}, "data.max_length"),
        ({"limit": 10, "validation": 10}, "data.limit"),
        ({"validation": 0}, "data.validation"),
    ],
)
def test_ranges(changes, key):
    with pytest.raises(UserError) as caught:
        BuiltinData(**changes)
    assert caught.value.key == key


def test_padding_is_not_answer():
    batch = collate(SAMPLES[:4])
    for row, entry in enumerate(SAMPLES[:4]):
        assert not batch["answer"][row, len(entry.ids) :].any()
        assert torch.equal(batch["ids"][row, : len(entry.ids)], torch.tensor(entry.ids))
