"""SwitchSD: the target's own states say when it copies; then the copy is drafted, else a neural proposer drafts.

With n tokens committed, x_{n−1} is the last one (methods.md §2):

    x_{n−1} stood nowhere before             neural   "no occurrence"
    it did, p(H_{n−2}) ≥ threshold           copy     "probe": what followed the longest run of last tokens
    it did, p(H_{n−2}) < threshold           neural   "probe says no"

x_{n−1} is the target's own token of the last round and has been forwarded nowhere: the probe reads H_{n−2}, the state
it was chosen by, which is the last one that was captured. Probes are trained with the same offset.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from specwave.artifacts import UserError, reading
from specwave.copying.composite import Composite
from specwave.copying.folder import KEY, TrainedProbes, check_probe, read_probe
from specwave.copying.ledger import PLAIN
from specwave.copying.lookup import Lookup
from specwave.copying.match import LastN
from specwave.copying.proposers import (
    built,
    check_length,
    check_method,
    check_run,
    takes_checkpoint,
    used,
)
from specwave.copying.simulate import LONGEST, best_length
from specwave.decoding import Context, Proposer, Tree
from specwave.decoding.loop import ROOM
from specwave.target import Target, Wants
from specwave.target.clock import clock

TOGETHER = "copy+neural"


@dataclass(frozen=True)
class SwitchSdDecoding:
    """`decoding=switchsd`: where the last token stood before and the probe says that it is copied, the `length` tokens
    behind the longest run of last tokens, `n` at most, that stood before; a copy that comes to the end of the text goes
    on with itself. Elsewhere what `neural` drafts, a decoding method with the drafter in `checkpoint`; without one,
    plain decoding.

    `probe`: its folder. `site`, `layer`, `threshold`: null is the probe's own choice. `length` "auto": by what the card
    says copies of each length brought, and the time of a forward over so many tokens here. `together`: where it says
    copy, the copy and the neural draft are verified in one tree; deterministic drafts only.
    """

    neural: Any
    probe: str | None = None
    site: Literal["attention", "block"] | None = None
    layer: int | None = None
    threshold: float | None = None
    n: int = 8
    length: int | str = 10
    occurrence: Literal["first", "recent"] = "recent"
    together: bool = False
    batch_invariant: bool = False

    needs_checkpoint = False
    label = "switchsd"

    def __post_init__(self) -> None:
        check_method("decoding.neural", self.neural)
        check_run(self.n)
        if not isinstance(self.length, str):
            check_length(self.length)
        elif self.length != "auto":
            raise UserError("decoding.length", self.length, f"must be auto, or a number from 1 to {ROOM}")
        if self.threshold is not None and not 0 < self.threshold < 1:
            remedy = "must be between 0 and 1, both excluded, or null for the probe's own"
            raise UserError("decoding.threshold", self.threshold, remedy)

    @property
    def takes_checkpoint(self) -> bool:
        return takes_checkpoint(self.neural)

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> Switch:
        if self.probe is None:
            raise no_probe(self)
        probes = read_probe(self.probe)
        check_probe(probes, target, allow_other_target)
        if probes.card["offset"] != 1:
            remedy = (
                "it reads a token's own state, which the last token has not when the choice is made: probe.offset=1"
            )
            raise UserError(KEY, self.probe, remedy)
        chosen = probes.card["choice"]
        site = chosen["site"] if self.site is None else self.site
        layer = chosen["layer"] if self.layer is None else self.layer
        if not 0 <= layer < probes.num_layers:
            remedy = f"layer {layer} is unknown: {target.name} has layers 0 to {probes.num_layers - 1}"
            raise UserError("decoding.layer", layer, remedy)
        threshold = probes.threshold(site, layer) if self.threshold is None else self.threshold
        neural = built(self.neural, target, checkpoint, allow_other_target, self.batch_invariant)
        length = self._length(probes, target, (site, layer, threshold))
        settings = replace(
            self,
            neural=None if neural is None else used(self.neural, neural),
            site=site,
            layer=layer,
            threshold=threshold,
            length=length,
        )
        copy = Lookup(partial(LastN, self.n, 1, self.occurrence), lambda _: length, overlap=True)
        probe = Probe(probes.weights[site][layer].to(target.device), site, layer, threshold)
        return Switch(copy, neural, probe, self.together, Used.of(settings, probes.sha256))

    def _length(self, probes: TrainedProbes, target: Target, used: tuple[str, int, float]) -> int:
        if not isinstance(self.length, str):
            return self.length
        known = tuple(probes.card["choice"][name] for name in ("site", "layer", "threshold"))
        if (*used, self.n, self.occurrence) != (*known, LONGEST, "recent"):
            remedy = (
                "what copies bring is known for the probe's own site, layer and threshold, n=8 and occurrence=recent: "
                "leave those as they are, or give a number"
            )
            raise UserError("decoding.length", self.length, remedy)
        with reading(KEY, str(self.probe), "train the probe again"):
            rows = [
                {key: float(row[key]) for key in ("length", "copies", "drafted", "accepted", "others")}
                for row in probes.card["copies"]
            ]
            if not all(1 <= row["length"] <= ROOM for row in rows):
                raise ValueError("copies of a length that no round verifies")
            if not all(0 <= row["accepted"] <= row["drafted"] <= row["length"] for row in rows):
                raise ValueError("copies of which more are accepted than drafted")
            if not all(row["copies"] > 0 and row["others"] >= 0 for row in rows):
                raise ValueError("numbers of rounds")
        if not rows:
            remedy = (
                "no copy was triggered when the probe was trained, so its card does not say how long: give a number"
            )
            raise UserError("decoding.length", self.length, remedy)
        return best_length(rows, clock(target, invariant=self.batch_invariant))


@dataclass(frozen=True)
class Used(SwitchSdDecoding):
    """The settings that were worked with, and which weights the probe had: a folder may be trained anew."""

    probe_sha256: str = ""

    @classmethod
    def of(cls, settings: SwitchSdDecoding, sha256: str) -> Used:
        return cls(**{entry.name: getattr(settings, entry.name) for entry in fields(settings)}, probe_sha256=sha256)


def reads_probe(method: Any) -> bool:
    """Whether a decoding method, or one within it, has a probe."""
    named = (getattr(method, name, None) or {} for name in ("arms", "sources"))
    within = [getattr(method, "neural", None), *(one for methods in named for one in methods.values())]
    return hasattr(method, "probe") or any(reads_probe(one) for one in within if one is not None)


def no_probe(method: Any) -> UserError:
    """The error of a method that has none."""
    remedy = f"decoding={method.label} needs a probe: give the folder that train.py task=probe probe=linear wrote"
    return UserError(KEY, "null", remedy)


@dataclass(frozen=True)
class Probe:
    """One probe at work: weights [D] for the states of a site, on the target's device."""

    weights: Tensor
    site: str
    layer: int
    threshold: float

    @property
    def wants(self) -> Wants:
        return Wants(attentions=(self.layer,)) if self.site == "attention" else Wants(blocks=(self.layer,))

    def state(self, context: Context) -> Tensor:
        """H_{n−2} [D], the last captured state; there is one as soon as there are two tokens."""
        captured = context.attentions if self.site == "attention" else context.blocks
        return captured[self.layer][-1]

    def says_copy(self, states: Sequence[Tensor]) -> list[bool]:
        """For each state [D]. One transfer to the host."""
        logits = torch.stack(list(states)).float() @ self.weights
        return [bool(said) for said in (logits >= math.log(self.threshold / (1 - self.threshold))).tolist()]


