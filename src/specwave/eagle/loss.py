"""Training-time test: the drafter is unrolled S steps on its own states, as a server will run it.

B rows, T positions, S steps, J keys of step 0, N live slots, H hidden width, V_d draft vocabulary.

x the tokens, ℓ_t = 1 where x_t is answer text, y_t the target's distribution for x_{t+1}. At step s slot t reads token
x_{t+1+s} and the state of its own step s−1, and is held against y_{t+1+s}: hidden states stay, tokens and targets
shift. It sees the step-0 keys j ≤ t of its document and its own keys of steps 1…s, with rotary position t + s. Which
slots count is said, with a worked table, in slots.py; how far a draft is from y, in divergence.py:

    loss = Σ_s decay^s · Σ M·divergence / normaliser_s

`ttt_loss` is what training uses; `reference.ttt_loss_reference` is the same in plain loops. Memory grows with T, not
with T²: attention is taken a chunk of slots at a time, logits a chunk of rows. Padding stands right of a row with ℓ = 0
or is no document: it counts nowhere, and no slot that counts sees it.

Knows nothing about where states come from, optimisers or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specwave.eagle.attention import merged_attention
from specwave.eagle.divergence import chunked_loss
from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.slots import ahead, answer_slots, counting_slots, lay_out
from specwave.eagle.targets import TargetBatch

NORMALISERS = ("counted", "all")


@dataclass
class Outcome:
    """A loss and, per step, detached sums [S]: means of several batches or ranks are sums divided by sums.

    `hits` and `slots` are of the slots a server drafts at, whatever the loss counts.
    """

    loss: Tensor
    losses: Tensor  # Σ M·divergence
    counts: Tensor  # Σ M
    hits: Tensor  # answer slots whose draft was the data token, all earlier drafts too
    slots: Tensor  # answer slots whose earlier drafts all were


def weighted(losses: Sequence[Tensor], counts: Tensor, decay: float) -> Tensor:
    """Σ_s decay^s · Σ M·divergence / Σ M; a step nobody counts at adds nothing."""
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


def _take(x_BTH: Tensor, index: Tensor) -> Tensor:
    """Rows of x flattened over its first two sizes: [1, *index.shape, H]. Its backward adds whole rows."""
    return x_BTH.flatten(0, 1).index_select(0, index)[None]


def unroll(
    drafter: Eagle3Drafter, batch: TargetBatch, live_BT: Tensor, steps: int, checkpointing: bool = False
) -> tuple[Tensor, Tensor]:
    """(the states handed on at the live slots [S, N, H], the slots' places in the flattened batch [N]).

    Only keys and values are computed of other tokens, and of those behind a document's last live slot nothing.
    """
    layout = lay_out(live_BT, batch.documents)
    place_N, position_N = layout.keys[layout.slots], layout.positions[layout.slots][None]
    first_1JH = drafter.fuse([_take(batch.states[layer], layout.keys) for layer in drafter.config.layers])
    last = batch.ids.numel() - 1
    z0_1JZ = drafter.mix(_take(batch.embedding, (layout.keys + 1).clamp(max=last)), first_1JH)
    key0_KJd, value0_KJd = (x[0] for x in drafter.keys_values(z0_1JZ, drafter.rotary(layout.positions[None])))

    def advance(step: int, hidden_1NH: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        """The state handed on and, from step 1 on, the slots' own key and value."""
        own, rotary = list(zip(flat[::2], flat[1::2], strict=True)), drafter.rotary(position_N + step)
        if step == 0:
            z_1NZ = _take(z0_1JZ, layout.slots)
        else:  # where the token is clamped the slot does not count
            z_1NZ = drafter.mix(_take(batch.embedding, (place_N + 1 + step).clamp(max=last)), hidden_1NH)
            key, value = drafter.keys_values(z_1NZ, rotary)
            own.append((key[0], value[0]))
        query_HNd = drafter.queries(z_1NZ, rotary)[0]
        attended = merged_attention(query_HNd, key0_KJd, value0_KJd, own, layout.slots, layout.chunks)
        return drafter.finish(hidden_1NH, attended[None]), *(own[-1] if step else ())

    hidden, flat, handed_on = _take(first_1JH, layout.slots), list[Tensor](), []
    for step in range(steps):
        if checkpointing and torch.is_grad_enabled():
            hidden, *found = checkpoint(advance, step, hidden, *flat, use_reentrant=False)
        else:
            hidden, *found = advance(step, hidden, *flat)
        flat += found
        handed_on.append(hidden[0])
    return torch.stack(handed_on), place_N


def ttt_loss(
    drafter: Eagle3Drafter,
    batch: TargetBatch,
    steps: int,
    decay: float = 0.8,
    normaliser: Tensor | str = "counted",
    *,
    loss: str = "cross_entropy",
    count_from: str = "ours",
    checkpointing: bool = False,
) -> Outcome:
    """The objective, with all work on slots that cannot count left out.

    Args:
        normaliser: what a step's sum is divided by. `counted`: Σ M of this batch; `all`: B·T, padding included, as
            EAGLE; or Σ M per step [S] summed over all ranks. It does not touch `losses` and `counts`.
        loss: cross_entropy, forward_kl or lk (divergence.py).
        count_from: ours, speculators or eagle (slots.py); `batch` must have been read with the same.
        checkpointing: keep of each step what it hands on only, and run it again in backward.
    """
    alive_SBT = answer_slots(batch.answer, steps, batch.documents)
    M_SBT = counting_slots(batch.answer, batch.in_vocab, steps, count_from, batch.documents)
    hidden_SNH, place_N = unroll(drafter, batch, alive_SBT[0] | M_SBT.any(0), steps, checkpointing)

    M_SN, alive_SN = M_SBT.flatten(1)[:, place_N], alive_SBT.flatten(1)[:, place_N]
    known_SN = torch.stack([ahead(batch.in_vocab, step + 1).flatten()[place_N] for step in range(steps)])
    step_n, slot_n = (M_SN | (alive_SN & known_SN)).nonzero(as_tuple=True)  # a draft that no loss counts may be a hit
    counts = M_SBT.sum((1, 2))
    if isinstance(normaliser, str):
        normaliser = counts if normaliser == "counted" else torch.full_like(counts, batch.ids.numel())
    dtype = torch.promote_types(drafter.dtype, torch.float32)  # autocast hands out bf16 logits
    weight_S = decay ** torch.arange(steps, device=counts.device, dtype=dtype) / normaliser.clamp(min=1)
    row_n = batch.row.flatten()[place_N[slot_n] + 1 + step_n]
    total, losses_n, drafts_n = chunked_loss(
        drafter.logits,
        [*drafter.norm.parameters(), *drafter.lm_head.parameters()],
        hidden_SNH[step_n, slot_n],
        batch.target,
        batch.mass,
        row_n,
        weight_S[step_n] * M_SN[step_n, slot_n],
        loss,
    )
    losses = torch.zeros_like(weight_S).index_add_(0, step_n, losses_n * M_SN[step_n, slot_n])

    hit_SN = torch.zeros_like(M_SN)  # out of the draft vocabulary: a miss
    data_n = batch.ids.flatten()[(place_N[slot_n] + 2 + step_n).clamp(max=batch.ids.numel() - 1)]
    hit_SN[step_n, slot_n] = drafter.draft_ids[drafts_n] == data_n
    reached_N, hits, slots = torch.ones_like(M_SN[0]), [], []  # every earlier draft was the data token
    for step in range(steps):
        reached_N = reached_N & alive_SN[step]
        slots.append(reached_N.sum())
        reached_N = reached_N & hit_SN[step]
        hits.append(reached_N.sum())
    return Outcome(total, losses, counts, torch.stack(hits), torch.stack(slots))
