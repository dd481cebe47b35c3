"""Forwards of fixed shape, recorded once and replayed: a GPU then gets one launch where it got hundreds.

A decoding step of a small model is over before Python has launched its kernels. A *program* is the forward of one shape
(T tokens a row, S slots looked at, the states wanted) over a cache that stays where it is; what changes from call to
call is copied into its inputs. S grows in strides, so that few shapes are met; slots beyond a row's own are masked. A
shape is recorded when it is met the second time: one met once, as by a draft cut at the token limit, is not worth it.

Knows nothing about sessions and how a forward is computed: `run` is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specwave.target.cache import KVCache

STRIDE = 256  # slots
KINDS = ("auto", "eager", "graphs", "compiled")
Run = Callable[..., Any]  # tensors → a tree of tensors


def strides(slots: int) -> int:
    """The next multiple of the stride."""
    return -(-slots // STRIDE) * STRIDE


def capture(run: Run, inputs: tuple[Tensor, ...], pool: Any) -> Callable[[], Any]:
    """A CUDA graph of `run(*inputs)`; replaying it reads those very tensors and fills the outputs again.

    Graphs and streams belong to the current device, which need not be the one that the tensors lie on.
    """
    with torch.cuda.device(inputs[0].device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(*inputs)  # libraries set themselves up, which a graph may not hold
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = run(*inputs)

    def replay() -> Any:
        with torch.cuda.device(inputs[0].device):
            graph.replay()
        return outputs

    return replay


class Programs:
    """The recorded forwards over one cache."""

    def __init__(self, kind: str):
        self.kind, self._spent = kind, [0.0]
        self._met: set[Hashable] = set()
        self._made: dict[Hashable, Run] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._made)

    @property
    def seconds(self) -> float:
        """What recording has taken so far, here and in siblings, those of the past included."""
        return self._spent[0]

    def sibling(self) -> Programs:
        """Further programs over the same cache, on the same account."""
        other = Programs(self.kind)
        other._spent = self._spent
        return other

    def __call__(self, key: Hashable, run: Run, inputs: tuple[Tensor, ...]) -> Any:
        """`run(*inputs)`: as it is the first time that `key` is met, recorded the second time, from then on replayed.

        `run` may depend on nothing but `key`, the cache and its inputs, whose shapes follow from `key`.
        """
        if key not in self._met:
            self._met.add(key)
            return run(*inputs)
        if key not in self._made:
            start = time.perf_counter()
            self._made[key] = self._record(run, inputs)
            self._spent[0] += time.perf_counter() - start
        return self._made[key](*inputs)

    def _record(self, run: Run, inputs: tuple[Tensor, ...]) -> Run:
        if self.kind == "compiled":
            run = torch.compile(run, dynamic=False, fullgraph=True)
        if self._pool is None and inputs[0].is_cuda:
            self._pool = torch.cuda.graph_pool_handle()
        held = tuple(each.clone() for each in inputs)
        replay = capture(run, held, self._pool)

        def again(*fresh: Tensor) -> Any:
            for mine, given in zip(held, fresh, strict=True):
                mine.copy_(given)
            # All graphs of a pool share memory: the next replay may overwrite these outputs.
            return torch.utils._pytree.tree_map(torch.clone, replay())

        return again

    def forget(self) -> None:
        """The cache has moved: what was recorded over it is void."""
        self._met.clear()
        self._made.clear()


@dataclass
class Place:
    """A cache and the programs recorded over it."""

    cache: KVCache
    programs: Programs


class Shelf:
    """Places that sessions have left, for later sessions of the same size: recording pays over many of them."""

    def __init__(self, keep: int = 2):
        self._keep, self._places = keep, list[Place]()

    @torch.inference_mode()
    def take(self, batch: int, capacity: int) -> Place | None:
        for place in self._places:
            if (place.cache.batch, place.cache.capacity) == (batch, capacity):
                self._places.remove(place)
                place.cache.lengths = [0] * batch
                for store in (*place.cache.keys, *place.cache.values):
                    store.zero_()  # masked slots weigh nothing, but nothing times NaN is NaN
                return place
        return None

    def put(self, place: Place) -> None:
        self._places = [*self._places, place][-self._keep :]
