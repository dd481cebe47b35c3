"""How the token states of a conversation become rows: settings, and the collector that carries them out.

Shapes: T positions of a conversation, K kept ones, R rows, N layers, D hidden size.
Knows nothing about models: it is handed entropies and states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from specwave.artifacts import UserError, check_seed
from specwave.layers.blocks import Averages, Reservoir, averaging, block_sizes, keep_positions


@dataclass(frozen=True)
class Rows:
    """The settings that decide which rows a pass leaves; scale and centre act on Grams afterwards (`prepare_grams`)."""

    rho: float = 0.3
    keep: Literal["entropy", "random"] = "entropy"
    filter_scope: Literal["prompt", "set"] = "prompt"
    skip_first: int = 1
    block_size: int = 32
    blocks: Literal["tokens", "rows"] = "tokens"
    ragged_tail: Literal["drop", "keep"] = "drop"
    aggregate: Literal["concatenate", "average"] = "concatenate"
    max_rows: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1:
            raise UserError("calibration.rho", self.rho, "must be in (0, 1]: the share of positions that is kept")
        for key, floor in (("block_size", 1), ("skip_first", 0), ("max_rows", 2)):
            if getattr(self, key) < floor:
                raise UserError(f"calibration.{key}", getattr(self, key), f"must be ≥ {floor}")
        check_seed("calibration.seed", self.seed)
        if self.keep == "random" and self.filter_scope == "set":
            raise UserError("calibration.filter_scope", "set", "random positions are drawn per prompt: use prompt")

    def kept(self, entropy_T: Tensor, index: int) -> Tensor:
        """The kept positions of one conversation, ascending; `index` is its place in the calibration set."""
        if self.keep == "random":
            draw = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
            return keep_positions(torch.rand(len(entropy_T), generator=draw), self.rho, self.skip_first)
        return keep_positions(entropy_T, self.rho, self.skip_first)


def keep_in_set(entropies: Sequence[Tensor], rho: float, skip_first: int) -> list[Tensor]:
    """The filter over the whole set: the max(1, ceil(ρ·ΣT')) positions of largest entropy, wherever they lie.

    Ties go to the earlier conversation, then to the lower position. A conversation may keep nothing.
    """
    rest = [entropy[skip_first:] for entropy in entropies]
    joined = torch.cat(rest)
    count = max(1, math.ceil(round(rho * len(joined), 9)))
    taken = torch.zeros(len(joined), dtype=torch.bool)
    taken[torch.sort(joined, descending=True, stable=True).indices[:count]] = True
    parts = taken.split([len(part) for part in rest])
    return [part.nonzero()[:, 0] + skip_first for part in parts]


@dataclass
class Collector:
    """The rows of one setting, and the counts that tell what became of the positions."""

    settings: Rows
    seen: int = 0
    kept: int = 0
    dropped: int = 0
    store: Reservoir | Averages = field(init=False)

    def __post_init__(self) -> None:
        average = self.settings.aggregate == "average"
        make = Averages if average else Reservoir
        self.store = make(self.settings.max_rows, self.settings.seed)

    def plan(self, kept: Tensor, length: int) -> Tensor:
        """The averaging matrix [R, T] of a conversation whose `kept` positions are given."""
        own = self.settings
        sizes = block_sizes(len(kept), own.block_size, own.blocks, own.ragged_tail)
        self.seen, self.kept, self.dropped = self.seen + length, self.kept + len(kept), self.dropped + (not sizes)
        return averaging(kept, sizes, length)

    def take(self, rows_NRD: Tensor, prompt: int) -> None:
        self.store.offer(rows_NRD.transpose(0, 1), prompt)

    def grams(self) -> Tensor:
        """float64 [N, R, R], one layer at a time: the rows themselves are most of the memory.

        Raises:
            UserError: fewer than two rows.
        """
        if len(self.store) < 2:
            own = self.settings
            raise UserError(
                "calibration.block_size", own.block_size,
                f"{len(self.store)} rows are left, at least 2 are needed: calibration.rho={own.rho} keeps {self.kept} "
                f"of {self.seen} positions, and {self.dropped} prompts have no whole block of {own.block_size}; use a "
                "smaller calibration.block_size, a larger calibration.rho or longer answers",
            )  # fmt: skip
        layers = (rows_RD.double() for rows_RD in self.store.stack().unbind(1))
        return torch.stack([rows_RD @ rows_RD.T for rows_RD in layers])
