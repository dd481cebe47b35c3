"""Sub-layers on trial: many variants ("branches") of the same tokens through one sub-layer, the cache left as it is.

Letters: J branches, T tokens of all windows, t tokens of one window, D hidden size, H heads, G key/value heads, h head
width, S slots.

A window is a run of tokens of one row behind a prefix of committed slots. A branch gives every token of every window a
hidden state of its own; its attention sees the prefix, which is the target's and shared by all branches, and causally
the branch's own tokens. Two branches of a window of two tokens behind S slots look at

              prefix     a1 a2   b1 b2
    a1        • • • •    •
    a2        • • • •    •  •
    b1        • • • •            •
    b2        • • • •            •  •

so branches are one forest of tokens, and the prefix is read once for many of them instead of being copied for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specwave.target.cache import KVCache
from specwave.target.decoder import attend_masked, group_bias
from specwave.target.load import Target

QUERIES = 64  # tokens of a window that attend together: more share the prefix, but look at more of one another


@dataclass(frozen=True)
class Window:
    """`length` tokens behind the first `prefix` slots of a session's row `slot`, at positions prefix, prefix + 1, …"""

    slot: int
    prefix: int
    length: int


class Trial:
    """Runs sub-layers over branches of `windows`; hidden states are [J, T, D], windows behind each other in T."""

    def __init__(self, target: Target, cache: KVCache, windows: Sequence[Window]):
        for window in windows:
            if window.length < 1 or not 0 <= window.prefix <= cache.lengths[window.slot]:
                raise ValueError(f"{window} is no window behind {cache.lengths[window.slot]} committed slots")
        self.target, self.cache, self.windows = target, cache, list(windows)
        places = [torch.arange(window.prefix, window.prefix + window.length) for window in windows]
        positions = torch.cat(places).to(target.device)
        cos, sin = target.rope
        self._turn = cos[positions][:, None], sin[positions][:, None]
        self._biases: dict[tuple[int, int, int], Tensor] = {}  # by branches, window length, prefix

    @torch.inference_mode()
    def attention(self, layer: int, hidden_JTD: Tensor) -> Tensor:
        """Block `layer`'s attention sub-layer, residual included."""

        def attend(query_JTHh: Tensor, key_JTGh: Tensor, value_JTGh: Tensor) -> Tensor:
            parts, start = [], 0
            for window in self.windows:
                own = slice(start, start + window.length)
                parts.append(self._attend(layer, window, query_JTHh[:, own], key_JTGh[:, own], value_JTGh[:, own]))
                start += window.length
            return torch.cat(parts, 1)

        return self.target.blocks[layer].attention(hidden_JTD, *self._turn, attend)

    @torch.inference_mode()
    def mlp(self, layer: int, hidden_JTD: Tensor) -> Tensor:
        """Block `layer`'s MLP sub-layer, residual included."""
        return self.target.blocks[layer].mlp(hidden_JTD)

    def run(self, sub_layer: int, hidden_JTD: Tensor) -> Tensor:
        """Sub-layer 2i is block i's attention, 2i + 1 its MLP."""
        layer, is_mlp = divmod(sub_layer, 2)
        return self.mlp(layer, hidden_JTD) if is_mlp else self.attention(layer, hidden_JTD)

    def _attend(self, layer: int, window: Window, query_JtHh: Tensor, key_JtGh: Tensor, value_JtGh: Tensor) -> Tensor:
        """[J, t, H, h], a few branches at a time."""
        stores = self.cache.keys[layer], self.cache.values[layer]
        keys_GSh, values_GSh = (store[window.slot, :, : window.prefix] for store in stores)
        parts, each = [], max(1, QUERIES // window.length)
        for query, key, value in zip(query_JtHh.split(each), key_JtGh.split(each), value_JtGh.split(each), strict=True):
            own = [new.flatten(0, 1).transpose(0, 1) for new in (key, value)]  # [G, J·t, h]
            keys = torch.cat([keys_GSh, own[0]], 1)[None]
            values = torch.cat([values_GSh, own[1]], 1)[None]
            mixed = attend_masked(query.reshape(1, -1, *query.shape[2:]), keys, values, self._bias(len(query), window))
            parts.append(mixed.view_as(query))
        return torch.cat(parts)

    def _bias(self, branches: int, window: Window) -> Tensor:
        key = branches, window.length, window.prefix
        if key not in self._biases:
            arch, device = self.target.arch, self.target.device
            own = torch.ones(window.length, window.length, dtype=torch.bool, device=device).tril()
            forest = torch.block_diag(*[own] * branches).bool()
            prefix = torch.ones(len(forest), window.prefix, dtype=torch.bool, device=device)
            visible_1QS = torch.cat([prefix, forest], 1)[None]
            self._biases[key] = group_bias(visible_1QS, arch.num_heads // arch.num_kv_heads, self.target.dtype)
        return self._biases[key]
