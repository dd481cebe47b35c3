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


def counts(answer: list[bool], t: int, step: int, count_from: str) -> bool:
    """Whether the loss of slot t of one document counts at a step, were every token in the draft vocabulary."""
    if t + 1 + step >= len(answer):
        return False
    if count_from == "speculators":
        return answer[t + 1 + step]
    if count_from == "eagle":
        return answer[t + step]
    return t + step + 2 < len(answer) and all(answer[t + 1 : t + step + 3])


def divergence(logits: Tensor, y: Tensor, names: list[int], loss: str) -> Tensor:
    """Of one draft from the target's logits y [V], in nats."""
    log_q, p = torch.log_softmax(logits, -1), torch.softmax(y[names], -1)
    if loss == "lk":
        return -torch.minimum(torch.softmax(y, -1)[names], log_q.exp()).sum().log()
    cross_entropy = -(p * log_q).sum()
    return cross_entropy + (p * p.log()).sum() if loss == "forward_kl" else cross_entropy


def documents_of(numbers: list[int]) -> list[slice]:
    """Runs of one number ≥ 0."""
    found, start = [], 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[start]:
            if numbers[start] >= 0:
                found.append(slice(start, end))
            start = end
    return found


def ttt_loss_reference(
    drafter: Eagle3Drafter,
    ids_BT: Tensor,
    answer_BT: Tensor,
    states: dict[int, Tensor],
    embedding: Tensor,
    target_logits_BTV: Tensor,
    steps: int,
    decay: float = 0.8,
    normaliser: str = "counted",
    *,
    loss: str = "cross_entropy",
    count_from: str = "ours",
    documents_BT: Tensor | None = None,
) -> Outcome:
    """As `ttt_loss`, from the target's full logits, one document after the other.

    Rows may be padded on the right (ℓ = 0 there; with `documents` a negative number).
    """
    losses = [torch.zeros((), dtype=drafter.dtype) for _ in range(steps)]
    counted, hits, slots = (torch.zeros(steps, dtype=torch.int64) for _ in range(3))
    names = drafter.draft_ids.tolist()
    numbers = torch.zeros_like(ids_BT) if documents_BT is None else documents_BT
    spans = [(row, place) for row, run in enumerate(numbers.tolist()) for place in documents_of(run)]
    for row, place in spans:
        x, answer = ids_BT[row, place].tolist(), answer_BT[row, place].tolist()
        captured = [states[layer][row, place] for layer in drafter.config.layers]
        logits = unrolled_logits(drafter, captured, embedding[ids_BT[row, place]].to(drafter.dtype), steps)
        for t in range(len(x)):
            reached = True  # every earlier draft of this chain was the data token
            for step in range(steps):
                if t + 1 + step >= len(x):
                    break
                y = target_logits_BTV[row, place][t + 1 + step].to(drafter.dtype)
                known = int(y.argmax()) in names
                if known and counts(answer, t, step, count_from):
                    losses[step] = losses[step] + divergence(logits[step][t], y, names, loss)
                    counted[step] += 1
                reached = reached and counts(answer, t, step, "ours")
                if reached:
                    slots[step] += 1
                    reached = known and names[int(logits[step][t].argmax())] == x[t + step + 2]
                    hits[step] += int(reached)
    total = torch.zeros((), dtype=drafter.dtype)
    for step in range(steps):
        if counted[step]:
            total = total + decay**step * losses[step] / (counted[step] if normaliser == "counted" else ids_BT.numel())
    return Outcome(total, torch.stack(losses).detach(), counted, hits, slots)
