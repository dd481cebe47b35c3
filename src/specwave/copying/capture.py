"""The target's states over answers, at both sites of every layer, kept on disk: what probes are trained on.

    attention.<l>   after block l's attention sub-layer, with its residual
    block.<l>       block l's output, before the final norm

An answer's rows are those of its tokens and of the one before it, so that a token's label can be held against the state
that the token was chosen by (offset 1) or against its own (offset 0). With a prompt of 3 tokens and an answer of 4:

    position       0 1 2 3 4 5 6
    token          p p p a b c d
    row            – – 0 1 2 3 4
    offset 1       label of position j, row j − 3:  a ← 0   b ← 1   c ← 2   d ← 3
    offset 0       label of position j, row j − 2:  a ← 1   b ← 2   c ← 3   d ← 4

Shards and their index are those of data/states.py; a killed capture goes on at the shard it was in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import LAYER_CONVENTION, UserError, cache_dir
from specwave.copying.answers import Answer
from specwave.data.states import (
    Column,
    Index,
    Plan,
    Reader,
    alone,
    check_room,
    damaged,
    digest,
    free_bytes,
    name_of,
    size,
    write_shard,
)
from specwave.target.decoder import attend_causal

if TYPE_CHECKING:
    from specwave.target import Target

SITES = ("attention", "block")
KEY = "probe.states.path"
_TOKENS = 4096  # of one forward, padding included


@dataclass
class ProbeStates:
    """`probe.states`: where captured states lie and how they are kept."""

    path: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    shard_mib: int = 256

    def __post_init__(self) -> None:
        if self.shard_mib < 1:
            raise UserError("probe.states.shard_mib", self.shard_mib, "must be ≥ 1")
        if self.path is not None:
            self.path = str(Path(self.path).expanduser())


def column_of(site: str, layer: int) -> str:
    return f"{site}.{layer}"


def all_columns(num_layers: int) -> list[str]:
    """Every site of every layer: those after attention first, layers ascending."""
    return [column_of(site, layer) for site in SITES for layer in range(num_layers)]


def bytes_per_row(target: Target, settings: ProbeStates) -> int:
    return 2 * target.num_layers * Column(target.hidden_size, settings.dtype).bytes


def key_of(answer: Answer) -> bytes:
    """16 bytes that stand for an answer: the same tokens behind a shorter prompt are another one."""
    return digest([answer.start, *answer.ids])


class _Plan(Plan):
    """Which answers go into which shard, by their rows."""

    def __init__(self, answers: Sequence[Answer]):
        super().__init__([one.start, *one.ids] for one in answers)
        self.lengths = [answers[place].tokens + 1 for place in self.places]
        self.tokens = sum(self.lengths)


def capture(target: Target, answers: Sequence[Answer], settings: ProbeStates, say: Callable[[str], None]) -> States:
    """The answers' states: from the folder as far as they are there, else captured now.

    Raises:
        UserError: too little room (before anything is written); the folder holds other states; states that are no
            finite numbers.
    """
    widths = {name: Column(target.hidden_size, settings.dtype) for name in all_columns(target.num_layers)}
    plan, facts = _Plan(answers), _facts(target, settings)
    folder = Path(settings.path) if settings.path is not None else _own_folder(target, facts, plan)
    index = Index.load(folder, KEY)
    if index is None:
        rows = max(1, settings.shard_mib * 2**20 // sum(column.bytes for column in widths.values()))
        index = Index(facts, widths, plan.sha256, rows, len(plan.shards(rows)))
    elif (index.facts, index.columns, index.samples) != (facts, widths, plan.sha256):
        was = f"{index.facts.get('target')} in {index.facts.get('dtype')}, {len(index.columns)} columns"
        remedy = f"it holds other states ({was}) or those of other answers: name another folder, or delete it"
        raise UserError(KEY, folder, remedy)
    index = _fill(folder, index, plan, target, answers, say)
    return States(Reader(folder, index, KEY), target.num_layers, target.device)


def _facts(target: Target, settings: ProbeStates) -> dict[str, Any]:
    return {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "computed_in": str(target.dtype).removeprefix("torch."),
        "dtype": settings.dtype,
        "layer_convention": LAYER_CONVENTION,
        "rows": "answers and the token before each",
    }


def _own_folder(target: Target, facts: dict[str, Any], plan: Plan) -> Path:
    name = hashlib.sha256(json.dumps([facts, plan.sha256], sort_keys=True).encode()).hexdigest()[:24]
    return cache_dir() / "probe_states" / f"{target.name}-{name}"


def _fill(
    folder: Path, index: Index, plan: Plan, target: Target, answers: Sequence[Answer], say: Callable[[str], None]
) -> Index:
    """Captures the shards that are missing or damaged; finished ones are checked byte by byte before it goes on."""
    shards, seen = plan.shards(index.shard_tokens), dict(index.shards)
    bad = damaged(folder, index, checksums=bool(seen) and not index.complete)
    todo = [number for number in range(index.total) if number not in seen or number in bad]
    for number, why in bad.items():
        say(f"states: {name_of(number)} is damaged ({why}) and is made again")
    if not todo:
        say(f"states: re-used from {folder}")
        return index
    counts = [(len(shards[number]), sum(plan.lengths[row] for row in shards[number])) for number in todo]
    needed = size(index.columns.values(), counts)
    say(
        f"states: {plan.tokens:,} rows of {index.bytes_per_token:,} bytes ({len(index.columns)} sites), {len(todo)} of "
        f"{index.total} shards to make: {readable(needed)} in {folder}, {readable(free_bytes(folder))} free"
    )
    check_room(folder, needed, KEY)
    with alone(folder, KEY):
        index = Index.load(folder, KEY) or index
        todo = [number for number in todo if index.shards.get(number) == seen.get(number)]  # made meanwhile: kept
        if bad:  # they are listed no more, whatever happens now
            index.shards = {number: entry for number, entry in index.shards.items() if number not in todo}
            index.save(folder)
        done = sum(plan.lengths[row] for number in index.shards for row in shards[number])
        shown = {"desc": "states", "unit": "token", "unit_scale": True}
        with tqdm(total=plan.tokens, initial=done, disable=None, **shown) as bar:
            for number in todo:
                columns = _shard(target, [answers[plan.places[row]] for row in shards[number]], index, bar)
                samples = [(plan.digests[row], plan.lengths[row]) for row in shards[number]]
                write_shard(folder, index, number, samples, columns)
    return index


def _shard(target: Target, answers: Sequence[Answer], index: Index, bar: tqdm) -> dict[str, Tensor]:
    """The columns of a shard, filled forward by forward: no more than one state of a forward is held beside them."""
    rows = sum(one.tokens + 1 for one in answers)
    columns, start = {name: column.empty(rows) for name, column in index.columns.items()}, 0
    for batch in _passes(answers):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(one.ids) for one in batch], batch_first=True)
        place = torch.arange(ids.shape[1])
        kept = torch.stack([(place >= one.start - 1) & (place < len(one.ids)) for one in batch]).to(target.device)
        end = start + sum(one.tokens + 1 for one in batch)
        for name, hidden in sites(target, ids.to(target.device)):
            found = hidden[kept]
            if not bool(found.isfinite().all()):
                remedy = f"{name} of the target is not finite on an answer like this: use model.dtype=float32"
                raise UserError("probe_data", batch[0].id, remedy)
            columns[name][start:end] = found
        bar.update(end - start)
        start = end
    return columns


def _passes(answers: Sequence[Answer]) -> Iterator[list[Answer]]:
    """Answers that are forwarded together; they come by length, so little is padded."""
    batch: list[Answer] = []
    for one in answers:
        if batch and (len(batch) + 1) * len(one.ids) > _TOKENS:
            yield batch
            batch = []
        batch.append(one)
    yield batch


@torch.inference_mode()
def sites(target: Target, ids_BT: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Column and states [B, T, D] of every site, in the order they are computed; rows are padded on the right."""
    cos, sin = (table[: ids_BT.shape[1], None] for table in target.rope)
    hidden_BTD = target.embed(ids_BT)
    for layer, block in enumerate(target.blocks):
        hidden_BTD = block.attention(hidden_BTD, cos, sin, attend_causal)
        yield column_of("attention", layer), hidden_BTD
        hidden_BTD = block.mlp(hidden_BTD)
        yield column_of("block", layer), hidden_BTD


def readable(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


# ---------------------------------------------------------------- reading


class States:
    """Captured states as features: [P, A, D] of an answer of A tokens, at P sites.

    Args:
        device: where they are handed out.
        names: the columns that are read; all of them by default.
    """

    def __init__(self, reader: Reader, num_layers: int, device: torch.device, names: Sequence[str] | None = None):
        self.reader, self.num_layers, self.device = reader, num_layers, device
        self.names = list(names) if names is not None else all_columns(num_layers)

    def at(self, *names: str) -> States:
        """The same, of these sites alone: nothing else is read from disk."""
        return States(self.reader, self.num_layers, self.device, names)

    def features(self, answer: Answer, offset: int) -> Tensor:
        """States that stand for the answer's tokens: of the position before each (offset 1) or of itself (0)."""
        key, rows = key_of(answer), slice(1 - offset, answer.tokens + 1 - offset)
        return torch.stack([self.reader.rows(name, key)[rows] for name in self.names]).to(self.device)
