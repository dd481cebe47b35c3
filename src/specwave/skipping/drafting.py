"""Drafting with a part of the target: chains of tokens from a kept set, and how alike its tokens are to the target's.

Letters: R live rows, B rows of the session's batch, V vocabulary, J branches, T tokens of a window.

**Coupled draws.** A draft is chosen as the target would choose from these logits: the same processors and, when
sampling, the same keyed noise of the same position. What is committed is the target's own choice whatever was drafted
(sample-and-match), so this changes no token of the output; it only makes the draft right more often than a draw of its
own, or the likeliest token, would be. Greedy, it is the argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specwave.decoding import Context, Sampling
from specwave.decoding.sampling import TARGET, pick, scores
from specwave.skipping.stops import Stop

_SCORED = 128  # tokens whose logits are held at once


def choose_coupled(
    logits: Tensor, sampling: Sampling, sequences: Tensor, positions: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The token [...] the target would commit at each position by these logits [..., V], and their processed scores.

    Args:
        sequences, positions: int64, keys of the noise: those of the token that comes behind each.
        seen: bool [..., V], the distinct tokens before; under a repetition penalty only.
    """
    processed = scores(logits, sampling, seen)
    return pick(processed, sampling, sequences, positions, TARGET), processed


@torch.inference_mode()
def draft_chains(contexts: Sequence[Context], kept: Sequence[bool], gamma: int, stop: Stop) -> list[Tensor]:
    """Each row's chain of at most γ drafts, int64; drafting goes on until every row has stopped.

    Keys and values of drafts go behind the committed ones and are given up by roll-back: verification overwrites them.
    One transfer to the host per step, none where the stop rule is idle. The rule is asked behind the last step too: it
    may learn from all probabilities.
    """
    session, sampling = contexts[0].session, contexts[0].sampling
    device, batch = session.target.device, session.batch
    slots = [context.slot for context in contexts]
    every = slots == list(range(batch))
    live = [int(slot in slots) for slot in range(batch)]
    sequences = torch.tensor([context.sequence for context in contexts], device=device)
    first = torch.tensor([len(context.tokens) for context in contexts], device=device)
    tokens_B = torch.zeros(batch, dtype=torch.int64)
    tokens_B[slots] = torch.tensor([context.tokens[-1] for context in contexts])
    tokens_B = tokens_B.to(device)
    seen_RV = None
    if sampling.penalised:
        seen_RV = torch.stack([context.seen for context in contexts if context.seen is not None])
    drafts: list[Tensor] = []
    counts, going = [0] * len(contexts), [True] * len(contexts)
    steps = min(gamma, max(context.remaining for context in contexts) - 1)  # the loop would cut what goes beyond
    mark = session.mark()
    try:
        for step in range(steps):
            positions = None
            if batch > 1:  # rows that idle may stand at the end of the context
                lengths = torch.tensor(session.lengths, device=device)
                positions = lengths.clamp(max=session.target.max_length - 1)[:, None]
            logits_BV = _last(session.forward(tokens_B[:, None], positions, plan=kept).logits)
            logits_RV = logits_BV if every else logits_BV[slots]
            token_R, processed_RV = choose_coupled(logits_RV, sampling, sequences, first + step, seen_RV)
            drafts.append(token_R)
            counts = [count + on for count, on in zip(counts, going, strict=True)]
            if not stop.idle:
                ends = stop.ends(contexts, confidence(processed_RV, token_R).tolist())
                going = [on and not end for on, end in zip(going, ends, strict=True)]
            if step + 1 == steps or not any(going):
                break
            session.advance(live)
            tokens_B = token_R if every else tokens_B.index_put((torch.tensor(slots, device=device),), token_R)
            if seen_RV is not None:
                seen_RV = seen_RV.scatter(1, token_R[:, None], True)
    finally:
        session.rollback(mark)
    if not drafts:
        return [torch.empty(0, dtype=torch.int64, device=device) for _ in contexts]
    chains_RL = torch.stack(drafts, 1)
    return [chain[:count] for chain, count in zip(chains_RL, counts, strict=True)]


def _last(logits_BTV: Tensor | None) -> Tensor:
    assert logits_BTV is not None
    return logits_BTV[:, -1]


def confidence(processed: Tensor, tokens: Tensor) -> Tensor:
    """The probability [...] that processed scores [..., V] give to tokens [...]."""
    return (processed.gather(-1, tokens[..., None])[..., 0] - processed.logsumexp(-1)).exp()


@torch.inference_mode()
def agreement(
    score: Callable[[Tensor], Tensor],
    final_JTD: Tensor,
    tokens_T: Tensor,
    sampling: Sampling,
    sequences_T: Tensor,
    positions_T: Tensor,
    seen_TV: Tensor | None = None,
) -> list[float]:
    """α of each branch: the share of the window's positions where its draft would have been the target's token.

    Args:
        score: final norm and head, [..., D] → [..., V].
        final_JTD: the branches' states behind the last block.
    """
    shares = []
    for some_jTD in final_JTD.split(max(1, _SCORED // len(tokens_T))):
        drafted_jT, _ = choose_coupled(score(some_jTD), sampling, sequences_T, positions_T, seen_TV)
        shares.append((drafted_jT == tokens_T).float().mean(-1))
    return [float(share) for share in torch.cat(shares).tolist()]
