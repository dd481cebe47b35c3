"""Methods and the plain baseline over the same questions, in one process.

Question by question, and within a question every method in an order that is rotated from question to question, so that
a machine that drifts (warm, busy) drifts for all alike. Each finished question is on disk before the next begins.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from specwave.benchmark.answers import AnswerFile, Turn, failed_row, finished_row
from specwave.benchmark.exact import Comparison, TargetScorer, compare
from specwave.benchmark.metrics import Verdict, failed
from specwave.benchmark.questions import Question
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
    rule: str | None = None


@dataclass
class Evaluator:
    """Decodes questions with one target.

    Attributes:
        max_new_tokens: the limit per turn.
        sampling, batch_invariant: as in `generate`.
    """

    target: Target
    max_new_tokens: int
    sampling: Sampling
    batch_invariant: bool = False

    # ---------------------------------------------------------------- answering

    def run(self, methods: Sequence[Method], questions: Sequence[Question]) -> None:
        """Answers what is not answered yet; a question that fails is a row that says so, and the run goes on."""
        waiting = [
            (question, method)
            for number, question in enumerate(questions)
            for method in rotated(methods, number)
            if question.id not in method.answers.done
        ]
        for method in methods:
            if any(pending is method for _, pending in waiting):
                self._warm_up(method)
        with tqdm(waiting, desc="questions", unit="answer", disable=None, dynamic_ncols=True) as progress:
            for question, method in progress:
                progress.set_postfix_str(f"{method.label}, {question.category}", refresh=False)
                method.answers.add(self.answer(method, question))
        for method in methods:
            method.answers.close()

    def answer(self, method: Method, question: Question) -> dict[str, Any]:
        """One question's row."""
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)
        turns: list[Turn] = []
        try:
            for number in range(len(question.turns)):
                ids = self.prompt(question, [turn.text for turn in turns])
                turns.append(self._turn(method, ids, sequence_id(question, number)))
        except Exception as error:  # whatever a method does, the other questions and methods count
            return failed_row(question, f"{self.target.name}-{method.label}", error)
        return finished_row(question, f"{self.target.name}-{method.label}", turns, peak_memory(self.target.device))

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
        )

    def _warm_up(self, method: Method) -> None:
        """The first forwards pay for allocation and packing; no question shall."""
        ids = prompt_ids(self.target, [{"role": "user", "content": "Count to ten, then say good night."}])
        with contextlib.suppress(Exception):  # what fails here fails at the questions, where it is written down
            self.decode(method.proposer, ids, WARM_UP_TOKENS)

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


def sequence_id(question: Question, turn: int) -> int:
    """Names a turn to the sampling noise: the same for every method, another for every question and turn."""
    return zlib.crc32(f"{question.id}/{turn}".encode())


def peak_memory(device: torch.device) -> int:
    """Bytes; see `peak_memory_bytes` in the definitions."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
