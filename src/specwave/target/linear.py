"""Frozen linear layers, packed for the device.

On a CPU a decoding step is bound by how fast weights stream from memory. oneDNN multiplies a weight that was re-ordered
once about twice as fast as a plain one at 1 to 16 rows, so frozen weights are kept packed.
"""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight  # noqa: B018 - private, so its absence must be survivable
        torch.ops.mkldnn._linear_pointwise  # noqa: B018
    except AttributeError:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.backends.mkldnn.is_available())


class FrozenLinear:
    """`x @ weight.T + bias` without gradients; weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = True):
        self.packed = pack and _can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self.packed else weight
        self.bias = bias
        self.out, self.width = weight.shape
        self.least = 1  # rows that are multiplied at least: see `padded`

    def padded(self, least: int) -> FrozenLinear:
        """The same layer, which multiplies so many rows at least: padding keeps a kernel of few from being taken."""
        twin = copy(self)
        twin.least = least
        return twin

    def __call__(self, x: Tensor) -> Tensor:
        if self.least > 1 and (rows := x.numel() // self.width) < self.least:
            padded = torch.cat([x.reshape(rows, -1), x.new_zeros(self.least - rows, self.width)])
            return self._multiply(padded)[:rows].view(*x.shape[:-1], -1)
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)
