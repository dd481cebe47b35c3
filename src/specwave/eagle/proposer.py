"""EAGLE-3 as a proposer: pairs each committed token with the target's states before it, then drafts a chain.

With n tokens committed, states g_0 … g_{n−2} are known. Slot t of the drafter reads g_t and token x_{t+1} at position
t; its output predicts x_{t+2}. A round first catches up on the slots that became known, whose last one (t = n−2, whose
token is the root x_{n−1}) gives the first draft; each further level reads the draft and the state before it.

The drafter's cache keeps the slots made of true states; what a round drafts is rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specwave.artifacts import UserError, group_name
from specwave.decoding import BaseProposer, Context, Tree, Verdict
from specwave.decoding.loop import ROOM
from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.export import check_target, read_drafter
from specwave.target import Target, Wants
from specwave.target.cache import KVCache
from specwave.target.decoder import attend_masked, group_bias
from specwave.target.linear import FrozenLinear
from specwave.target.rope import rotate


@dataclass(frozen=True)
class Eagle3Decoding:
    """`decoding=eagle3`: chains of `levels` drafts per round."""

    levels: int = 2

    needs_checkpoint = True
    label = "eagle3"

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= ROOM:
            raise UserError("decoding.levels", self.levels, f"must be 1 to {ROOM}, which one round can verify")

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> Eagle3:
        if checkpoint is None:
            remedy = "decoding=eagle3 needs a drafter: give a folder that train.py wrote (…/drafters/L…)"
            raise UserError("checkpoint", "null", remedy)
        return load_drafter(checkpoint, target, allow_other_target, levels=self.levels)


def load_drafter(
    path: Path | str, target: Target, allow_other_target: bool = False, levels: int = Eagle3Decoding.levels
) -> Eagle3:
    """A drafter folder as a proposer for `target`, in the target's dtype.

    Raises:
        UserError: no drafter, no layer ids, a vocabulary map that does not fit, another target's drafter.
    """
    config, tensors, card = read_drafter(path)
    check_target(config, card, target, allow_other_target)
    drafter = Eagle3Drafter(config)
    drafter.load_state_dict({name: tensors[name] for name in drafter.state_dict()})
    return Eagle3(drafter, target, levels, card)


class _Packed(nn.Module):
    """A frozen linear layer in the place of a trained one."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.weight = layer.weight  # the module's dtype is read here
        self.run = FrozenLinear(layer.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def _freeze(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, _Packed(child))
        else:
            _freeze(child)


class _Frozen(Eagle3Drafter):
    """A drafter that only decodes: packed weights, and one product where several read the same input."""

    def __init__(self, drafter: Eagle3Drafter, target: Target):
        super().__init__(drafter.config, drafter.d2t, drafter.t2d)
        self.load_state_dict(drafter.state_dict())
        self.to(target.device, target.dtype).requires_grad_(False)
        attention, mlp = self.midlayer.self_attn, self.midlayer.mlp
        self._qkv = FrozenLinear(torch.cat([attention[f"{name}_proj"].weight for name in "qkv"]))
        self._gate_up = FrozenLinear(torch.cat([mlp[f"{name}_proj"].weight for name in ("gate", "up")]))
        _freeze(self)

    def attention_inputs(self, z: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv = self.config.num_heads, self.config.num_kv_heads
        turned, value = self._heads(self._qkv(z)).split([heads + kv, kv], 1)
        query, key = rotate(turned, *rotary).to(z.dtype).split([heads, kv], 1)
        return query, key, value

    def gated(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, -1)
        return F.silu(gate) * up


class Eagle3(BaseProposer):
    """Greedy chains of `levels` drafts. The drafter is copied into the target's dtype and frozen."""

    scope = "sequence"

    def __init__(self, drafter: Eagle3Drafter, target: Target, levels: int = 2, card: dict[str, Any] | None = None):
        self.drafter = _Frozen(drafter, target)
        self.target, self.levels, self.card = target, levels, card or {}
        self.layers = tuple(drafter.config.layers)
        self.label = group_name(self.layers)
        self.ids = self.drafter.draft_ids.to(target.device)
        self.cache: KVCache | None = None
        self.waiting: dict[int, list[Tensor]] = {}  # per row: fused target states not yet in the drafter's cache

    def wants(self, contexts: Sequence[Context]) -> Wants:
        return Wants(blocks=self.layers)

    def begin(self, contexts: Sequence[Context]) -> None:
        config, rows = self.drafter.config, 1 + max(context.row for context in contexts)
        capacity = max(len(context.tokens) + context.limit for context in contexts) + self.levels
        self.cache = KVCache(
            1, rows, config.num_kv_heads, capacity, config.head_dim, self.target.dtype, self.target.device
        )
        self.waiting = {context.row: [] for context in contexts}
        for context in contexts:
            self._take(context)

    def end(self, row: int) -> None:
        self.waiting.pop(row, None)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            self._take(verdict.context)

    def _take(self, context: Context) -> None:
        if context.blocks:
            self.waiting[context.row].append(torch.cat([context.blocks[layer] for layer in self.layers], -1))

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        """One chain per row; empty where nothing is known yet or the drafter's positions end (sglang#3574: stop
        drafting, go on decoding)."""
        able = [
            context
            for context in contexts
            if len(context.tokens) > 1 and len(context.tokens) + self.levels <= self.drafter.config.max_length
        ]
        trees = {context.row: Tree.empty(self.target.device) for context in contexts}
        if able:
            for context, tokens in zip(able, self._draft(able), strict=True):
                trees[context.row] = Tree.chain(tokens)
        return [trees[context.row] for context in contexts]

    def _draft(self, contexts: Sequence[Context]) -> Tensor:
        """Target ids [len(contexts), levels]. Rows of the cache without a context idle in the batch."""
        assert self.cache is not None
        cache, device, rows = self.cache, self.target.device, torch.tensor([context.row for context in contexts])
        known = [torch.cat(self.waiting[context.row]) for context in contexts]
        counts = [0] * cache.batch
        tokens = torch.zeros(cache.batch, max(len(states) for states in known), dtype=torch.int64)
        states_BTD = known[0].new_zeros(*tokens.shape, known[0].shape[-1])
        for context, states in zip(contexts, known, strict=True):
            counts[context.row] = len(states)
            tokens[context.row, : len(states)] = torch.tensor(context.tokens[-len(states) :])
            states_BTD[context.row, : len(states)] = states
            self.waiting[context.row] = []
        hidden = self._step(tokens.to(device), self.drafter.fuse(states_BTD))
        cache.advance(counts)
        last = torch.tensor([max(count - 1, 0) for count in counts], device=device)
        hidden = hidden[torch.arange(cache.batch, device=device), last][:, None]
        before, drafts = list(cache.lengths), list[Tensor]()
        for level in range(self.levels):
            if level:
                hidden = self._step(drafts[-1], hidden)
                cache.advance([1] * cache.batch)
            drafts.append(self.ids[self.drafter.logits(hidden).argmax(-1)])
        cache.lengths = before
        return torch.cat(drafts, 1)[rows.to(device)]

    def _step(self, tokens_BT: Tensor, hidden_BTD: Tensor) -> Tensor:
        """One step of the drafter behind each row's cached slots; writes its keys, commits nothing."""
        assert self.cache is not None
        cache, config, new = self.cache, self.drafter.config, tokens_BT.shape[1]
        reach, slots = cache.reach(new), cache.slots(new)
        start = torch.tensor(cache.lengths, device=tokens_BT.device)
        positions = start[:, None] + torch.arange(new, device=tokens_BT.device)
        bias = None
        if new > 1 or not isinstance(slots, int):
            tree = torch.ones(new, new, dtype=torch.bool, device=tokens_BT.device).tril().expand(cache.batch, -1, -1)
            bias = group_bias(cache.visible(tree, reach), config.num_heads // config.num_kv_heads, hidden_BTD.dtype)

        def attend(query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor) -> Tensor:
            cache.write(0, key_BKTd.transpose(1, 2), value_BKTd.transpose(1, 2), slots)
            keys, values = cache.keys[0][:, :, :reach], cache.values[0][:, :, :reach]
            return attend_masked(query_BHTd.transpose(1, 2).contiguous(), keys, values, bias).transpose(1, 2)

        return self.drafter.forward_step(self.target.embed(tokens_BT), hidden_BTD, attend, positions)
