"""Early exit: the first E blocks of the target draft, by its own norm and head, and verification goes on from block E.

Letters: R live rows, B rows of the session's batch, L drafts, D hidden size, V vocabulary, N blocks.

What the first blocks make of a token is what they make of it in the whole target, so their keys, values and outputs
are kept and only blocks E … N−1 are left to verify with. A chain of γ drafts takes γ + 1 steps, because the last draft
has to run through the first blocks too. With γ = 2:

    step       1       2       3         verification
    of         root    d1      d2        root, d1, d2 at once
    blocks     0 … E−1                   E … N−1
    gives      d1      d2                what the target says behind each

That is E·(γ + 1) + N − E blocks a round. Source: LayerSkip (arXiv 2404.16710); methods.md §4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specwave.decoding import Context, Resume, Tree
from specwave.skipping.drafting import choose_coupled, confidence
from specwave.skipping.plans import Plan, skipping_blocks
from specwave.skipping.proposer import SelfSpeculation, Source
from specwave.skipping.settings import SelfDecoding
from specwave.skipping.stops import Stop
from specwave.target import Output, Target, Wants


def exit_plan(block: int, num_layers: int, gamma: int, **more: Any) -> Plan:
    """γ drafts of the first `block` blocks, 1 … N−1 of them."""
    return Plan(skipping_blocks(num_layers, range(block, num_layers)), gamma, **more)


@dataclass(frozen=True)
class ExitDecoding(SelfDecoding):
    """Settings of a method that composes a source of exits with any stop rule."""

    def compose(self, target: Target, source: Source) -> EarlyExit:
        found = super().compose(target, source)
        return EarlyExit(target, found.settings, source, found.stop)


class EarlyExit(SelfSpeculation):
    """Self-speculation whose plans keep the first blocks of the target, all of each and no others."""

    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        self._own(contexts)
        plan = self.source.plan(contexts)
        if plan is None or plan.gamma == 0:
            return [Tree.empty(self.target.device) for _ in contexts]
        wanted = self.source.wants(contexts).blocks
        return draft_to_exit(contexts, sum(plan.kept) // 2, plan.gamma, self.stop, wanted)


@torch.inference_mode()
def draft_to_exit(
    contexts: Sequence[Context],
    block: int,
    gamma: int,
    stop: Stop,
    layers: Sequence[int] = (),
    read: Callable[[Tensor], Tensor] | None = None,
) -> list[Tree]:
    """Each row's chain of at most γ drafts by the first `block` blocks, with the states to go on from.

    Drafting goes on until every row has stopped. One transfer to the host per step, none where the stop rule is idle.

    Args:
        layers: blocks whose outputs are wanted of every verified node; those that run here are handed on.
        read: makes logits [R, V] of the exit's output [R, D] of a token of each row, called for the root and then for
            every draft but the last; None: the target's own norm and head do.
    """
    session, sampling = contexts[0].session, contexts[0].sampling
    device, rows = session.target.device, Rows(contexts)
    steps = min(gamma, max(context.remaining for context in contexts) - 1)  # the loop would cut what goes beyond
    if steps < 1:
        return [Tree.empty(device) for _ in contexts]
    sequences = torch.tensor([context.sequence for context in contexts], device=device)
    first = torch.tensor([len(context.tokens) for context in contexts], device=device)
    token_R = torch.tensor([context.tokens[-1] for context in contexts], device=device)
    seen_RV = None
    if sampling.penalised:
        seen_RV = torch.stack([context.seen for context in contexts if context.seen is not None])
    wants = Wants(tuple(layer for layer in layers if layer < block - 1))
    outputs: list[Output] = []
    drafts: list[Tensor] = []
    counts, going = [0] * len(contexts), [True] * len(contexts)
    mark = session.mark()
    try:
        while len(drafts) < steps and any(going):
            early = "all" if read is None else None
            outputs.append(rows.step(token_R, end_block=block, wants=wants, logits=early))
            logits_RV = outputs[-1].logits if read is None else read(outputs[-1].hidden)
            assert logits_RV is not None
            token_R, processed_RV = choose_coupled(logits_RV, sampling, sequences, first + len(drafts), seen_RV)
            drafts.append(token_R)
            counts = [count + on for count, on in zip(counts, going, strict=True)]
            if not stop.idle:
                ends = stop.ends(contexts, confidence(processed_RV, token_R).tolist())
                going = [on and not end for on, end in zip(going, ends, strict=True)]
            if seen_RV is not None:
                seen_RV = seen_RV.scatter(1, token_R[:, None], True)
        outputs.append(rows.step(token_R, end_block=block, wants=wants, logits=False))
    finally:
        session.rollback(mark)
    chains_RL = torch.stack(drafts, 1)
    hidden = torch.stack([output.hidden for output in outputs], 1)
    earlier = {layer: torch.stack([output.blocks[layer] for output in outputs], 1) for layer in wants.blocks}
    trees = []
    for row, count in enumerate(counts):
        whole = Resume(block, hidden[row], {layer: states[row] for layer, states in earlier.items()})
        trees.append(Tree.chain(chains_RL[row, :count], resume=whole.first(count + 1)))
    return trees


class Rows:
    """The live rows of a batch, one token of each at a time, behind each other in the cache; other rows idle."""

    def __init__(self, contexts: Sequence[Context]):
        self.session = contexts[0].session
        slots = [context.slot for context in contexts]
        self.slots = torch.tensor(slots, device=self.session.target.device)
        self.live = [int(slot in slots) for slot in range(self.session.batch)]
        self.every = slots == list(range(self.session.batch))

    def step(self, tokens_R: Tensor, **how: Any) -> Output:
        """Runs a token of each row, `how` the session's forward says; its output is of these rows alone, [R, …]."""
        session, positions = self.session, None
        tokens_B = tokens_R
        if not self.every:
            tokens_B = tokens_R.new_zeros(session.batch).index_copy(0, self.slots, tokens_R)
        if session.batch > 1:  # rows that idle, or draft beyond their limit, may stand at the end of the context
            lengths = torch.tensor(session.lengths, device=self.slots.device)
            positions = lengths.clamp(max=session.target.max_length - 1)[:, None]
        output = session.forward(tokens_B[:, None], positions, **how)
        session.advance(self.live)
        scored = None if output.logits is None else self._own(output.logits)
        return Output(self._own(output.hidden), scored, {layer: self._own(one) for layer, one in output.blocks.items()})

    def _own(self, states_B1X: Tensor) -> Tensor:
        return states_B1X[:, 0] if self.every else states_B1X[self.slots, 0]
