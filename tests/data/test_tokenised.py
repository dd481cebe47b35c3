"""Samples made by several processes and kept: the same as by one, re-used, and whole or absent after a kill."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specwave.artifacts import UserError
from specwave.data.conversations import Conversation
from specwave.data.render import given
from specwave.data.tokenised import tokenised

KILLED = Path(__file__).parent / "killed.py"
QWEN = (Path(__file__).parent / "templates" / "qwen3.jinja").read_text()
U, A, S = "user", "assistant", "system"
TWO = ((U, "Hi"), (A, "Yes."), (U, "Count"), (A, "one\ntwo"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def told(count=70):
    return [Conversation((*TWO, (U, "x" * n), (A, f"é{n}")), f"c{n}", "chat") for n in range(count)]


def test_as_many_processes_as_wanted_give_the_same(make_chat, cache):
    chat = make_chat()
    expected = given(chat, told(), "data", 10**6)
    for workers in (1, 2):
        found = tokenised(chat, told(), "data", workers)
        assert f"made by {workers} process" in found.note
        assert list(found.samples) == expected
        assert [found.samples[place] for place in (0, 69, -1)] == [expected[0], expected[69], expected[69]]
        assert found.samples[3:9:2] == expected[3:9:2]
        assert (len(found.samples), found.rewritten) == (70, 0)
        shutil.rmtree(cache)


def test_the_second_run_reads_what_the_first_one_kept(make_chat, cache, monkeypatch):
    first = tokenised(make_chat(), told(), "data", 1)
    monkeypatch.setattr("specwave.data.tokenised.masked", None)  # nothing is rendered
    again = tokenised(make_chat(), told(), "data", 2)
    assert again.note == f"tokens of 70 conversations: re-used from the cache, {next(cache.iterdir())}"
    assert list(again.samples) == list(first.samples)


def test_the_key_is_of_all_that_decides_a_sample(make_chat, cache):
    chat = make_chat()
    other = [Conversation((*TWO[:3], (A, "one\n two")), "c", "")]
    same = [Conversation(TWO, "c", "")]
    variants = [
        (chat, same),
        (chat, other),
        (chat, [Conversation(TWO, "d", "")]),
        (make_chat(chat.tokenizer.chat_template + "{# another #}"), same),
        (make_chat(date_string="1 May 2020"), same),
        (make_chat(special=("<extra>",)), same),
    ]
    for number, (own, conversations) in enumerate(variants, start=1):
        tokenised(own, conversations, "data", 1)
        assert len(list(cache.iterdir())) == number
    tokenised(make_chat(), same, "data", 1)
    assert len(list(cache.iterdir())) == len(variants)


def test_a_template_that_rewrites_gives_a_sample_for_every_answer(make_chat):
    chat = make_chat(QWEN, ("<think>", "</think>"))
    talks = [Conversation(TWO, "two", ""), Conversation(TWO[:2], "one", "")]
    found = tokenised(chat, talks, "data", 1)
    assert [sample.id for sample in found.samples] == ["two", "two", "one"]
    assert found.rewritten == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_in_a_worker_is_one_line_and_keeps_nothing(make_chat, cache, workers):
    talks = [*told(40), Conversation(((U, "a"),), "bad", "")]
    with pytest.raises(UserError, match=r"^data=bad: this conversation has no answer: set data\.answers=regenerate$"):
        tokenised(make_chat(), talks, "data", workers)
    assert [entry.name for entry in cache.iterdir() if not entry.name.endswith(".lock")] == []


def test_a_system_turn_without_a_place_is_folded_by_workers_too(make_chat):
    silent = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    chat = make_chat(silent + "{% if add_generation_prompt %}[assistant]{% endif %}")
    talks = [Conversation(((S, "Brief."), (U, "a"), (A, "b")), f"c{n}", "") for n in range(50)]
    with pytest.warns(UserWarning, match="takes no system turn.* in 50 of 50 conversations"):
        found = tokenised(chat, talks, "data", 2)
    assert {chat.tokenizer.decode(sample.ids) for sample in found.samples} == {
        "[user]Brief.\n\na<|im_end|>[assistant]b<|im_end|>"
    }


def test_a_damaged_result_is_named(make_chat, cache):
    tokenised(make_chat(), told(3), "data", 1)
    (folder,) = cache.iterdir()
    next(folder.glob("*.arrow")).write_bytes(b"torn")
    with pytest.raises(UserError, match=rf"^cache={folder}.*delete it: the tokens are made again"):
        tokenised(make_chat(), told(3), "data", 1)


def test_a_cache_that_cannot_be_written_is_named(make_chat, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set SPECWAVE_CACHE to a folder with room"):
        tokenised(make_chat(), told(3), "data", 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc; elsewhere workers are not told to go")
def test_a_killed_run_leaves_nothing_that_is_taken_for_whole(tmp_path, cache):
    environment = os.environ | {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, str(KILLED), "tokens", str(tmp_path / "cache")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    attempts = done.stdout.splitlines()
    assert [line.rpartition(": ")[2] for line in attempts[::2]] == ["killed"] * 3 + ["exit 0"], done
    assert set(attempts[1::2]) == {"results [], processes 0"}, done  # workers and their manager went too
    spec = importlib.util.spec_from_file_location("killed_data", KILLED)
    killed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(killed)
    found = tokenised(killed.chat(), killed.many(), "data", 1)
    assert "re-used" in found.note
    assert list(found.samples) == given(killed.chat(), killed.many(), "data", 10**6)
