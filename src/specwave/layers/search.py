"""Which m layers together span the most directions: the beams of ELSI and ELSI-C, and the exact answer.

Shapes: N layers, R rows. The order of groups and its ties are those of `groups.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specwave.layers.cka import condition, inner_products, transitions
from specwave.layers.groups import Group, Layers, best, checked, score
from specwave.layers.ranking import Ranking

Beams = list[list[Group]]  # of size 1, 2, …, m: the beam after every step of a search, best first


def _with(layers: Layers, layer: int) -> Layers:
    return tuple(sorted((*layers, layer)))


def _beam(
    grams: Tensor,
    m: int,
    k_beam: int,
    alpha: float,
    grow: Callable[[list[Group]], list[Group]],
    steps: Beams | None,
) -> list[Group]:
    """(S1) the best single layers; `grow` makes scored children, each once (S2, S3); the best of them stay (S4)."""
    if k_beam < 1:
        raise ValueError(f"k_beam must be at least 1, got {k_beam}")
    beams = [best(score(grams, [(layer,) for layer in range(len(grams))], alpha), k_beam)]
    for _ in range(m - 1):
        beams.append(best(grow(beams[-1]), k_beam))
    if steps is not None:
        steps.extend(beams)
    return beams[-1]


def elsi(
    grams: Tensor, m: int, k_beam: int = 10, k_expand: int = 10, alpha: float = 1.0, steps: Beams | None = None
) -> list[Group]:
    """ELSI: a beam over sets, each widened by the `k_expand` layers that raise its entropy most.

    Args:
        grams: [N, R, R], float64 advised.
        m: size of the sets, 1 … N.
        k_beam, k_expand: width of the beam, children per set; exact when the beam holds every set and k_expand ≥ N.
        alpha: order of the entropy.
        steps: takes the beam after every step.

    Returns:
        at most `k_beam` groups, best first.

    Source: "Surfing the Activation Wave", algorithm 1.
    """
    grams = checked(grams, m)

    def grow(beam: list[Group]) -> list[Group]:
        families = [
            [_with(parent.layers, layer) for layer in range(len(grams)) if layer not in parent.layers]
            for parent in beam
        ]
        unique = sorted({child for family in families for child in family})  # shared children are scored once
        scored = {group.layers: group for group in score(grams, unique, alpha)}
        kept = {child for family in families for child in best((scored[child] for child in family), k_expand)}
        return list(kept)

    return _beam(grams, m, k_beam, alpha, grow, steps)


def elsi_c(
    grams: Tensor,
    m: int,
    k_beam: int = 10,
    k_pool: int = 10,
    alpha: float = 1.0,
    right_neighbour: bool = False,
    unbiased: bool = False,
    steps: Beams | None = None,
) -> list[Group]:
    """ELSI-C: as `elsi`, but a set is widened by the `k_pool` layers at its largest conditional transitions.

    δ_L(r) = ‖M_L[r] − M_L[r−1]‖² of conditional CKA. Layer 0 has no left neighbour: its δ is 0, which almost bars it,
    or with `right_neighbour` that of row 1. `unbiased` takes the unbiased CKA.

    Source: "Surfing the Activation Wave", algorithm 2.
    """
    grams = checked(grams, m)
    table = inner_products(grams, unbiased)

    def grow(beam: list[Group]) -> list[Group]:
        children = set()
        for parent in beam:
            steep = transitions(condition(table, parent.layers)).tolist()
            delta = [steep[0] if right_neighbour and steep else 0.0, *steep]
            free = [layer for layer in range(len(grams)) if layer not in parent.layers]
            pool = sorted(free, key=lambda layer: (-round(delta[layer], 12), layer))[:k_pool]
            children |= {_with(parent.layers, layer) for layer in pool}
        return score(grams, sorted(children), alpha)

    return _beam(grams, m, k_beam, alpha, grow, steps)


def exhaustive(grams: Tensor, m: int, top: int | None = 10, alpha: float = 1.0) -> list[Group]:
    """Every one of the C(N, m) sets: the `top` best, best first (all for None). Certifies the beams."""
    return Ranking(grams, m, alpha).top(top)
