"""Which m layers together span the most directions: the beams of ELSI and ELSI-C, and the exact answer.

Shapes: N layers, R rows, C candidate sets. The identity that makes it cheap: the Gram of concatenated layers is the sum
of their Grams, so a set costs one R×R `eigvalsh`, whatever the hidden size.

Order everywhere: larger entropy first; what is equal to 12 decimals, the rounding of `eigvalsh`, counts as a tie, and
ties go to the lexicographically smallest set.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specwave.layers.cka import condition, inner_products, transitions
from specwave.layers.entropy import matrix_entropy

Layers = tuple[int, ...]
_CHUNK = 1 << 22  # float64 numbers in one batch of summed Grams: 32 MiB


@dataclass(frozen=True)
class Group:
    """A set of layers, ascending, and the entropy of their concatenation in nats."""

    layers: Layers
    entropy: float


def score(grams: Tensor, sets: Sequence[Layers], alpha: float = 1.0) -> list[Group]:
    """The entropy of each set (all of one size), in the order given. Grams [N, R, R]."""
    chunk = max(1, _CHUNK // grams.shape[-1] ** 2)
    values: list[float] = []
    for start in range(0, len(sets), chunk):
        index = torch.tensor(sets[start : start + chunk])  # [C, m]
        total = grams[index[:, 0]]
        for place in range(1, index.shape[1]):  # never C·m Grams at once
            total = total + grams[index[:, place]]
        values += matrix_entropy(total, alpha).tolist()
    return [Group(*pair) for pair in zip(sets, values, strict=True)]


def best(groups: Iterable[Group], count: int | None) -> list[Group]:
    """The `count` best, best first (all for None)."""
    return sorted(groups, key=lambda group: (-round(group.entropy, 12), group.layers))[:count]


def _checked(grams: Tensor, m: int) -> Tensor:
    if not 1 <= m <= len(grams):
        raise ValueError(f"m must be in 1 … {len(grams)}, the number of layers, got {m}")
    return grams.double()


def _with(layers: Layers, layer: int) -> Layers:
    return tuple(sorted((*layers, layer)))


def _beam(grams: Tensor, m: int, k_beam: int, alpha: float, grow: Callable[[list[Group]], list[Group]]) -> list[Group]:
    """(S1) the best single layers; `grow` makes scored children, each once (S2, S3); the best of them stay (S4)."""
    if k_beam < 1:
        raise ValueError(f"k_beam must be at least 1, got {k_beam}")
    beam = best(score(grams, [(layer,) for layer in range(len(grams))], alpha), k_beam)
    for _ in range(m - 1):
        beam = best(grow(beam), k_beam)
    return beam


def elsi(grams: Tensor, m: int, k_beam: int = 10, k_expand: int = 10, alpha: float = 1.0) -> list[Group]:
    """ELSI: a beam over sets, each widened by the `k_expand` layers that raise its entropy most.

    Args:
        grams: [N, R, R], float64 advised.
        m: size of the sets, 1 … N.
        k_beam, k_expand: width of the beam, children per set; exact when the beam holds every set and k_expand ≥ N.
        alpha: order of the entropy.

    Returns:
        at most `k_beam` groups, best first.

    Source: "Surfing the Activation Wave", algorithm 1.
    """
    grams = _checked(grams, m)

    def grow(beam: list[Group]) -> list[Group]:
        families = [
            [_with(parent.layers, layer) for layer in range(len(grams)) if layer not in parent.layers]
            for parent in beam
        ]
        unique = sorted({child for family in families for child in family})  # shared children are scored once
        scored = {group.layers: group for group in score(grams, unique, alpha)}
        kept = {child for family in families for child in best((scored[child] for child in family), k_expand)}
        return list(kept)

    return _beam(grams, m, k_beam, alpha, grow)


def elsi_c(grams: Tensor, m: int, k_beam: int = 10, k_pool: int = 10, alpha: float = 1.0) -> list[Group]:
    """ELSI-C: as `elsi`, but a set is widened by the `k_pool` layers at its largest conditional transitions.

    δ_L(r) = ‖M_L[r] − M_L[r−1]‖² of conditional CKA; δ_L(0) has no left neighbour and is 0.
    Source: "Surfing the Activation Wave", algorithm 2.
    """
    grams = _checked(grams, m)
    table = inner_products(grams)

    def grow(beam: list[Group]) -> list[Group]:
        children = set()
        for parent in beam:
            delta = [0.0, *transitions(condition(table, parent.layers)).tolist()]
            free = [layer for layer in range(len(grams)) if layer not in parent.layers]
            pool = sorted(free, key=lambda layer: (-round(delta[layer], 12), layer))[:k_pool]
            children |= {_with(parent.layers, layer) for layer in pool}
        return score(grams, sorted(children), alpha)

    return _beam(grams, m, k_beam, alpha, grow)


def exhaustive(grams: Tensor, m: int, top: int | None = 10, alpha: float = 1.0) -> list[Group]:
    """Every one of the C(N, m) sets: the `top` best, best first (all for None). Certifies the beams."""
    grams = _checked(grams, m)
    sets = itertools.combinations(range(len(grams)), m)
    leaders: list[Group] = []
    while batch := list(itertools.islice(sets, 4096)):
        leaders = best(leaders + score(grams, batch, alpha), top)
    return leaders
