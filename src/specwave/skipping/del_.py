"""DEL: before every round, the exit and the number of drafts that promise most tokens per block that runs.

At every verification each exit's *shadow prediction*, what it would have drafted behind a committed token, is compared
with what the target committed there. So α_E is known for all exits E, whichever drafts, by counts that decay:

    TPL(E, γ) = (1 + α_E + … + α_E^γ) / (N − E + (γ + 1)·E)

Worked, N = 8: E = 2, α = 0.8, γ = 3 gives 2.952/14 = 0.211; E = 4, α = 0.9, γ = 3 gives 3.439/20 = 0.172; γ = 0, plain
decoding, gives 1/8. All blocks cost the same in it, embedding and head nothing. Source: DEL (arXiv 2504.05598);
methods.md §4. Ours: counts decay per round, and all rows of a batch, which has one exit, count together.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specwave.artifacts import UserError
from specwave.decoding import Context, Verdict
from specwave.skipping.drafting import choose_coupled, confidence
from specwave.skipping.early_exit import EarlyExit, ExitDecoding, exit_plan
from specwave.skipping.exits import exit_block
from specwave.skipping.logs import Logged
from specwave.skipping.midway import Midway, Tally
from specwave.skipping.plans import Plan
from specwave.skipping.stops import Rule
from specwave.skipping.tpt import fastest
from specwave.skipping.windows import Evidence, gather
from specwave.target import Target, Wants

_SCORED = 128  # tokens whose logits are held at once


@dataclass(frozen=True)
class DelDecoding(ExitDecoding):
    """`decoding=del`. `gamma`: the most drafts per round. `stop`: null is `Midway`, which here knows the shadow
    predictions of the exit that drafts. `exits`: how many blocks may draft, a list; null is any number."""

    stop: Any = None
    decay: float = 0.95
    exits: list[int] | None = None

    label = "del"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.decay <= 1.0:
            self.refuse("decay", "must be 0 (only the last round counts) to 1 (all rounds count alike)")
        if isinstance(self.stop, Midway) and self.stop.decay != self.decay:
            rule = f"it counts as decoding.decay={self.decay} says, not by {self.stop.decay}: give null"
            raise UserError("decoding.stop", "Midway", rule)
        if self.exits is not None and min(self.exits, default=0) < 1:
            self.refuse("exits", "numbers of blocks, one at least; null for all")

    def rule(self) -> Rule:
        return Midway(self.decay) if self.stop is None else super().rule()

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> EarlyExit:
        """A proposer.

        Raises:
            UserError: an exit that is not before the last of the target's blocks.
        """
        blocks = range(1, target.num_layers) if self.exits is None else self.exits
        exits = sorted({exit_block(block, target.num_layers, "decoding.exits") for block in blocks})
        source = Del(target, exits, self.gamma, self.decay)
        found = self.compose(target, source)
        if isinstance(self.rule(), Midway):
            found.stop = Shadowed(source)
        return found


class Del(Logged):
    """The source of DEL's exits; its log has a row for every change.

    Attributes:
        exits: ascending numbers of blocks.
        tallies: shadow predictions, by exit.
    """

    scope: Literal["sequence", "stream"] = "sequence"

    def __init__(self, target: Target, exits: Sequence[int], gamma: int, decay: float):
        super().__init__(target)
        self.exits, self.gamma, self.decay = tuple(exits), gamma, decay
        self.wanted = Wants(tuple(block - 1 for block in self.exits))
        self.begin([])

    def begin(self, contexts: Sequence[Context]) -> None:
        self.tallies = [Tally(self.decay) for _ in self.exits]
        self.present: Plan | None = None
        self.option: int | None = None  # of the exits, the one that drafts
        self.rounds = 0

    def end(self, row: int) -> None: ...

    def wants(self, contexts: Sequence[Context]) -> Wants:
        return self.wanted

    def plan(self, contexts: Sequence[Context]) -> Plan | None:
        """Decodes plainly before anything is known, and while that promises most."""
        if self.rounds == 0:
            return None
        began = time.perf_counter()
        blocks, alphas = self.target.num_layers, [tally.alpha for tally in self.tallies]
        best = fastest(alphas, self.exits, lambda tokens: blocks, range(1, self.gamma + 1))
        self.option = best.option
        if best.option is None:
            plan = Plan.full(blocks, rate=best.rate)
        else:
            plan = exit_plan(self.exits[best.option], blocks, best.gamma, alpha=alphas[best.option], rate=best.rate)
        if self.present is None or (plan.kept, plan.gamma) != (self.present.kept, self.present.gamma):
            self.note(contexts, self.rounds, plan, time.perf_counter() - began)
        self.present = plan
        return plan

    def threshold(self) -> float:
        """Midway between the probabilities of right and of wrong predictions of the exit that drafts."""
        return 0.0 if self.option is None else self.tallies[self.option].midway

    @torch.inference_mode()
    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.rounds += 1
        states = [torch.cat([verdict.context.blocks[layer] for verdict in verdicts]) for layer in self.wanted.blocks]
        contexts, counts = [verdict.context for verdict in verdicts], [len(verdict.tokens) for verdict in verdicts]
        right_JT, probability_JT = self._shadows(torch.stack(states), gather(self.target, contexts, counts), contexts)
        table = zip(right_JT.tolist(), probability_JT.tolist(), strict=True)
        for tally, (right, probability) in zip(self.tallies, table, strict=True):
            tally.add(zip(right, probability, strict=True))

    def _shadows(self, states_JTD: Tensor, committed: Evidence, contexts: Sequence[Context]) -> tuple[Tensor, Tensor]:
        """Whether each exit would have drafted what was committed behind each position, and how probable its draft."""
        right, probability = [], []
        keys = contexts[0].sampling, committed.sequences, committed.positions, committed.seen
        for some_jTD in states_JTD.split(max(1, _SCORED // len(committed.tokens))):
            drafted_jT, processed_jTV = choose_coupled(self.target.logits(some_jTD), *keys)
            right.append(drafted_jT == committed.tokens)
            probability.append(confidence(processed_jTV, drafted_jT))
        return torch.cat(right), torch.cat(probability)


class Shadowed:
    """`Midway` on DEL's own shadow predictions, which know every exit and more positions than drafts do."""

    idle = False

    def __init__(self, source: Del):
        self.source = source

    def begin(self, contexts: Sequence[Context]) -> None: ...

    def ends(self, contexts: Sequence[Context], probabilities: Sequence[float]) -> list[bool]:
        threshold = self.source.threshold()
        return [probability < threshold for probability in probabilities]

    def observe(self, verdicts: Sequence[Verdict]) -> None: ...
