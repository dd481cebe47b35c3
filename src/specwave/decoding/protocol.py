"""What a decoding method is to the loop: a proposer of trees.

**Context invariant**: `tokens[0:n]` are committed; the KV cache and all captured states cover `[0:n−1)`;
`tokens[n−1]` is the root of the next round's tree. EAGLE's pairing, probes, cuts at the end token and roll-back hang
on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from specwave.decoding.sampling import DRAFT, Sampling, pick, scores
from specwave.decoding.tree import Tree
from specwave.target import Session, Wants


@dataclass(eq=False)
class Context:
    """One sequence being decoded."""

    row: int  # the sequence's number in this call of `generate`; stays the same
    sequence: int  # key of its noise
    tokens: list[int]  # prompt and output, committed
    prompt_length: int
    limit: int  # new tokens that may be committed in all
    session: Session
    slot: int  # its present row of the session's batch
    # States that the last forward added, [k, D] per wanted layer: they cover positions [n−1−k, n−1).
    blocks: dict[int, Tensor] = field(default_factory=dict)
    attentions: dict[int, Tensor] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    seen: Tensor | None = None  # bool [V], the distinct tokens so far; kept under a repetition penalty only

    @property
    def remaining(self) -> int:
        return self.limit - (len(self.tokens) - self.prompt_length)


@dataclass(eq=False)
class Verdict:
    """What a round did to one sequence; its context is already up to date."""

    context: Context
    tree: Tree  # as verified: cut at what could still be committed
    path: list[int]  # accepted nodes, the root (0) first; draft i is node i + 1
    tokens: list[int]  # committed in this round
    logits: Tensor | None = None  # [K, V] of root and drafts
    levels: int = 0  # how deep the tree is


@runtime_checkable
class Proposer(Protocol):
    """A decoding method. `scope` says whether learned state belongs to a question or is carried along a stream."""

    scope: Literal["sequence", "stream"]

    def prepare(self, session: Session, data: Any) -> None:
        """Offline work before anything is timed: latency fits, plans. Its result is saved by the caller and re-used."""

    def begin(self, contexts: Sequence[Context]) -> None:
        """After prefill; each context carries the wanted states of its prompt."""

    def end(self, row: int) -> None:
        """Row `row` is finished: free what belongs to it."""

    def wants(self, contexts: Sequence[Context]) -> Wants:
        """States that the next forward shall capture; asked before prefill too."""

    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        """One tree per context."""

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        """After every round, whether this proposer's draft was used or not."""


class BaseProposer:
    """Every method of `Proposer` but the draft itself, doing nothing; `propose` goes row by row."""

    scope: Literal["sequence", "stream"] = "sequence"

    def prepare(self, session: Session, data: Any) -> None: ...

    def begin(self, contexts: Sequence[Context]) -> None: ...

    def end(self, row: int) -> None: ...

    def wants(self, contexts: Sequence[Context]) -> Wants:
        return Wants()

    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        return [self.propose_row(context) for context in contexts]

    def propose_row(self, context: Context) -> Tree:
        return Tree.empty()

    def observe(self, verdicts: Sequence[Verdict]) -> None: ...


def draw_drafts(
    logits_BV: Tensor, contexts: Sequence[Context], drafted_BL: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The next draft of a sampled chain in each row: (tokens [B], the distribution q [B, V] they were drawn from).

    A chain may be drawn from anything, but q must be exactly that (transformers#32867), and a draft is accepted the
    more often the closer q is to the target's *processed* distribution. So the proposer's logits (over the target's
    ids, −inf where it has no opinion) pass the target's processors, see what the target will have seen, prefix and
    drafts, and meet noise of their own. The chain then is `Tree.chain(tokens, q=torch.stack(qs))`.

    Args:
        drafted_BL: the chain's drafts so far; none by default.

    Returns:
        q None when decoding is greedy: the tokens are then the likeliest ones, and a chain of them is deterministic.
    """
    sampling, device = contexts[0].sampling, logits_BV.device
    drafted = drafted_BL if drafted_BL is not None else torch.empty(len(contexts), 0, dtype=torch.int64, device=device)
    seen = None
    if sampling.penalised:
        seen = torch.stack([context.seen for context in contexts if context.seen is not None])
        seen = seen.scatter_(1, drafted, True)
    processed = scores(logits_BV, sampling, seen)
    sequences = torch.tensor([context.sequence for context in contexts], device=device)
    positions = torch.tensor([len(context.tokens) for context in contexts], device=device) + drafted.shape[1]
    tokens = pick(processed, sampling, sequences, positions, DRAFT)
    return tokens, None if sampling.greedy else processed.softmax(-1)


@dataclass(frozen=True)
class Autoregressive:
    """`decoding=autoregressive`: the proposer that proposes nothing. `batch_invariant` is the loop's."""

    batch_invariant: bool = False

    needs_checkpoint = False
    label = "autoregressive"

    def build(self, target: Any, checkpoint: Any = None, allow_other_target: bool = False) -> None:
        return None
