"""ASD, adaptive self-speculation by cosine similarity: attentions that hardly change their input are left out.

**Our reading** of "Draft on the Fly" (arXiv 2410.01028). Its rule of thresholds is known: attention sub-layers alone
are dropped, those whose input and output are alike beyond a threshold, anew for every context. Its two further rules
about the structure of the draft were not available to us, nor its thresholds; what stands here beside the rule is ours:

- input and output are the residual stream before and after the sub-layer;
- they are compared at the positions of the last `window` verified rounds, by the mean of their cosines;
- first and last block keep theirs, and where no attention is dropped nothing is drafted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from specwave.decoding import Context, Verdict
from specwave.skipping.online import Online
from specwave.skipping.plans import Plan
from specwave.skipping.proposer import SelfSpeculation
from specwave.skipping.settings import SelfDecoding
from specwave.skipping.stops import Adaptive, Rule
from specwave.target import Target, Wants


@dataclass(frozen=True)
class AsdDecoding(SelfDecoding):
    """`decoding=asd`: attentions of a mean cosine above `threshold` over the last `window` rounds are dropped, chosen
    anew every `every` rounds. Chains end by Draft & Verify's rule, as in the paper."""

    stop: Any = None
    threshold: float = 0.95
    window: int = 5
    every: int = 64

    label = "asd"
    own: ClassVar[Rule | None] = Adaptive()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1.0 <= self.threshold < 1.0:
            self.refuse("threshold", "is a cosine: must be at least -1 and below 1")
        if self.window < 1:
            self.refuse("window", "cosines are taken over at least 1 round")
        if self.every < self.window:
            self.refuse("every", f"must be at least decoding.window={self.window}, the rounds watched before a choice")

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> SelfSpeculation:
        return self.compose(target, Asd(target, self))


class Asd(Online):
    """The source of ASD's plans."""

    def __init__(self, target: Target, settings: AsdDecoding):
        self.settings = settings
        self._rounds = deque[tuple[Tensor, int]](maxlen=settings.window)  # sums of cosines by middle block, and tokens
        self.middle = range(1, target.num_layers - 1)  # blocks whose attention may be dropped
        before = tuple(layer - 1 for layer in self.middle)
        super().__init__(target, Wants(before, tuple(self.middle)), settings.window, settings.every)

    def forget(self) -> None:
        self._rounds.clear()

    def take(self, verdicts: Sequence[Verdict]) -> None:
        if not self.middle:
            return
        contexts = [verdict.context for verdict in verdicts]
        inputs = torch.stack([torch.cat([one.blocks[layer - 1] for one in contexts]) for layer in self.middle])
        outputs = torch.stack([torch.cat([one.attentions[layer] for one in contexts]) for layer in self.middle])
        found = F.cosine_similarity(inputs.float(), outputs.float(), dim=-1).sum(-1)
        self._rounds.append((found, inputs.shape[1]))

    def cosines(self) -> list[float]:
        """The mean of each middle block over the rounds watched."""
        sums, tokens = zip(*self._rounds, strict=True)
        return (torch.stack(sums).sum(0) / sum(tokens)).tolist()

    def make(self, contexts: Sequence[Context]) -> Plan:
        if not self.middle:
            return Plan.full(self.target.num_layers)
        kept = kept_attentions(self.cosines(), self.settings.threshold)
        return Plan.full(self.target.num_layers) if all(kept) else Plan(kept, self.settings.gamma)


def kept_attentions(cosines: Sequence[float], threshold: float) -> tuple[bool, ...]:
    """Flags of all sub-layers from the cosines of the attentions between first and last block."""
    middle = [flag for cosine in cosines for flag in (cosine <= threshold, True)]
    return (True, True, *middle, True, True)
