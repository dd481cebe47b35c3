"""`answers.jsonl`: Spec-Bench's answer line, one per finished question, on disk when the question is finished.

    {"question_id", "category", "answer_id", "model_id",
     "choices": [{"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}], "tstamp",
     "specwave": {"tokens", "prefill_seconds", "draft_seconds", "verify_seconds", "warmup_seconds",
                  "peak_memory_bytes"}}

Lists have an entry per turn, but `accept_lengths` is flat over the turns. `specwave` is ours, kept apart. A question
that failed has no choices and `"specwave": {"error", "traceback"}`.
"""

from __future__ import annotations

import math
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specwave.artifacts import UserError, append_line, drop_torn_line, read_json, read_jsonl, write_json, write_text
from specwave.benchmark.metrics import failed
from specwave.benchmark.questions import Question


@dataclass
class Turn:
    """One answered turn: text, its tokens, the tokens each round committed, and where the seconds went."""

    text: str
    tokens: list[int]
    accept_lengths: list[int]
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    warmup_seconds: float = 0.0


def finished_row(question: Question, model_id: str, turns: Sequence[Turn], peak_memory: int | None) -> dict[str, Any]:
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [len(turn.accept_lengths) for turn in turns],
        "new_tokens": [len(turn.tokens) for turn in turns],
        "wall_time": [turn.seconds for turn in turns],
        "accept_lengths": [length for turn in turns for length in turn.accept_lengths],
    }
    own = {
        "tokens": [turn.tokens for turn in turns],
        "prefill_seconds": [turn.prefill_seconds for turn in turns],
        "draft_seconds": [turn.draft_seconds for turn in turns],
        "verify_seconds": [turn.verify_seconds for turn in turns],
        "warmup_seconds": [turn.warmup_seconds for turn in turns],
        "peak_memory_bytes": peak_memory,
    }
    return _row(question, model_id, [choice], own)


def failed_row(question: Question, model_id: str, error: BaseException) -> dict[str, Any]:
    where = "".join(traceback.format_exception(error))
    return _row(question, model_id, [], {"error": f"{type(error).__name__}: {error}", "traceback": where})


def _row(question: Question, model_id: str, choices: list[dict[str, Any]], own: dict[str, Any]) -> dict[str, Any]:
    return {
        "question_id": question.id,
        "category": question.category,
        "answer_id": uuid.uuid4().hex,
        "model_id": model_id,
        "choices": choices,
        "tstamp": time.time(),
        "specwave": own,
    }


@dataclass
class AnswerFile:
    """The answers of one method in one folder, with the settings they were made under (`settings.json`).

    Going on in a folder keeps every finished question, drops a line that a killed run left torn, and drops failed rows:
    those questions are tried again.
    """

    folder: Path
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "answers.jsonl"
        drop_torn_line(path)
        if path.exists() and path.stat().st_size:
            self._take_up(path)
        write_json(self.folder / "settings.json", self.settings)
        self._stream = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run lasts

    def _take_up(self, path: Path) -> None:
        same = differences(read_json(self.folder / "settings.json", "resume"), self.settings)
        if same:
            raise UserError("resume", path, f"these answers were made with other settings: {'; '.join(same)}")
        rows = read_answers(path, "resume")
        self.rows = [row for row in rows if not failed(row)]
        if len(self.rows) < len(rows):
            kept = [line for line, row in zip(_lines(path), rows, strict=True) if not failed(row)]
            write_text(path, "".join(line + "\n" for line in kept))

    @property
    def done(self) -> set[Any]:
        return {row["question_id"] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """On disk when this returns."""
        append_line(self._stream, row)
        self.rows.append(row)

    def close(self) -> None:
        self._stream.close()


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def read_answers(path: Path | str, key: str) -> list[dict[str, Any]]:
    """The rows of an answers file.

    Raises:
        UserError: for a line that is no answer, or a question answered twice.
    """
    rows: list[dict[str, Any]] = []
    seen: dict[Any, int] = {}
    for number, row in read_jsonl(path, key):
        problem = _problem(row)
        if problem is None and seen.setdefault(str(row["question_id"]), number) != number:
            problem = f"question {row['question_id']!r} was answered in line {seen[str(row['question_id'])]} already"
        if problem is not None:
            raise UserError(key, f"{path}:{number}", problem)
        rows.append(row)
    return rows


def _problem(row: dict[str, Any]) -> str | None:
    missing = [name for name in ("question_id", "category", "choices") if name not in row]
    if missing:
        return f"not an answer: it lacks {', '.join(missing)}"
    if isinstance(row["question_id"], bool) or not isinstance(row["question_id"], int | str):
        return "question_id must be a whole number or a text"
    if not isinstance(row["choices"], list) or not isinstance(row.get("specwave", {}), dict):
        return "choices must be a list, and specwave an object"
    if not row["choices"] and not failed(row):
        return "it holds no choice and no error"
    for choice in row["choices"]:
        for name in ("new_tokens", "wall_time", "accept_lengths"):
            values = choice.get(name) if isinstance(choice, dict) else None
            if not isinstance(values, list) or not all(map(_is_count, values)):
                return f"{name} must be a list of numbers that are not negative"
    return None if failed(row) else _own_problem(row)


def _own_problem(row: dict[str, Any]) -> str | None:
    """What specwave needs of a finished row beside Spec-Bench's fields, to compare outputs token by token."""
    own, texts = row.get("specwave", {}), row["choices"][0].get("turns")
    peak, tokens = own.get("peak_memory_bytes"), own.get("tokens")
    if (
        not isinstance(row["category"], str)
        or not isinstance(texts, list)
        or not all(isinstance(t, str) for t in texts)
    ):
        return "category must be a text and turns a list of texts"
    if not isinstance(tokens, list) or len(tokens) != len(texts) or not all(isinstance(turn, list) for turn in tokens):
        return "specwave.tokens must hold a list of token ids for every turn"
    if peak is not None and not _is_count(peak):
        return "specwave.peak_memory_bytes must be a number"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def differences(earlier: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two settings: "max_new_tokens (64, now 32)"; nested keys are joined with dots."""
    found = []
    for name in dict.fromkeys([*earlier, *now]):
        before, after = earlier.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name} ({before}, now {after})")
    return found
