"""`train.py task=regenerate`: the target answers every user turn of a data set, into answers.jsonl of the run's folder.

check → read → answer, batch by batch → a file that `data=jsonl data.path=<it>` trains on.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specwave.artifacts import UserError, read_json, write_json
from specwave.data.dialogues import answers_key, write_dialogues
from specwave.data.engines import Engine, LoopEngine, VllmEngine, read_chat

if TYPE_CHECKING:
    from specwave.app.run import Run
    from specwave.app.train import TrainConfig

ANSWERS = "answers.jsonl"
GROWING = "answers.part.jsonl"  # its name until the last answer is there


def regenerate(config: TrainConfig, run: Run) -> None:
    """Answers into the run's folder; `run.resume` goes on where a killed run stopped.

    Raises:
        UserError: on resuming, other conversations, another model or damaged files.
    """
    settings: Any = config.regenerate
    chat = read_chat(config.model)
    conversations = config.data.conversations()
    longest = min(config.data.max_length, chat.max_length)
    path, growing, note = run.folder / ANSWERS, run.folder / GROWING, run.folder / "regenerate.json"
    key = answers_key(config.model.identify(), chat, conversations, settings, longest)
    if note.exists() and read_json(note, "resume").get("key") != key:
        remedy = "the conversations, the model or the machine are not those the run began with: choose another folder"
        raise UserError("resume", path, remedy)
    write_json(note, {"key": key})
    if path.exists():
        os.replace(path, growing)  # looked through again

    def engine() -> Engine:
        if settings.engine == "vllm":
            return VllmEngine(config.model, chat, settings)
        return LoopEngine(config.model.load(), settings)

    turns = sum(role == "user" for one in conversations for role, _ in one.messages)
    run.say(f"{chat.name} answers {turns} turns of {len(conversations)} conversations by {settings.engine}")
    counts = write_dialogues(chat, engine, conversations, settings, growing, longest)
    os.replace(growing, path)
    run.note(**asdict(counts))
    run.say(
        f"{counts.conversations} conversations, {counts.answers} answers, {counts.unfinished} of them cut at "
        f"{settings.max_new_tokens} tokens; {counts.dropped} conversations got no answer (no room for one, no text, or "
        "its thought was cut)"
    )
    run.say(f"written: {path}")
    run.say(f"train on it: python train.py data=jsonl data.path={path}")
