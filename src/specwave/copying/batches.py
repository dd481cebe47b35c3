"""Training batches for probes: features of captured answers beside the labels of their tokens.

Letters: P sites, B tokens of a batch, D width. Answers are read one at a time, so memory holds a batch and an answer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from specwave.copying.answers import Labelled
from specwave.copying.capture import States
from specwave.copying.probe import Batches, Probes


def batches(states: States, data: Labelled, offset: int, size: int, seed: int | None = None) -> Batches:
    """The data as `probe.fit` takes it: `size` tokens a batch, fewer in the last one.

    Args:
        seed: answers come in an order of their own at every call; None: always in the data's order.
    """
    calls = itertools.count()

    def passes() -> Iterator[tuple[Tensor, Tensor]]:
        order = list(range(len(data)))
        if seed is not None:
            random.Random(f"{seed}/{next(calls)}").shuffle(order)
        found: list[Tensor] = []
        labels: list[Tensor] = []
        waiting = 0
        for place in order:
            found.append(states.features(data.answers[place], offset))
            labels.append(data.copied[place].to(states.device))
            waiting += len(labels[-1])
            if waiting >= size:
                states_PND, labels_N, whole = torch.cat(found, 1), torch.cat(labels), waiting // size * size
                yield from zip(states_PND[:, :whole].split(size, 1), labels_N[:whole].split(size), strict=True)
                found, labels, waiting = [states_PND[:, whole:]], [labels_N[whole:]], waiting - whole
        if waiting:
            yield torch.cat(found, 1), torch.cat(labels)

    return passes


def logits(probes: Probes, states: States, data: Labelled, offset: int) -> Tensor:
    """What the probes say of every token: float32 [P, N], on the CPU."""
    parts = [probes.logits(states.features(one, offset)).cpu() for one in data.answers]
    return torch.cat([torch.zeros(len(probes.weights), 0), *parts], 1)
