"""Reading a row of `answers.jsonl`: did it fail, and what is told of every time it was answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def failed(row: Mapping[str, Any]) -> bool:
    return bool(row.get("specwave", {}).get("error"))


def machine_of_row(row: Mapping[str, Any]) -> str | None:
    """On whose clock its seconds are; None where the file does not say."""
    return row.get("specwave", {}).get("machine")


def machines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Those that answered, in order of their marks."""
    return sorted({mark for row in rows if (mark := machine_of_row(row)) is not None})


def repetitions(row: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(choice, what specwave noted of it) of every time the question was answered; {} in a file of Spec-Bench's."""
    own = row.get("specwave", {})
    noted = [own, *own.get("repetitions", [])]
    for place, choice in enumerate(row["choices"]):
        yield choice, noted[place] if place < len(noted) else {}


def is_plain(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether every round of every answer commits one token: plain decoding."""
    lengths = {
        length for row in rows if not failed(row) for choice in row["choices"] for length in choice["accept_lengths"]
    }
    return lengths == {1}
