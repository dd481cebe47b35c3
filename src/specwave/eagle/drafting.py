"""A round of drafting: catch up on the slots that became known, then read a tree of drafts level by level.

Letters: B rows, T new slots of a row, N nodes of a level, S slots looked at, D width, d width of a head, K drafts.

The cache keeps slots made of true target states only. The drafts that a round reads lie in a scratch behind the longest
row, the same slots for all rows and one slot per node, so that a level is written by one slice; the next round's true
slots overwrite them, and rolling back costs nothing. Two rows, of 4 and 2 true slots, two nodes read at each level:

    slot     0 1 2 3 | 4 5 | 6 7       at level 3 a node sees, of its own row,
    row 0    • • • • | a b | c d       c (below a): 0 1 2 3, a, c
    row 1    • •     | e f | g h       g (below f): 0 1, f, g

Knows nothing about contexts and verification.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specwave.decoding.grow import Frontier, Shape
from specwave.eagle.frozen import FrozenDrafter
from specwave.target import Target
from specwave.target.cache import KVCache
from specwave.target.decoder import group_bias

Rotary = tuple[Tensor, Tensor]


class Drafts:
    """The drafter at work on a batch of rows of at most `length` tokens each."""

    def __init__(self, drafter: FrozenDrafter, target: Target, shape: Shape, rows: int, length: int):
        config = drafter.config
        self.drafter, self.target, self.shape = drafter, target, shape
        self.ids = drafter.draft_ids
        capacity = length + shape.slots + 1  # the last slot takes what nobody reads
        self.cache = KVCache(
            1, rows, config.num_kv_heads, capacity, config.head_dim, target.dtype, drafter.fc.weight.device
        )
        self.cos, self.sin = drafter.tables(capacity + shape.levels)

    def catch_up(self, tokens_BT: Tensor, states_BTD: Tensor, counts: Sequence[int]) -> Tensor:
        """Commits `counts[b]` slots of row b; the state [B, 1, D] that each row's last one hands on.

        Of all other slots only keys and values are ever looked at, so nothing else of them is computed.

        Args:
            tokens_BT: slot t's token x_{t+1}; rows are padded on the right.
            states_BTD: the target's captured states g_t, joined.
        """
        cache, drafter, new = self.cache, self.drafter, tokens_BT.shape[1]
        slots = cache.slots(new)
        if isinstance(slots, int):
            rotary = self.cos[slots : slots + new], self.sin[slots : slots + new]
        else:  # the padding of a long row may reach past the end
            slots = slots.clamp(max=cache.capacity - 1)
            rotary = self.cos[slots][:, None], self.sin[slots][:, None]
        hidden = drafter.fuse(states_BTD)
        query, key, value = drafter.attention_inputs(drafter.mix(self.target.embed(tokens_BT), hidden), rotary)
        cache.write(0, key.transpose(1, 2), value.transpose(1, 2), slots)
        cache.advance(list(counts))
        if new > 1:
            row = torch.arange(cache.batch, device=hidden.device)
            last = torch.tensor([max(count - 1, 0) for count in counts], device=hidden.device)
            hidden, query = hidden[row, last][:, None], query[row, :, last][:, :, None]
        return drafter.finish(hidden, self._attend(query, max(cache.lengths), self._bias(self._committed())))

    def grow(self, hidden_BND: Tensor) -> tuple[Tensor, Tensor]:
        """The trees below `catch_up`'s slots: (target ids [B, K], parents [B, K], −1 the root)."""
        growth, place, committed = self.shape.start(self.cache.batch), max(self.cache.lengths), self._committed()
        turns = self._turns()
        while (frontier := growth.add(self.drafter.logits(hidden_BND))) is not None:
            hidden_BND = self._read(frontier, hidden_BND, next(turns), place, committed)
            place += frontier.ids.shape[1]
        ids, parents = growth.finish()
        return self.ids[ids], parents

    def _read(
        self, frontier: Frontier, hidden_BND: Tensor, rotary: Rotary, place: int, committed: Tensor | None
    ) -> Tensor:
        """One level: h at the frontier's nodes, each from its token and the h it hangs on."""
        nodes = frontier.ids.shape[1]
        if frontier.source is None:
            hidden_BND = hidden_BND.expand(-1, nodes, -1)
        else:
            hidden_BND = hidden_BND.gather(1, frontier.source[:, :, None].expand(-1, -1, hidden_BND.shape[2]))
        embedding = self.target.embed(self.ids[frontier.ids])
        query, key, value = self.drafter.attention_inputs(self.drafter.mix(embedding, hidden_BND), rotary)
        self.cache.write(0, key.transpose(1, 2), value.transpose(1, 2), place)
        behind = place + nodes - max(self.cache.lengths)
        bias = self._bias(committed, nodes, behind, frontier.sees)
        return self.drafter.finish(hidden_BND, self._attend(query, place + nodes, bias))

    def _turns(self) -> Iterator[Rotary]:
        """Rotary tables for each level that is read: a row's last true slot t is the root's, its children stand at
        t + 1."""
        lengths, levels = self.cache.lengths, range(self.shape.levels - 1)
        if len(set(lengths)) == 1:
            return ((self.cos[lengths[0] + level], self.sin[lengths[0] + level]) for level in levels)
        positions = torch.tensor(lengths)[:, None] + torch.tensor([*levels], dtype=torch.int64)
        cos, sin = (table[positions.to(table.device)][:, :, None, None] for table in (self.cos, self.sin))
        return ((cos[:, level], sin[:, level]) for level in levels)

    def _committed(self) -> Tensor | None:
        """bool [B, 1, S]: which of the slots before the scratch are a row's own. None when all rows are as long."""
        lengths = self.cache.lengths
        if len(set(lengths)) == 1:
            return None
        slot = torch.arange(max(lengths), device=self.cache.device)
        return (slot < torch.tensor(lengths, device=slot.device)[:, None])[:, None]

    def _bias(
        self, committed: Tensor | None, nodes: int = 1, behind: int = 0, sees: Tensor | None = None
    ) -> Tensor | None:
        """Additive, for `_attend`: `committed` before the scratch, and of the `behind` nodes in it those that `sees`
        [B, N, behind] names. None where everything is seen."""
        if committed is None and sees is None:
            return None
        rows, longest = self.cache.batch, max(self.cache.lengths)
        if committed is None:
            committed = torch.ones(rows, 1, longest, dtype=torch.bool, device=self.cache.device)
        if sees is None:
            sees = torch.ones(rows, nodes, behind, dtype=torch.bool, device=self.cache.device)
        config = self.drafter.config
        visible = torch.cat([committed.expand(-1, nodes, -1), sees], 2)
        return group_bias(visible, config.num_heads // config.num_kv_heads, self.cache.keys[0].dtype)

    def _attend(self, query_BHTd: Tensor, reach: int, bias: Tensor | None) -> Tensor:
        """[B, H, T, d]. The heads that share keys are laid side by side, as more queries of one head."""
        rows, _, _, width = query_BHTd.shape
        keys, values = self.cache.keys[0][:, :, :reach], self.cache.values[0][:, :, :reach]
        query = query_BHTd.reshape(rows, keys.shape[1], -1, width)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias).view_as(query_BHTd)
