"""Batches by number, padding, the split, and samples that must be refused."""

from __future__ import annotations

import itertools
import json
import warnings
from types import SimpleNamespace

import pytest
import torch

from specwave.artifacts import UserError
from specwave.data import Sample
from specwave.data.datamodule import (
    DrafterData,
    Stream,
    collate,
    collate_packed,
    epoch_plan,
    first_fit,
    packed_plan,
)
from specwave.data.engines import Regenerate
from specwave.data.samples import BuiltinData, JsonlData, ShareGptUltraChat, prepare


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


def test_one_prompt_under_several_names_is_held_out_or_trained_on():
    """Dumps hold a conversation twice, and name several alike."""
    copies = [Sample(entry.ids, entry.answer, f"again {entry.id}") for entry in SAMPLES[:12]]
    other_answer = Sample([*SAMPLES[12].ids[:-1], 5], SAMPLES[12].answer, "other answer")
    numbered = sample(f"{SAMPLES[13].id}#2", 4, 9)  # how a source names the second row of one id
    stranger = sample("p#7", 4, 9)  # no row is named p
    twins = [(entry.id, copy.id) for entry, copy in zip(SAMPLES, copies, strict=False)]
    twins += [(SAMPLES[12].id, "other answer"), (SAMPLES[13].id, numbered.id)]
    for validation in range(1, 20):
        got = prepare([*copies, *SAMPLES, other_answer, numbered, stranger], 64, validation, decode)
        held = {entry.id for entry in got.validation}
        assert not held & {entry.id for entry in got.train}
        for one, two in twins:
            assert (one in held) is (two in held)
        lone = {entry.id for entry in got.validation} - {two for _, two in twins}
        assert len(lone) == validation


def test_length_is_enforced():
    got = prepare(
        [sample("long", 3, 40), sample("prompt", 20, 5), sample("ok", 3, 6), sample("v", 3, 6)], 10, 1, decode
    )
    assert (got.cut, got.dropped) == (2, 1)
    both = [*got.train, *got.validation]
    assert all(len(entry.ids) == len(entry.answer) <= 10 for entry in both)
    assert "prompt" not in {entry.id for entry in both}


def test_chosen_samples_are_a_sequence_of_known_lengths():
    got = prepare(SAMPLES, 9, 3, decode).train
    assert list(got) == [got[place] for place in range(len(got))] == got[:]
    assert got.lengths == [len(entry.ids) for entry in got]
    assert max(got.lengths) == 9
    assert got[-1] == got[len(got) - 1]
    with pytest.raises(IndexError):
        got[len(got)]


def test_an_empty_mask_is_refused_with_its_text():
    with pytest.raises(UserError, match=r"data=bad: no token of this sample is answer text.*<9 tokens>"):
        prepare([*SAMPLES, sample("bad", 9, 0)], 64, 3, decode)


def test_nothing_left_is_refused():
    with pytest.raises(UserError, match=r"nothing is left to train on: of 23 samples 23 have no answer"):
        prepare(SAMPLES, 3, 1, decode)
    with pytest.raises(UserError, match="those of 23 prompts are held out"):
        prepare(SAMPLES, 64, 23, decode)


# ---------------------------------------------------------------- packing


def test_packed_by_hand():
    rows = [[sample("a", 2, 2), sample("b", 1, 2)], [sample("c", 2, 1)]]
    batch = collate_packed(rows)
    assert batch["documents"].tolist() == [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, -1, -1, -1, -1]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 0, 0, 0, 0]]
    assert batch["answer"].int().tolist() == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 1, 0, 0, 0, 0]]
    assert batch["ids"][0].tolist() == [*sample("a", 2, 2).ids, *sample("b", 1, 2).ids]
    assert (batch["names"], batch["tokens"]) == (["a", "b", "c"], 10)
    assert {batch[key].dtype for key in ("documents", "positions", "ids")} == {torch.int64}


def test_the_first_token_of_a_conversation_is_nobodys_to_predict():
    """An answer that begins at once: else the run of answer tokens would go on over the border."""
    batch = collate_packed([[sample("a", 1, 2), sample("b", 0, 3)]])
    assert batch["answer"].int().tolist() == [[0, 1, 1, 0, 1, 1]]


