"""CLaSp: after a verification, the M whole blocks whose skipping leaves the last accepted token's state most alike.

The programme is KnapSpec's (`search.py`) over blocks: cell (i, j) holds, after the first i blocks with j of them
skipped, the state most like the target's own at that depth. All blocks weigh 1, none is forced to run, nothing is
pruned, and of the last depth only the cell with exactly M is read. Source: CLaSp (arXiv 2505.24196); methods.md §4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specwave.decoding import Context
from specwave.skipping.online import Online
from specwave.skipping.plans import Plan, skipping_blocks
from specwave.skipping.proposer import SelfSpeculation
from specwave.skipping.search import Run, Survivor, search
from specwave.skipping.settings import SelfDecoding
from specwave.target import Target, Wants
from specwave.target.sublayers import Window


@dataclass(frozen=True)
class ClaspDecoding(SelfDecoding):
    """`decoding=clasp`: exactly `blocks` whole blocks are skipped, or the share `skip` of all N, rounded, where it is
    null. Planned anew every `every` rounds; 1 is after each verification."""

    skip: float = 0.5
    blocks: int | None = None
    every: int = 1

    label = "clasp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.skip < 1.0:
            self.refuse("skip", "is the share of blocks that are skipped: above 0 and below 1")
        if self.blocks is not None and self.blocks < 1:
            self.refuse("blocks", "is the number of blocks that are skipped, at least 1; null: decoding.skip of them")
        if self.every < 1:
            self.refuse("every", "is a number of rounds, at least 1")

    def skipped_of(self, num_layers: int) -> int:
        """M for a target of so many blocks."""
        if self.blocks is not None:
            if self.blocks >= num_layers:
                self.refuse("blocks", f"must be 1 to {num_layers - 1}: this target has {num_layers} blocks")
            return self.blocks
        count = round(self.skip * num_layers)
        if not 1 <= count < num_layers:
            rule = "must be at least one and not all: give another share, or decoding.blocks"
            self.refuse("skip", f"skips {count} of the {num_layers} blocks, {rule}")
        return count

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> SelfSpeculation:
        return self.compose(target, Clasp(target, self, self.skipped_of(target.num_layers)))


class Clasp(Online):
    """The source of CLaSp's plans. The last accepted token's states are those of the last position that was verified;
    a batch is planned for together, by the mean cosine of its rows."""

    def __init__(self, target: Target, settings: ClaspDecoding, count: int):
        super().__init__(target, Wants(tuple(range(target.num_layers))), window=1, every=settings.every)
        self.settings, self.count = settings, count

    @torch.inference_mode()
    def make(self, contexts: Sequence[Context]) -> Plan:
        num_layers = self.target.num_layers
        windows = [Window(context.slot, len(context.tokens) - 2, 1) for context in contexts]
        trial = contexts[0].session.trial(windows)
        last = torch.tensor([context.tokens[-2] for context in contexts], device=self.target.device)
        states = [self.target.embed(last[None])[0]]
        states += [torch.stack([context.blocks[layer][-1] for context in contexts]) for layer in range(num_layers)]

        def run(block: int, hidden_JTD: Tensor) -> Tensor:
            return trial.mlp(block, trial.attention(block, hidden_JTD))

        found = skip_exactly(run, states, self.count)
        skipped = [block for block, runs in enumerate(found.kept) if not runs]
        return Plan(skipping_blocks(num_layers, skipped), self.settings.gamma, cosine=found.cosine)


def skip_exactly(run: Run, states: Sequence[Tensor], count: int) -> Survivor:
    """The programme's best choice of exactly `count` blocks to skip; `kept` has a flag for each block.

    Args:
        run: runs one block for all branches, [J, T, D] → [J, T, D].
        states: the target's own [T, D] at depth 0 (the embeddings), 1, …, N blocks.
        count: 0 to N.
    """
    blocks = len(states) - 1
    found, _ = search(run, states, [1] * blocks, count, [False] * blocks, prune=-2.0)
    return next(one for one in found if one.saved == count)
