"""The questions of a benchmark: Spec-Bench's schema, read with errors that name file and line.

A line is `{"question_id", "category", "turns"}`; other keys (Spec-Bench's `reference`) are passed over. Knows nothing
of tokens or models.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwave.artifacts import UserError, is_whole, read_jsonl
from specwave.benchmark.download import check_sha256_form, fetch

SUBTASKS: dict[
    str, tuple[str, ...]
] = {  # Spec-Bench (arXiv 2401.07851): 8 categories of MT-bench, 5 tasks of their own
    "mt_bench": ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math_reasoning": ("math_reasoning",),
    "rag": ("rag",),
}
CATEGORIES: tuple[str, ...] = tuple(category for group in SUBTASKS.values() for category in group)
# Where Spec-Bench publishes its questions, and what the file must be.
OFFICIAL_URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
OFFICIAL_SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
BUILTIN = Path(__file__).parent / "builtin" / "question.jsonl"


@dataclass(frozen=True)
class Question:
    """One question: the user's messages of a conversation, first to last."""

    id: int | str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Benchmark:
    """benchmark=builtin and benchmark=jsonl: which questions.

    `path` None is the built-in set; `sha256`, if given, must be the file's.
    """

    path: str | None = None
    sha256: str | None = None

    needs_target = False

    def __post_init__(self) -> None:
        check_sha256_form("benchmark.sha256", self.sha256)

    @property
    def file(self) -> Path:
        return BUILTIN if self.path is None else Path(self.path).expanduser()

    @property
    def name(self) -> str:
        return "builtin" if self.path is None else self.file.name

    def questions(self, limit: int | None = None, categories: Sequence[str] | None = None) -> list[Question]:
        """The chosen questions in the file's order; see `choose`."""
        if self.sha256 is not None:
            check_sha256(self.file, self.sha256)
        return choose(read_questions(self.file), limit, categories)


@dataclass(frozen=True)
class SpecBench:
    """benchmark=spec_bench: the 480 questions of Spec-Bench, from a file or fetched once from `url`.

    `sha256` is the official file's; another version's may be given, or null for a file of one's own.
    """

    path: str | None = None
    url: str | None = OFFICIAL_URL
    sha256: str | None = OFFICIAL_SHA256

    needs_target = False
    name = "spec_bench"

    def __post_init__(self) -> None:
        check_sha256_form("benchmark.sha256", self.sha256)
        if self.path is None and self.url is None:
            raise UserError("benchmark.path", "null", "name question.jsonl of Spec-Bench, or benchmark.url")
        if self.path is None and self.sha256 is None:
            raise UserError("benchmark.sha256", "null", "what is fetched from an address must have a known sha256")

    def questions(self, limit: int | None = None, categories: Sequence[str] | None = None) -> list[Question]:
        """The chosen questions in the file's order; see `choose`."""
        if self.path is not None:
            return Benchmark(self.path, self.sha256).questions(limit, categories)
        assert self.url is not None
        assert self.sha256 is not None
        return choose(read_questions(fetch(self.url, self.sha256, "benchmark")), limit, categories)


def check_sha256(path: Path, expected: str) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError("benchmark.path", path, f"the file cannot be read ({error.strerror})") from None
    if found != expected.lower():
        raise UserError("benchmark.sha256", expected, f"{path} has {found}: give that, null, or the right file")


def read_questions(path: Path | str) -> list[Question]:
    """All questions of a JSONL file.

    Raises:
        UserError: naming file and line, for a line that is not of the schema or an id that was used before.
    """
    questions: list[Question] = []
    line_of: dict[str, int] = {}
    for number, row in read_jsonl(path, "benchmark.path"):
        question = _question(row, f"{path}:{number}")
        earlier = line_of.setdefault(str(question.id), number)  # 7 and "7" would be one row in most readers
        if earlier != number:
            raise UserError(
                "benchmark.path", f"{path}:{number}", f"question_id {question.id!r} was used in line {earlier}"
            )
        questions.append(question)
    return questions


def _question(row: dict[str, Any], where: str) -> Question:
    def wrong(remedy: str) -> UserError:
        return UserError("benchmark.path", where, remedy)

    missing = [key for key in ("question_id", "category", "turns") if key not in row]
    if missing:
        raise wrong(f"the line lacks {', '.join(missing)}")
    name, category, turns = row["question_id"], row["category"], row["turns"]
    if isinstance(name, bool) or not isinstance(name, int | str) or name == "":
        raise wrong(f"question_id must be a whole number or a text, got {name!r}")
    if not isinstance(category, str) or not category.strip():
        raise wrong(f"category must be a text, got {category!r}")
    if not isinstance(turns, list) or not turns:
        raise wrong(f"turns must be a list of at least one text, got {turns!r}")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise wrong(f"every turn must be a text that is not blank, got {turn!r}")
    for text in (str(name), category, *turns):
        if not is_whole(text):
            raise wrong(f"a text holds half of a surrogate pair: {text!r}")
    return Question(name, category, tuple(turns))


def choose(
    questions: Sequence[Question], limit: int | None = None, categories: Sequence[str] | None = None
) -> list[Question]:
    """The questions of `categories` (None: all), at most `limit` of them spread evenly over the categories.

    Categories get equal counts as far as their sizes allow (a small one gives what it has, the rest share what
    remains); where a rest of r questions does not go round, categories evenly spaced in the file's order get one more.
    Within a category the first ones of the file are taken. Nothing is random, and the file's order is kept.
    """
    present = list(dict.fromkeys(question.category for question in questions))
    if categories is not None:
        if not isinstance(categories, list | tuple) or not categories:
            raise UserError("categories", categories, f"give null or a list of: {', '.join(present)}")
        for category in categories:
            if category not in present:
                raise UserError(
                    "categories", category, f"no question has this category; there are {', '.join(present)}"
                )
        present = [category for category in present if category in categories]
        questions = [question for question in questions if question.category in categories]
    if limit is None:
        return list(questions)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise UserError("limit", limit, "give null or a whole number of at least 1")
    sizes = [sum(question.category == category for question in questions) for category in present]
    left = dict(zip(present, spread(sizes, limit), strict=True))
    chosen = []
    for question in questions:
        if left[question.category]:
            left[question.category] -= 1
            chosen.append(question)
    return chosen


def spread(sizes: Sequence[int], limit: int) -> list[int]:
    """How many to take of each of C heaps so that `limit` are taken as evenly as the sizes allow."""
    taken = [0] * len(sizes)
    remaining = min(limit, sum(sizes))
    while remaining:
        open_heaps = [heap for heap, size in enumerate(sizes) if taken[heap] < size]
        if remaining < len(open_heaps):
            open_heaps = [open_heaps[i * len(open_heaps) // remaining] for i in range(remaining)]
        for heap in open_heaps:
            taken[heap] += 1
        remaining -= len(open_heaps)
    return taken


def fingerprint(questions: Sequence[Question]) -> str:
    """A hash of what is asked, in order: two runs with the same one answered the same questions."""
    content = [[question.id, question.category, list(question.turns)] for question in questions]
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()[:16]
