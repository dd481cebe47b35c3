"""A target at work on a batch of rows: weights and a KV cache, forwards over trees of tokens, roll-back by index.

Letters: B rows, T new tokens of a row, D hidden size, V vocabulary, S cache slots.
Knows nothing about proposals, acceptance or sampling.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specwave.target.cache import KVCache
from specwave.target.decoder import attend_causal, attend_exact, attend_masked, group_bias
from specwave.target.load import Target
from specwave.target.recorded import Place, Programs, strides
from specwave.target.sublayers import Trial, Window

PLANS = 4  # of which recorded forwards are kept: a plan that has been replaced does not come back


@dataclass(frozen=True)
class Wants:
    """Which hidden states a forward shall hand out. Layer l is block l's output, before the final norm."""

    blocks: tuple[int, ...] = ()  # outputs of blocks
    attentions: tuple[int, ...] = ()  # after the attention sub-layer (with its residual) of blocks

    def __or__(self, other: Wants) -> Wants:
        return Wants(tuple(sorted({*self.blocks, *other.blocks})), tuple(sorted({*self.attentions, *other.attentions})))


@dataclass
class Output:
    """What a forward gives: logits (float32 [B, T, V], or None), and the wanted states [B, T, D] by layer."""

    hidden: Tensor
    logits: Tensor | None
    blocks: dict[int, Tensor] = field(default_factory=dict)
    attentions: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _View:
    """What the new tokens of a forward look at, the same for all blocks."""

    turn: tuple[Tensor, Tensor]  # rotary tables
    slots: Tensor | int  # where their keys and values go
    reach: int  # slots looked at
    bias: Tensor | None = None  # for `attend_masked`
    visible: Tensor | None = None  # for `attend_exact`, when given
    alone: bool = False  # nothing is before them, each sees those before it


class _Part(NamedTuple):
    """Which of the target's sub-layers a forward runs."""

    plan: tuple[bool, ...] | None  # 2N flags; None is all
    start: int  # first block
    end: int  # the block behind the last one


