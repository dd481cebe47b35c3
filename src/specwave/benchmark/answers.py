"""`answers.jsonl`: Spec-Bench's answer line, one per finished question, on disk when the question is finished.

    {"question_id", "category", "answer_id", "model_id",
     "choices": [{"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}], "tstamp",
     "specwave": {"tokens", "draft_levels", "prefill_seconds", "draft_seconds", "verify_seconds", "accept_seconds",
                  "warmup_seconds", "sources", "peak_memory_bytes", "machine", "repetitions"}}

Lists have an entry per turn, but `accept_lengths` and `draft_levels` are flat over the turns, an entry per round. A
question that was answered n times has n choices. `specwave` is ours, kept apart; its lists are those of the first
choice, `repetitions` holds those of the others. A question that failed has no choices and `"specwave": {"error",
"traceback"}`. `sources` is there where a method has several sources of drafts. `machine` says on whose clock the
seconds are (`settings.machine_of`).
"""

from __future__ import annotations

import time
import traceback
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specwave.artifacts import (
    UserError,
    append_line,
    drop_torn_line,
    filled,
    is_whole,
    read_json,
    read_jsonl,
    write_json,
    write_text,
)
from specwave.benchmark.measures import TALLIED
from specwave.benchmark.questions import Question
from specwave.benchmark.rows import failed, repetitions


@dataclass
class Turn:
    """One answered turn: text, its tokens, the tokens each round committed, and where the seconds went.

    `verify_seconds` holds `accept_seconds`; `draft_levels`: how deep each round's draft went, None where unknown;
    `sources`: the account of a method with several sources of drafts (`copying.ledger`).
    """

    text: str
    tokens: list[int]
    accept_lengths: list[int]
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    warmup_seconds: float = 0.0
    accept_seconds: float = 0.0
    draft_levels: list[int] | None = None
    sources: dict[str, Any] | None = None


LARGEST = 1e15  # no number of an answer is as large; sums and quotients of smaller ones are finite
SECONDS = ("prefill_seconds", "draft_seconds", "verify_seconds", "accept_seconds", "warmup_seconds")


def finished_row(
    question: Question,
    model_id: str,
    answered: Sequence[Sequence[Turn]],
    peak_memory: int | None,
    machine: str | None = None,
) -> dict[str, Any]:
    """The line of a question that was answered once or several times."""
    choices = [_choice(index, turns) for index, turns in enumerate(answered)]
    first, *others = map(_own, answered)
    more = {"repetitions": others} if others else {}
    return _row(question, model_id, choices, {**first, "peak_memory_bytes": peak_memory, "machine": machine, **more})


def _choice(index: int, turns: Sequence[Turn]) -> dict[str, Any]:
    return {
        "index": index,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [len(turn.accept_lengths) for turn in turns],
        "new_tokens": [len(turn.tokens) for turn in turns],
        "wall_time": [turn.seconds for turn in turns],
        "accept_lengths": [length for turn in turns for length in turn.accept_lengths],
    }


def _own(turns: Sequence[Turn]) -> dict[str, Any]:
    own: dict[str, Any] = {"tokens": [turn.tokens for turn in turns]}
    if all(turn.draft_levels is not None for turn in turns):
        own["draft_levels"] = [levels for turn in turns for levels in turn.draft_levels or []]
    if any(turn.sources for turn in turns):
        own["sources"] = [turn.sources for turn in turns]
    return own | {name: [getattr(turn, name) for turn in turns] for name in SECONDS}


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
    those questions are tried again. Of a run on several devices, each has a `part`, 0 … n−1, and writes to
    `answers.<part>.jsonl` until `merge`; part 0 takes up what parts a killed run has left, before the others begin.

    `defaults`: of settings that answers made before there were such keys do not name.
    """

    folder: Path
    settings: dict[str, Any]
    part: int | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "answers.jsonl"
        if not self.part:
            drop_torn_line(path)
        if any(place.exists() and place.stat().st_size for place in (path, *parts(self.folder))):
            earlier = filled(read_json(self.folder / "settings.json", "resume"), self.defaults)
            if other := differences(earlier, self.settings):
                raise UserError("resume", path, f"these answers were made with other settings: {'; '.join(other)}")
            self._take_up(path)
        if not self.part:
            write_json(self.folder / "settings.json", self.settings)
        self._open()

    def _open(self) -> None:
        name = "answers.jsonl" if self.part is None else f"answers.{self.part}.jsonl"
        self._stream = open(self.folder / name, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run lasts

    def _take_up(self, path: Path) -> None:
        known, left = _read_lines(path), [] if self.part else parts(self.folder)
        found = {name: entry for name, entry in known.items() if not failed(entry[1])}
        for place in left:
            drop_torn_line(place)
            for name, entry in _read_lines(place).items():
                if not failed(entry[1]):
                    found.setdefault(name, entry)
        if not self.part and found != known:
            write_text(path, _joined(found))
        for place in left:
            place.unlink()
        self.rows = [row for _, row in found.values()]

    @property
    def done(self) -> set[Any]:
        return {row["question_id"] for row in self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """On disk when this returns."""
        append_line(self._stream, row)
        self.rows.append(row)

    def forget(self, names: Collection[Any]) -> None:
        """Drops the answers to these questions, which then wait again. Only before anything is added, by any part."""
        self.rows = [row for row in self.rows if row["question_id"] not in names]
        path, kept = self.folder / "answers.jsonl", self.done
        known = _read_lines(path)
        write_text(path, _joined({name: entry for name, entry in known.items() if entry[1]["question_id"] in kept}))
        self._stream.close()
        self._open()

    def close(self) -> None:
        self._stream.close()

    def merge(self, order: Sequence[Any]) -> None:
        """Part 0, when all are done: one file in the order of these question ids, and its rows; the parts go."""
        path, found = self.folder / "answers.jsonl", dict[str, tuple[str, dict[str, Any]]]()
        for place in (path, *parts(self.folder)):
            found |= _read_lines(place)
        places = {str(name): place for place, name in enumerate(order)}
        whole = {name: found[name] for name in sorted(found, key=lambda name: places.get(name, len(places)))}
        write_text(path, _joined(whole))
        for place in parts(self.folder):
            place.unlink()
        self.rows = [row for _, row in whole.values()]


def parts(folder: Path) -> list[Path]:
    """The answers files of devices that are not merged yet."""
    return sorted(folder.glob("answers.*.jsonl"))


def _read_lines(path: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Question id → its line and row; {} for no file or an empty one."""
    if not path.exists() or not path.stat().st_size:
        return {}
    rows = read_answers(path, "resume")
    return {str(row["question_id"]): (line, row) for line, row in zip(_lines(path), rows, strict=True)}


