"""What the tests of offline states share: samples, and a capture of them."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from specwave.data import Sample
from specwave.data.samples import Prepared, prepare
from specwave.eagle import offline as room
from specwave.eagle.offline import StatesConfig, offline

FIRST = [(2, 4, 5), (7,)]


def samples(count: int = 14) -> list[Sample]:
    draw, made = torch.Generator().manual_seed(0), []
    for index in range(count):
        ids = torch.randint(3, 259, (14 + index,), generator=draw).tolist()
        made.append(Sample(ids, [False] * 5 + [True] * (len(ids) - 5), f"s{index // 2}"))  # two of every conversation
    return made


def prepared(count: int = 14, row_length: int | None = None) -> Prepared:
    data = prepare(samples(count), 64, 2, lambda ids: str(len(ids)))
    data.row_length = row_length
    return data


def settings_for(folder, **changes) -> StatesConfig:
    return replace(StatesConfig("offline", None if folder is None else str(folder), "float32"), **changes)


def captured(target, folder, groups=FIRST, data=None, said=None, **changes):
    say = (lambda text: None) if said is None else said.append
    return offline(target, data or prepared(), groups, settings_for(folder, **changes), say)


def small_shards(monkeypatch, tokens: int = 40) -> None:
    """One or two samples in a shard: a MiB holds all of them."""
    make = room._Capture.new_index

    def small(self):
        index = make(self)
        return replace(index, shard_tokens=tokens, total=len(self.plan.shards(tokens)))

    monkeypatch.setattr(room._Capture, "new_index", small)


def hashes(folder) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
