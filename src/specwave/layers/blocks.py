"""From token states to the few rows that stand for a layer: filter, block means, a bounded sample, Gram options.

Shapes: T positions of a conversation, B positions per block, R rows, N layers, D hidden size.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from specwave.layers.cka import centred

SCALES = ("none", "frobenius")


def keep_positions(entropy: Tensor, rho: float, skip_first: int = 1) -> Tensor:
    """The uncertain positions of a conversation: `max(1, ceil(ρ·(T − skip_first)))` of largest predictive entropy.

    T = 6, skip_first = 1, ρ = 0.4 keeps ceil(2.0) = 2 of positions 1…5, ties to the lower index:

        position   0    1    2    3    4    5
        entropy   9.0  0.5  2.0  0.1  2.0  2.0
        kept                 ×         ×            → [2, 4]

    Args:
        entropy: [T], nats, of the distribution *at* each position.
        rho: share kept, in (0, 1].
        skip_first: leading positions never kept (position 0 is an attention sink of huge norm).

    Returns:
        int64 indices into 0…T−1, ascending; empty when T ≤ skip_first.
    """
    if not 0 < rho <= 1:
        raise ValueError(f"rho must be in (0, 1], got {rho}")
    rest = torch.as_tensor(entropy)[skip_first:]
    if not len(rest):
        return torch.empty(0, dtype=torch.int64)
    count = max(1, math.ceil(round(rho * len(rest), 9)))  # 0.07·100 is 7.000000000000001 in floats
    order = torch.sort(rest, descending=True, stable=True).indices  # stable: equal ones stay in index order
    return order[:count].sort().values + skip_first


def block_means(hidden: Tensor, block_size: int) -> Tensor:
    """Means of consecutive, non-overlapping blocks: [..., T, D] → [..., T // B, D]; a ragged tail is dropped.

    Half-precision states are averaged in float32.
    """
    count = hidden.shape[-2] // block_size
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    return wide[..., : count * block_size, :].unflatten(-2, (count, block_size)).mean(-2)


def prepare_grams(grams: Tensor, scale: str = "none", centre: bool = False) -> Tensor:
    """The options on Z that a Gram can carry out: [..., R, R] → float64 [..., R, R].

    `centre` subtracts the mean row (K → HKH); `frobenius` then makes ‖Z‖_F = 1 (K → K / tr K).
    """
    grams = grams.double()
    if centre:
        grams = centred(grams)
    if scale == "frobenius":
        trace = grams.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        grams = grams / torch.where(trace > 0, trace, 1.0)
    elif scale != "none":
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale}")
    return grams


class Reservoir:
    """A uniform sample of at most `capacity` rows of a stream (Vitter 1985, algorithm R), the same for the same seed.

    Rows keep their order of arrival until the reservoir is full; then each new one takes a random place or none.
    """

    def __init__(self, capacity: int, seed: int = 0):
        self.capacity, self.seen = capacity, 0
        self._rows: list[Tensor] = []
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._rows)

    def offer(self, rows: Tensor) -> None:
        """Rows [R, ...], one after the other."""
        for row in rows:
            self.seen += 1
            if len(self._rows) < self.capacity:
                self._rows.append(row.clone())  # a view would keep its whole batch alive
            elif (place := self._random.randrange(self.seen)) < self.capacity:
                self._rows[place] = row.clone()

    def stack(self) -> Tensor:
        """The rows kept: [R, ...]."""
        return torch.stack(self._rows)
