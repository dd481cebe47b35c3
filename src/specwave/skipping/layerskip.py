"""LayerSkip: every chain is drafted by the target's first E blocks, E and the chain's length fixed.

The paper trains its targets for it (layer dropout, an early-exit loss at every block); any target decodes exactly, one
that was not trained so drafts the worse the earlier it exits. Source: LayerSkip (arXiv 2404.16710); methods.md §4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specwave.skipping.draft_verify import Fixed
from specwave.skipping.early_exit import EarlyExit, ExitDecoding, exit_plan
from specwave.skipping.exits import check_exit, exit_block
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
        check_exit(self.exit, "decoding.exit")

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> EarlyExit:
        """A proposer; its settings name the block.

        Raises:
            UserError: an exit that is not before the last of the target's blocks.
        """
        block = exit_block(self.exit, target.num_layers, "decoding.exit")
        plan = exit_plan(block, target.num_layers, self.gamma)
        return replace(self, exit=block).compose(target, Fixed(plan))
