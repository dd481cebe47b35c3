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

Shards and their index are those of data/states.py, here with a row for a token; a killed capture goes on at the shard
it was in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import LAYER_CONVENTION, UserError, cache_dir
from specwave.copying.answers import Answer
from specwave.data.filling import fill, passes
from specwave.data.states import Column, Index, Plan, Reader, digest
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


class AnswerPlan(Plan):
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
    plan, facts = AnswerPlan(answers), _facts(target, settings)
    folder = Path(settings.path) if settings.path is not None else _own_folder(target, facts, plan)
    index = Index.load(folder, KEY)
    if index is None:
        rows = max(1, settings.shard_mib * 2**20 // sum(column.bytes for column in widths.values()))
        index = Index(facts, widths, plan.sha256, rows, len(plan.shards(rows)))
    elif (index.facts, index.columns, index.samples) != (facts, widths, plan.sha256):
        was = f"{index.facts.get('target')} in {index.facts.get('dtype')}, {len(index.columns)} columns"
        remedy = f"it holds other states ({was}) or those of other answers: name another folder, or delete it"
        raise UserError(KEY, folder, remedy)
    make = partial(_shard, target, [answers[place] for place in plan.places], index)
    index = fill(folder, index, plan, make, say, key=KEY, holds=f"{len(index.columns)} sites")
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


def _shard(target: Target, planned: Sequence[Answer], index: Index, rows: range, bar: tqdm) -> dict[str, Tensor]:
    """The columns of a shard, filled forward by forward: no more than one state of a forward is held beside them."""
    answers = planned[rows.start : rows.stop]
    count = sum(one.tokens + 1 for one in answers)
    columns, start = {name: column.empty(count) for name, column in index.columns.items()}, 0
    for run in passes([len(one.ids) for one in answers], _TOKENS):
        batch = answers[run.start : run.stop]
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
