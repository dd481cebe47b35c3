"""Whole conversations with the target's own answers: each turn is answered after its own answers to the turns before.

Written as a file of messages, one finished conversation on a line. Batches are fixed by the list of conversations, and
the lines of a batch are appended in one write: a killed run goes on at the batch it was in and ends with the same file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specwave.artifacts import UserError, append_lines, drop_torn_line, read_jsonl, reading
from specwave.data.conversations import Conversation, Speaker
from specwave.data.engines import Engine, Regenerate
from specwave.data.locks import wait_for
from specwave.data.regenerate import batches
from specwave.data.render import template_of
from specwave.data.tokenised import digest
from specwave.target.load import Identity


@dataclass
class Counts:
    """What became of the conversations."""

    conversations: int = 0  # written
    answers: int = 0
    unfinished: int = 0  # answers that ended at max_new_tokens
    dropped: int = 0  # conversations without an answer: no room for one, nothing said, a thought cut at max_new_tokens


def answers_key(
    identity: Identity, chat: Speaker, conversations: Sequence[Conversation], settings: Regenerate, max_length: int
) -> str:
    """A hash of all that decides the answers. dtype and batch size count: in bf16 they can turn a near-tie."""
    if not settings.temperature:
        settings = replace(settings, seed=0)  # greedy answers are those of any seed
    facts = [identity.fingerprint, str(identity.dtype), identity.device.type, asdict(settings), max_length]
    facts += [digest(template_of(chat, conversations), conversations)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def write_dialogues(
    chat: Speaker,
    make_engine: Callable[[], Engine],
    conversations: Sequence[Conversation],
    settings: Regenerate,
    path: Path,
    max_length: int,
    label: str = "answers",
) -> Counts:
    """Answers every user turn of the conversations into `path`, going on where it ends.

    A conversation ends before the first turn whose prompt leaves no room for `max_new_tokens` in `max_length` tokens,
    and at an answer without text or in the middle of whose thought (`<think>`) the limit falls.

    Args:
        make_engine: called when there is something to answer.

    Raises:
        UserError: a damaged file; no conversation gets an answer.
    """
    order = batches([sum(len(text) for _, text in one.messages) for one in conversations], settings.batch_size)
    turns = [_user_turns(one) for one in conversations]
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(path, "a", encoding="utf-8") as stream,
        tqdm(total=sum(turns), desc=label, unit="turn", disable=None) as bar,
    ):
        wait_for(stream)
        drop_torn_line(path)
        done = _written(path)
        todo = _todo(order, [one.id in done for one in conversations])
        bar.update(sum(turns) - sum(turns[row] for batch in todo for row in batch))
        talker = _Talker(chat, make_engine(), settings, max_length, conversations) if todo else None
        for batch in todo:
            assert talker is not None
            rows = talker.answered(batch)
            append_lines(stream, [row for row in rows if row["id"] not in done])
            done |= {row["id"]: row for row in rows}
            bar.update(sum(turns[row] for row in batch))
    if not done:
        rule = (
            f"none of {len(conversations)} conversations gets an answer of so many tokens within {max_length}: lower it"
        )
        raise UserError("regenerate.max_new_tokens", settings.max_new_tokens, rule)
    answers = sum(_roles(row).count("assistant") for row in done.values())
    unfinished = sum(row["unfinished"] for row in done.values())
    return Counts(len(done), answers, unfinished, len(conversations) - len(done))


def _written(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists() or path.stat().st_size == 0:
        return {}
    with reading("resume", path, "delete it: the answers are made again"):
        found = {str(row["id"]): row for _, row in read_jsonl(path, "resume")}
        for row in found.values():
            _roles(row), int(row["unfinished"])
        return found


def _todo(order: Sequence[Sequence[int]], done: Sequence[bool]) -> Sequence[Sequence[int]]:
    """The batches from the last one that has a line: all before are complete, and that one may be torn."""
    last = max((number for number, batch in enumerate(order) if any(done[row] for row in batch)), default=0)
    return order[last + 1 :] if all(done[row] for row in order[last]) else order[last:]


def _roles(row: dict[str, Any]) -> list[str]:
    return [message["role"] for message in row["messages"]]


def _user_turns(conversation: Conversation) -> int:
    return sum(role == "user" for role, _ in conversation.messages)


class _Talk:
    """A conversation on its way: `told` so far, own answers included, and what the user will say."""

    def __init__(self, source: Conversation):
        self.source, self.unfinished = source, 0
        self.told = [message for message in source.messages if message[0] == "system"]
        self.waiting = [text for role, text in source.messages if role == "user"]

    def asking(self) -> Conversation:
        """Up to the next question."""
        return Conversation((*self.told, ("user", self.waiting[0])), self.source.id, "")

    def take(self, answer: str, whole: bool) -> bool:
        """Notes an answer; whether another one is due.

        A thought that the limit cut is none: a template would put a second one around it.
        """
        if not answer.strip() or ("<think>" in answer and "</think>" not in answer):
            return False
        self.told += [("user", self.waiting.pop(0)), ("assistant", answer)]
        self.unfinished += not whole
        return bool(self.waiting)

    def line(self) -> dict[str, Any]:
        messages = [{"role": role, "content": text} for role, text in self.told]
        return {
            "id": self.source.id,
            "category": self.source.category,
            "messages": messages,
            "unfinished": self.unfinished,
        }


class _Talker:
    def __init__(
        self,
        chat: Speaker,
        engine: Engine,
        settings: Regenerate,
        max_length: int,
        conversations: Sequence[Conversation],
    ):
        self.engine, self.settings, self.max_length, self.conversations = engine, settings, max_length, conversations
        self.template = template_of(chat, conversations)

    def answered(self, batch: Sequence[int]) -> list[dict[str, Any]]:
        """The lines of the conversations of these numbers, those without any answer left out."""
        talks = {row: _Talk(self.conversations[row]) for row in batch}
        live, turn = list(batch), 0
        while live:
            prompts = {row: self.prompt(talks[row]) for row in live}
            asked = [row for row in live if prompts[row]]
            noise = [row + turn * len(self.conversations) for row in asked]  # every answer draws by itself
            found = self.engine.answers([prompts[row] for row in asked], noise) if asked else []
            live = [row for row, tokens in zip(asked, found, strict=True) if talks[row].take(*self.text(tokens))]
            turn += 1
        return [talk.line() for talk in talks.values() if talk.told and talk.told[-1][0] == "assistant"]

    def prompt(self, talk: _Talk) -> list[int]:
        """Token ids of the conversation up to the next answer; [] where it leaves no room for one."""
        asking = talk.asking()
        ids = self.template.ids(asking, self.template.messages(asking, last="user"))
        return ids if len(ids) + self.settings.max_new_tokens <= self.max_length else []

    def text(self, tokens: list[int]) -> tuple[str, bool]:
        """An answer's text, and whether the target ended it."""
        whole = bool(tokens) and tokens[-1] in self.template.target.eos_ids
        text = self.template.target.tokenizer.decode(tokens[:-1] if whole else tokens, skip_special_tokens=True)
        return text if whole else text.rstrip("\ufffd"), whole  # the limit may fall within a character
