"""What a set of answers is worth. Pure: rows of `answers.jsonl` in, plain numbers out.

Every rate is micro-averaged: sums over questions are divided, never the questions' own rates averaged. A question that
failed counts nowhere but in `failed`. What cannot be said is None (null), never NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specwave.benchmark.questions import CATEGORIES, SUBTASKS

DEFINITIONS: dict[str, str] = {
    "tau": "tokens committed per verification forward of the target: sum of accept_lengths / rounds (accepted drafts "
    "plus the target's own token of the round). Prefill is no round; tokens after the end token or beyond the limit "
    "are not counted. Plain decoding has 1.",
    "accept_lengths": "per round, the tokens it committed: accepted drafts plus one. Flat over a question's turns.",
    "tokens": "new tokens committed, counted as token ids where they are made (never re-tokenised text); the end token "
    "counts, nothing after it.",
    "rounds": "verification forwards of the target (decoding_steps), prefill not counted.",
    "wall_time": "seconds of decoding one turn: from the prompt's ids to the last new token, prefill, drafting and "
    "verification included; tokenising, templates, detokenising and writing are not.",
    "tokens_per_second": "sum of tokens / sum of wall_time (token-weighted; prefill is in the time).",
    "seconds_per_token": "sum of wall_time / sum of tokens.",
    "speedup": "tokens_per_second of the method / that of plain decoding on the same target, dtype and machine, both "
    "over the questions that both finished.",
    "peak_memory_bytes": "largest peak while answering: on a GPU of the memory allocated during the question; on a CPU "
    "of the process's resident memory so far, which methods measured in one process share.",
    "exact_match_rate": "share of questions whose every turn equals the target's own greedy output token for token. "
    "In float32 a listed near-tie is excused and decoding is compared again from the target's token on. null when "
    "sampling.",
    "near_ties": "float32 only: divergences at positions where the tokens' scores differ by at most 10 times the "
    "measured noise of the logits (one-shot against token by token). null in other dtypes, where none is excused.",
    "questions": "questions answered. A question that raised an error is a row with `error` and counts in failed only.",
    "failed": "questions that raised an error.",
}


@dataclass(frozen=True)
class Verdict:
    """Is one question's output the target's own? `near_ties`: excused divergences (float32), None where none can be."""

    exact: bool
    near_ties: int | None


@dataclass(frozen=True)
class Totals:
    """Sums over questions. `accepted` is the sum of accept_lengths; it equals `tokens` when nothing was cut."""

    questions: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


def failed(row: Mapping[str, Any]) -> bool:
    return bool(row.get("specwave", {}).get("error"))


def totals(rows: Iterable[Mapping[str, Any]]) -> Totals:
    """Sums over the rows that did not fail."""
    questions = tokens = rounds = accepted = 0
    seconds = 0.0
    for row in rows:
        if failed(row):
            continue
        questions += 1
        for choice in row["choices"]:
            tokens += sum(choice["new_tokens"])
            rounds += len(choice["accept_lengths"])
            accepted += sum(choice["accept_lengths"])
            seconds += sum(choice["wall_time"])
    return Totals(questions, tokens, rounds, accepted, seconds)


def block(
    rows: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    verdicts: Mapping[Any, Verdict] | None,
) -> dict[str, Any]:
    """The figures of one set of rows against the baseline's rows of the same questions.

    Args:
        rows: the method's rows.
        baseline: rows of plain decoding, in any order, of any questions.
        verdicts: by question id; None when nothing can be compared (sampling).
    """
    own = totals(rows)
    finished = {row["question_id"] for row in rows if not failed(row)}
    shared = {row["question_id"] for row in baseline if not failed(row)} & finished
    ours = totals(row for row in rows if row["question_id"] in shared).rate
    plain = totals(row for row in baseline if row["question_id"] in shared).rate
    peaks = [row["specwave"].get("peak_memory_bytes") for row in rows if "specwave" in row and not failed(row)]
    judged = [verdicts[name] for name in finished if name in verdicts] if verdicts is not None else []
    ties = [verdict.near_ties for verdict in judged if verdict.near_ties is not None]
    return {
        "questions": own.questions,
        "failed": sum(map(failed, rows)),
        "tau": own.accepted / own.rounds if own.rounds else None,
        "tokens": own.tokens,
        "rounds": own.rounds,
        "tokens_per_second": own.rate,
        "seconds_per_token": 1 / own.rate if own.rate else None,
        "speedup": ours / plain if ours and plain else None,
        "peak_memory_bytes": max((peak for peak in peaks if peak is not None), default=None),
        "exact_match_rate": sum(verdict.exact for verdict in judged) / len(judged) if judged else None,
        "near_ties": sum(ties) if ties else None,
    }


def blocks(
    rows: Sequence[Mapping[str, Any]],
    baseline: Sequence[Mapping[str, Any]],
    verdicts: Mapping[Any, Verdict] | None,
) -> dict[str, Any]:
    """`overall`, the 6 `subtasks` and the 13 `categories` (all of them, empty ones with 0 questions).

    A category outside Spec-Bench's 13 gets a block of its own after them; it counts overall and in no subtask.
    """

    def of(categories: Iterable[str]) -> dict[str, Any]:
        wanted = set(categories)
        return block([row for row in rows if row["category"] in wanted], baseline, verdicts)

    others = dict.fromkeys(row["category"] for row in rows if row["category"] not in CATEGORIES)
    return {
        "overall": block(rows, baseline, verdicts),
        "subtasks": {name: of(categories) for name, categories in SUBTASKS.items()},
        "categories": {name: of([name]) for name in (*CATEGORIES, *others)},
    }