class Session:
    """B sequences of one target. `lengths[b]` tokens of row b are in the cache; `forward` adds behind them, `advance`
    or `keep_paths` commits what was added. Everything not committed is overwritten by the next forward.

    `invariant`: a token's states do not depend, to the last bit, on the batch, tree or slots it is computed among.
    Attention then sums in float64, and the linear layers never see fewer rows than `Target.least_rows`.

    Raises:
        UserError: `invariant` on a device whose linear layers round by their shape.
    """

    def __init__(self, target: Target, batch: int, capacity: int, invariant: bool = False):
        if invariant:
            target = target.make_invariant("batch_invariant")
        self.target, self.arch, self.invariant = target, target.arch, invariant
        self._planned: dict[tuple[bool, ...], Programs] = {}  # by kept set, the one used last at the end
        self.programs: Programs | None = None
        self.aside_seconds = 0.0  # what whoever drafts has spent on what no method would: an oracle's look ahead
        if invariant or target.forwards == "eager":
            self.cache = self._new_cache(batch, capacity)
            return
        capacity = strides(capacity)
        place = target.shelf.take(batch, capacity) or Place(self._new_cache(batch, capacity), Programs(target.forwards))
        self.cache, self.programs = place.cache, place.programs
        weakref.finalize(self, target.shelf.put, place)

    def _new_cache(self, batch: int, capacity: int) -> KVCache:
        arch, target = self.arch, self.target
        return KVCache(arch.num_layers, batch, arch.num_kv_heads, capacity, arch.head_dim, target.dtype, target.device)

    @property
    def warmup_seconds(self) -> float:
        """What is no part of a decoding's time: what recording forwards has taken, those of earlier sessions of this
        size included, and `aside_seconds`."""
        return self.aside_seconds + (0.0 if self.programs is None else self.programs.seconds)

    @property
    def batch(self) -> int:
        return self.cache.batch

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor | None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        plan: Sequence[bool] | None = None,
        start_block: int = 0,
        hidden: Tensor | None = None,
        wants: Wants | None = None,
        logits: bool = True,
        end_block: int | None = None,
    ) -> Output:
        """Runs T new tokens per row behind the committed ones.

        Args:
            tokens: int64 [B, T]; None when `hidden` is given.
            positions: int64 [B, T]; by default each row goes on from its length.
            mask: bool [B, T, T], which of the new tokens each new token sees (itself included); causal by default.
            plan: 2N flags, [2i] keeps attention and [2i+1] the MLP of block i; all by default. A skipped attention
                writes no keys: what was drafted with a plan is to be rolled back, never committed.
            start_block: the first block to run; `hidden` is then block start_block−1's output [B, T, D].
            wants: states to hand out, of blocks that run.
            logits: whether they are computed. A prompt's are not: its last token is left to the first round.
            end_block: an early exit, the first block not to run; N by default. Logits are early ones then. A forward of
                the same tokens may go on from there; before that they are not to be committed, since later blocks hold
                no keys of theirs.
        """
        wants, depth = wants or Wants(), self.arch.num_layers
        if plan is not None and len(plan) != 2 * depth:
            raise ValueError(f"a plan has a flag for each of {2 * depth} sub-layers, got {len(plan)}")
        end = depth if end_block is None else end_block
        if not 0 <= start_block <= end <= depth:
            raise ValueError(f"blocks {start_block} to {end} of a target that has {depth}")
        if hidden is None and (tokens is None or start_block > 0):
            raise ValueError("forward needs tokens, or hidden with start_block")
        part = _Part(None if plan is None else tuple(map(bool, plan)), start_block, end)
        # A prompt's forward, which asks for no logits, is of a shape of its own: not worth recording.
        if self.programs is not None and (logits or end_block is not None):
            return self._recorded(tokens, hidden, positions, mask, wants, part, logits)
        cache = self.cache
        if hidden is None:
            assert tokens is not None
            hidden = self.target.embed(tokens)
        batch, new, _ = hidden.shape
        reach, slots = cache.reach(new), cache.slots(new)
        turn = _turn(self.target, slots if positions is None else positions, new)
        fresh = mask is None and max(cache.lengths) == 0 and not self.invariant
        bias = visible = None
        if self.invariant:
            visible = cache.visible(mask if mask is not None else _causal(batch, new, hidden.device), reach)
        elif not fresh and (new > 1 or not isinstance(slots, int) or mask is not None):
            bias = self._bias(mask if mask is not None else _causal(batch, new, hidden.device), reach)
        view = _View(turn, slots, reach, bias, visible, fresh and new > 1)
        hidden, kept = _through(self.target, cache, hidden, view, wants, part)
        return Output(hidden, self.target.logits(hidden) if logits else None, *kept)

    def _recorded(
        self,
        tokens: Tensor | None,
        hidden: Tensor | None,
        positions: Tensor | None,
        mask: Tensor | None,
        wants: Wants,
        part: _Part,
        scored: bool,
    ) -> Output:
        """The same by a program of this shape."""
        first, embedded = (tokens, False) if hidden is None else (hidden, True)
        assert first is not None
        cache, (batch, new) = self.cache, first.shape[:2]
        reach = min(strides(cache.reach(new)), cache.capacity)
        slots = cache.slot_table(new)
        bias = self._bias(mask if mask is not None else _causal(batch, new, first.device), reach)

        target = self.target  # the program outlives this session: it may not hold it

        def run(first: Tensor, positions: Tensor, slots: Tensor, bias: Tensor) -> tuple[Tensor, list[Tensor], Any]:
            view = _View(_turn(target, positions, new), slots, reach, bias)
            hidden, kept = _through(target, cache, first if embedded else target.embed(first), view, wants, part)
            return hidden, [target.logits(hidden)] if scored else [], kept

        inputs = (first, slots if positions is None else positions, slots, bias)
        key = (new, reach, wants, part.start, part.end, embedded, scored)
        hidden, logits, kept = self._programs_of(part.plan)(key, run, inputs)
        return Output(hidden, logits[0] if scored else None, *kept)

    def _programs_of(self, plan: tuple[bool, ...] | None) -> Programs:
        """The recorded forwards of a kept set. Those of whole forwards are lent to later sessions; the others live and
        die with this one, and a set that has not been asked for lately makes room for a new one."""
        assert self.programs is not None
        if plan is None:
            return self.programs
        found = self._planned.pop(plan, None)
        self._planned[plan] = found = self.programs.sibling() if found is None else found
        while len(self._planned) > PLANS:
            del self._planned[next(iter(self._planned))]
        return found

    def _bias(self, tree_BTT: Tensor, reach: int) -> Tensor:
        share = self.arch.num_heads // self.arch.num_kv_heads
        return group_bias(self.cache.visible(tree_BTT, reach), share, self.target.dtype)

    # ---------------------------------------------------------------- sub-layers, for methods that skip or exit

    def trial(self, windows: Sequence[Window]) -> Trial:
        """Sub-layers on trial over windows of this session's rows: nothing is written to the cache."""
        return Trial(self.target, self.cache, windows)

    @torch.inference_mode()
    def attention(self, i: int, hidden: Tensor, prefix_len: int, branches: int = 1) -> Tensor:
        """Block i's attention sub-layer on trial: nothing is written to the cache.

        `hidden` [B·branches, T, D]: rows b·branches … belong to row b. Each sees the first `prefix_len` slots of its
        row and, causally, its own tokens, which stand at positions prefix_len, prefix_len + 1, …
        """
        new, batch = hidden.shape[1], len(hidden) // branches
        trial = self.trial([Window(row, prefix_len, new) for row in range(batch)])
        by_branch = hidden.reshape(batch, branches, new, -1).transpose(0, 1).reshape(branches, batch * new, -1)
        mixed = trial.attention(i, by_branch).view(branches, batch, new, -1)
        return mixed.transpose(0, 1).reshape(hidden.shape)

    @torch.inference_mode()
    def mlp(self, i: int, hidden: Tensor) -> Tensor:
        """Block i's MLP sub-layer."""
        return self.target.blocks[i].mlp(hidden)

    @torch.inference_mode()
    def early_logits(self, hidden: Tensor) -> Tensor:
        """What the target's own norm and head make of any block's output: [..., V], float32."""
        return self.target.logits(hidden)

    # ---------------------------------------------------------------- commit and roll back

    def advance(self, counts: list[int]) -> None:
        """Commits the first counts[b] tokens of the last forward of each row."""
        self.cache.advance(counts)

    def keep_paths(self, paths: list[list[int]]) -> None:
        """Commits, per row, the tokens of the last forward with these ascending indices."""
        self.cache.keep_paths(paths)

    def mark(self) -> list[int]:
        """The present lengths, to come back to."""
        return list(self.cache.lengths)

    def rollback(self, mark: list[int]) -> None:
        """Back to a mark: what was committed since is forgotten."""
        self.cache.lengths = list(mark)

    def select_rows(self, rows: list[int]) -> None:
        """Goes on with these rows only, in this order."""
        self.cache.select_rows(rows)
        self._planned.clear()
        if self.programs is not None:
            self.programs.forget()


