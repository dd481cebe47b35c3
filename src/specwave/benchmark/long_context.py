"""Long prompts of given lengths in the target's own tokens: documents to summarise, and questions over them.

Summaries are asked of generated logbooks (documents.py) or of the reports of a GovReport-style file; reasoning is asked
of logbooks. A prompt is the longest one that does not exceed its length, chat template included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specwave.artifacts import UserError, check_seed, is_whole, read_jsonl
from specwave.benchmark.documents import ask, document, logbook
from specwave.benchmark.download import check_sha256_form
from specwave.benchmark.questions import Question, check_sha256, choose
from specwave.data.conversations import Speaker, prompt_ids

TASKS = ("summarization", "reasoning")
SHORTEST, LONGEST = 128, 1 << 20  # tokens of a prompt
TERSE = 256  # logbooks of shorter prompts leave out what counts for nothing: else hardly an entry would fit
SHORT_BY = 0.1  # a report may leave so much of a prompt's length unused; a shorter one is passed over
SUMMARISE = "Summarise the following document in one paragraph of at most 150 words.\n\n{}\n\nSummary:"
REASON = "Read the following document, then answer the question below it.\n\n{}\n\nQuestion: {} Reason step by step."


@dataclass(frozen=True)
class LongContext:
    """benchmark=long_context. Categories are named by task and length: `summarization_1k`, `reasoning_4k`, …"""

    lengths: list[int] = field(default_factory=lambda: [1024, 4096])
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    each: int = 4
    path: str | None = None
    sha256: str | None = None
    seed: int = 0

    needs_target = True
    name = "long_context"

    def __post_init__(self) -> None:
        check_seed("benchmark.seed", self.seed)
        check_sha256_form("benchmark.sha256", self.sha256)
        if self.each < 1:
            raise UserError("benchmark.each", self.each, "must be at least 1")
        if not self.lengths or len(set(self.lengths)) < len(self.lengths):
            raise UserError("benchmark.lengths", self.lengths, "name at least one length, each once")
        for length in self.lengths:
            if isinstance(length, bool) or not isinstance(length, int) or not SHORTEST <= length <= LONGEST:
                raise UserError("benchmark.lengths", length, f"must be whole numbers of {SHORTEST} to {LONGEST} tokens")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks) or set(self.tasks) - set(TASKS):
            raise UserError("benchmark.tasks", self.tasks, f"name some of {', '.join(TASKS)}, each once")
        if self.path is not None and "summarization" not in self.tasks:
            raise UserError("benchmark.path", self.path, "its reports are summarised: add summarization to the tasks")
        if self.path is None and self.sha256 is not None:
            raise UserError("benchmark.sha256", self.sha256, "there is no file it could be of: give benchmark.path")

    def questions(
        self,
        limit: int | None = None,
        categories: Sequence[str] | None = None,
        target: Speaker | None = None,
        room: int = 0,
    ) -> list[Question]:
        """The chosen questions, by task, length and number.

        Args:
            target: whose tokens are counted, in its chat template.
            room: tokens of an answer, which must fit the target's positions too.

        Raises:
            UserError: a length that does not fit the target, a file with too few reports that long.
        """
        if target is None:
            raise ValueError("lengths are in the target's tokens: a target is needed")
        for length in self.lengths:
            if length + room > target.max_length:
                rule = f"prompt and {room} new tokens must fit the {target.max_length} positions of {target.name}"
                raise UserError("benchmark.lengths", length, rule)
        wanted = [(task, length) for task in self.tasks for length in self.lengths]
        if categories is not None:  # checked by names alone: a long text that is not asked for need not be written
            choose([Question(0, category(*one), ("-",)) for one in wanted], None, categories)
            wanted = [one for one in wanted if category(*one) in categories]
        count = counter(target)
        reports = self._reports() if self.path is not None else []
        found: list[Question] = []
        for task, length in wanted:
            if task == "summarization" and self.path is not None:
                texts = self._of_reports(reports, length, count)
            else:
                texts = [self._of_logbook(task, length, number, count) for number in range(self.each)]
            names = (f"{task}-{length}-{number}" for number in range(len(texts)))
            found += [Question(name, category(task, length), (text,)) for name, text in zip(names, texts, strict=True)]
        return choose(found, limit)

    def _of_logbook(self, task: str, length: int, number: int, count: Callable[[str], int]) -> str:
        return logbook_prompt(task, length, 1000 * self.seed + number, count)[0]

    def _reports(self) -> list[str]:
        assert self.path is not None
        path = Path(self.path).expanduser()
        if self.sha256 is not None:
            check_sha256(path, self.sha256)
        found = []
        for line, row in read_jsonl(path, "benchmark.path"):
            text = row.get("report")
            if not isinstance(text, str) or not text.strip():
                raise UserError("benchmark.path", f"{path}:{line}", "a line is an object whose report is a text")
            if not is_whole(text):
                remedy = "its report holds half of a surrogate pair, which no tokeniser takes"
                raise UserError("benchmark.path", f"{path}:{line}", remedy)
            found.append(text.strip())
        return found

    def _of_reports(self, reports: Sequence[str], length: int, count: Callable[[str], int]) -> list[str]:
        """Of the first reports that are long enough, as many sentences as fit."""
        texts: list[str] = []
        for report in reports:
            if len(texts) == self.each:
                break
            text = report_prompt(report, length, count)
            if text is not None and count(text) >= (1 - SHORT_BY) * length:
                texts.append(text)
        if len(texts) < self.each:
            rule = f"{len(texts)} of its {len(reports)} reports fill a prompt of {length} tokens: lower it, or each="
            raise UserError("benchmark.lengths", length, f"{rule}{self.each}")
        return texts


def category(task: str, length: int) -> str:
    return f"{task}_{length // 1024}k" if length % 1024 == 0 else f"{task}_{length}"


def counter(target: Speaker) -> Callable[[str], int]:
    """How many tokens a message makes as a prompt."""

    def count(text: str) -> int:
        return len(prompt_ids(target, [{"role": "user", "content": text}]))

    return count


def longest(size: Callable[[int], int], limit: int, step: float, start: int) -> int:
    """The largest n with size(n) ≤ limit (`size` grows by about `step` each): guessed, then found by steps.

    Returns 0 where not even 1 fits.
    """
    place = max(1, start)
    for _ in range(4):  # corrections, each from what the last guess was short or over
        place = max(1, place + int((limit - size(place)) / step))
    while place > 0 and size(place) > limit:
        place -= 1
    while place > 0 and size(place + 1) <= limit:
        place += 1
    return place


def logbook_prompt(task: str, length: int, seed: int, count: Callable[[str], int]) -> tuple[str, str | None]:
    """(a prompt of at most `length` tokens, the answer to its question; None for a summary)."""
    terse = length < TERSE
    sample = logbook(seed, 20, terse)
    step = (count(document(sample)) - count(document(sample[:10]))) / 10
    entries = logbook(seed, int(2 * length / step) + 2, terse)

    def prompt(number: int, filler: int = 0) -> tuple[str, str | None]:
        held = entries[:number]
        text = document(held, filler)
        if task == "summarization":
            return SUMMARISE.format(text), None
        asked = ask(held, seed)
        return REASON.format(text, asked.question), asked.answer

    number = longest(lambda n: count(prompt(n)[0]), length, step, int(length / step) - 1)
    if number == 0:
        raise UserError("benchmark.lengths", length, "not one entry of a logbook fits: name a larger length")
    filler = 0
    while count(prompt(number, filler + 1)[0]) <= length:
        filler += 1
    return prompt(number, filler)


def report_prompt(report: str, length: int, count: Callable[[str], int]) -> str | None:
    """A report's first sentences in a prompt of at most `length` tokens; None where the first is too long."""
    if count(SUMMARISE.format(report)) <= length:
        return SUMMARISE.format(report)
    ends = [match.end() for match in re.finditer(r"[.!?]\s+|\n+", report)] or [len(report)]
    step = max(1.0, count(report) / len(ends))

    def prompt(number: int) -> str:
        return SUMMARISE.format(report[: ends[min(number, len(ends)) - 1]].strip())

    number = longest(lambda n: count(prompt(n)) if n < len(ends) else 2 * length, length, step, int(length / step))
    return prompt(number) if number else None
