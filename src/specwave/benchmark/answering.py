"""One question after the other, answered by methods and by plain decoding, in one process.

Within a question every method has its turn, in an order that is rotated from question to question and from repetition
to repetition, so that a machine that drifts (warm, busy) drifts for all alike. A method's answer is on disk when it is
finished. Knows nothing of devices or of how questions are shared out (`evaluator.py`).
"""

from __future__ import annotations

import contextlib
import resource
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specwave.artifacts import UserError
from specwave.benchmark.answers import AnswerFile, Turn, failed_row, finished_row
from specwave.benchmark.exact import Comparison, TargetScorer, compare
from specwave.benchmark.metrics import Verdict
from specwave.benchmark.questions import Question
from specwave.benchmark.rows import failed, machine_of_row
from specwave.benchmark.settings import machine_of
from specwave.data.conversations import prompt_ids
from specwave.decoding import Sampling, generate
from specwave.target import Target

WARM_UP_TOKENS = 16


@dataclass
class Method:
    """A method under test. `proposer` None is plain decoding."""

    label: str
    name: str
    proposer: Any
    answers: AnswerFile
    layers: list[int] | None = None
    rules: tuple[str, ...] = ()


@dataclass
class Answerer:
    """Decodes questions with one target.

    Attributes:
        max_new_tokens: the limit per turn.
        sampling, batch_invariant: as in `generate`.
        repeat: how often every method answers a question; when sampling, with other noise each time.
        machine: the mark of this one, noted with every answer.
    """

    target: Target
    max_new_tokens: int
    sampling: Sampling
    batch_invariant: bool = False
    repeat: int = 1
    machine: str = field(init=False)

    def __post_init__(self) -> None:
        self.machine = machine_of(self.target.device)

    # ---------------------------------------------------------------- answering

    def check_answers(self, method: Method, questions: Sequence[Question]) -> None:
        """What a folder holds already must be answers of this method to these questions.

        Raises:
            UserError: for an answers file that was put there from another run.
        """
        asked, path = {str(question.id): question for question in questions}, method.answers.folder / "answers.jsonl"
        for row in method.answers.rows:
            question, turns = asked.get(str(row["question_id"])), [len(choice["turns"]) for choice in row["choices"]]
            if question is None:
                wrong = f"question {row['question_id']!r} is not asked by this run"
            elif row["category"] != question.category or set(turns) != {len(question.turns)}:
                wrong = f"question {row['question_id']!r} is another one there (category or number of turns)"
            elif len(turns) != self.repeat:
                wrong = f"question {row['question_id']!r} was answered {len(turns)} times, not {self.repeat}"
            elif row.get("model_id") != self.model_id(method):
                wrong = f"they are answers of {row.get('model_id')!r}, this run is {self.model_id(method)!r}"
            else:
                continue
            raise UserError("resume", path, f"these are answers of another run ({wrong}): choose another folder")

    def unpaired(self, methods: Sequence[Method]) -> set[Any]:
        """Questions that another machine began and this one would end: a speedup of such a question would divide the
        times of two machines."""
        answered = [{row["question_id"]: machine_of_row(row) for row in method.answers.rows} for method in methods]
        every = {name for rows in answered for name in rows}
        begun = {name for name in every if any(name not in rows for rows in answered)}
        foreign = {name for rows in answered for name, mark in rows.items() if mark not in (None, self.machine)}
        return begun & foreign

    def model_id(self, method: Method) -> str:
        return f"{self.target.name}-{method.label}"

    def answer_all(self, methods: Sequence[Method], question: Question, number: int) -> None:
        """Answers of the methods that have none yet, each on disk when it is finished; one that fails is a row that
        says so.

        Args:
            number: decides who begins; consecutive for the questions of a device.
        """
        waiting = [method for method in methods if question.id not in method.answers.done]
        answered: dict[str, list[list[Turn]]] = {method.label: [] for method in waiting}
        peaks: dict[str, int] = {}
        for repetition in range(self.repeat):
            for method in rotated(methods, number + repetition):
                if method not in waiting:
                    continue
                name, made = self.model_id(method), answered[method.label]
                try:
                    turns, peak = self.answer(method, question, repetition)
                except Exception as error:  # whatever a method does, the other questions and methods count
                    method.answers.add(failed_row(question, name, error))
                    waiting.remove(method)
                    continue
                made.append(turns)
                peaks[name] = max(peaks.get(name, 0), peak)
                if len(made) == self.repeat:
                    method.answers.add(finished_row(question, name, made, peaks[name], self.machine))
                    if hasattr(method.proposer, "flush"):
                        method.proposer.flush(method.answers.folder)

    def answer(self, method: Method, question: Question, repetition: int = 0) -> tuple[list[Turn], int]:
        """(the turns of one answer, the peak of memory in bytes)."""
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)
        turns: list[Turn] = []
        for number in range(len(question.turns)):
            ids = self.prompt(question, [turn.text for turn in turns])
            turns.append(self._turn(method, ids, sequence_id(question, number, repetition)))
        return turns, peak_memory(self.target.device)

    def prompt(self, question: Question, answers: Sequence[str]) -> list[int]:
        """The ids of the next turn: the conversation so far with the method's own answers, and the next message."""
        messages = []
        for message, answer in zip(question.turns, answers, strict=False):
            messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": question.turns[len(answers)]})
        return prompt_ids(self.target, messages)

    def decode(self, proposer: Any, ids: Sequence[int], limit: int, sequence: int = 0) -> Any:
        """A `Generation` of one row."""
        ids_BT = torch.tensor([list(ids)], device=self.target.device)
        return generate(
            self.target,
            proposer,
            ids_BT,
            max_new_tokens=limit,
            sampling=self.sampling,
            sequence_ids=[sequence],
            batch_invariant=self.batch_invariant,
        )

    def _turn(self, method: Method, ids: Sequence[int], sequence: int) -> Turn:
        made = self.decode(method.proposer, ids, self.max_new_tokens, sequence)
        return Turn(
            text=self.target.tokenizer.decode(made.tokens, skip_special_tokens=True),
            tokens=list(made.tokens),
            accept_lengths=list(made.accept_lengths),
            seconds=made.seconds,
            prefill_seconds=made.prefill_seconds,
            draft_seconds=made.draft_seconds,
            verify_seconds=made.verify_seconds,
            warmup_seconds=made.warmup_seconds,
            accept_seconds=made.accept_seconds,
            draft_levels=list(made.draft_levels),
            sources=method.proposer.ledger.of(0) if hasattr(method.proposer, "ledger") else None,
        )

    def warm_up(self, method: Method) -> None:
        """The first forwards pay for allocation and packing; no question shall. A method that learns along the stream
        of questions learns from them alone: plain decoding is warmed up in its place."""
        proposer = method.proposer
        if getattr(proposer, "scope", "sequence") == "stream":
            proposer = None
        ids = prompt_ids(self.target, [{"role": "user", "content": "Count to ten, then say good night."}])
        with contextlib.suppress(Exception):  # what fails here fails at the questions, where it is written down
            self.decode(proposer, ids, WARM_UP_TOKENS)
        if hasattr(proposer, "warmed_up"):
            proposer.warmed_up()

    # ---------------------------------------------------------------- is it the target's own output?

    def verdicts(
        self, method: Method, baseline: Sequence[dict[str, Any]], questions: Sequence[Question]
    ) -> tuple[dict[Any, Verdict], list[dict[str, Any]]]:
        """Per question finished by both, whether the method gave the target's own output.

        Returns:
            verdicts by question id, and the divergences as plain rows: in float32 judged under the contract (near-ties
            are excused), else the first one of each question with its top-2 gap.
        """
        plain = {row["question_id"]: row for row in baseline if not failed(row)}
        by_id = {question.id: question for question in questions}
        found, listed = {}, []
        for row in method.answers.rows:
            if failed(row) or row["question_id"] not in plain:
                continue
            question = by_id[row["question_id"]]
            comparisons = self._compare(method, question, row, plain[question.id])
            ties = sum(len(comparison.near_ties) for comparison in comparisons)
            exact = all(comparison.equal for comparison in comparisons)
            found[question.id] = Verdict(exact, ties if self.target.dtype == torch.float32 else None)
            for turn, comparison in enumerate(comparisons):
                for divergence in comparison.divergences:
                    listed.append({"question_id": question.id, "turn": turn, **vars(divergence)})
        return found, listed

    def _compare(
        self, method: Method, question: Question, row: dict[str, Any], plain: dict[str, Any]
    ) -> list[Comparison]:
        """A comparison per turn, up to the first that is not equal.

        A near-tie in one turn changes the next turn's prompt: the reference is then the target's own answer to that
        prompt, decoded here.
        """
        comparisons: list[Comparison] = []
        float32 = self.target.dtype == torch.float32
        texts, tokens = row["choices"][0]["turns"], row["specwave"]["tokens"]
        plain_texts, plain_tokens = plain["choices"][0]["turns"], plain["specwave"]["tokens"]
        for turn in range(len(question.turns)):
            if tokens[turn] == plain_tokens[turn] and texts[:turn] == plain_texts[:turn]:
                comparisons.append(Comparison())
                continue
            ids, sequence = self.prompt(question, texts[:turn]), sequence_id(question, turn)
            reference = plain_tokens[turn]
            if texts[:turn] != plain_texts[:turn]:
                reference = list(self.decode(None, ids, self.max_new_tokens, sequence).tokens)

            def again(ids: list[int], limit: int, sequence: int = sequence) -> list[int]:
                return list(self.decode(method.proposer, ids, limit, sequence).tokens)

            comparisons.append(
                compare(
                    ids,
                    reference,
                    tokens[turn],
                    scorer=TargetScorer(self.target),
                    again=again if float32 else None,
                    max_new_tokens=self.max_new_tokens,
                    sampling=self.sampling,
                    sequence=sequence,
                )
            )
            if not comparisons[-1].equal:
                break
        return comparisons


def rotated(methods: Sequence[Method], number: int) -> list[Method]:
    """Question 0: A B C, question 1: B C A, question 2: C A B, …"""
    start = number % len(methods)
    return [*methods[start:], *methods[:start]]


def sequence_id(question: Question, turn: int, repetition: int = 0) -> int:
    """Names a turn to the sampling noise: the same for all methods, another for each question, turn and repetition."""
    again = f"/{repetition}" if repetition else ""
    return zlib.crc32(f"{question.id}/{turn}{again}".encode())


def peak_memory(device: torch.device) -> int:
    """Bytes; see `peak_memory_bytes` in the definitions."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
