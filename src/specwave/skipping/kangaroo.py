"""Kangaroo: the target's first E blocks and a trained adapter draft, and a chain ends twice early.

The first exit is at block E: behind it stand the adapter (adapter.py) and the target's own head. The second is the stop
rule's: a chain ends behind a draft less probable than 0.6, and at 6 drafts. Verification goes on from block E with the
drafts' states. With γ = 6 and these probabilities of the drafts:

    draft         d1     d2     d3     d4     d5     d6
    probability   0.9    0.7    0.5    0.95   0.9    0.8
    drafted       yes    yes    yes, and it is the last one: 0.5 < 0.6

so a verification is of root, d1, d2 and d3, and blocks 0 … E−1 have run 4 times, the adapter 3 times. Source: Kangaroo
(arXiv 2404.18911) and its code, where the unlikely draft is verified too; methods.md §4. Ours: when sampling, the
probability is the drafted token's (drawn with the target's noise: drafting.py), not the likeliest one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from specwave.artifacts import UserError
from specwave.decoding import Context, Tree, Verdict
from specwave.skipping.adapter import Adapter, FrozenAdapter
from specwave.skipping.adapter_folder import KEY, check_target, read_adapter
from specwave.skipping.draft_verify import Fixed
from specwave.skipping.early_exit import EarlyExit, draft_to_exit, exit_plan
from specwave.skipping.settings import SelfDecoding
from specwave.target import Target, Wants
from specwave.target.cache import KVCache
from specwave.target.decoder import attend_masked, group_bias


@dataclass(frozen=True)
class KangarooDecoding(SelfDecoding):
    """`decoding=kangaroo`, with the adapter in `checkpoint`, which says where its exit is."""

    gamma: int = 6
    stop: Any = 0.6

    needs_checkpoint: ClassVar[bool] = True
    takes: ClassVar[str] = "kangaroo"  # the method of a checkpoint's card
    label: ClassVar[str] = "kangaroo"

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> DoubleExit:
        """A proposer.

        Raises:
            UserError: no adapter, a damaged one, one of another target.
        """
        if checkpoint is None:
            remedy = "decoding=kangaroo needs its adapter: give a folder that train.py drafter=kangaroo wrote"
            raise UserError(KEY, "null", f"{remedy} (…/drafters/kangaroo)")
        adapter, card = read_adapter(checkpoint)
        check_target(adapter, card, target, allow_other_target)
        return DoubleExit(target, adapter, self)


class DoubleExit(EarlyExit):
    """Chains of the first blocks and an adapter, which is copied into the target's dtype and frozen."""

    def __init__(self, target: Target, adapter: Adapter, settings: KangarooDecoding):
        plan = exit_plan(adapter.config.exit, target.num_layers, settings.gamma)
        super().__init__(target, settings, Fixed(plan), settings.rule().start())
        self.block, self.adapter = adapter.config.exit, FrozenAdapter(adapter, target.dtype, target.device)
        self.wanted = Wants((self.block - 1,))
        self.readings: Readings | None = None

    def wants(self, contexts: Sequence[Context]) -> Wants:
        return self.wanted  # of the prompt too

    def begin(self, contexts: Sequence[Context]) -> None:
        super().begin(contexts)
        self.readings = Readings(self.adapter, self.target, contexts, self.settings.gamma)
        for context in contexts:
            self._take(context)

    def end(self, row: int) -> None:
        super().end(row)
        if self.readings is not None:
            self.readings.end(row)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        super().observe(verdicts)
        for verdict in verdicts:
            self._take(verdict.context)

    def _take(self, context: Context) -> None:
        if context.blocks:  # none behind a prompt of one token
            assert self.readings is not None
            self.readings.waiting[context.row].append(context.blocks[self.block - 1])

    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        self._own(contexts)
        assert self.readings is not None
        read = partial(self.readings.read, contexts)
        try:
            return draft_to_exit(contexts, self.block, self.settings.gamma, self.stop, self.wanted.blocks, read)
        finally:
            self.readings.rewind()


