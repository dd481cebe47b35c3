"""total_token=auto: a whole choice made by the clock, noted, and no token of the output changed by it."""

import json
import os
from pathlib import Path

import pytest
import torch

from specwave.decoding import generate
from specwave.eagle import Eagle3Decoding, load_drafter, tuning
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.export import TargetFacts, write_drafter
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map
from specwave.target import clock as clock_room
from specwave.target.clock import Clock, clock

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [300, 12, 12, 12, 8]]


@pytest.fixture
def folder(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_PROMPTS", 2)
    monkeypatch.setattr(tuning, "_TOKENS", 12)
    d2t, t2d = build_vocab_map(torch.randint(0, 9, (tiny.vocab_size,)), 200)
    drafter = Eagle3Drafter(DrafterConfig.of_target(tiny.arch, (1, 4, 6), 200), d2t, t2d)
    initialise(drafter, tiny, "target", 0)
    facts = TargetFacts(tiny.name, tiny.fingerprint, tiny.num_layers)
    write_drafter(tmp_path / "d", drafter, facts, dtype=torch.float32)
    return tmp_path / "d"


def test_the_choice_is_noted_and_changes_no_token(folder, tiny, monkeypatch):
    drafter = load_drafter(folder, tiny, total_token="auto")
    assert drafter.settings.total_token != "auto"
    assert drafter.settings == Eagle3Decoding(**vars(drafter.settings))  # a combination a user could give
    plain = generate(tiny, None, PROMPTS, max_new_tokens=20)
    assert generate(tiny, drafter, PROMPTS, max_new_tokens=20).tokens == plain.tokens
    monkeypatch.setattr(tuning, "_tune", lambda *_: pytest.fail("noted already"))
    assert load_drafter(folder, tiny, total_token="auto").settings == drafter.settings
    (note,) = (Path(os.environ["SPECWAVE_CACHE"]) / "tuned").iterdir()
    choices = json.loads(note.read_text())["choices"]
    assert [choice["tokens"] / choice["seconds"] for choice in choices] == sorted(
        (choice["tokens"] / choice["seconds"] for choice in choices), reverse=True
    )
    assert {choice["drafts"] for choice in choices} >= {0, 1, 8}


def test_batch_invariant_decoding_is_tuned_by_its_own_clock(folder, tiny, monkeypatch):
    """Its forwards take another time, so the clock times them, the drafter is watched with them, and both are noted
    apart from those of ordinary decoding."""
    timed, watched = [], []
    measure, decode = clock_room._measure, tuning.generate
    monkeypatch.setattr(clock_room, "_measure", lambda *how: timed.append(how[-1]) or measure(*how))
    monkeypatch.setattr(
        tuning, "generate", lambda *what, **how: watched.append(how["batch_invariant"]) or decode(*what, **how)
    )
    drafter = Eagle3Decoding(total_token="auto", batch_invariant=True).build(tiny, folder)
    assert (timed, set(watched)) == ([True], {True})
    assert drafter.settings.batch_invariant
    assert drafter.settings.total_token != "auto"
    plain = generate(tiny, None, PROMPTS, max_new_tokens=20, batch_invariant=True)
    assert generate(tiny, drafter, PROMPTS, max_new_tokens=20, batch_invariant=True).tokens == plain.tokens
    ordinary = load_drafter(folder, tiny, total_token="auto")
    assert (timed, set(watched), ordinary.settings.batch_invariant) == ([True, False], {True, False}, False)
    for place in ("clock", "tuned"):
        assert len(list((Path(os.environ["SPECWAVE_CACHE"]) / place).iterdir())) == 2
    Eagle3Decoding(total_token="auto", batch_invariant=True).build(tiny, folder)
    assert timed == [True, False]


CHAIN = {"levels": 1, "drafts": 1, "chain": True, "tokens": 2.0, "seconds": 1.0}
DAMAGED = [
    "[" * 5000,
    "{}",
    json.dumps({"choices": []}),
    *(json.dumps({"choices": [CHAIN | change], "seconds": [0.0, -1.0]})
      for change in ({"levels": 99}, {"drafts": 99}, {"tokens": "2"}, {"seconds": 0.0}, {"other": 1})),
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_note_is_made_again(content, folder, tiny):
    expected = load_drafter(folder, tiny, total_token="auto").settings
    for place in ("tuned", "clock"):
        for note in (Path(os.environ["SPECWAVE_CACHE"]) / place).iterdir():
            note.write_text(content)
    again = load_drafter(folder, tiny, total_token="auto").settings
    assert (again.levels >= 1, expected.levels >= 1) == (True, True)


def test_a_drafter_that_knows_one_token_drafts_chains(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))
    d2t, t2d = build_vocab_map(torch.randint(0, 9, (tiny.vocab_size,)), 1)
    drafter = Eagle3Drafter(DrafterConfig.of_target(tiny.arch, (1,), 1), d2t, t2d)
    initialise(drafter, tiny, "target", 0)
    found = tuning.tuned_settings("one", drafter, tiny)
    assert (found["top_k"], found["total_token"]) == (1, None)


def test_the_clock_is_noted_and_follows_its_sizes(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path))
    found = clock(tiny, (1, 4, 16))
    assert found.sizes == (1, 4, 16)
    assert all(second > 0 for second in found.seconds)
    monkeypatch.setattr(clock_room, "_measure", lambda *_: pytest.fail("noted already"))
    assert clock(tiny, (1, 4, 16)) == found


def test_between_sizes_the_clock_draws_lines():
    times = Clock((1, 4, 8), (1.0, 4.0, 6.0))
    assert [times(size) for size in (1, 2, 4, 6, 8, 10)] == [1.0, 2.0, 4.0, 5.0, 6.0, 7.0]
    assert Clock((1,), (3.0,))(5) == 3.0
