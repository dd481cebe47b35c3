"""Which drafts stand: pure functions on tensors, no host sync, no loop over nodes.

Letters: B rows, K nodes (root 0), V vocabulary. Sources: methods.md §5; Leviathan et al. 2023 (speculative sampling).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specwave.decoding.processors import met
from specwave.decoding.sampling import (
    ACCEPT,
    RESIDUAL,
    TARGET,
    Sampling,
    choose,
    keyed_gumbel,
    keyed_uniform,
    largest,
    scores,
)


@dataclass(frozen=True)
class Nodes:
    """A round's trees, rows padded to K nodes: a pad carries token −1 and hangs on the root.

    Attributes:
        tokens, parents: int64 [B, K]; the root's token is the last committed one.
        sees: bool [B, K, K], as `tree.ancestors` makes them.
        positions: int64 [B, K], of the token that comes behind each node.
        sequences: int64 [B], keys of the noise.
        depth: no node lies deeper below the root.
        seen: bool [B, V], the tokens up to the root; under a repetition penalty only.
    """

    tokens: Tensor
    parents: Tensor
    sees: Tensor
    positions: Tensor
    sequences: Tensor
    depth: int
    seen: Tensor | None = None


def accept(nodes: Nodes, logits_BKV: Tensor, sampling: Sampling, q_BKV: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(accepted nodes bool [B, K], root included; the token committed behind the last of them [B]).

    The token is `NO_TOKEN` where the target's logits are no numbers. `q_BKV`: see `accept_chain`; None when all drafts
    were made without randomness.
    """
    if q_BKV is not None and not sampling.greedy:
        seen = None if nodes.seen is None else met(nodes.seen, nodes.tokens, nodes.sees)
        end, final = accept_chain(nodes.tokens, q_BKV, logits_BKV, sampling, nodes.sequences, nodes.positions, seen)
        return torch.arange(nodes.tokens.shape[1], device=end.device) <= end[:, None], final
    if not sampling.greedy or sampling.penalised:
        return walk_tree(nodes, logits_BKV, sampling)
    chosen = largest(logits_BKV)
    end, on_path = match_tree(nodes.tokens, nodes.parents, nodes.sees, chosen)
    return on_path, chosen.gather(1, end[:, None])[:, 0]


def match_tree(
    tokens_BK: Tensor, parents_BK: Tensor, ancestors_BKK: Tensor, chosen_BK: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample-and-match: from the root on, descend to the child that equals the target's token.

    `chosen[b, k]` is the target's token after node k. Returns (end [B], on_path bool [B, K]): the deepest accepted node
    and its path, root included; chosen[b, end] is the token committed behind them. A pad node carries token −1.

    Exact for drafts that were made without looking at the target's randomness: what is committed at each node is the
    target's own choice, the tree only decides how many of them one forward yields.
    """
    fits = tokens_BK == chosen_BK.gather(1, parents_BK)
    fits[:, 0] = True
    alive = ~(ancestors_BKK & ~fits[:, None]).any(-1)
    depth = ancestors_BKK.sum(-1)
    end = torch.where(alive, depth, 0).argmax(-1)
    return end, ancestors_BKK.gather(1, end[:, None, None].expand(-1, 1, ancestors_BKK.shape[2]))[:, 0]


def walk_tree(nodes: Nodes, logits_BKV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample-and-match, level by level: (accepted nodes [B, K], the token behind them [B]).

    Processors and noise cost more than a look at the logits, so only the nodes that the walk comes to are processed:
    one per row and level. Where a row finds no child it stays, and the same node gives the same token again.
    """
    rows = torch.arange(len(logits_BKV), device=logits_BKV.device)
    at = torch.zeros_like(rows)
    for _ in range(nodes.depth + 1):
        seen = None
        if nodes.seen is not None:
            seen = met(nodes.seen, nodes.tokens, nodes.sees[rows, at][:, None])[:, 0]
        chosen = choose(logits_BKV[rows, at], sampling, nodes.sequences, nodes.positions[rows, at], seen)
        fits = (nodes.parents == at[:, None]) & (nodes.tokens == chosen[:, None])
        fits[:, 0] = False  # the root is its own parent
        at = torch.where(fits.any(1), fits.int().argmax(1), at)
        if fits.device.type == "cpu" and not bool(fits.any()):  # on a GPU the look would cost more than it saves
            break
    return nodes.sees[rows, at], chosen


def accept_chain(
    tokens_BK: Tensor,
    q_BKV: Tensor,
    logits_BKV: Tensor,
    sampling: Sampling,
    sequences_B: Tensor,
    positions_BK: Tensor,
    seen_BKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Speculative sampling of a chain drawn from q: (end [B], token committed behind it [B]).

    Draft i (node i + 1) is accepted with min(1, p/q) at its parent, node i; after the first rejection the token comes
    from norm(max(p − q, 0)), after the last draft from p, the processed distribution. `q_BKV[:, i]` is the distribution
    behind node i; zero where no draft follows (the last node and padding, whose token is −1), which makes the residual
    p itself.
    """
    p = scores(logits_BKV, sampling, seen_BKV).double().softmax(-1)
    drafts = tokens_BK[:, 1:].clamp(min=0)[..., None]
    kept = p[:, :-1].gather(2, drafts)[..., 0] / q_BKV[:, :-1].double().gather(2, drafts)[..., 0].clamp(min=1e-300)
    draw = keyed_uniform(sampling.seed, sequences_B[:, None], ACCEPT, positions_BK[:, :-1], tokens_BK.new_zeros(()))
    taken = (draw < kept) & (tokens_BK[:, 1:] >= 0)
    end = taken.long().cumprod(1).sum(1)
    at = end[:, None, None].expand(-1, 1, p.shape[2])
    p_end, q_end = p.gather(1, at)[:, 0], q_BKV.double().gather(1, at)[:, 0]
    residual = (p_end - q_end).clamp(min=0)
    # p − q can vanish through rounding alone when p equals q; then nothing was rejectable and p itself is right.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_end)
    position = positions_BK.gather(1, end[:, None])[:, 0]
    rejected = q_end.sum(-1) > 0
    noise = [keyed_gumbel(sampling.seed, sequences_B, purpose, position, p.shape[2]) for purpose in (RESIDUAL, TARGET)]
    return end, largest(residual.log() + torch.where(rejected[:, None], noise[0], noise[1]))
