"""How sure a selection is: the same search on resampled conversations.

A bootstrap draws conversations (or whole domains) with replacement; a conversation drawn twice counts its rows twice.
Rows that differ only in how often they count need no copies where only the spectrum is read: with multiplicities w,
the Gram of the copies has the non-zero eigenvalues of diag(√w) K diag(√w) over the distinct rows, less than half of
the work squared. Searches that read CKA get the copies themselves.

Shapes: N layers, R rows, U units (conversations or domains).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import UserError
from specwave.layers.blocks import prepare_grams
from specwave.layers.calibrate import Calibrated
from specwave.layers.groups import entropies, in_threads

Layers = tuple[int, ...]
INTERVAL = (0.025, 0.975)
SUPPORT = 0.5  # of the resamples must choose the same set for a choice to be called supported (our rule)


@dataclass
class Stability:
    """What a bootstrap over `units` conversations or domains found; entropies in nats."""

    over: str  # "prompts" or "domains"
    units: int
    resamples: int
    seed: int
    chosen: list[int]
    against: list[int]
    against_name: str
    layer_share: list[float]  # [N]: share of resamples whose set holds the layer
    sets: list[dict[str, Any]]  # {"layers", "share"}, most frequent first
    searched: bool
    gap: list[float]  # entropy of `chosen` less that of `against` in each resample: 2.5 %, median, 97.5 %

    @property
    def share(self) -> float:
        """Of the resamples that choose the chosen set again."""
        return next((entry["share"] for entry in self.sets if entry["layers"] == self.chosen), 0.0)

    @property
    def supported(self) -> bool:
        return self.searched and self.share >= SUPPORT and (self.chosen == self.against or self.gap[0] > 0)

    def sentence(self) -> str:
        """Whether the choice is supported, in one sentence."""
        names = ",".join(map(str, self.chosen))
        text = f"Resampling {self.units} {self.over} {self.resamples} times "
        if not self.searched:
            ends = ", ".join(f"{value:+.3f}" for value in (self.gap[0], self.gap[2]))
            return f"{text}put the entropy of {{{names}}} {self.gap[1]:+.3f} nats [{ends}] from {self.against_name}'s."
        text += f"chose {{{names}}} in {self.share:.0%}"
        if self.chosen != self.against:
            low, middle, high = self.gap
            text += f"; its entropy less {self.against_name}'s is {middle:+.3f} nats [{low:+.3f}, {high:+.3f}]"
        if self.supported:
            return text + ": the choice is supported."
        reasons = []
        if self.share < SUPPORT:
            runner = next((entry for entry in self.sets if entry["layers"] != self.chosen), None)
            other = f", {{{','.join(map(str, runner['layers']))}}} came in {runner['share']:.0%}" if runner else ""
            reasons.append(f"most resamples choose another set{other}")
        if self.chosen != self.against and self.gap[0] <= 0:
            reasons.append(f"it is not clearly above {self.against_name}")
        return f"{text}: the choice is not supported ({'; '.join(reasons)})."

    def content(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share, "supported": self.supported, "sentence": self.sentence()}


def bootstrap(
    found: Calibrated,
    select: Callable[[Tensor], Layers],
    chosen: Layers,
    against: tuple[str, Layers],
    *,
    over: str,
    resamples: int,
    seed: int = 0,
    scale: str = "none",
    centre: bool = False,
    alpha: float = 1.0,
    copies: bool = False,
    searched: bool = True,
) -> Stability | None:
    """Resamples the units behind the rows; None where there are fewer than two, or rows belong to no conversation.

    Args:
        select: Grams [N, R, R] → the best set.
        against: name and layers that the chosen set is compared with.
        over: "prompts" or "domains".
        searched: False for layers named beforehand, whose choice no data can support.
        copies: hand `select` the Grams of rows really repeated (for CKA), not the weighted ones.
    """
    units = _units(found, over)
    if units is None:
        return None
    count = int(units.max()) + 1
    draw = torch.Generator().manual_seed(seed)
    draws = [torch.randint(count, (count,), generator=draw) for _ in range(resamples)]

    def resample(drawn: Tensor) -> tuple[Layers, float] | None:
        grams = _resampled(found.grams, units, drawn, scale, centre, copies)
        if grams is None:
            return None
        own, other = (entropies(grams, torch.tensor([layers]), alpha).item() for layers in (chosen, against[1]))
        try:
            return select(grams), own - other
        except UserError:  # a resample with too few rows for this selector
            return None

    chosen_sets: Counter[Layers] = Counter()
    gaps = []
    bar = tqdm(
        in_threads(resample, draws), total=resamples, desc=f"bootstrap over {over}", unit="resample", disable=None
    )
    for result in bar:
        if result is not None:
            chosen_sets[result[0]] += 1
            gaps.append(result[1])
    if not gaps:
        raise UserError("analysis.resamples", resamples, "no resample had two rows: calibrate on more conversations")
    total = len(gaps)
    ranked = sorted(chosen_sets.items(), key=lambda entry: (-entry[1], entry[0]))
    share = torch.zeros(len(found.grams), dtype=torch.float64)
    for layers, times in ranked:
        share[list(layers)] += times / total
    points = torch.tensor([INTERVAL[0], 0.5, INTERVAL[1]], dtype=torch.float64)
    return Stability(
        over=over,
        units=count,
        resamples=total,
        seed=seed,
        chosen=list(chosen),
        against=list(against[1]),
        against_name=against[0],
        searched=searched,
        layer_share=share.tolist(),
        sets=[{"layers": list(layers), "share": times / total} for layers, times in ranked],
        gap=torch.tensor(gaps, dtype=torch.float64).quantile(points).tolist(),
    )


def _units(found: Calibrated, over: str) -> Tensor | None:
    """int64 [R]: the unit of each row, 0 … U−1; prompts without a row are no unit."""
    if (found.labels < 0).any():
        return None
    keys: Sequence[Any] = found.labels.tolist()
    if over == "domains":
        keys = [found.categories[prompt] for prompt in keys]
    names = {key: place for place, key in enumerate(sorted(set(keys)))}
    return torch.tensor([names[key] for key in keys]) if len(names) > 1 else None


def _resampled(raw: Tensor, units: Tensor, drawn: Tensor, scale: str, centre: bool, copies: bool) -> Tensor | None:
    """Grams of the rows of the drawn units; None when fewer than two distinct rows are among them."""
    times = torch.bincount(drawn, minlength=int(units.max()) + 1)[units]  # [R]
    rows = times.nonzero()[:, 0]
    if len(rows) < 2:
        return None
    if copies:
        rows = rows.repeat_interleave(times[rows])
        return prepare_grams(raw[:, rows][:, :, rows], scale, centre)
    weight = times[rows].double()
    grams = raw[:, rows][:, :, rows]
    if centre:  # the mean row of the copies is the weighted one
        share = weight / weight.sum()
        mean = grams @ share
        grams = grams - mean[:, :, None] - mean[:, None, :] + (mean @ share)[:, None, None]
    root = weight.sqrt()
    return prepare_grams(grams * root[:, None] * root, scale)