class Switch(Composite):
    """The rule at the top of this file.

    Args:
        neural: None is plain decoding.
        together: where the probe says copy, the neural draft is verified beside the copy.
    """

    def __init__(
        self, copy: Lookup, neural: Proposer | None, probe: Probe, together: bool = False, settings: Any = None
    ):
        super().__init__({"copy": copy, "neural": neural}, settings)
        self.copy, self.probe, self.together = copy, probe, together

    def wants(self, contexts: Sequence[Context]) -> Wants:
        return super().wants(contexts) | self.probe.wants

    @torch.inference_mode()
    def decide(self, contexts: Sequence[Context]) -> dict[int, str]:
        """By row, why the round's source is what it is: "probe" for a copy."""
        why = {context.row: "no occurrence" for context in contexts}
        asked = [context for context in contexts if self.copy.find(context) is not None]
        if asked:
            said = self.probe.says_copy([self.probe.state(context) for context in asked])
            why |= {one.row: "probe" if yes else "probe says no" for one, yes in zip(asked, said, strict=True)}
        return why

    def draft(self, contexts: Sequence[Context]) -> dict[int, Tree]:
        began = time.perf_counter()
        why = self.decide(contexts)
        self.ledger.spent("copy", [context.row for context in contexts], time.perf_counter() - began)
        copying = [context for context in contexts if why[context.row] == "probe"]
        others = [context for context in contexts if why[context.row] != "probe"]
        trees = self._asked("copy", copying)
        source = dict.fromkeys(trees, "copy")
        if self.together:
            others = list(contexts)
        for row, tree in self._asked("neural", others).items():
            if row in trees and len(trees[row]):
                if len(tree):
                    trees[row], source[row] = merged(trees[row], tree), TOGETHER
            else:
                trees[row], source[row] = tree, "neural"
        for row, tree in trees.items():
            self.ledger.note(row, source[row] if len(tree) else PLAIN, why[row])
        return trees

    def _asked(self, name: str, contexts: Sequence[Context]) -> dict[int, Tree]:
        if not contexts:
            return {}
        return {context.row: tree for context, tree in zip(contexts, self.ask(name, contexts), strict=True)}


def merged(one: Tree, other: Tree, room: int = ROOM) -> Tree:
    """One tree of two: a draft of `other` that `one` has at the same place is one draft. One transfer to the host.

        one    a b c          other   a d · x        merged   a b c · d · x
               −1 0 1                 −1 0  −1                −1 0 1  0   −1

    Of `other` the first drafts that there is room for stay; parents come before their children, so none is orphaned.

    Raises:
        UserError: a sampled chain, which is accepted by another rule than copies are.
    """
    if one.q is not None or other.q is not None:
        raise UserError("decoding.together", "true", "copies share a tree with deterministic drafts only: give false")
    pairs = torch.cat([torch.stack([tree.tokens, tree.parents.to(tree.tokens)]) for tree in (one, other)], 1).tolist()
    tokens, parents, place = list[int](), list[int](), dict[tuple[int, int], int]()
    for tree_start, tree_end in ((0, len(one)), (len(one), len(one) + len(other))):
        own: list[int] = []  # by draft of this tree: its place in the merged one
        for token, parent in zip(pairs[0][tree_start:tree_end], pairs[1][tree_start:tree_end], strict=True):
            above = own[parent] if parent >= 0 else -1
            if (above, token) not in place and len(tokens) < room and above != room:
                place[above, token] = len(tokens)
                tokens.append(token)
                parents.append(above)
            own.append(place.get((above, token), room))  # `room`: it did not fit, nor will what hangs on it
    device = one.tokens.device
    levels = [tree.depth if tree.depth is not None else len(tree) for tree in (one, other)]
    return Tree(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        torch.tensor(parents, dtype=torch.int64, device=device),
        depth=max(levels),
    )
