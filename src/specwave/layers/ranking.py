"""Every set of m layers in order of entropy: the exact best, and where any set stands.

Shapes: N layers, R rows, C = C(N, m) sets.

All sets are screened in float32, half the work, and those that a question turns on are scored again in float64: the
leaders for the best, the neighbours of a set for its rank. `tolerance` is ten times the largest difference between the
two precisions seen on sets spread over the whole list, and it grows when a later comparison exceeds it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.layers.groups import Group, all_sets, best, checked, entropies, in_threads

_TRIAL = 64  # sets scored in both precisions before the screening
_WORTH_SCREENING = 2_000  # fewer sets are scored in float64 at once
_SLOW = 20.0  # seconds above which an estimate is said first
_CHEAP = 3e9  # sets × (rows³ + _FLOOR): what a second or two can do
_FLOOR = 40**3  # below so many rows it is not the eigenvalues that take the time
_PART = 256  # sets of one task


class Ranking:
    """All sets of m layers with their entropies in nats.

    Args:
        grams: [N, R, R], scale and centre applied.
        m: size of the sets, 1 … N.
        alpha: order of the entropy.
        say: told the estimate when the work is long.
    """

    def __init__(self, grams: Tensor, m: int, alpha: float = 1.0, say: Callable[[str], None] | None = None):
        self.grams, self.alpha = checked(grams, m), alpha
        self.sets = all_sets(len(grams), m)  # int64 [C, m], lexicographic
        self.exact = torch.zeros(len(self.sets), dtype=torch.bool)
        self.entropy = torch.zeros(len(self.sets), dtype=torch.float64)
        self.tolerance = 0.0
        trial = torch.linspace(0, len(self.sets) - 1, min(_TRIAL, len(self.sets))).long().unique()
        began = time.perf_counter()
        self.entropy[trial] = self._float64(trial)
        seconds = (time.perf_counter() - began) / len(trial) * len(self.sets)
        if say is not None and seconds > _SLOW:
            say(f"{len(self.sets):,} sets of {m} layers, {grams.shape[-1]} rows: about {_duration(seconds)}")
        every = torch.arange(len(self.sets))
        if len(self.sets) < _WORTH_SCREENING:
            self.entropy, self.exact[:] = self._float64(every), True
            return
        screened = self._scores(self.grams.float(), every, "all sets")
        self.tolerance = 10 * (screened[trial] - self.entropy[trial]).abs().max().item() + 1e-9
        self.entropy = screened
        self._sharpen(trial)

    def __len__(self) -> int:
        return len(self.sets)

    def top(self, count: int | None) -> list[Group]:
        """The `count` best, best first (all for None, each scored in float64)."""
        count = len(self) if count is None else min(count, len(self))
        while True:
            floor = self.entropy.topk(count).values[-1]
            unsure = (self.entropy >= floor - 2 * self.tolerance) & ~self.exact
            if not unsure.any():
                break
            self._sharpen(unsure.nonzero()[:, 0])
        leaders = (self.entropy >= floor - 1e-11).nonzero()[:, 0].tolist()  # ties at the end of the list included
        return best((Group(tuple(self.sets[place].tolist()), self.entropy[place].item()) for place in leaders), count)

    def rank(self, layers: Sequence[int]) -> int:
        """1 for the best set; sets that tie share the better rank."""
        place = self._place(layers)
        self._sharpen(torch.tensor([place]))
        while True:
            own = self.entropy[place]
            unsure = ((self.entropy - own).abs() <= 2 * self.tolerance) & ~self.exact
            if not unsure.any():
                return 1 + int((self.entropy > own + 1e-12).sum())
            self._sharpen(unsure.nonzero()[:, 0])

    def order(self) -> Tensor:
        """Places of all sets, best first; neighbours closer than `tolerance` may be swapped where not `exact`."""
        return torch.sort(self.entropy, descending=True, stable=True).indices

    # ---------------------------------------------------------------- scores

    def _place(self, layers: Sequence[int]) -> int:
        wanted = torch.tensor(sorted(layers))
        if len(wanted) == self.sets.shape[1]:
            for place in (self.sets == wanted).all(1).nonzero()[:, 0].tolist():
                return place
        raise ValueError(f"{list(layers)} is no set of {self.sets.shape[1]} of these layers")

    def _sharpen(self, places: Tensor) -> None:
        """Scores these sets in float64."""
        places = places[~self.exact[places]]
        if len(places):
            values = self._float64(places)
            self.tolerance = max(self.tolerance, 2 * (values - self.entropy[places]).abs().max().item())
            self.entropy[places], self.exact[places] = values, True

    def _float64(self, places: Tensor) -> Tensor:
        return self._scores(self.grams, places, "leading sets" if self.tolerance else None)

    def _scores(self, grams: Tensor, places: Tensor, label: str | None) -> Tensor:
        """Entropy [C] float64 of the sets at `places`, computed in the precision of the Grams."""
        parts = self.sets[places].split(_PART)
        if grams.device.type != "cpu":
            return torch.cat([entropies(grams, part, self.alpha) for part in parts])
        found = []
        quiet = None if label and len(parts) > 4 else True
        with tqdm(total=len(places), desc=label, unit="set", disable=quiet) as bar:
            for part in in_threads(lambda part: entropies(grams, part, self.alpha), parts):
                found.append(part)
                bar.update(len(part))
        return torch.cat(found)


def worth_it(wanted: str, grams: Tensor, m: int) -> bool:
    """Whether a ranking is computed beside a selection: "always", "never", or "auto", where it costs about a second."""
    num_layers, rows, _ = grams.shape
    cost = math.comb(num_layers, m) * (rows**3 + _FLOOR)
    return wanted == "always" or (wanted == "auto" and cost <= _CHEAP)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
