"""`conf/calibration`: which conversations, who answers them, and how their states become rows.

Every option shares the keys of `Calibration`; a subclass adds where its conversations come from.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specwave.artifacts import UserError
from specwave.data.sources import SHAREGPT, ULTRACHAT
from specwave.layers.blocks import SCALES
from specwave.layers.rows import Rows

if TYPE_CHECKING:
    from specwave.data.conversations import Sample
    from specwave.data.sources import Conversation
    from specwave.target import Target


@dataclass(frozen=True)
class Calibration(Rows):
    """`calibration=builtin`: the built-in prompts, which only the target can answer."""

    scale: Literal["none", "frobenius"] = "none"
    centre: bool = False
    limit: int | None = 200
    answers: Literal["regenerate", "given"] = "regenerate"
    max_new_tokens: int = 96
    max_length: int = 2048
    answer_batch_size: int = 64
    batch_size: int = 4
    check_benchmark: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("limit", "max_new_tokens", "max_length", "answer_batch_size", "batch_size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"calibration.{key}", value, "must be ≥ 1")
        if self.scale not in SCALES:
            raise UserError("calibration.scale", self.scale, f"must be one of {', '.join(SCALES)}")
        if self.check_benchmark is not None and not Path(self.check_benchmark).is_file():
            remedy = "there is no such file: name a question.jsonl"
            raise UserError("calibration.check_benchmark", self.check_benchmark, remedy)

    def source(self) -> list[Conversation]:
        """All conversations there are."""
        from specwave.data.sources import builtin_conversations

        return builtin_conversations()

    def conversations(self) -> list[Conversation]:
        """Those that are used: `limit` of them, spread evenly."""
        from specwave.data.sources import spread

        return spread(self.source(), self.limit)

    def samples(self, target: Target, conversations: Sequence[Conversation]) -> list[Sample]:
        """Token ids: with the answers given, or with the target's greedy ones (cached)."""
        from specwave.data.regenerate import answered
        from specwave.data.render import given, prompts

        longest = min(self.max_length, target.max_length)
        if self.answers == "given":
            return given(target, conversations, "calibration.answers", longest)
        asked = prompts(target, conversations)
        short = [prompt for prompt in asked if len(prompt[2]) + self.max_new_tokens <= longest]
        if len(short) < len(asked):
            rule = (
                f"{len(asked) - len(short)} of {len(asked)} prompts leave no room for {self.max_new_tokens} new tokens"
            )
            if not short:
                raise UserError("calibration.max_length", longest, f"{rule}: raise it, or lower max_new_tokens")
            warnings.warn(f"calibration.max_length={longest}: {rule} and are passed over", stacklevel=2)
        return answered(
            target,
            short,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.answer_batch_size,
            label="calibration answers",
        )

    def rows(self) -> Rows:
        """The part of the settings that decides which rows a pass leaves."""
        return Rows(**{entry.name: getattr(self, entry.name) for entry in fields(Rows)})

    def digest(self, conversations: Sequence[Conversation]) -> str:
        """A hash of all that decides the token ids of the pass, the target apart."""
        own = [self.answers, self.max_length]
        if self.answers == "regenerate":
            own += [self.max_new_tokens, self.answer_batch_size]  # in bf16 the batch can turn a near-tie
        content = json.dumps([own, [asdict(one) for one in conversations]], ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class File(Calibration):
    """`calibration=jsonl`: ShareGPT or messages, one conversation on a line (or a list in a .json file)."""

    path: str = "???"

    def source(self) -> list[Conversation]:
        from specwave.data.sources import file_conversations

        return file_conversations(self.path, "calibration.path")


@dataclass(frozen=True)
class ShareGpt(Calibration):
    """`calibration=sharegpt`: the paper's set, from the hub or a local copy."""

    answers: Literal["regenerate", "given"] = "given"
    path: str = SHAREGPT[0]
    split: str = SHAREGPT[1]

    def source(self) -> list[Conversation]:
        from specwave.data.sources import hub_conversations, with_answers

        found = hub_conversations(self.path, self.split, "calibration.path")
        return with_answers(found) if self.answers == "given" else found


@dataclass(frozen=True)
class UltraChat(ShareGpt):
    """`calibration=ultrachat`: from the hub or a local copy."""

    path: str = ULTRACHAT[0]
    split: str = ULTRACHAT[1]


HUBS = {"sharegpt": ShareGpt, "ultrachat": UltraChat}


@dataclass(frozen=True)
class Mixed(Calibration):
    """`calibration=mixed`: several sources by weight."""

    limit: int | None = 60
    sources: list[str] = field(default_factory=lambda: ["builtin"])
    weights: list[float] = field(default_factory=lambda: [1.0])

    def __post_init__(self) -> None:
        super().__post_init__()
        from specwave.data.sources import check_weights

        check_weights(self.weights, len(self.sources), "calibration.weights")
        if self.limit is None:
            raise UserError("calibration.limit", "null", "a mixture needs the number of its conversations")

    def conversations(self) -> list[Conversation]:
        from specwave.data.sources import builtin_conversations, hub_conversations, mix, with_answers

        parts = []
        for place, name in enumerate(self.sources):
            key = f"calibration.sources[{place}]"
            if name == "builtin":
                parts.append(builtin_conversations())
            elif name in HUBS:
                found = hub_conversations(HUBS[name].path, HUBS[name].split, key)
                parts.append(with_answers(found) if self.answers == "given" else found)
            else:
                parts.append(hub_conversations(name, "train", key))
        assert self.limit is not None
        keys = [f"calibration.sources[{place}]" for place in range(len(parts))]
        return mix(parts, self.weights, self.limit, keys)


def record(settings: Calibration, counts: dict[str, int], fingerprint: str) -> dict[str, Any]:
    """The `calibration` block of selection.json."""
    return {**asdict(settings), **counts, "fingerprint": fingerprint}
