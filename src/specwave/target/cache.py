"""A static key/value cache with one length per row: written at the end of each row, rolled back by index.

Letters: B rows, T new tokens, H key/value heads, S slots, h head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values [B, H, S, h] of each layer. `lengths[b]` slots of row b hold committed tokens."""

    def __init__(
        self, layers: int, batch: int, heads: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device
    ):
        store = torch.zeros(2, layers, batch, heads, capacity, width, dtype=dtype, device=device)
        self.capacity, self.device = capacity, device
        self._hold(store, [0] * batch)

    def _hold(self, store: Tensor, lengths: list[int]) -> None:
        self._store, self.lengths, self.batch = store, lengths, len(lengths)
        self.keys, self.values = store[0].unbind(0), store[1].unbind(0)  # views, so that a layer costs no indexing
        self._rows = torch.arange(self.batch, device=self.device)[:, None]

    def reach(self, new: int) -> int:
        """Slots that a forward over `new` tokens touches: the longest row plus the new ones."""
        longest = max(self.lengths) + new
        if longest > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens per row, {longest} are needed")
        return longest

    def slots(self, new: int) -> Tensor | int:
        """Where `new` tokens go: a common start when all rows are equally long, else slots [B, new]."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else self.slot_table(new)

    def slot_table(self, new: int) -> Tensor:
        """Where `new` tokens go, int64 [B, new]."""
        start = torch.tensor(self.lengths, device=self.device)
        return start[:, None] + torch.arange(new, device=self.device)

    def write(self, layer: int, key_BTHh: Tensor, value_BTHh: Tensor, slots: Tensor | int) -> None:
        """Stores new keys and values; the lengths stay as they are until `advance`."""
        for store, new in ((self.keys[layer], key_BTHh), (self.values[layer], value_BTHh)):
            if isinstance(slots, int):
                store[:, :, slots : slots + new.shape[1]].copy_(new.transpose(1, 2))
            else:
                store.transpose(1, 2)[self._rows, slots] = new

    def visible(self, tree_BTT: Tensor, reach: int) -> Tensor:
        """bool [B, T, reach]: a new token sees its row's committed slots and, of the new ones, what `tree` allows."""
        new = tree_BTT.shape[1]
        start = torch.tensor(self.lengths, device=self.device)
        slot = torch.arange(reach, device=self.device)
        offset = slot[None] - start[:, None]  # [B, reach]: which new token a slot holds
        inside = (offset >= 0) & (offset < new)
        index = offset.clamp(0, new - 1)[:, None].expand(-1, new, -1)
        return (offset < 0)[:, None] | (inside[:, None] & tree_BTT.gather(2, index))

    def advance(self, counts: list[int]) -> None:
        """The first `counts[b]` new tokens of row b become committed."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def keep_paths(self, paths: list[list[int]]) -> None:
        """Commits the new tokens `paths[b]` (ascending indices) of each row, moving them together first."""
        for row, path in enumerate(paths):
            start = self.lengths[row]
            moved = [(source, place) for place, source in enumerate(path) if source != place]
            if moved:
                source = torch.tensor([start + s for s, _ in moved], device=self.device)
                first = start + moved[0][1]
                # The gather on the right copies before anything is written.
                self._store[:, :, row, :, first : first + len(moved)] = self._store[:, :, row, :, source]
        self.advance([len(path) for path in paths])

    def select_rows(self, rows: list[int]) -> None:
        """Keeps only the named rows, in that order (one copy)."""
        index = torch.tensor(rows, device=self.device)
        self._hold(self._store[:, :, index], [self.lengths[row] for row in rows])
