"""The additive knapsack, exactly, and the small integers that stand for sub-layer times. Pure, standard library only.

KnapSpec (arXiv 2602.20217) weighs a sub-layer by its time. Its own search is no additive knapsack, since what a
sub-layer is worth depends on those before it (`search.py`); this is the problem it would be if worths added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LARGEST = 5  # the dearer kind weighs at most this many times the cheaper one


def solve(values: Sequence[float], weights: Sequence[float], budget: float) -> list[bool]:
    """The items of largest total value whose weights fit the budget, as a mask; all False when nothing fits.

    Dynamic programming over items, keeping of each number of items looked at only the selections that no other beats in
    both weight and value: exact for whole numbers, of which there are at most budget + 1 weights, and for any others.

    Args:
        values: of the items; one that is not positive is never taken.
        weights: ≥ 0.

    Returns:
        of equal values the lighter selection, of equally heavy ones that which takes the earlier items.

    Raises:
        ValueError: lists of different lengths, negative weights, numbers that are none.
    """
    if len(values) != len(weights):
        raise ValueError(f"{len(values)} values with {len(weights)} weights")
    if any(math.isnan(number) for number in (*values, *weights, budget)):
        raise ValueError("values, weights and budget must be numbers, one is NaN")
    if any(weight < 0 for weight in weights):
        raise ValueError(f"weights must be at least 0, got {min(weights)}")
    front: list[tuple[float, float, tuple[int, ...]]] = [(0, 0, ())]  # weight ascending, value ascending
    for item, (value, weight) in enumerate(zip(values, weights, strict=True)):
        taken = [(w + weight, v + value, (*items, item)) for w, v, items in front if w + weight <= budget]
        front = _undominated(front + taken)
    mask = [False] * len(values)
    if budget >= 0:
        for item in front[-1][2]:
            mask[item] = True
    return mask


def _undominated(
    selections: list[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Those that are worth more than every other one of the same weight or less."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for selection in sorted(selections, key=lambda one: (one[0], -one[1], one[2])):
        if not kept or selection[1] > kept[-1][1]:
            kept.append(selection)
    return kept


def integer_weights(t_attention: float, t_mlp: float, resolution: int = 1) -> tuple[int, int]:
    """Whole weights (attention, MLP) in the ratio of their times.

    The cheaper kind weighs `resolution` (1 in the paper), the dearer one round(resolution · ratio), at most 5 times as
    much. Python rounds halves to even.

    Raises:
        ValueError: times that are not positive.
    """
    if not (0 < t_attention < math.inf and 0 < t_mlp < math.inf):
        raise ValueError(f"times must be positive, got {t_attention} and {t_mlp}")
    ratio = max(t_attention, t_mlp) / min(t_attention, t_mlp)
    dear = min(round(resolution * ratio), LARGEST * resolution)
    return (dear, resolution) if t_attention >= t_mlp else (resolution, dear)
