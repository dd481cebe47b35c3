"""Conversations as text and as token ids with a mask over the answers, and the built-in prompts.

Knows nothing about training or selection; the target's own chat template makes the text.
"""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol, overload

from specwave.target import ModelConfig

Prompt = tuple[str, str, str]  # id, category, text


class Speaker(Protocol):
    """What text needs of a target: a `Target` is one, and so is a `Chat`."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def name(self) -> str: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def max_length(self) -> int: ...


@dataclass(frozen=True)
class Chat:
    """A speaker without weights: small enough to be sent to other processes."""

    tokenizer: Any
    config: ModelConfig
    name: str
    eos_ids: tuple[int, ...]
    max_length: int

    @classmethod
    def of(cls, target: Speaker) -> Chat:
        return cls(target.tokenizer, target.config, target.name, target.eos_ids, target.max_length)


@dataclass(frozen=True)
class Conversation:
    """Who said what. `messages` are (role, content): at most one system turn, then user and assistant in turns."""

    messages: tuple[tuple[str, str], ...]
    id: str
    category: str  # its domain; "" when unknown


@dataclass(frozen=True)
class Sample:
    """A tokenised conversation; `answer[t]` says whether token t is text of an answer (its end token included)."""

    ids: list[int]
    answer: list[bool]
    id: str = ""
    category: str = ""


class Samples(Sequence[Sample]):
    """Samples that are made when they are asked for: a subclass says how many there are and makes one."""

    @abstractmethod
    def at(self, place: int) -> Sample:
        """The sample of this number, 0 … len − 1."""

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> list[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | list[Sample]:
        if isinstance(place, slice):
            return [self.at(one) for one in range(*place.indices(len(self)))]
        return self.at(place)


def template_options(target: Speaker) -> dict[str, Any]:
    """What the chat template is given besides the messages."""
    if target.config.date_string is None:
        return {}
    return {"date_string": target.config.date_string}  # templates that print today's date would change every day


def prompt_ids(target: Speaker, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation ({"role", "content"} each) up to where the assistant begins to answer."""
    return target.tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **template_options(target)
    )


def user_prompt_ids(target: Speaker, prompts: Sequence[Prompt]) -> list[tuple[str, str, list[int]]]:
    """(id, category, token ids) of single-turn prompts."""
    return [(name, kind, prompt_ids(target, [{"role": "user", "content": text}])) for name, kind, text in prompts]


def _builtin(name: str) -> str:
    return files("specwave.data").joinpath("builtin", name).read_text(encoding="utf-8")


def builtin_calibration_prompts() -> list[Prompt]:
    """65 prompts, 5 of each Spec-Bench category, written for this project."""
    rows = [json.loads(line) for line in _builtin("calibration.jsonl").splitlines() if line.strip()]
    return [(row["id"], row["category"], row["prompt"]) for row in rows]


def builtin_training_prompts() -> list[Prompt]:
    """The training prompts: templates and the values of their slots, expanded in a fixed order."""
    prompts = []
    for number, entry in enumerate(json.loads(_builtin("training.json"))):
        combine = zip if entry["pairing"] == "zip" else itertools.product
        for count, values in enumerate(combine(*entry["slots"].values())):
            text = entry["template"].format(**dict(zip(entry["slots"], values, strict=True)))
            prompts.append((f"train-{number}-{count}", entry["category"], text))
    return prompts
