"""Attention of an unrolled drafter: causal over the keys of step 0, and one own key per later step.

H heads in groups of G = H/K that share keys, K key heads, N live slots, J keys of step 0, C slots of one chunk, d width
of a head. A slot's scores are one softmax over the keys it sees and its s own ones. `attend_merged` says so and keeps
all of them; `merged_attention` is what training uses. It holds C·J scores at a time: the keys of step 0 are attended
to by themselves, with the logarithm of their sum of exponentials, by which the own scores are merged:

    lse = ln(exp lse_0 + Σ_r exp s_r),    out = exp(lse_0 − lse)·out_0 + Σ_r exp(s_r − lse)·v_r

Backward computes the scores of a chunk again. With the merged `out` and `lse`, exp(score − lse) are the merged weights
and Σ grad·out is the merged correction, so a fused kernel's own backward gives the gradients of the step-0 part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Chunk = tuple[int, int, int, int]  # slots a…b−1 see no keys but c…d−1


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


def merged_attention(
    query_HNd: Tensor,
    key0_KJd: Tensor,
    value0_KJd: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    last_N: Tensor,
    chunks: Sequence[Chunk],
) -> Tensor:
    """As `attend_merged` over slots and keys of all documents behind each other: [H, N, d].

    Args:
        own: (k, v) [K, N, d] of steps 1…s.
        last_N: the last step-0 key a slot sees, its own.
        chunks: cover all slots; the first key a slot sees is that of its chunk.
    """
    dtype = value0_KJd.dtype  # under autocast values are narrower than rotated keys
    flat = [tensor.to(dtype) for pair in own for tensor in pair]
    return _Merged.apply(query_HNd.to(dtype), key0_KJd.to(dtype), value0_KJd, last_N, chunks, *flat)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key0: Tensor, value0: Tensor, last_N: Tensor, chunks: Sequence[Chunk], *own: Tensor
    ) -> Tensor:
        q_KGNd = query.unflatten(0, (key0.shape[0], -1))
        wide = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty_like(q_KGNd, memory_format=torch.contiguous_format)
        lse = torch.empty(q_KGNd.shape[:-1], dtype=wide, device=query.device)
        for a, b, c, d in chunks:
            part, seen = q_KGNd[:, :, a:b], slice(c, d)
            bias = _bias(last_N[a:b], c, d, query.dtype)
            out[:, :, a:b], lse[:, :, a:b] = _past(part, key0[:, seen], value0[:, seen], bias)
        if own:
            scores = [_own_scores(q_KGNd, key) for key in own[::2]]
            merged = torch.logsumexp(torch.stack([lse, *scores]), 0)
            out *= (lse - merged).exp()[..., None].to(out.dtype)
            for score, value in zip(scores, own[1::2], strict=True):
                out.addcmul_((score - merged).exp()[..., None].to(out.dtype), value[:, None])
            lse = merged
        ctx.save_for_backward(query, key0, value0, last_N, out, lse, *own)
        ctx.chunks = chunks
        return out.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key0, value0, last_N, out, lse, *own = ctx.saved_tensors
        q_KGNd, grad = (x.unflatten(0, (key0.shape[0], -1)) for x in (query, grad))
        scale, inner = query.shape[-1] ** -0.5, (grad * out).sum(-1, dtype=lse.dtype)
        dq, dk, dv = torch.empty_like(out), torch.zeros_like(key0), torch.zeros_like(value0)
        for a, b, c, d in ctx.chunks:
            mine, seen = (slice(None), slice(None), slice(a, b)), (slice(None), slice(c, d))
            bias = _bias(last_N[a:b], c, d, query.dtype)
            given = (grad[mine], q_KGNd[mine], key0[seen], value0[seen], out[mine], lse[mine], inner[mine], bias)
            dq[mine], for_key, for_value = _past_backward(*given)
            dk[seen] += for_key
            dv[seen] += for_value
        found: list[Tensor] = []
        for key, value in zip(own[::2], own[1::2], strict=True):
            weight = (_own_scores(q_KGNd, key) - lse).exp()
            slope = (weight * ((grad * value[:, None]).sum(-1, dtype=lse.dtype) - inner) * scale)[..., None].to(key)
            dq.addcmul_(slope, key[:, None])
            found += [(slope * q_KGNd).sum(1), (weight[..., None].to(grad) * grad).sum(1)]
        return dq.flatten(0, 1), dk, dv, None, None, *found


def _own_scores(q_KGNd: Tensor, key_KNd: Tensor) -> Tensor:
    """q·k of each slot with its own key, [K, G, N]."""
    wide = torch.promote_types(q_KGNd.dtype, torch.float32)
    return (q_KGNd * key_KNd[:, None]).sum(-1, dtype=wide) * q_KGNd.shape[-1] ** -0.5


def _bias(last_C: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """0 where a slot sees a key of start…end−1, else −∞, [C, end − start]."""
    bias = torch.zeros(len(last_C), end - start, dtype=dtype, device=last_C.device)
    unseen = torch.arange(start, end, device=last_C.device) > last_C[:, None]
    return bias.masked_fill_(unseen, float("-inf"))


# ---------------------------------------------------------------- the keys of step 0


def _fused(x: Tensor) -> bool:
    """torch's fused kernel hands out the logarithm of the sum that merging needs on a CPU; elsewhere plain products."""
    return x.device.type == "cpu"


