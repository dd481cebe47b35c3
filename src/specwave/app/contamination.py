"""Whether what is learnt from holds text of the benchmark: counted, noted and said, never refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from specwave.artifacts import UserError
from specwave.benchmark.questions import BUILTIN, read_questions
from specwave.data.overlap import LENGTH, Overlap, overlap
from specwave.data.samples import Prepared

SHOWN = 200  # characters of a shared text on the console


def compare(data: Prepared, decode: Callable[..., str]) -> tuple[dict[str, Any], list[str]]:
    """(plain data for the card by benchmark, lines for the console). Training samples only, as they are trained on.

    Raises:
        UserError: data.check_benchmark is no file of questions.
    """
    texts = ((sample.id, decode(sample.ids, skip_special_tokens=True)) for sample in data.train)
    return compare_texts(texts, data.benchmark, "data.check_benchmark", "the training data")


def compare_texts(
    texts: Iterable[tuple[str, str]], benchmark: str | None, key: str, what: str
) -> tuple[dict[str, Any], list[str]]:
    """`compare` for texts (name, text): with the built-in benchmark, and with the question file that `key` names."""
    benchmarks = {"builtin": _questions(str(BUILTIN), key)}
    if benchmark is not None:
        benchmarks[benchmark] = _questions(benchmark, key)
    found = overlap(texts, benchmarks)
    lines = [line for name, one in found.items() for line in _lines(name, one, what)]
    return {name: one.facts() for name, one in found.items()}, lines


def _questions(path: str, key: str) -> list[tuple[str, str]]:
    try:
        return [(str(question.id), turn) for question in read_questions(path) for turn in question.turns]
    except UserError as error:
        raise UserError(key, error.value, error.remedy) from None


def _lines(name: str, found: Overlap, what: str) -> list[str]:
    short = found.questions - found.comparable
    hit = f"{len(found.hit)} of {found.comparable} questions share {LENGTH} words in a row with {what}"
    head = f"benchmark {name}: {hit}" + (f" ({short} more are shorter than that)" if short else "")
    if not found.hit:
        return [head]
    lines = [f"{head}; the longest:"]
    for match in found.longest():
        text = match.text if len(match.text) <= SHOWN else f"{match.text[:SHOWN]}…"
        lines.append(f"  question {match.question}, sample {match.sample}, {match.words} words: {text}")
    return lines
