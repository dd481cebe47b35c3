"""`conf/drafter/eagle3.yaml`: how an EAGLE-3 drafter is built and taught."""

from __future__ import annotations

from dataclasses import dataclass, field

from specwave.artifacts import UserError
from specwave.data.schedule import check_optimiser, warmed_cosine
from specwave.eagle.divergence import FORMS
from specwave.eagle.loss import NORMALISERS
from specwave.eagle.slots import COUNT_FROM

STARTS = ("target", "random")


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
        if not 0 < self.decay <= 1:
            refuse("decay", "in (0, 1]: the weight of each step beside the one before")
        for key, known in (("loss", tuple(FORMS)), ("count_from", COUNT_FROM), ("normaliser", NORMALISERS)):
            if getattr(self, key) not in known:
                refuse(key, f"one of {', '.join(known)}")
        if self.init not in STARTS:
            refuse("init", f"one of {', '.join(STARTS)}")
        if self.fc_norm and self.norm_before_fc:
            refuse("norm_before_fc", "false where drafter.fc_norm is true: one of the two scales the captured layers")
        check_optimiser(self)

    def rate(self, step: int, max_steps: int) -> float:
        """Share of `lr` at a step 0…max_steps−1."""
        return warmed_cosine(step, max_steps, self.warmup)
