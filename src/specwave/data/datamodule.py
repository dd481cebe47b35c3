"""Batches as a function of their number: a run that resumes at step n reads batch n, whatever it read before.

B rows, T tokens of a row. A row is a conversation or, when packing, several: then every token has the number of its
conversation in the row and its position in that. Several processes share out the rows of each batch, so that n
processes of b rows read what one of n·b reads. Knows nothing about targets and drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, IterableDataset

from specwave.artifacts import UserError
from specwave.data import world
from specwave.data.conversations import Sample
from specwave.data.samples import Prepared

_WINDOW = 8  # batches sorted by length together: little padding, and still a different batch in every epoch
_OPEN = 64  # rows that packing keeps open at once


def collate(samples: Sequence[Sample]) -> dict[str, Any]:
    """ids int64 and answer bool [B, T], padded on the right with token 0 and ℓ = 0; names and lengths of the samples;
    tokens without padding."""
    return _padded([[sample] for sample in samples])


def collate_packed(rows: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """As `collate` for rows of several conversations one after the other, with two more keys, int64 [B, T].

    documents: the number of a token's conversation in its row, −1 for padding.
    positions: of a token in its conversation, 0 for padding.

    The first token of a conversation is nobody's to predict: it never counts as answer text.
    """
    batch = _padded(rows)
    documents, positions = torch.full_like(batch["ids"], -1), torch.zeros_like(batch["ids"])
    for row, samples in enumerate(rows):
        start = 0
        for number, sample in enumerate(samples):
            end = start + len(sample.ids)
            documents[row, start:end], positions[row, start:end] = number, torch.arange(end - start)
            batch["answer"][row, start] = False
            start = end
    return batch | {"documents": documents, "positions": positions}


def _padded(rows: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    joined = [[token for sample in row for token in sample.ids] for row in rows]
    marks = [[mark for sample in row for mark in sample.answer] for row in rows]
    length = max(map(len, joined))
    ids, answer = torch.zeros(len(rows), length, dtype=torch.int64), torch.zeros(len(rows), length).bool()
    for row, (tokens, mask) in enumerate(zip(joined, marks, strict=True)):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        answer[row, : len(mask)] = torch.tensor(mask)
    return {
        "ids": ids,
        "answer": answer,
        "names": [sample.id for row in rows for sample in row],
        "lengths": [len(sample.ids) for row in rows for sample in row],
        "tokens": sum(map(len, joined)),
    }


def _shuffled(count: int, seed: int, epoch: int) -> tuple[list[int], torch.Generator]:
    """A permutation of 0 … count−1 for an epoch, and the generator for further draws."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist(), generator