def test_first_fit_by_hand():
    """5 opens row 0 (3 left), 6 row 1 (2 left), 3 fills row 0, 1 fits row 1, 8 opens row 2, 1 fills row 1."""
    assert first_fit([5, 6, 3, 1, 8, 1], range(6), 8) == [[0, 2], [1, 3, 5], [4]]
    assert first_fit([5, 6, 3, 1, 8, 1], [4, 2, 3, 5, 0, 1], 8) == [[4], [2, 3, 5], [0], [1]]


def test_at_most_64_rows_are_open():
    lengths = [6] * 65 + [2, 4]
    rows = first_fit(lengths, range(67), 8)
    assert len(rows) == 66
    assert rows[1] == [1, 65]  # the 65th row closed the first one
    assert rows[65] == [66]


def test_packed_rows_hold_every_sample_once_and_whole():
    lengths = [len(entry.ids) for entry in SAMPLES]
    seen = set()
    for epoch in range(3):
        plan = packed_plan(lengths, 1, seed=0, epoch=epoch, row_length=30)
        rows = [row for batch in plan for row in batch]
        assert sorted(number for row in rows for number in row) == list(range(23))
        assert all(sum(lengths[number] for number in row) <= 30 for row in rows)
        assert len(rows) <= 2 * sum(lengths) / 30 + 1  # first-fit leaves at most one row half empty
        seen.add(str(plan))
    assert len(seen) == 3
    assert packed_plan(lengths, 4, 1, 0, 30) != packed_plan(lengths, 4, 0, 0, 30)
    alone, together = packed_plan(lengths, 1, 0, 0, 30), packed_plan(lengths, 99, 0, 0, 30)
    assert together == [[row for batch in alone for row in batch]]  # fewer rows than a batch: one batch


def test_a_packed_stream_can_begin_at_any_batch():
    """Epochs have different numbers of batches, and batch n is still the same one."""
    lengths = [len(entry.ids) for entry in SAMPLES]
    sizes = {len(packed_plan(lengths, 2, 3, epoch, 20)) for epoch in range(9)}
    assert len(sizes) > 1
    whole = names(Stream(SAMPLES, 2, seed=3, first=0, row_length=20), 60)
    for first in (1, 7, 13, 14, 29, 59):
        assert names(Stream(SAMPLES, 2, seed=3, first=first, row_length=20), 60 - first) == whole[first:]


def test_the_loader_packs_where_the_data_says_so():
    prepared = prepare(SAMPLES, 20, 3, decode)
    prepared.row_length = 20
    data = DrafterData(prepared, batch_size=2, seed=3)
    data.trainer = SimpleNamespace(global_step=5)
    batch = next(iter(data.train_dataloader()))
    assert batch["ids"].shape == batch["documents"].shape
    assert batch["ids"].shape[1] <= 20
    assert "documents" not in next(iter(data.val_dataloader()))


# ---------------------------------------------------------------- conf/data


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JsonlData(workers=0), r"^data\.workers=0: must be ≥ 1"),
        (lambda: JsonlData(max_length=2), r"^data\.max_length=2: must be ≥ 3"),
        (lambda: ShareGptUltraChat(weights=[0.5, 0.6], limit=90), r"^data\.weights=.* must add up to 1"),
        (lambda: ShareGptUltraChat(weights=[1.0], limit=90), r"^data\.weights=.*1 weights for 2 sources"),
        (lambda: ShareGptUltraChat(weights=[0.5, 0.5]), r"^data\.limit=null: weights share out"),
        (
            lambda: JsonlData(answers="regenerate", regenerate=Regenerate(engine="vllm")),
            r"^regenerate\.engine=vllm: .*run task=regenerate first",
        ),
    ],
)
def test_what_conversations_refuse(make, message):
    with pytest.raises(UserError, match=message):
        make()


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def talk(name, *turns):
    roles = itertools.cycle(("user", "assistant"))
    return {"id": name, "messages": [{"role": next(roles), "content": text} for text in turns]}


