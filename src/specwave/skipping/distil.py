"""What Kangaroo's adapter learns by: the target's distribution at every token of answers, and the figures of it.

x the tokens, ℓ_t = 1 where x_t is answer text, y_t the target's distribution for x_{t+1}. The adapter's state at t is
held against y_t where x_{t+1} is answer text. Prompt x_0…x_4, answer x_5…x_8 (x_8 the end token):

    slot t      3          4                5                6                7                8
    predicts    x_4        x_5              x_6              x_7              x_8              –
    counts      no         yes: the first   yes              yes              yes              no
                           draft of a round

Chains. A draft reads states of the exit alone, which for an accepted draft are those of the text. So the chain from t
on is right as long as the slots are: with hits at 4, 5 and 7 and a miss at 6, the chains of 2 drafts are

    from t      4          5                6                7
    drafts      4, 5       5, 6             6, 7             7 (the answer ends)
    right       2          1                0                1

so a_0 = 3/4 (slots 4 … 7), a_1 = 1/2 (second drafts behind a right one: at 5 and at 6), τ̂ = 1 + 3/4 + 3/4 · 1/2.

Letters: B rows, T tokens, P slots that count, D hidden size, V vocabulary, S drafts of a chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specwave.artifacts import UserError
from specwave.skipping.adapter import Adapter, Turn
from specwave.target.decoder import Attend, attend_causal
from specwave.target.documents import attend_within, document_positions, document_spans

CHUNK = 256  # slots whose logits are held at once
DRAFTS = 6  # of the chains that figures are of: the paper's γ


def following(x_BT: Tensor) -> Tensor:
    """x_{t+1} at t; zero at the end."""
    return torch.cat([x_BT[:, 1:], torch.zeros_like(x_BT[:, :1])], 1)


class _CrossEntropy(torch.autograd.Function):
    """−Σ_v p_v ln q_v of each slot, q = softmax(x Wᵀ). The head W is frozen, so that the gradient, (q − p) W, is known
    as soon as q is: nothing as wide as the vocabulary outlives its chunk."""

    @staticmethod
    def forward(
        ctx: Any, x_PD: Tensor, head_VD: Tensor, score: Callable[[Tensor], Tensor], rows_PX: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses, drafted, gradients = [], [], []
        for x, rows in zip(x_PD.split(CHUNK), rows_PX.split(CHUNK), strict=True):
            scores = F.linear(x.to(head_VD.dtype), head_VD)
            log_q = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(-1)
            p = score(rows).softmax(-1).to(log_q.dtype)
            losses.append(-(p * log_q).sum(-1))
            drafted.append(log_q.argmax(-1))
            gradients.append((log_q.exp() - p).to(head_VD.dtype) @ head_VD)
        ctx.save_for_backward(torch.cat(gradients).to(x_PD.dtype))
        tokens = torch.cat(drafted)
        ctx.mark_non_differentiable(tokens)
        return torch.cat(losses), tokens

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return gradients[0][:, None].to(own.dtype) * own, None, None, None


def cross_entropy(
    x_PD: Tensor, head_VD: Tensor, score: Callable[[Tensor], Tensor], rows_PX: Tensor
) -> tuple[Tensor, Tensor]:
    """(−Σ_v y_v ln q_v in nats, float32 at least; the token q holds likeliest), both [P].

    Args:
        x_PD: what the adapter makes of each slot; gradients go there alone.
        head_VD: the target's head.
        score: the target's logits [n, V] of rows [n, X].
    """
    return _CrossEntropy.apply(x_PD, head_VD, score, rows_PX)


def chains(hit_BT: Tensor, live_BT: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """(hits, slots), int64 [S]: of the s-th drafts of chains of live slots whose drafts before were right, how many
    were right, and how many there are."""
    hits, slots, going = [], [], live_BT
    for _ in range(steps):
        slots.append(going.sum())
        going = going & hit_BT
        hits.append(going.sum())
        hit_BT, live_BT = following(hit_BT), following(live_BT)
        going = going & live_BT
    return torch.stack(hits), torch.stack(slots)


@dataclass
class Outcome:
    """Of a batch: the mean over its slots, and detached sums."""

    loss: Tensor
    total: Tensor  # of the losses
    hits: Tensor
    slots: Tensor


def distil(
    adapter: Adapter,
    batch: dict[str, Any],
    states_BTD: Tensor,
    score: Callable[[Tensor], Tensor],
    rows_BTX: Tensor,
    rope: Turn,
    head_VD: Tensor,
) -> Outcome:
    """The adapter over whole texts, as it will see them a token at a time.

    Args:
        batch: as data/datamodule.py makes it; packed rows too.
        states_BTD: the exit's.
        score: the target's logits [n, V] of rows [n, X], which `rows_BTX` has for every position.
        rope: the target's tables, [positions, h] each.
    """
    ids_BT, documents = batch["ids"], batch.get("documents")
    places = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
    attend: Attend = attend_causal
    if documents is not None:
        places, attend = document_positions(documents), attend_within(document_spans(documents))
    turn = rope[0][places][:, :, None], rope[1][places][:, :, None]
    live_BT = following(batch["answer"])
    found_BTD = adapter(
        states_BTD.clone(), turn, attend
    )  # what inference made cannot be kept for a gradient, its clone can
    losses_P, drafted_P = cross_entropy(found_BTD[live_BT], head_VD, score, rows_BTX[live_BT])
    hit_BT = torch.zeros_like(live_BT)
    hit_BT[live_BT] = drafted_P == following(ids_BT)[live_BT]
    return Outcome(losses_P.mean(), losses_P.detach().double().sum(), *chains(hit_BT, live_BT, DRAFTS))


def refuse_not_finite(value: Tensor, what: str, step: int, batch: dict[str, Any]) -> None:
    """Ends a training before what is NaN or infinite reaches weights or a checkpoint.

    Raises:
        UserError: so.
    """
    if not bool(value.isfinite()):
        where = f"the {what} is not finite at step {step} in the batch of {', '.join(batch['names'])}"
        remedy = "the last checkpoint is as it was: lower drafter.lr, or look at these samples"
        raise UserError("training", float(value.detach()), f"{where}; {remedy}")


@dataclass
class Sums:
    """Of any number of batches: means are sums divided by sums, so that batches weigh by their slots."""

    loss: float = 0.0
    hits: tuple[int, ...] = (0,) * DRAFTS
    slots: tuple[int, ...] = (0,) * DRAFTS

    def add(self, found: Outcome) -> None:
        self.loss += float(found.total)
        self.hits = tuple(a + b for a, b in zip(self.hits, found.hits.tolist(), strict=True))
        self.slots = tuple(a + b for a, b in zip(self.slots, found.slots.tolist(), strict=True))

    def figures(self) -> dict[str, float]:
        """loss (nats a slot), a_0 … a_{S−1} (share of right drafts behind right ones), tau_hat (with the target's own
        token; of chains that only their length ends)."""
        shares = [hit / slot if slot else 0.0 for hit, slot in zip(self.hits, self.slots, strict=True)]
        tau, product = 1.0, 1.0
        for share in shares:
            product *= share
            tau += product
        named = {f"a_{step}": share for step, share in enumerate(shares)}
        return {"loss": self.loss / max(1, self.slots[0]), **named, "tau_hat": tau}
