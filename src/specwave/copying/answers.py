"""Answers with what is known of each of their tokens: whether it is copied, whether it stood before at all.

    token                          x_s … x_{T−1}, behind a prompt of s tokens
    copied                         in a run of n tokens that stood before (labels.py)
    repeated                       the token itself stood before: what triggers a copy where nobody asks a probe

Every copied token is repeated; a repeated one that is not copied is an accidental trigger. Knows nothing about states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specwave.artifacts import UserError
from specwave.copying.labels import copy_labels


@dataclass(frozen=True)
class Answer:
    """A prompt with the target's answer: `ids`, of which those from `start` on are the answer."""

    ids: list[int]
    start: int
    kind: str = ""
    domain: str = ""
    template: str = ""
    id: str = ""

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return len(self.ids) - self.start

    def among(self, kinds: Sequence[str]) -> bool:
        """Whether its kind or its domain is named."""
        return self.kind in kinds or self.domain in kinds


class Labelled:
    """Answers and their tokens' labels, one behind the other: N tokens in all.

    Args:
        n: tokens of a run that counts as copied.
    """

    def __init__(self, answers: Iterable[Answer], n: int):
        self.answers, self.n = list(answers), n
        self.copied = [copy_labels(one.ids, one.start, n)[one.start :] for one in self.answers]
        self.repeated = [copy_labels(one.ids, one.start, 1)[one.start :] for one in self.answers]

    def __len__(self) -> int:
        return len(self.answers)

    @cached_property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.answers)

    @cached_property
    def all_copied(self) -> Tensor:
        """bool [N]."""
        return torch.cat([torch.zeros(0, dtype=torch.bool), *self.copied])

    @cached_property
    def all_repeated(self) -> Tensor:
        """bool [N]."""
        return torch.cat([torch.zeros(0, dtype=torch.bool), *self.repeated])

    @cached_property
    def prompt_of(self) -> Tensor:
        """int64 [N]: the number of the answer that a token belongs to."""
        counts = torch.tensor([one.tokens for one in self.answers], dtype=torch.int64)
        return torch.arange(len(counts)).repeat_interleave(counts)

    @cached_property
    def template_of(self) -> Tensor:
        """int64 [N]: a number for the template of a token's prompt; a prompt without one counts by itself."""
        names = [one.template or place for place, one in enumerate(self.answers)]
        number = {name: count for count, name in enumerate(dict.fromkeys(names))}
        return torch.tensor([number[name] for name in names], dtype=torch.int64)[self.prompt_of]

    @property
    def both(self) -> bool:
        """Whether there are copied tokens and others."""
        return bool(self.all_copied.any()) and not bool(self.all_copied.all())

    def only(self, kinds: Sequence[str]) -> Labelled:
        """The answers of these kinds or domains."""
        return Labelled((one for one in self.answers if one.among(kinds)), self.n)

    def of(self, domain: str) -> Labelled:
        """The answers of a domain, whose name a kind of another one may have too."""
        return Labelled((one for one in self.answers if one.domain == domain), self.n)

    def check(self, what: str) -> Labelled:
        """Itself.

        Raises:
            UserError: no sequence as long as a run, no copied token, none that is not.
        """
        longest = max((len(one.ids) for one in self.answers), default=0)
        if longest < self.n:
            remedy = f"none of the {len(self)} {what} has so many tokens, the longest {longest}: lower it"
            raise UserError("probe.n_train", self.n, remedy)
        if not self.both:
            found = "all are" if self.tokens and bool(self.all_copied.all()) else "none is"
            remedy = f"of the {self.tokens} tokens of {len(self)} {what} {found} copied, a probe needs some of both: "
            raise UserError("probe.n_train", self.n, remedy + "lower it, or give more prompts or longer answers")
        return self
