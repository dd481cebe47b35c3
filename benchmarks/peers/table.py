"""What the methods did, as rates and as a Markdown table. Knows nothing of processes and models."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Method:
    """One row: how a peer decodes, and what it did.

    `tokens`, `seconds` and `cpu_seconds` are by repetition, then by question.
    """

    peer: str
    name: str  # the worker's word for it
    label: str
    searched: bool = False  # whether its drafts a round are looked for
    drafts: int = 0
    search: dict[int, float] = field(default_factory=dict)  # drafts a round: tokens per second
    tokens: list[list[list[int]]] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    cpu_seconds: list[list[float]] = field(default_factory=list)
    failure: str = ""

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition, over all its questions."""
        return [sum(map(len, tokens)) / sum(seconds) for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    @property
    def cores(self) -> float:
        """Processor seconds a second. Rows of unequal cores are no comparison: something else used the machine, or the
        method's threads wait otherwise."""
        return sum(map(sum, self.cpu_seconds)) / sum(map(sum, self.seconds))


def rotate(items: Sequence[T], by: int) -> list[T]:
    by %= max(1, len(items))
    return [*items[by:], *items[:by]]


def best(search: dict[int, float]) -> int:
    """The drafts a round of most tokens per second; the fewest of equals."""
    return max(sorted(search), key=search.__getitem__)


def cut(tokens: Sequence[int], ends: Sequence[int], limit: int) -> list[int]:
    """What counts as new, of every peer alike: at most `limit` tokens, up to the first end token and with it."""
    for place, token in enumerate(tokens[:limit]):
        if token in ends:
            return list(tokens[: place + 1])
    return list(tokens[:limit])


def agreeing(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """How many leading tokens are the reference's."""
    count = 0
    for one, other in zip(tokens, reference, strict=False):
        if one != other:
            break
        count += 1
    return count


def same_answers(method: Method, reference: Method) -> str:
    """Questions whose answer is the reference's in every repetition, of all."""
    pairs = zip(zip(*method.tokens, strict=True), reference.tokens[0], strict=True)
    same = [all(answer == expected for answer in answers) for answers, expected in pairs]
    return f"{sum(same)}/{len(same)}"


def same_tokens(method: Method, reference: Method) -> str:
    """Share of the reference's tokens (its first repetition) that the method gave before it first left them."""
    given = sum(map(agreeing, method.tokens[0], reference.tokens[0]))
    return f"{100 * given / sum(map(len, reference.tokens[0])):.1f} %"


HEAD = (
    "method",
    "drafts a round",
    "tokens/s",
    "min",
    "max",
    "cores used",
    "× HF",
    "answers as HF",
    "tokens as our plain",
)


def markdown(methods: Sequence[Method], base: Method, own: Method | None) -> str:
    """One row a method: medians over repetitions, ratios to `base`; what could not run says why."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for method in methods:
        drafts = {"auto": "by the clock"}.get(method.name, str(method.drafts))
        if method.failure:
            row = [method.label, drafts if method.drafts else "–", f"not here: {method.failure}", *["–"] * 6]
        else:
            rates = method.rates
            middle = statistics.median(rates)
            row = [
                method.label,
                drafts,
                f"{middle:.1f}",
                f"{min(rates):.1f}",
                f"{max(rates):.1f}",
                f"{method.cores:.2f}",
            ]
            row.append("–" if base.failure else f"{middle / statistics.median(base.rates):.2f}")
            row.append("–" if base.failure else same_answers(method, base))
            row.append("–" if own is None or own.failure else same_tokens(method, own))
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |")
    return "\n".join(lines)


def raw(method: Method) -> dict[str, Any]:
    """The row's numbers for a JSON file; answers are written as one string of ids each."""
    return {
        "peer": method.peer,
        "method": method.name,
        "label": method.label,
        "failure": method.failure or None,
        "drafts": method.drafts,
        "search": {str(drafts): rate for drafts, rate in method.search.items()},
        "tokens_per_second": [] if method.failure else method.rates,
        "seconds": method.seconds,
        "cpu_seconds": method.cpu_seconds,
        "new_tokens": [[len(answer) for answer in answers] for answers in method.tokens],
        "answers": [" ".join(map(str, answer)) for answer in method.tokens[0]] if method.tokens else [],
    }
