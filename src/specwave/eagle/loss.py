"""Training-time test: the drafter is unrolled S steps on its own states, as a server will run it.

B rows, T positions, S steps, L live slots per row, H hidden width, V_d draft vocabulary, P positions with a target.

x the tokens, ℓ_t = 1 where x_t is answer text, y_t the target's distribution for x_{t+1}. At step s slot t reads token
x_{t+1+s} and the state of its own step s−1, and is held against y_{t+1+s}: hidden states stay, tokens and targets
shift. It sees the step-0 keys j ≤ t and its own keys of steps 1…s, with rotary position t + s. It counts where
x_{t+1} … x_{t+s+2} are all answer text and argmax y_{t+1+s} is in the draft vocabulary. Prompt x_0…x_4, answer x_5…x_8
(x_8 the end token):

    slot t                     3           4           5           6           7
    s = 0: reads → predicts    x_4 → x_5   x_5 → x_6   x_6 → x_7   x_7 → x_8   x_8 → –
           counts              no          yes         yes         yes         no
    s = 1: reads → predicts    x_5 → x_6   x_6 → x_7   x_7 → x_8   x_8 → –     –
           counts              no          yes         yes         no          no
    s = 2: reads → predicts    x_6 → x_7   x_7 → x_8   x_8 → –     –           –
           counts              no          yes         no          no          no

(t = 3, s = 0: the target itself makes x_5. t = 4, s = 0: the first draft a server makes.)

`ttt_loss` is what training uses; `reference.ttt_loss_reference` is the same in plain loops. Padding stands right of a
row with ℓ = 0: it counts nowhere, and no slot that counts sees it.

Knows nothing about where states come from, optimisers or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.targets import TargetBatch, ahead


def answer_slots(answer_BT: Tensor, steps: int) -> Tensor:
    """Π_{r=1…s+2} ℓ_{t+r}, bool [S, B, T]."""
    run, slots = ahead(answer_BT, 1), []
    for step in range(steps):
        run = run & ahead(answer_BT, step + 2)
        slots.append(run)
    return torch.stack(slots)


def counting_slots(answer_BT: Tensor, in_vocab_BT: Tensor, steps: int) -> Tensor:
    """M, bool [S, B, T]: the slots whose loss counts (see the head of this file).

    Args:
        answer_BT: ℓ, bool.
        in_vocab_BT: whether argmax y_t is in the draft vocabulary, bool.
    """
    wanted = torch.stack([ahead(in_vocab_BT, step + 1) for step in range(steps)])
    return answer_slots(answer_BT, steps) & wanted


@dataclass
class Outcome:
    """A loss and, per step, detached sums [S]: means of several batches or ranks are sums divided by sums."""

    loss: Tensor
    losses: Tensor  # Σ M·CE
    counts: Tensor  # Σ M
    hits: Tensor  # answer slots whose draft was the data token, all earlier drafts too
    slots: Tensor  # answer slots whose earlier drafts all were


def weighted(losses: Sequence[Tensor], counts: Tensor, decay: float) -> Tensor:
    """Σ_s decay^s · Σ M·CE / Σ M; a step nobody counts at adds nothing."""
    weights = decay ** torch.arange(len(losses), device=counts.device, dtype=losses[0].dtype)
    return (weights * torch.stack(list(losses)) / counts.clamp(min=1)).sum()


def acceptance(hits: Tensor, slots: Tensor) -> tuple[list[float], float]:
    """a_s = hits / slots and τ̂ = 1 + a_0 + a_0·a_1 + … (the target's own token included)."""
    shares = [float(hit) / float(slot) if slot else 0.0 for hit, slot in zip(hits, slots, strict=True)]
    tau, product = 1.0, 1.0
    for share in shares:
        product *= share
        tau += product
    return shares, tau


def soft_cross_entropy(logits_nV: Tensor, target_nV: Tensor) -> Tensor:
    """−Σ_v P_v ln softmax(logits)_v per row [n], in nats; P sums to one."""
    return torch.logsumexp(logits_nV, -1) - (target_nV * logits_nV).sum(-1)


def attend_merged(
    q_BHLd: Tensor, key0_BKTd: Tensor, value0_BKTd: Tensor, own: Sequence[tuple[Tensor, Tensor]], visible_BLT: Tensor
) -> Tensor:
    """Attention to step-0 keys where `visible` and to one own key per later step: one softmax over T + s scores.

    Heads share keys in groups of H/K; `own` holds (k, v) [B, K, L, d] of steps 1…s.
    """
    groups = q_BHLd.shape[1] // key0_BKTd.shape[1]
    q_BKGLd = (q_BHLd * q_BHLd.shape[-1] ** -0.5).unflatten(1, (-1, groups))
    length = key0_BKTd.shape[2]
    past = (q_BKGLd.flatten(2, 3) @ key0_BKTd.transpose(-1, -2)).unflatten(2, (groups, -1))
    scores = [past.masked_fill(~visible_BLT[:, None, None], float("-inf"))]
    scores += [(q_BKGLd * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own]
    weight = torch.softmax(torch.cat(scores, -1), -1).to(value0_BKTd.dtype)
    out = (weight[..., :length].flatten(2, 3) @ value0_BKTd).unflatten(2, (groups, -1))
    for index, (_, value) in enumerate(own):
        out = out + weight[..., length + index, None] * value[:, :, None]
    return out.flatten(1, 2)


def _take(x_BTH: Tensor, index: Tensor) -> Tensor:
    """Rows of x flattened over its first two sizes: [*index.shape, H]. Its backward adds whole rows."""
    return x_BTH.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape)


def ttt_loss(
    drafter: Eagle3Drafter, batch: TargetBatch, steps: int, decay: float = 0.8, normaliser: Tensor | None = None
) -> Outcome:
    """The objective, with all work on slots that cannot count left out.

    Only slots with x_{t+1}, x_{t+2} in the answer ever count, and no other slot reads what a slot computes behind its
    step-0 key: so prompts and padding are mapped to keys and values and to nothing else.

    Args:
        normaliser: Σ M per step [S] where it is not this batch's own (summed over all ranks).
    """
    ids, (rows, width) = batch.ids, batch.ids.shape
    alive_SBT, M_SBT = answer_slots(batch.answer, steps), counting_slots(batch.answer, batch.in_vocab, steps)
    live = alive_SBT[0]
    # Live slots first and ascending; rows with fewer are filled up with dead slots, which count nowhere.
    slot_BL = torch.argsort(~live, dim=1, stable=True)[:, : max(1, int(live.sum(1).max()))]
    base_B1 = torch.arange(rows, device=ids.device)[:, None] * width
    visible_BLT = torch.arange(width, device=ids.device) <= slot_BL[:, :, None]

    first_BTH = drafter.fuse([batch.states[layer] for layer in drafter.config.layers])
    everywhere = torch.arange(width, device=ids.device).expand_as(ids)
    shifted_BTH = torch.cat([batch.embedding[:, 1:], batch.embedding[:, :1]], 1)  # slot T−1 is nobody's key
    z_BTZ = drafter.mix(shifted_BTH, first_BTH)
    key0, value0 = drafter.keys_values(z_BTZ, drafter.rotary(everywhere))

    hidden_BLH, own = _take(first_BTH, base_B1 + slot_BL), []
    losses, hits, slots = [], [], []
    reached_BL = torch.ones_like(slot_BL, dtype=torch.bool)  # every earlier draft was the data token
    ids_of_drafts = drafter.draft_ids
    for step in range(steps):
        token_BL = (slot_BL + 1 + step).clamp(max=width - 1)  # where it is clamped the slot does not count
        rotary = drafter.rotary(slot_BL + step)
        if step == 0:
            z_BLZ = _take(z_BTZ, base_B1 + slot_BL)
        else:
            z_BLZ = drafter.mix(_take(batch.embedding, base_B1 + token_BL), hidden_BLH)
            own.append(drafter.keys_values(z_BLZ, rotary))
        attended = attend_merged(drafter.queries(z_BLZ, rotary), key0, value0, own, visible_BLT)
        hidden_BLH = drafter.finish(hidden_BLH, attended)

        index_n = M_SBT[step].gather(1, slot_BL).flatten().nonzero().flatten()
        logits_nV = drafter.logits(_take(hidden_BLH, index_n))
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))  # autocast hands out bf16
        losses.append(
            soft_cross_entropy(logits_nV, batch.target[batch.row.gather(1, token_BL).flatten()[index_n]]).sum()
        )

        with torch.no_grad():
            reached_BL = reached_BL & alive_SBT[step].gather(1, slot_BL)
            slots.append(reached_BL.sum())
            data_n = ahead(ids, step + 2).gather(1, slot_BL).flatten()[index_n]
            hit_BL = torch.zeros_like(reached_BL)  # out of the draft vocabulary: a miss
            hit_BL.view(-1)[index_n] = ids_of_drafts[logits_nV.argmax(-1)] == data_n
            reached_BL = reached_BL & hit_BL
            hits.append(reached_BL.sum())
    counts = M_SBT.sum((1, 2))
    loss = weighted(losses, counts if normaliser is None else normaliser, decay)
    return Outcome(loss, torch.stack(losses).detach(), counts, torch.stack(hits), torch.stack(slots))
