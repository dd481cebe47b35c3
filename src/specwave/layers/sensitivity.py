"""What the options of the method do to its answer: each varied alone, all rows from one pass.

Shapes: N layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import UserError
from specwave.layers.analysis import Standing, rule_standings
from specwave.layers.calibrate import Calibrated
from specwave.layers.groups import Group
from specwave.layers.ranking import Ranking
from specwave.layers.rows import Rows
from specwave.layers.settings import Calibration

# Row options first: each value costs rows of the pass; then options on Grams; then those of the selector.
ROW_OPTIONS: dict[str, tuple[Any, ...]] = {
    "rho": (0.1, 0.3, 1.0),
    "keep": ("entropy", "random"),
    "filter_scope": ("prompt", "set"),
    "skip_first": (1, 0),
    "block_size": (8, 16, 32, 64),
    "blocks": ("tokens", "rows"),
    "ragged_tail": ("drop", "keep"),
    "aggregate": ("concatenate", "average"),
    "max_rows": (512, 64),
}
GRAM_OPTIONS: dict[str, tuple[Any, ...]] = {"scale": ("none", "frobenius"), "centre": (False, True)}
SELECTOR_OPTIONS: dict[str, tuple[Any, ...]] = {
    "alpha": (1.0, 0.5, 2.0),
    "k_beam": (10, 1, 5),
    "k_expand": (10, 1),
    "k_pool": (10, 3),
    "right_neighbour": (False, True),
    "unbiased": (False, True),
}


@dataclass
class Variant:
    """The base settings with one option changed (or none: option "base")."""

    option: str
    value: Any
    calibration: Calibration
    selector: Any


@dataclass
class Effect:
    """A row of the table: what a variant chooses."""

    option: str
    value: Any
    rows: int
    group: Group | None  # None when it could not be computed; `note` says why
    rules: list[Standing]
    sets: int = 0  # how many sets the ranks count
    note: str = ""


def variants(calibration: Calibration, selector: Any) -> Iterator[Variant]:
    """The base, then every other value of every option the base has, one at a time."""
    yield Variant("base", "", calibration, selector)
    for option, values in {**ROW_OPTIONS, **GRAM_OPTIONS}.items():
        for value in values:
            if value != getattr(calibration, option):
                try:
                    yield Variant(option, value, replace(calibration, **{option: value}), selector)
                except UserError:
                    continue  # two options that exclude each other
    yield Variant("scale, centre", "frobenius, true", replace(calibration, scale="frobenius", centre=True), selector)
    for option, values in SELECTOR_OPTIONS.items():
        for value in values:
            if hasattr(selector, option) and value != getattr(selector, option):
                yield Variant(option, value, calibration, replace(selector, **{option: value}))


def sensitivity(
    calibration: Calibration,
    selector: Any,
    passes: Callable[[list[Calibration]], dict[Rows, Calibrated | UserError]],
    ranked: bool = True,
) -> list[Effect]:
    """The table: every variant with its set, entropy and the ranks of the fixed rules among all sets of its size.

    Args:
        passes: calibrates several settings at once; a setting that leaves too few rows gives its error.
        ranked: False where ranking all sets would take too long: the rules are then listed without a rank.
    """
    listed = list(variants(calibration, selector))
    found = passes([variant.calibration for variant in listed])
    effects: list[Effect] = []
    base: dict[tuple[Any, ...], Ranking] = {}  # by what it is of: variants of the search alone share the base's Grams
    for variant in tqdm(listed, desc="sensitivity", unit="variant", disable=None):
        own = found[variant.calibration.rows()]
        if isinstance(own, UserError):
            effects.append(Effect(variant.option, variant.value, 0, None, [], note=own.remedy.split(":")[0]))
            continue
        grams = own.prepared(variant.calibration.scale, variant.calibration.centre)
        try:
            effects.append(_effect(variant, grams, base, ranked))
        except UserError as error:  # too few rows for this option, say
            effects.append(Effect(variant.option, variant.value, own.rows, None, [], note=error.remedy.split(":")[0]))
    return effects


def _effect(variant: Variant, grams: Tensor, base: dict[tuple[Any, ...], Ranking], ranked: bool) -> Effect:
    selector, calibration = variant.selector, variant.calibration
    m = selector.m_of(len(grams))
    key = (calibration.rows(), calibration.scale, calibration.centre, m, selector.alpha)
    outcome = selector.select(grams)
    ranking = base.get(key) or outcome.ranking
    if ranking is None and ranked:
        ranking = Ranking(grams, m, selector.alpha)
    if variant.option == "base" and ranking is not None:
        base[key] = ranking
    rules = rule_standings(grams, ranking, selector.alpha)
    sets = len(ranking) if ranking is not None else 0
    return Effect(variant.option, variant.value, grams.shape[-1], outcome.groups[0], rules, sets)


def table(effects: list[Effect]) -> list[dict[str, Any]]:
    """Plain rows for csv, Markdown and JSON: option, value, rows, layers, entropy, then a rank for each ranked rule."""
    names = [standing.name for standing in effects[0].rules if standing.rank is not None]
    lines = []
    for effect in effects:
        ranks = {standing.name: standing.rank for standing in effect.rules}
        lines.append(
            {
                "option": effect.option,
                "value": str(effect.value).lower() if isinstance(effect.value, bool) else effect.value,
                "rows": effect.rows,
                "layers": list(effect.group.layers) if effect.group else None,
                "entropy": effect.group.entropy if effect.group else None,
                **{f"rank_{name}": ranks.get(name) for name in names},
                "sets": effect.sets,
                "note": effect.note,
            }
        )
    return lines