class Readings:
    """The adapter at work on the rows of one decoding, with a cache of its own.

    Letters: R rows read, B rows of the cache, T new tokens of a row, S slots looked at, D hidden size, V vocabulary.

    The cache keeps the tokens before the root, by the states that verification captured (or prefill). What became known
    waits until the row is read: then it goes in front of the root, in the same product. Root and drafts go behind, and
    are given up by `rewind`, whoever's drafts are accepted. So it does not matter who drafted a round.

    Attributes:
        waiting: by row, states [k, D] of tokens before the root that are not in the cache.
    """

    def __init__(self, adapter: FrozenAdapter, target: Target, contexts: Sequence[Context], gamma: int):
        config = adapter.config
        longest = max(len(context.tokens) + context.limit for context in contexts)
        sizes = config.num_kv_heads, longest + gamma + 1, config.head_dim  # the last slot takes what nobody reads
        self.adapter, self.target = adapter, target
        self.cache = KVCache(1, len(contexts), *sizes, target.dtype, target.device)
        self.known = [0] * len(contexts)  # slots that stay
        self.places = {context.row: place for place, context in enumerate(contexts)}
        self.waiting: dict[int, list[Tensor]] = {context.row: [] for context in contexts}

    def end(self, row: int) -> None:
        self.waiting.pop(row, None)
        self.places.pop(row, None)
        if self.places and len(self.places) <= self.cache.batch // 2:  # each time the cache is copied
            kept = list(self.places.values())
            self.cache.select_rows(kept)
            self.known = [self.known[place] for place in kept]
            self.places = {row: place for place, row in enumerate(self.places)}

    def rewind(self) -> None:
        """Root and drafts are forgotten."""
        self.cache.lengths = list(self.known)

    def read(self, contexts: Sequence[Context], hidden_RD: Tensor) -> Tensor:
        """Logits [R, V] behind a next token of each row, by the exit's output for it."""
        fresh: dict[int, Tensor] = {}
        for context, state in zip(contexts, hidden_RD, strict=True):
            place = self.places[context.row]
            fresh[place] = torch.cat([*self.waiting[context.row], state[None]])
            self.known[place] += len(fresh[place]) - 1
            self.waiting[context.row] = []
        counts = [len(fresh[place]) if place in fresh else 0 for place in range(self.cache.batch)]
        states_BTD = hidden_RD.new_zeros(len(counts), max(counts), hidden_RD.shape[-1])
        for place, states in fresh.items():
            states_BTD[place, : len(states)] = states
        places = torch.tensor([self.places[context.row] for context in contexts], device=hidden_RD.device)
        return self.target.lm_head(self._last(states_BTD, counts)[places]).float()

    def _last(self, states_BTD: Tensor, counts: Sequence[int]) -> Tensor:
        """What the head reads [B, D] of each row's last token; of those before it only keys and values are needed."""
        cache, config = self.cache, self.adapter.config
        slots = cache.slot_table(states_BTD.shape[1])  # padding of a long row may reach past the end
        turned = slots.clamp(max=self.target.max_length - 1)
        cos, sin = (table[turned][:, :, None] for table in self.target.rope)
        query, key, value = self.adapter.read(states_BTD, (cos, sin))
        cache.write(0, key, value, slots.clamp(max=cache.capacity - 1))
        cache.advance(list(counts))
        row = torch.arange(cache.batch, device=slots.device)
        last = torch.tensor([max(count - 1, 0) for count in counts], device=slots.device)
        reach, bias = max(cache.lengths), None
        if len(set(cache.lengths)) > 1:
            ends = torch.tensor(cache.lengths, device=slots.device)[:, None, None]
            visible = torch.arange(reach, device=slots.device) < ends
            bias = group_bias(visible, config.num_heads // config.num_kv_heads, self.target.dtype)
        keys, values = cache.keys[0][:, :, :reach], cache.values[0][:, :, :reach]
        mixed = attend_masked(query[row, last][:, None], keys, values, bias)
        return self.adapter.finish(states_BTD[row, last][:, None], mixed)[:, 0]
