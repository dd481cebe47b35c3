"""EAGLE-3 as a proposer: pairs each committed token with the target's states before it, then drafts a tree.

With n tokens committed, states g_0 … g_{n−2} are known. Slot t of the drafter reads g_t and token x_{t+1} at position
t; its output predicts x_{t+2}. A round first catches up on the slots that became known, whose last one (t = n−2, whose
token is the root x_{n−1}) gives the first drafts; each further level reads drafts and the state each hangs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specwave.artifacts import UserError, group_name
from specwave.decoding import BaseProposer, Context, Tree, Verdict
from specwave.decoding.grow import Dynamic, Fixed, Shape, candidates
from specwave.decoding.loop import ROOM
from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.drafting import Drafts
from specwave.eagle.export import check_target, read_drafter
from specwave.eagle.frozen import FrozenDrafter
from specwave.target import Target, Wants


@dataclass(frozen=True)
class Eagle3Decoding:
    """`decoding=eagle3`: what is drafted per round.

    `top_k` = 1: a chain of `levels` drafts. `top_k` > 1: a dynamic tree (EAGLE-2), the `total_token` − 1 likeliest of
    the `top_k` children of the `top_k` likeliest paths of every level; null keeps all. `tree`: a fixed one, each draft
    by its path of ranks, as in [[0],[1],[0,0]]. `total_token` = "auto": levels, top_k and size are chosen by the clock
    for this drafter, target and device (`tuning.py`). `batch_invariant` is the loop's; it also says which forwards the
    clock times.
    """

    levels: int = 2
    top_k: int = 1
    total_token: int | str | None = None
    tree: list[list[int]] | None = None
    batch_invariant: bool = False

    needs_checkpoint = True
    label = "eagle3"

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= ROOM:
            raise UserError("decoding.levels", self.levels, f"must be 1 to {ROOM}, which one round can verify")
        if not 1 <= self.top_k <= ROOM:
            raise UserError("decoding.top_k", self.top_k, f"must be 1 (a chain) to {ROOM}")
        total = self.total_token
        if isinstance(total, str):
            self._check_auto(total)
            return
        if total is not None and not 2 <= total <= ROOM + 1:
            remedy = f"counts the root and the drafts below it: must be 2 to {ROOM + 1}, or null for all candidates"
            raise UserError("decoding.total_token", total, remedy)
        if self.tree is not None:
            self._check_fixed()
        elif self.top_k == 1 and total not in (None, self.levels + 1):
            remedy = f"top_k=1 is a chain, whose {self.levels} drafts are levels={self.levels}: leave it null"
            raise UserError("decoding.total_token", total, f"{remedy}, or give decoding.top_k=10 for a tree")
        elif self.top_k > 1 and total is None and candidates(self.levels, self.top_k) > ROOM:
            count = candidates(self.levels, self.top_k)
            remedy = f"there are {count} candidates, one round verifies {ROOM}: say how many tokens, root included"
            raise UserError("decoding.total_token", "null", remedy)

    def _check_auto(self, total: str) -> None:
        if total != "auto":
            raise UserError("decoding.total_token", total, f"must be auto, null, or a number from 2 to {ROOM + 1}")
        plain = {entry.name: entry.default for entry in fields(self)}
        for key in ("levels", "top_k", "tree"):
            if getattr(self, key) != plain[key]:
                remedy = "total_token=auto chooses it: leave it out"
                raise UserError(f"decoding.{key}", getattr(self, key), remedy)

    def _check_fixed(self) -> None:
        try:
            shape = Fixed(self.tree or [])
        except ValueError as error:
            raise UserError("decoding.tree", self.tree, str(error)) from None
        if shape.size > ROOM:
            raise UserError("decoding.tree", f"{shape.size} drafts", f"one round verifies {ROOM} at most")
        if shape.levels != self.levels:
            remedy = f"the tree has {shape.levels} levels: give decoding.levels={shape.levels}"
            raise UserError("decoding.levels", self.levels, remedy)
        for key, value, only in (("top_k", self.top_k, 1), ("total_token", self.total_token, None)):
            if value != only:
                remedy = f"the tree says which drafts are made: leave it {'null' if only is None else only}"
                raise UserError(f"decoding.{key}", value, remedy)

    def shape(self, device: torch.device) -> Shape:
        """The trees of these settings."""
        if self.tree is not None:
            return Fixed(self.tree, device)
        if self.top_k == 1 and self.total_token != "auto":
            return Fixed.chain(self.levels, device)
        if isinstance(self.total_token, str):
            raise ValueError("total_token=auto is for load_drafter, which knows the drafter and the clock")
        return Dynamic(self.levels, self.top_k, (self.total_token or ROOM + 1) - 1, device)

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> Eagle3:
        if checkpoint is None:
            remedy = "decoding=eagle3 needs a drafter: give a folder that train.py wrote (…/drafters/L…)"
            raise UserError("checkpoint", "null", remedy)
        keys = {name: getattr(self, name) for name in ("top_k", "total_token", "tree", "batch_invariant")}
        return load_drafter(checkpoint, target, allow_other_target, levels=self.levels, **keys)


def load_drafter(
    path: Path | str,
    target: Target,
    allow_other_target: bool = False,
    levels: int = Eagle3Decoding.levels,
    **tree: Any,
) -> Eagle3:
    """A drafter folder as a proposer for `target`, in the target's dtype; `tree`: further keys of `Eagle3Decoding`.

    Raises:
        UserError: no drafter, no layer ids, a vocabulary map that does not fit, another target's drafter, settings that
            do not go together.
    """
    settings = Eagle3Decoding(levels, **tree)
    config, tensors, card = read_drafter(path)
    check_target(config, card, target, allow_other_target)
    drafter = Eagle3Drafter(config)
    drafter.load_state_dict({name: tensors[name] for name in drafter.state_dict()})
    if settings.total_token == "auto":
        from specwave.eagle.tuning import tuned_settings  # which decodes with what this module makes

        invariant = settings.batch_invariant
        tuned = tuned_settings(path, drafter, target, invariant)
        return Eagle3(drafter, target, card=card, batch_invariant=invariant, **tuned)
    return Eagle3(drafter, target, levels, card, **tree)


class Eagle3(BaseProposer):
    """Trees of drafts, chosen without randomness. The drafter is copied into the target's dtype and frozen.

    `levels` and `tree` are the keys of `Eagle3Decoding`.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        target: Target,
        levels: int = Eagle3Decoding.levels,
        card: dict[str, Any] | None = None,
        **tree: Any,
    ):
        self.settings = Eagle3Decoding(levels, **tree)
        self.shape = self.settings.shape(target.device)
        if isinstance(self.shape, Fixed) and self.shape.ranks > drafter.config.draft_vocab_size:
            size = drafter.config.draft_vocab_size
            raise UserError("decoding.tree", self.settings.tree, f"the drafter knows {size} tokens: ranks end below it")
        self.drafter = FrozenDrafter(drafter, target)
        self.target, self.levels, self.card = target, levels, card or {}
        self.layers = tuple(drafter.config.layers)
        self.label = group_name(self.layers, drafter.config.switches)
        self.drafts: Drafts | None = None
        self.contexts: dict[int, Context] = {}  # by row, of the decoding that began last
        self.places: dict[int, int] = {}  # live rows: where each lies in the drafter's batch
        self.waiting: dict[int, list[Tensor]] = {}  # per row: target states not yet in the drafter's cache

    def wants(self, contexts: Sequence[Context]) -> Wants:
        return Wants(blocks=self.layers)

    @torch.inference_mode()
    def begin(self, contexts: Sequence[Context]) -> None:
        length = max(len(context.tokens) + context.limit for context in contexts)
        self.drafts = Drafts(self.drafter, self.target, self.shape, len(contexts), length)
        self.places = {context.row: place for place, context in enumerate(contexts)}
        self.waiting = {context.row: [] for context in contexts}
        self.contexts = {context.row: context for context in contexts}
        for context in contexts:
            self._take(context)

    def end(self, row: int) -> None:
        for held in (self.contexts, self.waiting, self.places):
            held.pop(row, None)

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self._own([verdict.context for verdict in verdicts])
        for verdict in verdicts:
            self._take(verdict.context)

    def _own(self, contexts: Sequence[Context]) -> None:
        """One proposer decodes one call of the loop at a time."""
        if any(self.contexts.get(context.row) is not context for context in contexts):
            raise ValueError("this drafter has begun another decoding since: load one for each that runs at a time")

    def _take(self, context: Context) -> None:
        if context.blocks and self._within(context):
            self.waiting[context.row].append(torch.cat([context.blocks[layer] for layer in self.layers], -1))

    def _within(self, context: Context) -> bool:
        """Whether drafts still have positions of the drafter's (sglang#3574: stop drafting, go on decoding)."""
        return len(context.tokens) + self.levels <= self.drafter.config.max_length

    def _pays(self, context: Context) -> bool:
        """Whether states are known, positions left, and drafts could still be committed: a row's last round is not."""
        return len(context.tokens) > 1 and context.remaining > 1 and self._within(context)

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        """One tree per row; empty where nothing is known yet, the drafter's positions end or one token is left."""
        self._own(contexts)
        able = [context for context in contexts if self._pays(context)]
        trees = {context.row: Tree.empty(self.target.device) for context in contexts}
        if able:
            ids, parents = self._draft(able)
            for context in able:
                place = self.places[context.row]
                trees[context.row] = Tree(ids[place], parents[place], depth=self.levels)
        return [trees[context.row] for context in contexts]

    def _draft(self, contexts: Sequence[Context]) -> tuple[Tensor, Tensor]:
        """(target ids, parents) of the trees, [B, K]: rows of the drafter's batch, those without a context idle."""
        drafts = self._gathered()
        known = {self.places[context.row]: torch.cat(self.waiting[context.row]) for context in contexts}
        counts = [len(known[place]) if place in known else 0 for place in range(drafts.cache.batch)]
        tokens = torch.zeros(len(counts), max(counts), dtype=torch.int64)
        states_BTD = next(iter(known.values())).new_zeros(*tokens.shape, self.drafter.fc.weight.shape[1])
        for context in contexts:
            place = self.places[context.row]
            tokens[place, : counts[place]] = torch.tensor(context.tokens[-counts[place] :])
            states_BTD[place, : counts[place]] = known[place]
            self.waiting[context.row] = []
        return drafts.grow(drafts.catch_up(tokens.to(states_BTD.device), states_BTD, counts))

    def _gathered(self) -> Drafts:
        """The drafts, without finished rows once they are half of the batch (each time the cache is copied)."""
        assert self.drafts is not None
        if len(self.places) <= self.drafts.cache.batch // 2:
            self.drafts.cache.select_rows(list(self.places.values()))
            self.places = {row: place for place, row in enumerate(self.places)}
        return self.drafts
