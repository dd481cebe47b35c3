"""The training objective in plain loops, to test `loss.ttt_loss` against: value, gradient and statistics.

Every slot of every row is computed, attention is one dense mask over all keys of all steps, logits are full, and each
rule is written as its sentence. Slow on purpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.loss import Outcome


def visible_keys(length: int, step: int) -> Tensor:
    """Which keys the query at (step, t) sees, bool [T, (step+1)·T]: keys j ≤ t of step 0, key t of each later step."""
    mask = torch.zeros(length, (step + 1) * length, dtype=torch.bool)
    for t in range(length):
        for j in range(t + 1):
            mask[t, j] = True
        for later in range(1, step + 1):
            mask[t, later * length + t] = True
    return mask


def unrolled_logits(drafter: Eagle3Drafter, states: list[Tensor], embedding_TH: Tensor, steps: int) -> list[Tensor]:
    """Draft logits [T, V_d] of each step for one sequence without padding.

    Args:
        states: captured layers, ascending, each [T, H_t].
        embedding_TH: embeddings of x_0…x_{T−1}; past the end a zero vector is read.
    """
    length = embedding_TH.shape[0]
    hidden, keys, values, logits = drafter.fuse([state[None] for state in states]), [], [], []
    for step in range(steps):
        embedding = torch.zeros_like(embedding_TH)
        for t in range(length - 1 - step):
            embedding[t] = embedding_TH[t + 1 + step]
        mask = visible_keys(length, step)

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = mask) -> Tensor:
            keys.append(k.repeat_interleave(q.shape[1] // k.shape[1], 1))
            values.append(v.repeat_interleave(q.shape[1] // v.shape[1], 1))
            scores = q @ torch.cat(keys, 2).transpose(-1, -2) / q.shape[-1] ** 0.5
            return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ torch.cat(values, 2)

        hidden = drafter.forward_step(embedding[None], hidden, attend, torch.arange(length)[None] + step)
        logits.append(drafter.logits(hidden)[0])
    return logits


def ttt_loss_reference(
    drafter: Eagle3Drafter,
    ids_BT: Tensor,
    answer_BT: Tensor,
    states: dict[int, Tensor],
    embedding: Tensor,
    target_logits_BTV: Tensor,
    steps: int,
    decay: float = 0.8,
) -> Outcome:
    """As `ttt_loss`, from the target's full logits; rows may be padded on the right (ℓ = 0 there)."""
    rows, length = ids_BT.shape
    losses = [torch.zeros((), dtype=drafter.dtype) for _ in range(steps)]
    counts, hits, slots = (torch.zeros(steps, dtype=torch.int64) for _ in range(3))
    names = drafter.draft_ids.tolist()
    for row in range(rows):
        x, answer = ids_BT[row].tolist(), answer_BT[row].tolist()
        captured = [states[layer][row] for layer in drafter.config.layers]
        logits = unrolled_logits(drafter, captured, embedding[ids_BT[row]].to(drafter.dtype), steps)
        for t in range(length):
            reached = True  # every earlier draft of this chain was the data token
            for step in range(steps):
                if t + step + 2 >= length or not all(answer[t + 1 : t + step + 3]):
                    break
                y = target_logits_BTV[row, t + 1 + step].to(drafter.dtype)
                known = int(y.argmax()) in names
                if known:
                    log_q = torch.log_softmax(logits[step][t], -1)
                    losses[step] = losses[step] - (torch.softmax(y[names], -1) * log_q).sum()
                    counts[step] += 1
                if reached:
                    slots[step] += 1
                    reached = known and names[int(logits[step][t].argmax())] == x[t + step + 2]
                    hits[step] += int(reached)
    loss = torch.zeros((), dtype=drafter.dtype)
    for step in range(steps):
        if counts[step]:
            loss = loss + decay**step * losses[step] / counts[step]
    return Outcome(loss, torch.stack(losses).detach(), counts, hits, slots)
