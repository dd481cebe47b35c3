"""From token states to the few rows that stand for a layer: filter, block means, a bounded sample, Gram options.

Shapes: T positions of a conversation, B positions per block, R rows, N layers, D hidden size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

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


def block_sizes(count: int, block_size: int, blocks: str = "tokens", ragged_tail: str = "drop") -> list[int]:
    """How many of `count` consecutive kept positions each block of a prompt averages.

        count = 11, B = 4     ragged tail dropped   kept
        tokens: B per block   [4, 4]                [4, 4, 3]
        rows: B per prompt    [3, 3, 3, 2]          [3, 3, 3, 2]
        count = 3             []                    tokens [3], rows [1, 1, 1]

    The source's text says both what `blocks` calls "tokens" (blocks of B tokens) and "rows" (B blocks per prompt).
    """
    keep = ragged_tail == "keep"
    if blocks == "tokens":
        whole, rest = divmod(count, block_size)
        return [block_size] * whole + [rest] * (keep and rest > 0)
    if count < block_size:
        return [1] * count if keep else []
    small, larger = divmod(count, block_size)
    return [small + 1] * larger + [small] * (block_size - larger)


def averaging(kept: Tensor, sizes: Sequence[int], length: int) -> Tensor:
    """The matrix [R, T] that takes states [T, D] to means over the kept positions of each block, in order."""
    matrix = torch.zeros(len(sizes), length)
    row = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64))
    used = kept[: len(row)]
    matrix[row, used] = 1 / torch.tensor(sizes, dtype=torch.float32)[row]
    return matrix


class Reservoir:
    """A uniform sample of at most `capacity` rows of a stream (Vitter 1985, algorithm R), the same for the same seed.

    Rows keep their order of arrival until the reservoir is full; then each new one takes a random place or none.
    """

    def __init__(self, capacity: int, seed: int = 0):
        self.capacity, self.seen = capacity, 0
        self.labels: list[int] = []
        self._rows: Tensor | None = None
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self.labels)

    def offer(self, rows: Tensor, label: int = 0) -> None:
        """Rows [R, ...] of one prompt, `label`, one after the other."""
        for row in rows:
            self.seen += 1
            if len(self.labels) < self.capacity:
                self._room(row)[len(self.labels)] = row
                self.labels.append(label)
            elif (place := self._random.randrange(self.seen)) < self.capacity:
                self._room(row)[place] = row
                self.labels[place] = label

    def _room(self, row: Tensor) -> Tensor:
        """The store, with room for one more row: doubled as rows come, so that few rows stay cheap."""
        if self._rows is None or len(self.labels) == len(self._rows) < self.capacity:
            size = min(self.capacity, max(512, 2 * len(self.labels)))
            larger = torch.empty(size, *row.shape, dtype=row.dtype)
            if self._rows is not None:
                larger[: len(self._rows)] = self._rows
            self._rows = larger
        return self._rows

    def stack(self) -> Tensor:
        """The rows kept: [R, ...]."""
        if self._rows is None:
            raise ValueError("no row was offered")
        return self._rows[: len(self.labels)]


class Averages:
    """Block b of all prompts averaged into row b: the other reading of how the source joins prompts.

    More rows than `capacity` are thinned out to a seeded sample, in order.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity, self.seed, self.seen = capacity, seed, 0
        self._sums: Tensor | None = None  # float64 [longest, ...]
        self._counts: list[int] = []

    def __len__(self) -> int:
        return min(len(self._counts), self.capacity)

    @property
    def labels(self) -> list[int]:
        """A row belongs to every prompt, so to none."""
        return [-1] * len(self)

    def offer(self, rows: Tensor, label: int = 0) -> None:
        """Rows [R, ...] of one prompt."""
        self.seen += len(rows)
        if self._sums is None or len(self._sums) < len(rows):
            longer = torch.zeros(rows.shape, dtype=torch.float64)
            if self._sums is not None:
                longer[: len(self._sums)] = self._sums
            self._sums, self._counts = longer, self._counts + [0] * (len(rows) - len(self._counts))
        self._sums[: len(rows)] += rows
        for place in range(len(rows)):
            self._counts[place] += 1

    def stack(self) -> Tensor:
        """float64 [R, ...]."""
        if self._sums is None:
            raise ValueError("no row was offered")
        counts = torch.tensor(self._counts, dtype=torch.float64)
        means = self._sums / counts.view(-1, *[1] * (self._sums.dim() - 1))
        return means[sorted(random.Random(self.seed).sample(range(len(means)), len(self)))]
