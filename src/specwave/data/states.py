"""Numbers per token, kept on disk: shards of whole samples, memory-mapped, and an index that vouches for each.

    index.json                whose they are, the columns, which samples, and of every finished shard bytes and sha256
    shard-00000.safetensors   column → [tokens, width]; `digests` [samples, 16] and `starts` [samples + 1] of its rows

A sample is known by the digest of its token ids, so it is found again in whatever row or order it is met. A shard is
written beside its place and renamed, then entered into the index: one that the index does not list does not exist.
Knows nothing about targets, drafters and what the columns mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specwave.artifacts import UserError, read_json, reading, write_json, write_tensors
from specwave.data.locks import wait_for

SCHEMA = 1
_HEADER = 4096  # bytes of a shard that are no numbers, at most


def digest(ids: Sequence[int]) -> bytes:
    """16 bytes that stand for a sample's token ids."""
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Column:
    """So many numbers of a torch dtype for every token."""

    width: int
    dtype: str

    @property
    def bytes(self) -> int:
        return self.width * getattr(torch, self.dtype).itemsize

    def empty(self, tokens: int) -> Tensor:
        return torch.empty(tokens, self.width, dtype=getattr(torch, self.dtype))


class Plan:
    """Which samples go into which shard: each once, the shortest first, in whatever order they are given."""

    def __init__(self, samples: Iterable[Sequence[int]]):
        """`samples`: token ids. They are read once and not kept."""
        found: dict[bytes, tuple[int, int]] = {}
        for place, ids in enumerate(samples):
            found.setdefault(digest(ids), (len(ids), place))
        order = sorted((length, key, place) for key, (length, place) in found.items())
        self.lengths = [length for length, _, _ in order]
        self.digests = [key for _, key, _ in order]
        self.places = [place for _, _, place in order]  # where a sample was first given
        self.tokens = sum(self.lengths)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(b"".join(self.digests)).hexdigest()

    def shards(self, tokens: int) -> list[range]:
        """Numbers of the samples of every shard: as many as fit into `tokens`, at least one."""
        cuts, held = [0], 0
        for number, length in enumerate(self.lengths):
            if held and held + length > tokens:
                cuts.append(number)
                held = 0
            held += length
        return [range(first, end) for first, end in zip(cuts, [*cuts[1:], len(self.lengths)], strict=True)]


@dataclass
class Index:
    """`index.json`."""

    facts: dict[str, Any]  # whose numbers these are
    columns: dict[str, Column]
    samples: str  # hash of the plan
    shard_tokens: int
    total: int  # shards there will be
    shards: dict[int, dict[str, Any]] = field(default_factory=dict)  # those that are there: bytes, sha256

    @property
    def complete(self) -> bool:
        return len(self.shards) == self.total

    @property
    def bytes_per_token(self) -> int:
        return sum(column.bytes for column in self.columns.values())

    def save(self, folder: Path) -> None:
        listed = {name_of(number): self.shards[number] for number in sorted(self.shards)}
        write_json(folder / "index.json", {"schema": SCHEMA} | asdict(self) | {"shards": listed})

    @classmethod
    def load(cls, folder: Path, key: str) -> Index | None:
        """None where there is none; `key` is the config key that named the folder."""
        path = folder / "index.json"
        if not path.exists():
            return None
        content = read_json(path, key)
        with reading(key, path, "delete the folder, or name another"):
            if content["schema"] != SCHEMA:
                raise ValueError(f"its schema is {content['schema']!r}, {SCHEMA} is read")
            columns = {name: Column(int(one["width"]), str(one["dtype"])) for name, one in content["columns"].items()}
            shards = {
                int(Path(name).stem.partition("-")[2]): {"bytes": int(one["bytes"]), "sha256": str(one["sha256"])}
                for name, one in content["shards"].items()
            }
            numbers = int(content["shard_tokens"]), int(content["total"])
            return cls(dict(content["facts"]), columns, str(content["samples"]), *numbers, shards)


