"""Batches as a function of their number: a run that resumes at step n reads batch n, whatever it read before.

Knows nothing about targets and drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from specwave.data.conversations import Sample
from specwave.eagle.samples import Prepared

_WINDOW = 8  # batches sorted by length together: little padding, and still a different batch in every epoch


def collate(samples: Sequence[Sample]) -> dict[str, Any]:
    """ids int64 and answer bool [B, T], padded on the right with token 0 and ℓ = 0; names; tokens without padding."""
    length = max(len(sample.ids) for sample in samples)
    ids, answer = torch.zeros(len(samples), length, dtype=torch.int64), torch.zeros(len(samples), length).bool()
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        answer[row, : len(sample.answer)] = torch.tensor(sample.answer)
    return {
        "ids": ids,
        "answer": answer,
        "names": [sample.id for sample in samples],
        "tokens": sum(len(sample.ids) for sample in samples),
    }


def epoch_plan(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Row numbers of every batch of an epoch: a seeded permutation, bucketed lightly, without a short last batch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    order = order[: len(order) // batch_size * batch_size]
    batches = []
    for start in range(0, len(order), batch_size * _WINDOW):
        window = sorted(order[start : start + batch_size * _WINDOW], key=lambda row: (lengths[row], row))
        batches += [window[place : place + batch_size] for place in range(0, len(window), batch_size)]
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


class Stream(IterableDataset):
    """An endless sequence of batches that begins at batch `first`."""

    def __init__(self, samples: Sequence[Sample], batch_size: int, seed: int, first: int):
        self.samples, self.seed, self.first = samples, seed, first
        self.batch_size = min(batch_size, len(samples))
        self.lengths = [len(sample.ids) for sample in samples]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, place = divmod(self.first, len(self.samples) // self.batch_size)
        while True:
            for rows in epoch_plan(self.lengths, self.batch_size, self.seed, epoch)[place:]:
                yield collate([self.samples[row] for row in rows])
            epoch, place = epoch + 1, 0


class DrafterData(pl.LightningDataModule):
    """Training batches from the trainer's step on; validation batches by length, the same every time."""

    def __init__(self, data: Prepared, batch_size: int, seed: int):
        super().__init__()
        self.data, self.batch_size, self.seed = data, batch_size, seed

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        # One batch per step, so the step a checkpoint was taken at is the number of the next batch.
        return DataLoader(
            Stream(self.data.train, self.batch_size, self.seed, self.trainer.global_step), batch_size=None
        )

    def val_dataloader(self) -> DataLoader:
        ordered = sorted(self.data.validation, key=lambda sample: (len(sample.ids), sample.id))
        return DataLoader(ordered, batch_size=self.batch_size, collate_fn=collate)  # type: ignore[arg-type]
