"""How far a draft's distribution is from the target's: value and gradient in closed form, a chunk of rows at a time.

n rows, V_d draft vocabulary, H width. p the target's probabilities of the draft vocabulary's tokens, m = Σ p ≤ 1,
P = p/m, q = softmax(logits). In nats:

    cross_entropy   −Σ P ln q                       gradient by the logits  q − P
    forward_kl      Σ P ln(P/q): the cross entropy minus P's entropy, so zero is perfect; the same gradient
    lk              −ln α, α = Σ min(p, q)          q·(A − [q < p])/α,  A = Σ q where q < p

α is the probability that speculative sampling accepts a draft sampled from q (Leviathan et al. 2023, arXiv 2211.17192),
and −ln α the α-variant of the LK losses (Samarin et al. 2026, arXiv 2602.23881); 1 − α, the total variation, has the
same optimum, but its gradient vanishes where q and p hardly overlap. p is not renormalised here, in contrast to
speculators' `nla` and SpecForge's `alpha`: a token outside the draft vocabulary is never accepted, so α ≤ m.

Logits exist for a chunk of rows only. Their gradient is taken on the way forward, where they are, so that backward
neither keeps nor recomputes them. Knows nothing about steps and slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# logits [n, V_d], P [n, V_d], m [n] → loss [n], gradient [n, V_d]
Form = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]

# Rows of one chunk. A CPU's cache holds the logits of few; a GPU would write the head's gradient too often.
_ROWS = {"cpu": 256, "else": 2048}


def cross_entropy(logits_nV: Tensor, target_nV: Tensor, mass_n: Tensor | None) -> tuple[Tensor, Tensor]:
    lse_n = torch.logsumexp(logits_nV, -1)
    return lse_n - torch.linalg.vecdot(target_nV, logits_nV), (logits_nV - lse_n[:, None]).exp_().sub_(target_nV)


def forward_kl(logits_nV: Tensor, target_nV: Tensor, mass_n: Tensor | None) -> tuple[Tensor, Tensor]:
    loss_n, gradient_nV = cross_entropy(logits_nV, target_nV, mass_n)
    return loss_n - torch.special.entr(target_nV).sum(-1), gradient_nV


def lk(logits_nV: Tensor, target_nV: Tensor, mass_n: Tensor | None) -> tuple[Tensor, Tensor]:
    assert mass_n is not None  # `read_target(with_mass=True)`
    q_nV, p_nV = torch.softmax(logits_nV, -1), target_nV * mass_n[:, None]
    alpha_n = torch.minimum(p_nV, q_nV).sum(-1).clamp(min=torch.finfo(q_nV.dtype).tiny)  # no overlap: large, not ∞
    below_nV = (q_nV < p_nV).to(q_nV.dtype)
    share_n = torch.linalg.vecdot(q_nV, below_nV)
    return -alpha_n.log(), q_nV.mul_(share_n[:, None] - below_nV).div_(alpha_n[:, None])


FORMS: dict[str, Form] = {"cross_entropy": cross_entropy, "forward_kl": forward_kl, "lk": lk}


def chunked_loss(
    logits: Callable[[Tensor], Tensor],
    head: list[nn.Parameter],
    hidden_nH: Tensor,
    target_PV: Tensor,
    mass_P: Tensor | None,
    row_n: Tensor,
    weight_n: Tensor,
    loss: str = "cross_entropy",
) -> tuple[Tensor, Tensor, Tensor]:
    """(Σ weight·loss with its gradient, loss [n], argmax of the logits [n]); logits never exist for more than a chunk.

    Args:
        logits: hidden rows [.., H] → [.., V_d], through the parameters `head` and no others.
        target_PV, mass_P: P and m; row i is held against row `row_n[i]` of them.
        loss: a key of `FORMS`.
    """
    learnt = [parameter for parameter in head if parameter.requires_grad]
    learns = torch.is_grad_enabled()

    def run(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        return _in_chunks(logits, learnt if learns else None, hidden, target_PV, mass_P, row_n, weight_n, FORMS[loss])

    return _Chunked.apply(hidden_nH, run, *learnt)


class _Chunked(torch.autograd.Function):
    """Hands on in backward what `run` found forward; `learnt` are inputs so that autograd asks for their gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, run: Callable[..., Any], *learnt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total, losses, drafts, ctx.gradients = run(hidden)
        ctx.mark_non_differentiable(losses, drafts)
        return total, losses, drafts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scale, *gradients = ctx.gradients
        hidden, *learnt = (None if x is None else x * (grad * scale).to(x.dtype) for x in gradients)
        return hidden, None, *learnt


def _in_chunks(
    logits: Callable[[Tensor], Tensor],
    learnt: list[nn.Parameter] | None,
    hidden_nH: Tensor,
    target_PV: Tensor,
    mass_P: Tensor | None,
    row_n: Tensor,
    weight_n: Tensor,
    form: Form,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """`chunked_loss`, and [scale, gradient of hidden, of each learnt parameter], all still to be multiplied by scale.

    Weights are about 1/n: left in the gradients they would underflow float16.
    """
    count = hidden_nH.shape[0]
    losses = torch.zeros_like(weight_n)
    drafts = torch.zeros(count, dtype=torch.int64, device=hidden_nH.device)
    gradients: list[Any] = []
    if learnt is not None:  # many chunks add up in the head's gradient: never in bf16, whatever its weights are
        wide_sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in learnt]
        gradients = [torch.zeros_like(hidden_nH), *wide_sums]
    scale = torch.cat([weight_n, weight_n.new_full((1,), torch.finfo(weight_n.dtype).tiny)]).max()
    relative_n1 = (weight_n / scale)[:, None]
    size = _ROWS.get(hidden_nH.device.type, _ROWS["else"])
    for start in range(0, count, size):
        part = slice(start, start + size)
        rows = hidden_nH[part].detach().requires_grad_(learnt is not None)
        with torch.set_grad_enabled(learnt is not None):
            narrow = logits(rows)
        wide = narrow.detach().to(weight_n.dtype)
        drafts[part] = wide.argmax(-1)
        losses[part], gradient = form(wide, target_PV[row_n[part]], None if mass_P is None else mass_P[row_n[part]])
        if learnt is not None:
            by_logits = gradient.mul_(relative_n1[part]).to(narrow.dtype)
            found = torch.autograd.grad(narrow, [rows, *learnt], by_logits, allow_unused=True)
            gradients[0][part] = found[0]
            for total, one in zip(gradients[1:], found[1:], strict=True):
                if one is not None:
                    total += one
    return (weight_n * losses).sum(), losses, drafts, [scale, *gradients]