def name_of(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def damaged(folder: Path, index: Index, checksums: bool) -> dict[int, str]:
    """Listed shards that are not what the index says, and why. Sizes are looked at; with `checksums` every byte is."""
    found = {}
    for number, entry in sorted(index.shards.items()):
        path = folder / name_of(number)
        if not path.is_file():
            found[number] = "it is missing"
        elif path.stat().st_size != entry["bytes"]:
            found[number] = f"it has {path.stat().st_size} bytes instead of {entry['bytes']}"
        elif checksums and _sha256(path) != entry["sha256"]:
            found[number] = "its sha256 is not the one in index.json"
    return found


# ---------------------------------------------------------------- writing


def size(columns: Iterable[Column], shards: Iterable[tuple[int, int]]) -> int:
    """Bytes on disk of shards of so many (samples, tokens)."""
    each, keys = sum(column.bytes for column in columns), 16 + 8
    return sum(tokens * each + (samples + 1) * keys + _HEADER for samples, tokens in shards)


def free_bytes(folder: Path) -> int:
    """Free bytes where `folder` lies or would be made."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free


def readable(count: int) -> str:
    """Bytes in words."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def check_room(folder: Path, needed: int, key: str) -> None:
    """Refuses a folder whose disk has less than `needed` bytes free."""
    free = free_bytes(folder)
    if needed > free:
        raise UserError(
            key, folder, f"{needed} bytes are needed and {free} are free: make room, or name a folder on a larger disk"
        )


@contextlib.contextmanager
def alone(folder: Path, key: str) -> Iterator[None]:
    """The folder, made if need be, for one process at a time and without what a killed one left half written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as stream:
            wait_for(stream)
            for part in folder.glob(".*.part"):
                part.unlink()
            yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = f"cannot be written ({reason}); finished shards are kept: mend it and start again, or name another"
        raise UserError(key, folder, remedy) from None


def write_shard(
    folder: Path, index: Index, number: int, samples: Sequence[tuple[bytes, int]], columns: dict[str, Tensor]
) -> None:
    """Writes a shard, whole or not at all, and enters it into the index.

    Args:
        samples: digest and length of each, in the order of the columns' rows.
        columns: name → [tokens, width].
    """
    starts = torch.tensor([0, *(length for _, length in samples)]).cumsum(0)
    keys = torch.frombuffer(bytearray(b"".join(key for key, _ in samples)), dtype=torch.uint8).view(-1, 16)
    path = folder / name_of(number)
    write_tensors(path, columns | {"digests": keys, "starts": starts})
    index.shards[number] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    index.save(folder)


# ---------------------------------------------------------------- reading


class Reader:
    """The rows of every sample, from memory-mapped shards."""

    def __init__(self, folder: Path, index: Index, key: str):
        self.index = index
        self._shards: list[Any] = []
        self._where: dict[bytes, tuple[int, int, int]] = {}
        for number in range(index.total):
            path = folder / name_of(number)
            with reading(key, path, "delete this shard: it is made again", also=(SafetensorError,)):
                shard = safe_open(path, framework="pt")
                keys, starts = shard.get_tensor("digests").numpy(), shard.get_tensor("starts").tolist()
                for name, column in index.columns.items():
                    if shard.get_slice(name).get_shape() != [starts[-1], column.width]:
                        raise ValueError(f"{name} has another size than the samples")
                for row, (start, end) in enumerate(itertools.pairwise(starts)):
                    self._where[keys[row].tobytes()] = (number, start, end)
            self._shards.append(shard)

    def __contains__(self, key: bytes) -> bool:
        return key in self._where

    def rows(self, column: str, key: bytes) -> Tensor:
        """[T, width] of the sample with this digest, in the stored dtype. Raises KeyError where there is none."""
        number, start, end = self._where[key]
        return self._shards[number].get_slice(column)[start:end]
