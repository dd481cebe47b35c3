"""`conf/drafter/eagle3.yaml`: how an EAGLE-3 drafter is built and taught."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specwave.artifacts import UserError
from specwave.eagle.divergence import FORMS
from specwave.eagle.loss import NORMALISERS
from specwave.eagle.slots import COUNT_FROM

STARTS = ("target", "random")
EXPORTS = ("bfloat16", "float32")


@dataclass
class Eagle3:
    draft_vocab_size: int = 4096
    steps: int = 3
    decay: float = 0.8
    loss: str = "cross_entropy"
    count_from: str = "ours"
    normaliser: str = "counted"
    checkpointing: bool = False
    init: str = "target"
    warm_start: str | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    lr: float = 1.5e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup: float = 0.05
    clip: float = 0.5
    export_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        def refuse(key: str, rule: str) -> None:
            raise UserError(f"drafter.{key}", getattr(self, key), f"must be {rule}")

        for key in ("draft_vocab_size", "steps"):
            if getattr(self, key) < 1:
                refuse(key, "≥ 1")
        for key in ("lr", "clip"):
            if not (0 < getattr(self, key) < math.inf):
                refuse(key, "> 0 and finite")
        if not 0 < self.decay <= 1:
            refuse("decay", "in (0, 1]: the weight of each step beside the one before")
        if not 0 <= self.warmup < 1:
            refuse("warmup", "in [0, 1): the share of all steps")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            refuse("betas", "two numbers in [0, 1)")
        if not self.weight_decay >= 0:
            refuse("weight_decay", "≥ 0")
        for key, known in (("loss", tuple(FORMS)), ("count_from", COUNT_FROM), ("normaliser", NORMALISERS)):
            if getattr(self, key) not in known:
                refuse(key, f"one of {', '.join(known)}")
        if self.init not in STARTS:
            refuse("init", f"one of {', '.join(STARTS)}")
        if self.fc_norm and self.norm_before_fc:
            refuse("norm_before_fc", "false where drafter.fc_norm is true: one of the two scales the captured layers")
        if self.export_dtype not in EXPORTS:
            refuse("export_dtype", f"one of {', '.join(EXPORTS)}")

    def rate(self, step: int, max_steps: int) -> float:
        """Share of `lr` at a step 0…max_steps−1: linear warm-up to 1, then a cosine to 0 after the last step."""
        warm = max(1, round(self.warmup * max_steps))
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, max_steps - warm))))
