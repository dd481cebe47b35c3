"""Whole conversations with the target's own answers: turn after turn, in batches, killed and resumed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specwave.artifacts import UserError
from specwave.data.conversations import Conversation, prompt_ids
from specwave.data.dialogues import answers_key, write_dialogues
from specwave.data.engines import LoopEngine, Regenerate, VllmEngine, check_engine, read_chat
from specwave.data.sources import file_conversations
from specwave.decoding import generate

U, A, S = "user", "assistant", "system"
KILLED = Path(__file__).parent / "killed.py"


class Scripted:
    """Answers with the next of its texts, and keeps what it was asked; None stands for an answer that is cut."""

    def __init__(self, chat, *texts):
        self.chat, self.texts, self.asked, self.keys = chat, list(texts), [], []

    def answers(self, prompts, keys):
        self.asked.append([self.chat.tokenizer.decode(prompt) for prompt in prompts])
        self.keys.append(list(keys))
        found = []
        for _ in prompts:
            text = self.texts.pop(0)
            ids = self.chat.tokenizer(text.rstrip("…"), add_special_tokens=False)["input_ids"]
            found.append(ids if text.endswith("…") else [*ids, *self.chat.eos_ids])
        return found


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(row):
    return [(message["role"], message["content"]) for message in row["messages"]]


def test_every_turn_follows_the_targets_own_answers(make_chat, tmp_path):
    chat, path = make_chat(), tmp_path / "deep" / "answers.jsonl"
    talks = [
        Conversation(((S, "Rules"), (U, "q1"), (A, "given"), (U, "q2"), (A, "given")), "two", "chat"),
        Conversation(((U, "q3 is a longer question than these"),), "one", ""),
    ]
    engine = Scripted(chat, "own 1", "own 3…", "own 2")
    counts = write_dialogues(chat, lambda: engine, talks, Regenerate(max_new_tokens=9), path, 4096)
    assert (counts.conversations, counts.answers, counts.unfinished, counts.dropped) == (2, 3, 1, 0)
    two, one = lines(path)
    assert (two["id"], two["category"], two["unfinished"], one["unfinished"]) == ("two", "chat", 0, 1)
    assert said(two) == [(S, "Rules"), (U, "q1"), (A, "own 1"), (U, "q2"), (A, "own 2")]
    assert said(one) == [(U, "q3 is a longer question than these"), (A, "own 3")]
    assert engine.asked[1] == [
        "<|im_start|>system\nRules<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\nown 1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert sorted(key for keys in engine.keys for key in keys) == [0, 1, 2]  # row + turn · rows
    assert [each.messages for each in file_conversations(path, "data.path")] == [
        tuple(said(two)),
        tuple(said(one)),
    ]


def test_answers_of_the_loop_are_generates(families, tmp_path):
    """Float32 and greedy: a batch gives what each prompt gives alone."""
    target, settings = families["llama"], Regenerate(max_new_tokens=6, batch_size=2)
    talks = [Conversation(((U, f"question {n}"),), f"t{n}", "") for n in range(3)]
    path = tmp_path / "answers.jsonl"
    write_dialogues(target, lambda: LoopEngine(target, settings), talks, settings, path, 512)
    for row in lines(path):
        ids = prompt_ids(target, [{"role": U, "content": dict(said(row))[U]}])
        tokens = generate(target, None, [ids], max_new_tokens=6).tokens[0]
        tokens = tokens[:-1] if tokens[-1] in target.eos_ids else tokens
        assert dict(said(row))[A] == target.tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")


def test_a_conversation_ends_where_there_is_no_room_or_nothing_is_said(make_chat, tmp_path):
    chat, path = make_chat(), tmp_path / "answers.jsonl"
    talks = [
        Conversation(((U, "a"), (A, "-"), (U, "b" * 90)), "second turn too long", ""),
        Conversation(((U, "a" * 110),), "first turn too long", ""),
        Conversation(((U, "a"),), "silent", ""),
    ]
    engine = Scripted(chat, " ", "yes")
    counts = write_dialogues(chat, lambda: engine, talks, Regenerate(max_new_tokens=20), path, 120)
    assert (counts.conversations, counts.answers, counts.dropped) == (1, 1, 2)
    assert [said(row) for row in lines(path)] == [[(U, "a"), (A, "yes")]]
    with pytest.raises(
        UserError, match=r"^regenerate\.max_new_tokens=99: none of 1 conversations gets an answer .* within 120"
    ):
        write_dialogues(chat, lambda: engine, talks[1:2], Regenerate(max_new_tokens=99), tmp_path / "b", 120)


def test_a_cut_answer_ends_with_a_whole_character(make_chat, tmp_path):
    chat, path = make_chat(), tmp_path / "answers.jsonl"

    class Cut(Scripted):
        def answers(self, prompts, keys):
            return [ids[:-1] for ids in super().answers(prompts, keys)]  # within the four bytes of 😀

    talks = [Conversation(((U, "a"),), "a", "")]
    write_dialogues(chat, lambda: Cut(chat, "Hé 😀…"), talks, Regenerate(), path, 4096)
    assert said(lines(path)[0])[-1] == (A, "Hé ")


def test_a_thought_that_the_limit_cut_is_no_answer(make_chat, tmp_path):
    chat, path = make_chat(), tmp_path / "answers.jsonl"
    talks = [Conversation(((U, "a"), (A, "-"), (U, "b")), "a", "")]
    engine = Scripted(chat, "<think>short</think>yes", "<think>and on, and…")
    counts = write_dialogues(chat, lambda: engine, talks, Regenerate(), path, 4096)
    assert said(lines(path)[0]) == [(U, "a"), (A, "<think>short</think>yes")]
    assert (counts.answers, counts.unfinished, counts.dropped) == (1, 0, 0)


def test_a_finished_file_asks_nobody(make_chat, tmp_path):
    chat, path = make_chat(), tmp_path / "answers.jsonl"
    talks = [Conversation(((U, "a"),), "a", "")]
    first = write_dialogues(chat, lambda: Scripted(chat, "b"), talks, Regenerate(), path, 4096)
    before = path.read_bytes()

    def nobody():
        raise AssertionError("an engine was made")

    assert write_dialogues(chat, nobody, talks, Regenerate(), path, 4096) == first
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["{}\n", '{"id": "a", "messages": 3, "unfinished": 0}\n', "torn\n"])
def test_a_damaged_file_is_named(make_chat, tmp_path, content):
    path = tmp_path / "answers.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=rf"^resume={path}"):
        write_dialogues(make_chat(), None, [Conversation(((U, "a"),), "a", "")], Regenerate(), path, 4096)


def test_the_key_is_of_all_that_decides_an_answer(family_folders):
    from specwave.target import ModelConfig

    def key(*, dtype="float32", family="llama", talks=(("a", "b"),), length=512, **settings):
        model = ModelConfig("tiny", str(family_folders[family]), dtype=dtype)
        told = [Conversation(((U, text),), name, "") for name, text in talks]
        return answers_key(model.identify(), read_chat(model), told, Regenerate(**settings), length)

    assert key() == key() == key(seed=1)  # greedy
    others = [key(dtype="bfloat16"), key(family="qwen3"), key(talks=(("a", "c"),)), key(length=99)]
    others += [key(temperature=1.0), key(temperature=1.0, seed=1), key(max_new_tokens=9), key(batch_size=2)]
    assert len({key(), *others}) == 9


def test_a_chat_is_read_without_weights(family_folders, families):
    from specwave.target import ModelConfig

    chat, target = read_chat(ModelConfig("tiny", str(family_folders["llama"]))), families["llama"]
    assert (chat.eos_ids, chat.max_length) == (target.eos_ids, target.max_length)
    assert prompt_ids(chat, [{"role": U, "content": "a"}]) == prompt_ids(target, [{"role": U, "content": "a"}])


# ---------------------------------------------------------------- killed and resumed


def test_a_killed_run_ends_with_the_same_file(family_folders, tmp_path):
    environment = os.environ | {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(KILLED), "dialogues", str(family_folders["llama"]), str(tmp_path / "killed.jsonl")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ends = [line.rpartition(": ")[2] for line in done.stdout.splitlines()]
    assert ends == ["killed"] * 5 + ["exit 0", "exit 0 exit 0"], done
    spec = importlib.util.spec_from_file_location("killed_data", KILLED)
    killed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(killed)
    killed.answer(str(family_folders["llama"]), tmp_path / "whole.jsonl")
    for name in ("killed", "both"):  # `both` by two processes at once
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    rows = lines(tmp_path / "whole.jsonl")
    assert sorted(row["id"] for row in rows) == sorted(f"talk-{n}" for n in range(11) if n != 4)


# ---------------------------------------------------------------- engines


def test_vllm_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not there, also where it is
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^regenerate\.engine=vllm: .*pip install 'specwave\[vllm\]'"):
        check_engine(Regenerate(engine="vllm"))
    check_engine(Regenerate())


def test_vllm_is_asked_by_token_ids(make_chat, monkeypatch, tmp_path):
    """With a stand-in of its classes: what is passed, and what is taken from its outputs."""
    from types import SimpleNamespace

    made = {}

    class LLM:
        def __init__(self, **options):
            made["model"] = options

        def generate(self, prompts, each, use_tqdm):
            made["prompts"], made["each"] = prompts, each
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(7, 2))]) for _ in prompts]

    stand_in = SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: options)
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    from specwave.target import ModelConfig

    (tmp_path / "config.json").write_text("{}")
    settings = Regenerate(engine="vllm", max_new_tokens=5, temperature=0.5, seed=1)
    engine = VllmEngine(ModelConfig("m", str(tmp_path)), make_chat(), settings)
    assert engine.answers([[1, 2], [3]], [0, 4]) == [[7, 2], [7, 2]]
    assert made["model"] == {"model": str(tmp_path), "dtype": "auto", "max_model_len": 4096, "seed": 1}
    assert made["prompts"] == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
    assert made["each"][1] == {"temperature": 0.5, "max_tokens": 5, "seed": 1_000_007, "stop_token_ids": [2]}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"max_new_tokens": 1}, "max_new_tokens"),
        ({"batch_size": 0}, "batch_size"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": -1}, "seed"),
    ],
)
def test_ranges(changes, key):
    with pytest.raises(UserError) as caught:
        Regenerate(**changes)
    assert caught.value.key == f"regenerate.{key}"
