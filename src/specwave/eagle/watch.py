"""A drafter watched at work during training: the τ of really decoding a few held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specwave.data.conversations import Sample
from specwave.data.sources import spread
from specwave.decoding import Proposer, generate
from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.proposer import Eagle3
from specwave.target import Target


class Watch:
    """Decodes up to `tokens` tokens behind each of `count` held-out prompts, greedily, with chains of `levels` drafts.

    One batch; what has no room in the target's or the drafter's context is passed over.
    """

    def __init__(self, target: Target, samples: Sequence[Sample], count: int, levels: int, tokens: int = 48):
        self.target, self.levels, self.tokens = target, levels, tokens
        prompts = [sample.ids[: sample.answer.index(True)] for sample in samples]
        fitting = [ids for ids in prompts if 1 < len(ids) <= target.max_length - tokens - levels]
        self.prompts = spread(fitting, count)

    def tau(self, drafter: Eagle3Drafter) -> float | None:
        """Committed tokens per verification; None where no prompt fits."""
        return self.tau_of(Eagle3(drafter, self.target, self.levels)) if self.prompts else None

    def tau_of(self, proposer: Proposer) -> float | None:
        """The same of any method."""
        if not self.prompts:
            return None
        with torch.autocast(self.target.device.type, enabled=False):
            made = generate(self.target, proposer, self.prompts, max_new_tokens=self.tokens)
        return sum(map(len, made.tokens)) / sum(map(len, made.accept_lengths))
