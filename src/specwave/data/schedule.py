"""What trainings of every kind set alike: the optimiser's keys, and the learning rate over the steps."""

from __future__ import annotations

import math
from typing import Any

from specwave.artifacts import UserError

EXPORTS = ("bfloat16", "float32")


def warmed_cosine(step: int, max_steps: int, warmup: float) -> float:
    """At a step 0…max_steps−1: linear to 1 over the share `warmup` of the steps, then a cosine to 0 after the last."""
    warm = max(1, round(warmup * max_steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, max_steps - warm))))


def check_optimiser(drafter: Any) -> None:
    """Refuses values of `lr`, `clip`, `warmup`, `betas`, `weight_decay` and `export_dtype` that cannot be meant.

    Raises:
        UserError: the first such key, as `drafter.<key>`.
    """

    def refuse(key: str, rule: str) -> None:
        raise UserError(f"drafter.{key}", getattr(drafter, key), f"must be {rule}")

    for key in ("lr", "clip"):
        if not (0 < getattr(drafter, key) < math.inf):
            refuse(key, "> 0 and finite")
    if not 0 <= drafter.warmup < 1:
        refuse("warmup", "in [0, 1): the share of all steps")
    if len(drafter.betas) != 2 or not all(0 <= beta < 1 for beta in drafter.betas):
        refuse("betas", "two numbers in [0, 1)")
    if not drafter.weight_decay >= 0:
        refuse("weight_decay", "≥ 0")
    if drafter.export_dtype not in EXPORTS:
        refuse("export_dtype", f"one of {', '.join(EXPORTS)}")