def epoch_plan(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Row numbers of every batch of an epoch: a seeded permutation, bucketed lightly, without a short last batch."""
    order, generator = _shuffled(len(lengths), seed, epoch)
    order = order[: len(order) // batch_size * batch_size]
    batches = []
    for start in range(0, len(order), batch_size * _WINDOW):
        window = sorted(order[start : start + batch_size * _WINDOW], key=lambda row: (lengths[row], row))
        batches += [window[place : place + batch_size] for place in range(0, len(window), batch_size)]
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def first_fit(lengths: Sequence[int], order: Sequence[int], row_length: int) -> list[list[int]]:
    """Sample numbers of every row: each goes, in `order`, into the first open row with room, else into a new one.

    A sample is never split; one longer than `row_length` is the caller's mistake. At most 64 rows are open: one more
    closes the first.
    """
    rows: list[list[int]] = []
    opened: list[tuple[int, list[int]]] = []  # room left, row
    for sample in order:
        size = lengths[sample]
        place = next((place for place, (room, _) in enumerate(opened) if room >= size), None)
        if place is None:
            if len(opened) == _OPEN:
                opened.pop(0)
            place = len(opened)
            rows.append([])
            opened.append((row_length, rows[-1]))
        room, row = opened[place]
        row.append(sample)
        opened[place] = (room - size, row)
    return rows


def packed_plan(
    lengths: Sequence[int], batch_size: int, seed: int, epoch: int, row_length: int
) -> list[list[list[int]]]:
    """Sample numbers of every row of every batch of an epoch, batches in a seeded order, without a short last batch.

    Where all rows together are fewer than `batch_size`, they are the epoch's one batch.
    """
    order, generator = _shuffled(len(lengths), seed, epoch)
    rows = first_fit(lengths, order, row_length)
    rows = [rows[place] for place in torch.randperm(len(rows), generator=generator).tolist()]
    size = min(batch_size, len(rows))
    return [rows[start : start + size] for start in range(0, len(rows) // size * size, size)]


class Stream(IterableDataset):
    """An endless sequence of batches that begins at batch `first`; with `row_length`, of packed rows.

    `rank` of `processes`: of each batch of `batch_size` rows for every process, this one's share. Each batch also says
    of all of them together: `tokens`, without padding, and `cells`, B·T as they would be padded in one process.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_size: int,
        seed: int,
        first: int,
        row_length: int | None = None,
        rank: int = 0,
        processes: int = 1,
    ):
        self.samples, self.seed, self.first, self.row_length = samples, seed, first, row_length
        self.batch_size = min(batch_size * processes, len(samples))
        self.rank, self.processes = rank, processes
        known = getattr(samples, "lengths", None)
        self.lengths: Sequence[int] = known if known is not None else [len(sample.ids) for sample in samples]

    def plan(self, epoch: int) -> list[Any]:
        if self.row_length is None:
            return epoch_plan(self.lengths, self.batch_size, self.seed, epoch)
        return packed_plan(self.lengths, self.batch_size, self.seed, epoch, self.row_length)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch, place = 0, self.first
        if self.row_length is None:  # as many batches in every epoch
            epoch, place = divmod(self.first, len(self.samples) // self.batch_size)
        while True:
            batches = self.plan(epoch)
            for batch in batches[place:]:
                yield self._share(batch)
            epoch, place = epoch + 1, max(0, place - len(batches))

    def _share(self, batch: list[Any]) -> dict[str, Any]:
        """This process's rows; neighbours in length go to different ones."""
        if len(batch) < self.processes:
            remedy = f"a step has {len(batch)} rows: fewer than processes; use fewer, or give more samples"
            raise UserError("trainer.devices", self.processes, remedy)
        own = batch[self.rank :: self.processes]
        if self.row_length is None:
            lengths = [self.lengths[number] for number in batch]
            made = collate([self.samples[number] for number in own])
        else:
            lengths = [sum(self.lengths[number] for number in row) for row in batch]
            made = collate_packed([[self.samples[number] for number in row] for row in own])
        return made | {"tokens": sum(lengths), "cells": len(lengths) * max(lengths)}


def share(batches: Sequence[Sequence[Sample]], rank: int, processes: int) -> list[dict[str, Any]]:
    """Every n-th batch, as many for each process; where that takes one twice the second is marked `again`."""
    found = []
    for first in range(0, len(batches), processes):
        again = first + rank >= len(batches)
        found.append(collate(batches[-1 if again else first + rank]) | {"again": again})
    return found


class DrafterData(pl.LightningDataModule):
    """Training batches from the trainer's step on; validation batches by length, the same every time."""

    def __init__(self, data: Prepared, batch_size: int, seed: int):
        super().__init__()
        self.data, self.batch_size, self.seed = data, batch_size, seed

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        # One batch per step, so the step a checkpoint was taken at is the number of the next batch.
        first, row_length = self.trainer.global_step, self.data.row_length
        place = world.rank(), world.size()
        return DataLoader(
            Stream(self.data.train, self.batch_size, self.seed, first, row_length, *place), batch_size=None
        )

    def val_dataloader(self) -> DataLoader:
        ordered = sorted(self.data.validation, key=lambda sample: (len(sample.ids), sample.id))
        batches = [ordered[start : start + self.batch_size] for start in range(0, len(ordered), self.batch_size)]
        return DataLoader(share(batches, world.rank(), world.size()), batch_size=None)  # type: ignore[arg-type]
