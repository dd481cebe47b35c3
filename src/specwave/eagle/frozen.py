"""A drafter that only decodes: packed weights, one product where several read the same input, rotary tables made once.

Computes what `Eagle3Drafter` does, part by part.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specwave.eagle.drafter import Eagle3Drafter
from specwave.target import Target
from specwave.target.linear import FrozenLinear
from specwave.target.rope import rotate


class _Packed(nn.Module):
    """A frozen linear layer in the place of a trained one."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.weight = layer.weight  # the module's dtype is read here
        self.run = FrozenLinear(layer.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # multiplied in one, never by themselves


def _freeze(module: nn.Module) -> None:
    for name, child in module.named_children():
        if name in FUSED:
            continue
        if isinstance(child, nn.Linear):
            setattr(module, name, _Packed(child))
        else:
            _freeze(child)


class FrozenDrafter(Eagle3Drafter):
    """A copy of a drafter in the target's dtype, on its device."""

    def __init__(self, drafter: Eagle3Drafter, target: Target):
        super().__init__(drafter.config, drafter.d2t, drafter.t2d)
        self.load_state_dict(drafter.state_dict())
        self.to(target.device, target.dtype).requires_grad_(False)
        attention, mlp = self.midlayer.self_attn, self.midlayer.mlp
        self._qkv = FrozenLinear(torch.cat([attention[f"{name}_proj"].weight for name in "qkv"]))
        self._gate_up = FrozenLinear(torch.cat([mlp[f"{name}_proj"].weight for name in ("gate", "up")]))
        _freeze(self)
        self._tables: tuple[Tensor, Tensor] | None = None

    def attention_inputs(self, z: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv = self.config.num_heads, self.config.num_kv_heads
        turned, value = self._heads(self._qkv(z)).split([heads + kv, kv], 1)
        query, key = rotate(turned, *rotary).to(z.dtype).split([heads, kv], 1)
        return query, key, value

    def gated(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return F.silu(gate) * up

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) [at least length, d], whose row p is what `rotary` says of position p."""
        if self._tables is None or len(self._tables[0]) < length:
            cos, sin = self.rotary(torch.arange(length, device=self.d2t.device)[None])
            self._tables = (cos[0, 0], sin[0, 0])
        return self._tables
