"""Whether the training data holds text of the benchmark: counted, noted and said, never refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specwave.artifacts import UserError
from specwave.benchmark.questions import BUILTIN, read_questions
from specwave.data.overlap import LENGTH, Overlap, overlap
from specwave.eagle.samples import Prepared

SHOWN = 200  # characters of a shared text on the console


def compare(data: Prepared, decode: Callable[..., str]) -> tuple[dict[str, Any], list[str]]:
    """(plain data for the card by benchmark, lines for the console). Training samples only, as they are trained on.

    Raises:
        UserError: data.check_benchmark is no file of questions.
    """
    benchmarks = {"builtin": _questions(str(BUILTIN))}
    if data.benchmark is not None:
        benchmarks[data.benchmark] = _questions(data.benchmark)
    texts = ((sample.id, decode(sample.ids, skip_special_tokens=True)) for sample in data.train)
    found = overlap(texts, benchmarks)
    lines = [line for name, one in found.items() for line in _lines(name, one)]
    return {name: one.facts() for name, one in found.items()}, lines


def _questions(path: str) -> list[tuple[str, str]]:
    try:
        return [(str(question.id), turn) for question in read_questions(path) for turn in question.turns]
    except UserError as error:
        raise UserError("data.check_benchmark", error.value, error.remedy) from None


def _lines(name: str, found: Overlap) -> list[str]:
    short = found.questions - found.comparable
    hit = f"{len(found.hit)} of {found.comparable} questions share {LENGTH} words in a row with the training data"
    head = f"benchmark {name}: {hit}" + (f" ({short} more are shorter than that)" if short else "")
    if not found.hit:
        return [head]
    lines = [f"{head}; the longest:"]
    for match in found.longest():
        text = match.text if len(match.text) <= SHOWN else f"{match.text[:SHOWN]}…"
        lines.append(f"  question {match.question}, sample {match.sample}, {match.words} words: {text}")
    return lines
