"""Kangaroo's adapter: one attention and two norms between an early exit and the target's own head.

    h             output of the exit's last block, before any norm
    h + attention(input_layernorm(h)) → norm → the target's head, which is frozen and no part of the adapter

Heads, their width and rotary positions are the target's. It reads states of the exit, never its own, so that it is
taught on whole texts as it is used on one token after the other. Source: Kangaroo (arXiv 2404.18911); methods.md §4.

Letters: B rows, T tokens, D hidden size, H heads, G key/value heads, h head width.
Knows nothing about training and decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specwave.target.arch import Arch
from specwave.target.decoder import Attend, rms_norm
from specwave.target.linear import FrozenLinear
from specwave.target.rope import rotate

Turn = tuple[Tensor, Tensor]  # rotary tables (cos, sin) that broadcast to [B, T, 1, h]


@dataclass(frozen=True)
class AdapterConfig:
    """Sizes of an adapter behind the first `exit` blocks of a target with `num_layers`; what it must have in common
    with its target."""

    exit: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_eps: float

    @classmethod
    def of_target(cls, arch: Arch, block: int) -> AdapterConfig:
        shared = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "rms_eps")
        return cls(block, *(getattr(arch, name) for name in shared))


class Norm(nn.Module):
    """The target's RMSNorm with a gain of its own."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Adapter(nn.Module):
    """See the head of this file."""

    def __init__(self, config: AdapterConfig):
        super().__init__()
        self.config = config
        size, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.input_layernorm = Norm(size, config.rms_eps)
        attention = {"q_proj": linear(size, heads), "k_proj": linear(size, kv), "v_proj": linear(size, kv)}
        self.self_attn: Any = nn.ModuleDict(attention | {"o_proj": linear(heads, size)})
        self.norm = Norm(size, config.rms_eps)

    def read(self, hidden_BTD: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [B, T, H, h] and k [B, T, G, h], and v."""
        heads, kv = self.config.num_heads, self.config.num_kv_heads
        projected = self._project(self.input_layernorm(hidden_BTD)).unflatten(-1, (-1, self.config.head_dim))
        turned, value = projected.split([heads + kv, kv], -2)
        query, key = rotate(turned, *turn).to(value.dtype).split([heads, kv], -2)
        return query, key, value

    def finish(self, hidden_BTD: Tensor, mixed_BTHh: Tensor) -> Tensor:
        """What the head reads, from what attention found."""
        return self.norm(hidden_BTD + self._output(mixed_BTHh.flatten(2)))

    def forward(self, hidden_BTD: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """What the head reads, [B, T, D], of the exit's states."""
        hidden_BTD = hidden_BTD.to(self.norm.weight.dtype)
        return self.finish(hidden_BTD, attend(*self.read(hidden_BTD, turn)))

    def _project(self, x: Tensor) -> Tensor:
        return torch.cat([self.self_attn[f"{name}_proj"](x) for name in "qkv"], -1)

    def _output(self, x: Tensor) -> Tensor:
        return self.self_attn["o_proj"](x)


class FrozenAdapter(Adapter):
    """A copy that only decodes: in the target's dtype on its device, weights packed, one product for q, k and v."""

    def __init__(self, adapter: Adapter, dtype: torch.dtype, device: torch.device):
        super().__init__(adapter.config)
        self.load_state_dict(adapter.state_dict())
        self.to(device, dtype).requires_grad_(False)
        weights = {name: layer.weight.detach() for name, layer in self.self_attn.items()}
        self._qkv = FrozenLinear(torch.cat([weights[f"{name}_proj"] for name in "qkv"]))
        self._o = FrozenLinear(weights["o_proj"])

    def _project(self, x: Tensor) -> Tensor:
        return self._qkv(x)

    def _output(self, x: Tensor) -> Tensor:
        return self._o(x)


@torch.no_grad()
def initialise(adapter: Adapter, target: Any) -> None:
    """First weights, in place, without chance: queries, keys, values and their norm are those of the block behind the
    exit, the last norm is the target's, and the output projection is zero. So the adapter starts as the plain early
    exit, LayerSkip's, and learns what to add to it."""
    block = target.block_weights(adapter.config.exit)
    for name in ("q_proj", "k_proj", "v_proj"):
        adapter.self_attn[name].weight.copy_(block[f"self_attn.{name}.weight"])
    adapter.self_attn["o_proj"].weight.zero_()
    adapter.input_layernorm.weight.copy_(block["input_layernorm.weight"])
    adapter.norm.weight.copy_(target.final_norm)
