"""Conversations as samples by several processes, kept in the user's cache: the same ones are never tokenised twice.

The result is a folder of Arrow files that are mapped, not read: it may be larger than memory. It is named by all
that decides its content (conversations, tokenizer, chat template) and written beside its place and then renamed, so a
folder of that name is whole. The number of processes changes nothing in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from specwave.artifacts import UserError, cache_dir, filling_cache, reading
from specwave.data.conversations import Chat, Conversation, Sample, Samples, Speaker
from specwave.data.locks import wait_for
from specwave.data.render import Template, masked, template_of

_SCHEME = 1  # raise it when the samples of the same conversations change
_BATCH = 32  # conversations that a process takes at once
_SHARE = 500  # conversations that are worth a process
_COLUMNS = ("id", "category", "roles", "texts")
_OLD = 86_400.0  # seconds after which a folder that is no longer written to is a killed run's

_pooling = False  # whether processes that are forked now belong to a pool of ours


class Stored(Samples):
    """Samples in a table on disk, read when they are asked for."""

    def __init__(self, table: Any):
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def at(self, place: int) -> Sample:
        row = self.table[place]
        return Sample(row["ids"], row["answer"], row["id"], row["category"])

    def __iter__(self) -> Iterator[Sample]:
        for rows in self.table.iter(256):  # a table hands out many rows as fast as one
            for values in zip(rows["ids"], rows["answer"], rows["id"], rows["category"], strict=True):
                yield Sample(*values)


@dataclass
class Tokenised:
    """The samples, how many conversations became several, and a line on what was done for them."""

    samples: Stored
    rewritten: int
    note: str


def tokenised(
    target: Speaker, conversations: Sequence[Conversation], key: str, workers: int | None = None
) -> Tokenised:
    """The conversations up to their last answer with a mask over all answers, in order, uncut.

    Where the template writes earlier answers anew, each answer is a sample of its own (see `render.masked`).

    Args:
        key: the config key that named the conversations, for messages.
        workers: processes; None is one per core, as far as there is work for them.

    Raises:
        UserError: as `render.masked`; a cache that cannot be written or read.
    """
    from datasets import load_from_disk  # seconds to import

    template = template_of(target, conversations)
    template = Template(Chat.of(target), template.folds)
    folder = cache_dir() / "tokens" / f"{target.name}-{digest(template, conversations)}"
    processes = workers or max(1, min(os.cpu_count() or 1, len(conversations) // _SHARE))
    note = f"tokens of {len(conversations)} conversations: "
    start = time.perf_counter()
    if not folder.is_dir() and _make_alone(folder, template, conversations, key, processes):
        took = f"{processes} process{'es' * (processes > 1)} in {time.perf_counter() - start:.1f} s"
        note += f"made by {took}, kept in {folder}"
    else:
        note += f"re-used from the cache, {folder}"
    with reading("cache", folder, "delete it: the tokens are made again"):
        table = load_from_disk(str(folder))
        return Tokenised(Stored(table), sum(table["anew"]), note)


def digest(template: Template, conversations: Iterable[Conversation]) -> str:
    """A hash of all that decides the samples."""
    chat = template.target
    core = getattr(chat.tokenizer, "backend_tokenizer", None)
    facts = [_SCHEME, chat.tokenizer.chat_template, chat.config.date_string, list(chat.eos_ids), template.folds]
    facts.append({name: str(token) for name, token in chat.tokenizer.special_tokens_map.items()})  # templates use them
    found = hashlib.sha256(json.dumps(facts).encode())
    found.update(b"" if core is None else core.to_str().encode())
    for one in conversations:
        found.update(json.dumps(astuple(one), ensure_ascii=False).encode())
    return found.hexdigest()[:24]


# ---------------------------------------------------------------- making them


class _RefusedError(Exception):
    """A UserError on its way out of a worker: its one argument, JSON, can be sent between processes."""


def _rows(batch: dict[str, list[Any]], template: Template, key: str) -> dict[str, list[Any]]:
    """What a worker does with a batch of conversations; `anew` is true once in each that became several samples."""
    rows: dict[str, list[Any]] = {name: [] for name in ("id", "category", "ids", "answer", "anew")}
    for name, category, roles, texts in zip(*(batch[column] for column in _COLUMNS), strict=True):
        conversation = Conversation(tuple(zip(roles, texts, strict=True)), name, category)
        try:
            samples, anew = masked(template, conversation, key, separate=True)
        except UserError as error:
            raise _RefusedError(json.dumps([error.key, str(error.value), error.remedy])) from None
        for place, sample in enumerate(samples):
            for column, value in asdict(sample).items():
                rows[column].append(value)
            rows["anew"].append(anew and place == 0)
    return rows


def _make_alone(
    folder: Path, template: Template, conversations: Sequence[Conversation], key: str, processes: int
) -> bool:
    """Makes the folder unless another process does so meanwhile; whether it was this one."""
    with filling_cache():
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock")
        with open(lock, "w") as stream:
            wait_for(stream)
            if folder.is_dir():
                return False
            _sweep(folder.parent)
            _make(folder, template, conversations, key, processes)
            lock.unlink(missing_ok=True)
    return True


def _make(folder: Path, template: Template, conversations: Sequence[Conversation], key: str, processes: int) -> None:
    from datasets import Dataset, Features, List, Value

    told = {
        "id": [one.id for one in conversations],
        "category": [one.category for one in conversations],
        "roles": [[role for role, _ in one.messages] for one in conversations],
        "texts": [[text for _, text in one.messages] for one in conversations],
    }
    text, flag = Value("string"), Value("bool")
    made = {"id": text, "category": text, "ids": List(Value("int32")), "answer": List(flag), "anew": flag}
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part") as part:
        try:
            with _workers_that_end_with_us():
                table = Dataset.from_dict(told).map(
                    _rows,
                    batched=True,
                    batch_size=_BATCH,
                    num_proc=processes if processes > 1 else None,
                    fn_kwargs={"template": template, "key": key},
                    remove_columns=list(told),
                    features=Features(made),
                    cache_file_name=os.path.join(part, "parts.arrow"),
                    load_from_cache_file=False,
                    new_fingerprint=folder.name[-16:],  # or datasets would hash the tokenizer in its own way
                    desc="tokenising",
                )
        except _RefusedError as refused:
            raise UserError(*json.loads(str(refused))) from None
        whole = Path(part) / "whole"
        table.save_to_disk(str(whole))
        try:
            whole.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first: its folder is the same
                raise


def _sweep(folder: Path) -> None:
    """Removes what killed runs left here."""
    for left in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _OLD:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _workers_that_end_with_us() -> Iterator[None]:
    """The workers of a pool and its manager wait for ever for a parent that was killed: on Linux they are told to go.

    Must be used in the thread that the processes are forked from.
    """
    global _pooling
    _register()
    _pooling = True
    try:
        yield
    finally:
        _pooling = False


@functools.cache
def _register() -> None:
    os.register_at_fork(after_in_child=_follow)


def _follow() -> None:
    if _pooling and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
