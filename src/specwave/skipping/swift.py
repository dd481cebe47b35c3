"""SWIFT: a random search for the kept set while decoding, with a guess of Bayesian optimisation now and then.

Every round one candidate is tried on the last tokens of the answer: how often would it have drafted what was committed?
The best so far is drafted with. With bayes = 25:

    trial       1 … 24    25              26 … 49    50
    candidate   random    most hopeful    random     most hopeful

Candidates skip one number of sub-layers; those of the first and last block always run. Source: SWIFT (arXiv 2410.06916)
and its code; methods.md §4.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from specwave.artifacts import UserError, check_seed
from specwave.decoding import Context, Verdict
from specwave.skipping.bayes import most_hopeful
from specwave.skipping.logs import Logged
from specwave.skipping.matching import match_rate
from specwave.skipping.plans import Plan, skipping_blocks
from specwave.skipping.proposer import SelfSpeculation
from specwave.skipping.search import forced_ends
from specwave.skipping.settings import SelfDecoding
from specwave.skipping.windows import gather
from specwave.target import Target, Wants

_REMEMBERED = 256  # trials that the process is fitted to, the last ones: its cost grows with their cube
_CANDIDATES = 512  # random sets that Bayesian optimisation chooses among, beside the neighbours of the best one


@dataclass(frozen=True)
class SwiftDecoding(SelfDecoding):
    """`decoding=swift`: `skip` is the share of the sub-layers between first and last block that are skipped.

    A candidate is tried on the last `window` tokens of the answer, every `every` rounds; each `bayes`-th is chosen by
    Bayesian optimisation, the others by chance from `seed`. The search ends for good with a candidate that matched more
    than `enough` of them, after `patience` candidates in a row that were no better, or after `trials` in all.
    """

    stop: Any = 0.8
    skip: float = 0.45
    window: int = 32
    every: int = 1
    bayes: int = 25
    enough: float = 0.93
    patience: int = 300
    trials: int = 1000
    seed: int = 0

    label = "swift"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.skip < 1.0:
            self.refuse("skip", "is the share of sub-layers that are skipped: above 0 and below 1")
        for name, rule in (
            ("window", "candidates are tried on at least 1 token"),
            ("every", "is a number of rounds, at least 1"),
            ("bayes", "is a number of candidates, at least 1; more than decoding.trials leaves all to chance"),
            ("patience", "is a number of candidates, at least 1"),
            ("trials", "is a number of candidates, at least 1"),
        ):
            if getattr(self, name) < 1:
                self.refuse(name, rule)
        if not 0.0 <= self.enough <= 1.0:
            self.refuse("enough", "is a share of matched tokens, 0 to 1; 1 is never enough")
        check_seed("decoding.seed", self.seed)

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> SelfSpeculation:
        return self.compose(target, Swift(target, self))


class Swift(Logged):
    """The source of SWIFT's plans. What it has found is carried along the stream.

    Attributes:
        best: the plan that is drafted with; α is the share it matched when it was tried, None of the first one.
        tried: masks of skipped sub-layers and the share each matched, in order.
    """

    scope: Literal["sequence", "stream"] = "stream"

    def __init__(self, target: Target, settings: SwiftDecoding):
        super().__init__(target)
        self.settings = settings
        always = forced_ends(target.num_layers)
        self.free = [place for place, runs in enumerate(always) if not runs]
        self.count = math.floor(settings.skip * len(self.free) + 1e-9)  # 0.58 · 50 is 28.999… to a computer
        if self.count < 1:
            rule = f"skips none of the {len(self.free)} sub-layers between first and last block of {target.name}"
            raise UserError("decoding.skip", settings.skip, f"{rule}: give a larger share")
        # every second block, as the released code begins: a set like any other, until a candidate has matched more
        second = skipping_blocks(target.num_layers, range(1, target.num_layers - 1, 2))
        self.best = Plan(second, settings.gamma)
        self.tried: list[tuple[tuple[bool, ...], float]] = []
        self.draw = random.Random(f"{settings.seed}/swift")
        self.rounds = self.idle = 0  # all rounds; candidates since the best one
        self.searching = True

    def begin(self, contexts: Sequence[Context]) -> None: ...

    def end(self, row: int) -> None: ...

    def wants(self, contexts: Sequence[Context]) -> Wants:
        return Wants()

    def plan(self, contexts: Sequence[Context]) -> Plan | None:
        if self.searching and self.rounds % self.settings.every == 0:
            window = self.settings.window
            ripe = [context for context in contexts if len(context.tokens) - context.prompt_length >= window]
            if ripe:
                self._try(ripe)
        return self.best

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.rounds += 1

    # ---------------------------------------------------------------- the search

    def _try(self, contexts: Sequence[Context]) -> None:
        """One candidate, on the last tokens of these rows together."""
        began = time.perf_counter()
        guided = (len(self.tried) + 1) % self.settings.bayes == 0 and bool(self.tried)
        skipped = self._guess() if guided else self._random()
        kept = self._kept(skipped)
        evidence = gather(self.target, contexts, [self.settings.window] * len(contexts))
        trial = contexts[0].session.trial(evidence.windows)
        rate = match_rate(self.target, trial, evidence, kept, contexts[0].sampling)
        self.tried.append((skipped, rate))
        better = rate > (self.best.alpha or 0.0)
        self.idle = 0 if better else self.idle + 1
        if better:
            self.best = Plan(kept, self.settings.gamma, rate)
        over = self.idle >= self.settings.patience or len(self.tried) >= self.settings.trials
        self.searching = not (over or (better and rate > self.settings.enough))
        seconds = time.perf_counter() - began
        self.note(contexts, self.rounds, Plan(kept, self.settings.gamma, rate), seconds, guided=guided, taken=better)

    def _random(self) -> tuple[bool, ...]:
        """A mask over the free sub-layers with `count` of them set."""
        chosen = set(self.draw.sample(range(len(self.free)), self.count))
        return tuple(place in chosen for place in range(len(self.free)))

    def _guess(self) -> tuple[bool, ...]:
        """The candidate for which the process has the highest hopes: a random one, or one swap away from the best."""
        recent = self.tried[-_REMEMBERED:]
        top = max(recent, key=lambda pair: pair[1])[0]
        candidates = [self._random() for _ in range(_CANDIDATES)] + neighbours(top)
        masks = [torch.tensor(rows, dtype=torch.float64) for rows in ([mask for mask, _ in recent], candidates)]
        values = torch.tensor([rate for _, rate in recent], dtype=torch.float64)
        return candidates[most_hopeful(masks[0], values, masks[1])]

    def _kept(self, skipped: Sequence[bool]) -> tuple[bool, ...]:
        """Flags of all sub-layers from a mask over the free ones."""
        flags = [True] * (2 * self.target.num_layers)
        for place, skips in zip(self.free, skipped, strict=True):
            flags[place] = not skips
        return tuple(flags)


def neighbours(mask: Sequence[bool]) -> list[tuple[bool, ...]]:
    """All masks with as many members that differ in one swap."""
    found = []
    for out in range(len(mask)):
        for into in range(len(mask)):
            if mask[out] and not mask[into]:
                swapped = list(mask)
                swapped[out], swapped[into] = False, True
                found.append(tuple(swapped))
    return found
