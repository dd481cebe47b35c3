"""Training samples: on-policy conversations, cut to length, checked, and split by prompt.

Knows nothing about batches or drafters.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specwave.artifacts import UserError
from specwave.data.conversations import Sample

if TYPE_CHECKING:
    from specwave.target import Target


@dataclass
class Prepared:
    """What training reads; both parts are disjoint in their prompts."""

    train: list[Sample]
    validation: list[Sample]
    cut: int  # samples shortened to max_length
    dropped: int  # samples where no slot counts: fewer than two answer tokens in a row

    def facts(self) -> dict[str, Any]:
        """Plain data for the card."""
        return {
            "samples": len(self.train),
            "validation_samples": len(self.validation),
            "tokens": sum(len(sample.ids) for sample in self.train),
            "answer_tokens": sum(sum(sample.answer) for sample in self.train),
            "cut": self.cut,
            "dropped": self.dropped,
        }


def prepare(
    samples: Sequence[Sample], max_length: int, validation: int, decode: Callable[[list[int]], str]
) -> Prepared:
    """Cuts, checks and splits.

    Held out are the `validation` prompts of smallest hash: the same ones whatever the seed and the other prompts.

    Raises:
        UserError: a sample without answer text (shown decoded), nothing left to train on or to validate with.
    """
    kept, cut, dropped = [], 0, 0
    for sample in samples:
        if not any(sample.answer):
            shown = decode(sample.ids)
            shown = shown if len(shown) <= 300 else f"{shown[:300]}…"
            raise UserError(
                "data", sample.id, f"no token of this sample is answer text, nothing can be learnt from {shown!r}"
            )
        ids, answer = sample.ids[:max_length], sample.answer[:max_length]
        cut += len(ids) < len(sample.ids)
        # x_{t+1} and x_{t+2} are answer text for some slot t ≥ 0
        if any(first and second for first, second in itertools.pairwise(answer[1:])):
            kept.append(Sample(ids, answer, sample.id, sample.category))
        else:
            dropped += 1
    held = set(sorted({sample.id for sample in kept}, key=_order)[:validation])
    train = [sample for sample in kept if sample.id not in held]
    if not train:
        raise UserError(
            "data.validation",
            validation,
            f"nothing is left to train on: of {len(samples)} samples {dropped} have no answer text within "
            f"data.max_length={max_length} and {len(held)} are held out",
        )
    return Prepared(train, [sample for sample in kept if sample.id in held], cut, dropped)


def _order(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


@dataclass
class BuiltinData:
    """`conf/data/builtin.yaml`: the built-in training prompts, answered by the target (greedily, cached)."""

    max_new_tokens: int = 128
    max_length: int = 512
    batch_size: int = 2
    validation: int = 24
    limit: int | None = None
    answer_batch_size: int = 64

    def __post_init__(self) -> None:
        floors = {
            "max_new_tokens": 2,
            "max_length": 3,
            "batch_size": 1,
            "validation": 1,
            "limit": 2,
            "answer_batch_size": 1,
        }
        for key, floor in floors.items():
            value = getattr(self, key)
            if value is not None and value < floor:
                raise UserError(f"data.{key}", value, f"must be ≥ {floor}")
        if self.limit is not None and self.limit <= self.validation:
            raise UserError(
                "data.limit", self.limit, f"must be above data.validation ({self.validation} prompts held out)"
            )

    def prepared(self, target: Target) -> Prepared:
        from specwave.data.conversations import builtin_training_prompts, user_prompt_ids
        from specwave.data.regenerate import answered

        texts = builtin_training_prompts()
        count = min(self.limit or len(texts), len(texts))
        chosen = [texts[place * len(texts) // count] for place in range(count)]  # evenly over the templates
        samples = answered(
            target,
            user_prompt_ids(target, chosen),
            max_new_tokens=self.max_new_tokens,
            batch_size=self.answer_batch_size,
            label="training answers",
        )
        return prepare(samples, min(self.max_length, target.max_length), self.validation, target.tokenizer.decode)