def _joined(entries: dict[str, tuple[str, dict[str, Any]]]) -> str:
    return "".join(line + "\n" for line, _ in entries.values())


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def read_answers(path: Path | str, key: str, own: bool = True) -> list[dict[str, Any]]:
    """The rows of an answers file.

    Args:
        own: it must be specwave's; False: Spec-Bench's fields will do.

    Raises:
        UserError: for a line that is no answer, or a question answered twice.
    """
    rows: list[dict[str, Any]] = []
    seen: dict[Any, int] = {}
    for number, row in read_jsonl(path, key):
        problem = _problem(row) or (_own_problem(row) if (own or row.get("specwave")) and not failed(row) else None)
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
    if not isinstance(row["category"], str):
        return "category must be a text"
    for name in ("category", "model_id"):
        if not is_whole(str(row.get(name))):
            return f"{name} holds half of a surrogate pair: mend it"
    for choice in row["choices"]:
        if not isinstance(choice, dict):
            return "every choice must be an object"
        for name in ("new_tokens", "wall_time", "accept_lengths"):
            values = choice.get(name)
            if not isinstance(values, list) or not all(map(_is_count, values)):
                return f"{name} must be a list of numbers that are not negative"
        steps = choice.get("decoding_steps", choice["new_tokens"])
        if not isinstance(steps, list) or not all(map(_is_count, steps)):
            return "decoding_steps must be a list of numbers that are not negative"
        if not len(choice["new_tokens"]) == len(choice["wall_time"]) == len(steps):
            return "new_tokens, wall_time and decoding_steps must have a number for every turn"
        if not all(length == int(length) for length in choice["new_tokens"] + choice["accept_lengths"]):
            return "new_tokens and accept_lengths must be whole numbers"
    return None


def _own_problem(row: dict[str, Any]) -> str | None:
    """What specwave needs of a finished row beside Spec-Bench's fields: to compare outputs token by token, and to tell
    where the time went."""
    own = row.get("specwave", {})
    peak, others = own.get("peak_memory_bytes"), own.get("repetitions", [])
    if peak is not None and not _is_count(peak):
        return "specwave.peak_memory_bytes must be a number"
    if not isinstance(own.get("machine") or "", str):
        return "specwave.machine must be a text"
    if not isinstance(others, list) or not all(isinstance(other, dict) for other in others):
        return "specwave.repetitions must be a list of objects"
    if len(others) != len(row["choices"]) - 1:
        return f"specwave tells of {len(others) + 1} repetitions, choices of {len(row['choices'])}"
    problems = (_noted_problem(choice, noted) for choice, noted in repetitions(row))
    return next((problem for problem in problems if problem is not None), None)


def _noted_problem(choice: dict[str, Any], noted: dict[str, Any]) -> str | None:
    texts, tokens, levels = choice.get("turns"), noted.get("tokens"), noted.get("draft_levels")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return "turns must be a list of texts"
    if len(texts) != len(choice["new_tokens"]):
        return "new_tokens must have a number for every turn"
    if not isinstance(tokens, list) or len(tokens) != len(texts) or not all(isinstance(turn, list) for turn in tokens):
        return "specwave.tokens must hold a list of token ids for every turn"
    if not all(isinstance(token, int) and not isinstance(token, bool) for turn in tokens for token in turn):
        return "specwave.tokens must hold whole numbers"
    if [len(turn) for turn in tokens] != choice["new_tokens"]:
        return "new_tokens must be the numbers of specwave.tokens"
    if sum(choice["accept_lengths"]) != sum(choice["new_tokens"]):
        return "accept_lengths must add up to new_tokens"
    if levels is not None and (
        not isinstance(levels, list)
        or not all(isinstance(level, int) and level >= 0 for level in levels)
        or len(levels) != len(choice["accept_lengths"])
    ):
        return "specwave.draft_levels must hold a number for every round"
    for name in SECONDS:
        values = noted.get(name, [0.0] * len(texts))
        if not isinstance(values, list) or len(values) != len(texts) or not all(map(_is_count, values)):
            return f"specwave.{name} must have a number of seconds for every turn"
    return _sources_problem(noted["sources"], len(texts)) if "sources" in noted else None


def _sources_problem(sources: Any, turns: int) -> str | None:
    if not isinstance(sources, list) or len(sources) != turns:
        return "specwave.sources must hold an account for every turn"
    for account in sources:
        tallies = list(account.values()) if isinstance(account, dict) else [None]
        if not all(
            isinstance(tally, dict) and all(_is_count(tally.get(name)) for name in TALLIED) for tally in tallies
        ):
            return f"a source in specwave.sources must have numbers for {', '.join(TALLIED)}"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST


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
