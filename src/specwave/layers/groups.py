"""Sets of layers and their entropies: what every search is made of.

Shapes: N layers, R rows, C candidate sets of m layers. The identity that makes it cheap: the Gram of concatenated
layers is the sum of their Grams, so a set costs one R×R `eigvalsh`, whatever the hidden size.

Order everywhere: larger entropy first; what is equal to 12 decimals, the rounding of `eigvalsh`, counts as a tie, and
ties go to the lexicographically smallest set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from specwave.layers.entropy import gram_entropy

Layers = tuple[int, ...]
T = TypeVar("T")
U = TypeVar("U")
_CHUNK = 1 << 22  # float64 numbers in one batch of summed Grams: 32 MiB


@dataclass(frozen=True)
class Group:
    """A set of layers, ascending, and the entropy of their concatenation in nats."""

    layers: Layers
    entropy: float
    score: float | None = None  # what its selector ranks by, where that is not the entropy
    origin: tuple[str, ...] = ()  # who proposed it, where several did
    # What else foretells its worth, where that was asked for.
    predictors: Mapping[str, float | None] = field(default_factory=dict, hash=False)

    def described(self) -> dict[str, Any]:
        """Plain data, without what is not there."""
        known = {"score": self.score, "origin": list(self.origin), "predictors": dict(self.predictors)}
        return {"layers": list(self.layers), "entropy": self.entropy} | {
            key: value for key, value in known.items() if value not in (None, [], {})
        }


def score(grams: Tensor, sets: Sequence[Layers] | Tensor, alpha: float = 1.0) -> list[Group]:
    """The entropy of each set (all of one size), in the order given. Grams [N, R, R]."""
    values = entropies(grams.double(), torch.as_tensor(sets, dtype=torch.int64), alpha).tolist() if len(sets) else []
    return [Group(tuple(int(layer) for layer in one), value) for one, value in zip(sets, values, strict=True)]


def entropies(grams: Tensor, sets_Cm: Tensor, alpha: float = 1.0) -> Tensor:
    """Entropy [C] of the sets, in the precision of the Grams."""
    chunk = max(1, _CHUNK // grams.shape[-1] ** 2)
    values = []
    for part in sets_Cm.split(chunk):
        index = part.long()
        total = grams[index[:, 0]]
        for place in range(1, index.shape[1]):  # never C·m Grams at once
            total = total + grams[index[:, place]]
        values.append(gram_entropy(total, alpha))
    return torch.cat(values)


def best(groups: Iterable[Group], count: int | None) -> list[Group]:
    """The `count` best, best first (all for None)."""
    return sorted(groups, key=lambda group: (-round(group.entropy, 12), group.layers))[:count]


def checked(grams: Tensor, m: int) -> Tensor:
    """Grams in float64; refuses an m outside 1 … N."""
    if not 1 <= m <= len(grams):
        raise ValueError(f"m must be in 1 … {len(grams)}, the number of layers, got {m}")
    return grams.double()


def all_sets(num_layers: int, m: int) -> Tensor:
    """Every set of m layers: int16 [C(N, m), m], lexicographic; memory C·m, whatever m is."""
    count = math.comb(num_layers, m)
    flat = itertools.chain.from_iterable(itertools.combinations(range(num_layers), m))
    return torch.from_numpy(np.fromiter(flat, np.int16, count * m)).view(count, m)


def in_threads(work: Callable[[T], U], items: Sequence[T]) -> Iterator[U]:
    """`work` of each item, in order. LAPACK takes one small matrix at a time: a thread for each, none for its parts."""
    threads = torch.get_num_threads()
    if threads == 1 or len(items) == 1:
        yield from map(work, items)
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(work, items)
    finally:
        torch.set_num_threads(threads)
