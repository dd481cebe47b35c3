"""LayerSkip: every chain is drafted by the target's first E blocks, E and the chain's length fixed.

The paper trains its targets for it (layer dropout, an early-exit loss at every block); any target decodes exactly, one
that was not trained so drafts the worse the earlier it exits. Source: LayerSkip (arXiv 2404.16710); methods.md §4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specwave.artifacts import UserError
from specwave.skipping.draft_verify import Fixed
from specwave.skipping.early_exit import EarlyExit, ExitDecoding, exit_plan
from specwave.target import Target


@dataclass(frozen=True)
class LayerSkipDecoding(ExitDecoding):
    """`decoding=layerskip`. `exit`: how many blocks draft; below 1 a share of the target's."""

    gamma: int = 6
    stop: Any = 0.0
    exit: float = 0.25

    label = "layerskip"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.exit < 1 or (self.exit >= 1 and float(self.exit).is_integer())):
            self.refuse("exit", "a number of blocks, or a share of them between 0 and 1")

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> EarlyExit:
        """A proposer; its settings name the block.

        Raises:
            UserError: an exit that is not before the last of the target's blocks.
        """
        block = exit_block(self.exit, target.num_layers, "decoding.exit")
        plan = exit_plan(block, target.num_layers, self.gamma)
        return replace(self, exit=block).compose(target, Fixed(plan))


def exit_block(given: float, num_layers: int, key: str) -> int:
    """How many blocks run up to an exit, 1 … N−1: `given` itself, or below 1 that share of all, rounded.

    Raises:
        UserError: there are not so many before the last block.
    """
    last = num_layers - 1
    block = min(max(round(given * num_layers), 1), last) if given < 1 else int(given)
    if not 1 <= block <= last:
        raise UserError(key, f"{given:g}", f"an exit leaves out a block at least: 1 to {last} of {num_layers} may run")
    return block
