"""The maths of one decoder block of Llama, Mistral, Qwen2 and Qwen3, on frozen weights.

Letters: B rows, T tokens, D hidden size, H heads, G key/value heads, h head width.
Knows nothing about caches: attention asks its caller for the keys and values to look at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specwave.target.arch import Arch
from specwave.target.linear import FrozenLinear
from specwave.target.rope import rotate

# attend(query [B,T,H,h], key [B,T,G,h], value [B,T,G,h]) → mixed [B,T,H,h]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) · gain over the last dimension, in float32 as Hugging Face computes it."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, gain.shape, gain, eps)
    return F.rms_norm(x.float(), gain.shape, None, eps).to(x.dtype) * gain


class Block:
    """One decoder block; `weights` has Hugging Face's names relative to the block."""

    def __init__(self, arch: Arch, weights: dict[str, Tensor], pack: bool = True):
        self.arch = arch
        self.heads, self.kv_heads, self.width = arch.num_heads, arch.num_kv_heads, arch.head_dim

        def fused(*names: str) -> FrozenLinear:
            bias = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
            return FrozenLinear(
                torch.cat([weights[f"{name}.weight"] for name in names]), torch.cat(bias) if bias else None, pack
            )

        self.qkv = fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.output = fused("self_attn.o_proj")
        self.gate_up = fused("mlp.gate_proj", "mlp.up_proj")
        self.down = fused("mlp.down_proj")
        self.input_norm = weights["input_layernorm.weight"]
        self.mlp_norm = weights["post_attention_layernorm.weight"]
        self.query_norm = weights.get("self_attn.q_norm.weight")
        self.key_norm = weights.get("self_attn.k_norm.weight")

    def linears(self) -> tuple[FrozenLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def attention(self, hidden_BTD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The attention sub-layer with its residual; cos, sin broadcast to [B, T, 1, h]."""
        batch, new, _ = hidden_BTD.shape
        qkv = self.qkv(rms_norm(hidden_BTD, self.input_norm, self.arch.rms_eps))
        qkv = qkv.view(batch, new, self.heads + 2 * self.kv_heads, self.width)
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
            query = rotate(rms_norm(query, self.query_norm, self.arch.rms_eps), cos, sin)
            key = rotate(rms_norm(key, self.key_norm, self.arch.rms_eps), cos, sin)
        else:  # queries and keys turn together
            turned, value = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
            query, key = rotate(turned, cos, sin).split([self.heads, self.kv_heads], dim=2)
        mixed = attend(query, key, value)
        return hidden_BTD + self.output(mixed.reshape(batch, new, self.heads * self.width))

    def mlp(self, hidden_BTD: Tensor) -> Tensor:
        """The MLP sub-layer with its residual."""
        gate, up = self.gate_up(rms_norm(hidden_BTD, self.mlp_norm, self.arch.rms_eps)).chunk(2, dim=-1)
        return hidden_BTD + self.down(F.silu(gate) * up)


def attend_causal(query_BTHh: Tensor, key_BTGh: Tensor, value_BTGh: Tensor) -> Tensor:
    """Causal attention among the tokens themselves. Padding on the right of a row changes nothing before it."""
    query, key, value = (x.transpose(1, 2) for x in (query_BTHh, key_BTGh, value_BTGh))
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def attend_masked(query_BTHh: Tensor, key_BGSh: Tensor, value_BGSh: Tensor, bias_B1QS: Tensor | None) -> Tensor:
    """Attention of few queries over many cached keys.

    The heads of one group look at the same keys, so they are laid side by side as more queries of one key head
    (Q = T·H/G) instead of copying the cache H/G times. `bias` is additive, repeated per group by `group_bias`; None
    when every query sees every key.
    """
    batch, new, heads, width = query_BTHh.shape
    groups = key_BGSh.shape[1]
    query = query_BTHh.view(batch, new, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
    query = query.reshape(batch, groups, -1, width)
    mixed = F.scaled_dot_product_attention(query, key_BGSh, value_BGSh, attn_mask=bias_B1QS)
    return mixed.view(batch, groups, heads // groups, new, width).permute(0, 3, 1, 2, 4).flatten(2, 3)


_QUERIES = 128  # of `attend_exact` at once: float64 scores of a long prompt are large


def attend_exact(query_BTHh: Tensor, key_BGSh: Tensor, value_BGSh: Tensor, visible_BTS: Tensor) -> Tensor:
    """Attention whose result for a query depends on what it sees, not on the slots, queries or rows around it.

    Products of half-precision numbers are exact in float64, and so, but for a rounding of 1e-16, are their sums in any
    order; the result is rounded once. Invisible slots weigh nothing.
    """
    batch, _, heads, width = query_BTHh.shape
    groups = key_BGSh.shape[1]
    keys, values = key_BGSh.double()[:, :, None], value_BGSh.double()[:, :, None]
    parts = []
    for query, visible in zip(query_BTHh.split(_QUERIES, 1), visible_BTS.split(_QUERIES, 1), strict=True):
        wide = query.double().view(batch, -1, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
        scores = (wide @ keys.transpose(-1, -2)) * width**-0.5  # [B, G, H/G, T, S]
        weights = scores.masked_fill_(~visible[:, None, None], -torch.inf).softmax(-1)
        parts.append((weights @ values).permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype))
    return torch.cat(parts, 1)


def group_bias(visible_BTS: Tensor, share: int, dtype: torch.dtype) -> Tensor:
    """bool [B, T, S] → additive [B, 1, share·T, S] for `attend_masked`, where `share` heads use one key head."""
    bias = torch.zeros(visible_BTS.shape, dtype=dtype, device=visible_BTS.device)
    bias.masked_fill_(~visible_BTS, torch.finfo(dtype).min)
    return bias.repeat(1, share, 1)[:, None]