def _past(q_KGCd: Tensor, key_KSd: Tensor, value_KSd: Tensor, bias_CS: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [K, G, C, d] and its log-sum-exp [K, G, C]."""
    groups = q_KGCd.shape[1]
    if _fused(q_KGCd):
        key, value = (x[:, None].expand(-1, groups, -1, -1) for x in (key_KSd, value_KSd))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q_KGCd, key, value, attn_mask=bias_CS)
    scores = _scores(q_KGCd, key_KSd, bias_CS)
    lse = torch.logsumexp(scores, -1)
    weight = (scores - lse[..., None]).exp_().to(value_KSd.dtype)
    return (weight.flatten(1, 2) @ value_KSd).unflatten(1, (groups, -1)), lse


def _past_backward(
    grad_KGCd: Tensor,
    q_KGCd: Tensor,
    key_KSd: Tensor,
    value_KSd: Tensor,
    out_KGCd: Tensor,
    lse_KGC: Tensor,
    inner_KGC: Tensor,
    bias_CS: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; `out`, `lse` and `inner` = Σ grad·out are those of the merged softmax."""
    groups = q_KGCd.shape[1]
    if _fused(q_KGCd):
        key, value = (x[:, None].expand(-1, groups, -1, -1) for x in (key_KSd, value_KSd))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_KGCd, q_KGCd, key, value, out_KGCd, lse_KGC, 0.0, False, attn_mask=bias_CS
        )
        return dq, dk.sum(1), dv.sum(1)
    weight = (_scores(q_KGCd, key_KSd, bias_CS) - lse_KGC[..., None]).exp_()
    grad, query = grad_KGCd.flatten(1, 2), q_KGCd.flatten(1, 2)
    slope = (grad @ value_KSd.mT).unflatten(1, (groups, -1)) - inner_KGC[..., None]
    slope = (slope.mul_(weight) * q_KGCd.shape[-1] ** -0.5).flatten(1, 2).to(query.dtype)
    dv = weight.flatten(1, 2).to(grad.dtype).mT @ grad
    return (slope @ key_KSd).unflatten(1, (groups, -1)), slope.mT @ query, dv


def _scores(q_KGCd: Tensor, key_KSd: Tensor, bias_CS: Tensor) -> Tensor:
    """Scaled scores [K, G, C, S], float32 at least."""
    scores = ((q_KGCd * q_KGCd.shape[-1] ** -0.5).flatten(1, 2) @ key_KSd.mT).unflatten(1, (q_KGCd.shape[1], -1))
    return scores.to(torch.promote_types(scores.dtype, torch.float32)) + bias_CS
