"""What training data and a benchmark share: runs of at least 13 equal words, looked up in a hash table.

Words are the runs of letters and digits of a text in lower case; 13 of them are what GPT-3 was checked with
(arXiv 2005.14165, appendix C). A run of 2k − 1 words holds, whole, one of the runs of k words that begin at a multiple
of k: so only every k-th position of the training text is looked up, and the rare hits are then followed word by word.

Knows nothing about tokens, files or where texts come from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

LENGTH = 13  # words in a row that count as shared
_ANCHOR = (LENGTH + 1) // 2
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Match:
    """A run of words that cannot be extended to either side."""

    words: int
    question: str
    sample: str
    text: str


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class Index:
    """The runs of `LENGTH` words of a benchmark's questions."""

    def __init__(self, questions: Iterable[tuple[str, str]]):
        """`questions`: (name, text); a question of several turns comes once for each."""
        self.names: list[str] = []
        self.texts: list[list[str]] = []
        self.grams: dict[str, list[tuple[int, int]]] = {}  # run → (text, place of its first word)
        self.anchors: set[str] = set()
        for name, text in questions:
            words, number = words_of(text), len(self.texts)
            self.names.append(name)
            self.texts.append(words)
            for place in range(len(words) - LENGTH + 1):
                self.grams.setdefault(" ".join(words[place : place + LENGTH]), []).append((number, place))
            if len(words) >= LENGTH:
                self.anchors.update(" ".join(words[at : at + _ANCHOR]) for at in range(len(words) - _ANCHOR + 1))

    @property
    def comparable(self) -> int:
        """Questions with a turn of `LENGTH` words or more."""
        return len({name for name, words in zip(self.names, self.texts, strict=True) if len(words) >= LENGTH})

    def matches(self, sample: str, words: Sequence[str]) -> Iterator[Match]:
        """The longest runs that a text's words share with the questions, each once per place in a question."""
        for anchor in range(0, len(words) - _ANCHOR + 1, _ANCHOR):
            if " ".join(words[anchor : anchor + _ANCHOR]) not in self.anchors:
                continue
            for start in range(max(0, anchor - _ANCHOR + 1), min(anchor, len(words) - LENGTH) + 1):
                for number, place in self.grams.get(" ".join(words[start : start + LENGTH]), ()):
                    asked = self.texts[number]
                    if start and place and words[start - 1] == asked[place - 1]:
                        continue  # part of the run that began a word earlier
                    size = LENGTH
                    while words[start + size : start + size + 1] == asked[place + size : place + size + 1] != []:
                        size += 1
                    yield Match(size, self.names[number], sample, " ".join(words[start : start + size]))


@dataclass
class Overlap:
    """Which questions share text with the training data, and of each the longest run.

    `comparable` of the `questions` are long enough to share a run at all: shares are of these.
    """

    questions: int
    comparable: int
    hit: dict[str, Match]

    def longest(self, count: int = 5) -> list[Match]:
        return sorted(self.hit.values(), key=lambda match: (-match.words, match.question))[:count]

    def facts(self) -> dict[str, Any]:
        """Plain data for the card."""
        return {
            "words_in_a_row": LENGTH,
            "questions": self.questions,
            "questions_too_short": self.questions - self.comparable,
            "questions_hit": len(self.hit),
            "share": len(self.hit) / self.comparable if self.comparable else 0.0,
            "longest": [asdict(match) for match in self.longest()],
        }


def overlap(
    samples: Iterable[tuple[str, str]], benchmarks: Mapping[str, Iterable[tuple[str, str]]]
) -> dict[str, Overlap]:
    """Compares training texts with the questions of benchmarks by name, all (name, text), in one pass over the texts.

    Of runs of equal length in one question the first is kept.
    """
    indices = {name: Index(questions) for name, questions in benchmarks.items()}
    found = {name: Overlap(len(set(index.names)), index.comparable, {}) for name, index in indices.items()}
    for sample, text in samples:
        words = words_of(text)
        for name, index in indices.items():
            hit = found[name].hit
            for match in index.matches(sample, words):
                if match.question not in hit or match.words > hit[match.question].words:
                    hit[match.question] = match
    return found