def test_a_file_of_conversations(tiny, tmp_path):
    rows = [
        talk(f"t{n}", f"question {n}", f"answer {n}", "and then?", "the end" * (1 + 30 * (n == 3))) for n in range(8)
    ]
    data = JsonlData(path=written(tmp_path / "mine.jsonl", rows), validation=2, max_length=140, packing=True)
    got = data.prepared(tiny)
    assert (len(got.train), len(got.validation), got.cut, got.dropped, got.row_length) == (6, 2, 1, 0, 140)
    assert got.origin == {"conversations": 8}
    assert got.facts()["conversations"] == 8
    assert "made by 1 process" in got.notes[0]
    said = {
        tiny.tokenizer.decode(list(itertools.compress(one.ids, one.answer))) for one in [*got.train, *got.validation]
    }
    assert "answer 5<|im_end|>the end<|im_end|>" in said
    assert "re-used from the cache" in data.prepared(tiny).notes[0]
    assert len(JsonlData(path=data.path, limit=4, validation=1).prepared(tiny).train) == 3


def test_answers_of_the_target_to_every_turn(tiny, tmp_path):
    rows = [talk("a", "question", "given", "and then?"), talk("b", "only asked"), talk("c", "once more", "given")]
    options = {"path": written(tmp_path / "mine.jsonl", rows), "validation": 1}
    with pytest.raises(UserError, match=r"^data=b: this conversation has no answer: set data\.answers=regenerate"):
        JsonlData(**options).prepared(tiny)
    settings = Regenerate(max_new_tokens=6, batch_size=2)
    data = JsonlData(**options, answers="regenerate", regenerate=settings)
    got = data.prepared(tiny)
    assert got.origin["regenerated"] == {"conversations": 3, "answers": 4, "unfinished": 4, "dropped": 0}
    both = {one.id: tiny.tokenizer.decode(one.ids) for one in [*got.train, *got.validation]}
    assert set(both) == {"a", "b", "c"}
    assert both["a"].count("<|im_start|>assistant") == 2
    assert "given" not in both["a"]
    again = data.prepared(tiny)
    assert [*again.train, *again.validation] == [*got.train, *got.validation]


def test_sharegpt_and_ultrachat_from_local_files(tmp_path):
    share = [
        {"id": f"s{n}", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
        for n in range(6)
    ]
    share.append({"id": "unanswered", "conversations": [{"from": "human", "value": "a"}]})
    ultra = [talk(f"u{n}", "c", "d", "e", "f") for n in range(18)]
    paths = {"sharegpt": written(tmp_path / "s.jsonl", share), "ultrachat": written(tmp_path / "u.jsonl", ultra)}

    def ids(**more):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one conversation has no answer
            found = ShareGptUltraChat(**paths, validation=1, **more).conversations()
        return [one.id for one in found]

    assert ids() == [f"s{n}" for n in range(6)] + [f"u{n}" for n in range(18)]
    assert ids(limit=99) == ids()
    assert ids(limit=8) == ["s0", "s3", "u0", "u3", "u6", "u9", "u12", "u15"]
    assert ids(limit=8, weights=[0.75, 0.25]) == ["s0", "s1", "s2", "s3", "s4", "s5", "u0", "u9"]
    assert len(ids(answers="regenerate")) == 25
    with pytest.raises(UserError, match=r"^data\.sharegpt=6 conversations: too few"):
        ids(limit=20, weights=[0.5, 0.5])


def test_without_network_the_remedy_is_said(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"^data\.sharegpt=Aeala/.*give the local file: data\.sharegpt=<path>, or use data="
    ):
        ShareGptUltraChat().conversations()
    with pytest.raises(UserError, match=r"^data\.path=.*there is no such file"):
        JsonlData(path=str(tmp_path / "none.jsonl")).conversations()


def test_builtin_prompts_as_conversations():
    found = BuiltinData(limit=30).conversations()
    assert len(found) == 30
    assert {len(one.messages) for one in found} == {1}


def test_padding_is_not_answer():
    batch = collate(SAMPLES[:4])
    for row, entry in enumerate(SAMPLES[:4]):
        assert not batch["answer"][row, len(entry.ids) :].any()
        assert torch.equal(batch["ids"][row, : len(entry.ids)], torch.tensor(entry.ids))