def _causal(batch: int, new: int, device: torch.device) -> Tensor:
    return torch.ones(new, new, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)


def _turn(target: Target, positions: Tensor | int, new: int) -> tuple[Tensor, Tensor]:
    """Rotary tables, broadcastable to [B, T, 1, h], of positions [B, T] or of `new` ones from a common start on."""
    cos, sin = target.rope
    if isinstance(positions, int):
        return cos[positions : positions + new, None], sin[positions : positions + new, None]
    return cos[positions][:, :, None], sin[positions][:, :, None]


def _through(
    target: Target,
    cache: KVCache,
    hidden: Tensor,
    view: _View,
    wants: Wants,
    part: _Part,
) -> tuple[Tensor, tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """(the last block's output, the wanted states of blocks and attentions); writes the new keys and values."""
    kept_blocks, kept_attentions = {}, {}
    plan = part.plan
    for layer in range(part.start, part.end):
        block = target.blocks[layer]
        if plan is None or plan[2 * layer]:

            def attend(query: Tensor, key: Tensor, value: Tensor, layer: int = layer) -> Tensor:
                cache.write(layer, key, value, view.slots)
                if view.alone:
                    return attend_causal(query, key, value)
                keys, values = cache.keys[layer][:, :, : view.reach], cache.values[layer][:, :, : view.reach]
                if view.visible is not None:
                    return attend_exact(query, keys, values, view.visible)
                return attend_masked(query, keys, values, view.bias)

            hidden = block.attention(hidden, *view.turn, attend)
        if layer in wants.attentions:
            kept_attentions[layer] = hidden
        if plan is None or plan[2 * layer + 1]:
            hidden = block.mlp(hidden)
        if layer in wants.blocks:
            kept_blocks[layer] = hidden
    return hidden, (kept_blocks, kept_attentions)
