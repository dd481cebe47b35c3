"""`conf/drafter/kangaroo.yaml`: where Kangaroo's adapter stands and how it is taught."""

from __future__ import annotations

from dataclasses import dataclass, field

from specwave.data.schedule import check_optimiser, warmed_cosine
from specwave.skipping.exits import check_exit


@dataclass
class Kangaroo:
    exit: float = 0.0625
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup: float = 0.05
    clip: float = 0.5
    export_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_exit(self.exit, "drafter.exit")
        check_optimiser(self)

    def rate(self, step: int, max_steps: int) -> float:
        """Share of `lr` at a step 0…max_steps−1."""
        return warmed_cosine(step, max_steps, self.warmup)
