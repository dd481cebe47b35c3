"""Which sub-layers of the target a draft runs: a plan, its checks, its file.

Sub-layers are counted in the order they run: 2i is the attention of block i, 2i + 1 its MLP. Knows nothing about how a
plan is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specwave.artifacts import UserError, read_json, reading
from specwave.decoding.loop import ROOM


@dataclass(frozen=True)
class Plan:
    """What is drafted: `kept` flags of the 2N sub-layers, and γ tokens per round; γ = 0 is plain decoding.

    `alpha`, `cosine` and `rate` (tokens per second) are what was expected of it when it was made.
    """

    kept: tuple[bool, ...]
    gamma: int
    alpha: float | None = None
    cosine: float | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if len(self.kept) % 2 or self.gamma < 0:
            raise ValueError(f"a plan has two flags per block and γ ≥ 0, got {len(self.kept)} flags, γ = {self.gamma}")

    @classmethod
    def full(cls, num_layers: int, **more: Any) -> Plan:
        """The target itself, that is plain decoding."""
        return cls((True,) * (2 * num_layers), 0, **more)

    @property
    def attentions(self) -> int:
        """How many attention sub-layers are kept."""
        return sum(self.kept[::2])

    @property
    def mlps(self) -> int:
        return sum(self.kept[1::2])

    @property
    def skipped_attention_share(self) -> float | None:
        """Attention's share of the skipped sub-layers; None when none is skipped."""
        skipped = len(self.kept) - sum(self.kept)
        return (len(self.kept) // 2 - self.attentions) / skipped if skipped else None

    def describe(self) -> dict[str, Any]:
        """Plain data; `read_plan` reads it again."""
        return {**asdict(self), "kept": [int(flag) for flag in self.kept]}


def skipping_blocks(num_layers: int, blocks: Iterable[int]) -> tuple[bool, ...]:
    """The kept set without these whole blocks."""
    skipped = set(blocks)
    return tuple(layer not in skipped for layer in range(num_layers) for _ in ("attention", "MLP"))


def check_kept(kept: Sequence[Any], num_layers: int, key: str) -> tuple[bool, ...]:
    """Flags for every sub-layer of a target with `num_layers` blocks, at least one of them set.

    Raises:
        UserError: a plan for another depth, flags that are none, a plan that keeps nothing.
    """
    if any(flag not in (0, 1) for flag in kept):
        remedy = "a plan's kept holds 0 or 1 for every sub-layer: attention, MLP, attention, …"
        raise UserError(key, list(kept)[:8], remedy)
    if len(kept) != 2 * num_layers:
        rule = f"it is a plan for another depth: this target has {num_layers} blocks, {2 * num_layers} sub-layers"
        raise UserError(key, f"{len(kept)} sub-layers", rule)
    if not any(kept):
        raise UserError(key, "nothing kept", "keep at least one sub-layer")
    return tuple(bool(flag) for flag in kept)


def read_plan(path: Path | str, num_layers: int, gamma: int, key: str = "decoding.plan") -> Plan:
    """A plan file, `{"kept": [2N flags], "gamma": γ}`; without its own, γ is `gamma`.

    Raises:
        UserError: no such file, one that is no plan, or one for another target.
    """
    content = read_json(path, key)
    if not isinstance(content.get("kept"), list):
        raise UserError(key, path, 'it is no plan: {"kept": [0 or 1 for each sub-layer], "gamma": drafts} is expected')
    with reading(key, path):
        own = int(content.get("gamma", gamma))
    if own < 1:
        raise UserError(key, path, f"its gamma is {own}: a plan drafts at least 1 token per round")
    if own > ROOM:
        raise UserError(key, path, f"its gamma is {own}: one round verifies {ROOM}")
    return Plan(check_kept(content["kept"], num_layers, key), own)
