"""`states.mode=offline`: the target runs once over all samples, training reads what it said from disk.

Kept per token are the outputs of the blocks that some group reads, and what the target's distribution is made from:

    recompute   block N−1's output too; final norm and head run again at every step. In bf16 a token takes
                2·H_t·(|U| + [N−1 ∉ U]) bytes, for the union U of the groups' layers.
    top_k       the log-probabilities of the k likeliest tokens, float32, and their ids, int32: 8·k bytes, and of
                block N−1 nothing. What their probabilities lack to one is the rest's mass r; each of the V − k other
                tokens is given r / (V − k).

From top_k a draft token i has P_i = q_i / Σ_{j in the draft vocabulary} q_j with q its own probability where it is one
of the k, else r / (V − k). Let a be the mass of those of the k that the draft vocabulary has: P is off by at most
r / (a + r) in total variation, as the rest can at most lie wholly inside the draft vocabulary or wholly outside.

The index says which target the states are of; a folder that does not hold what a run needs is refused, never filled up.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import LAYER_CONVENTION, UserError, cache_dir
from specwave.data.samples import Prepared
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
from specwave.target.documents import document_spans

if TYPE_CHECKING:
    from specwave.data.conversations import Sample
    from specwave.target import Target

_TOKENS = 8192  # of one forward, padding included
_ROWS = 256  # that the head is run on at once
_TOP = ("top.logs", "top.ids")


@dataclass
class StatesConfig:
    """`states` in conf/train.yaml."""

    mode: Literal["online", "offline"] = "online"
    path: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    targets: Literal["recompute", "top_k"] = "recompute"
    k: int = 64
    shard_mib: int = 256
    verify: bool = False

    def __post_init__(self) -> None:
        for key in ("k", "shard_mib"):
            if getattr(self, key) < 1:
                raise UserError(f"states.{key}", getattr(self, key), "must be ≥ 1")
        if self.path is not None and self.mode == "online":
            raise UserError("states.path", self.path, "nothing is kept online: add states.mode=offline")
        if self.path is not None:
            self.path = str(Path(self.path).expanduser())

    def described(self) -> str:
        """For the card: what the drafter learnt from."""
        if self.mode == "online":
            return "online"
        return f"offline, {self.dtype}, " + (f"top_k of {self.k}" if self.targets == "top_k" else self.targets)


def block(layer: int) -> str:
    return f"block.{layer}"


def wanted_columns(target: Target, layers: Sequence[int], settings: StatesConfig) -> dict[str, Column]:
    """What is kept per token for drafters that read `layers`."""
    last = [target.num_layers - 1] if settings.targets == "recompute" else []
    columns = {block(layer): Column(target.hidden_size, settings.dtype) for layer in sorted({*layers, *last})}
    if settings.targets == "top_k":
        if settings.k > target.vocab_size:
            raise UserError("states.k", settings.k, f"must be ≤ {target.vocab_size}, the target's vocabulary")
        columns |= {name: Column(settings.k, dtype) for name, dtype in zip(_TOP, ("float32", "int32"), strict=True)}
    return columns


def offline(
    target: Target, data: Prepared, groups: Sequence[Sequence[int]], settings: StatesConfig, say: Callable[[str], None]
) -> Offline:
    """The samples' states for drafters of these groups: from the folder as far as they are there, else captured now.

    Raises:
        UserError: too little room (before anything is written); the folder holds states of another target, loaded or
            kept in another precision, of other samples, without a group's layer, damaged where they cannot be made
            again.
    """
    capture = _Capture(target, data, groups, settings)
    folder, index = capture.folder, capture.index
    if index is not None:
        _check(folder, index, target, groups, capture.columns, settings)
    if index is None or (index.samples, index.columns) == (capture.plan.sha256, capture.columns):
        index = capture.fill(index or capture.new_index(), say)
    else:
        capture.check_foreign(index)
        say(f"states: re-used from {folder}, which holds {_layers(index.columns)}")
    return Offline(target, Reader(folder, index, "states.path"), sorted({*itertools.chain(*groups)}), settings)


def check_states(target: Target, groups: Sequence[Sequence[int]], settings: StatesConfig) -> None:
    """Refuses what the settings and the named folder say alone, before there are samples."""
    if settings.mode == "offline":
        columns = wanted_columns(target, list(itertools.chain(*groups)), settings)
        folder = Path(settings.path) if settings.path is not None else None
        index = Index.load(folder, "states.path") if folder is not None else None
        if folder is not None and index is not None:
            _check(folder, index, target, groups, columns, settings)


def _check(
    folder: Path,
    index: Index,
    target: Target,
    groups: Sequence[Sequence[int]],
    columns: dict[str, Column],
    settings: StatesConfig,
) -> None:
    """Refuses states of another target or precision, and states without a layer or distribution that is needed."""
    kept, own, other = index.facts, _facts(target, settings), "name another folder: the states are captured there"
    if kept.get("fingerprint") != target.fingerprint:
        _refuse(
            folder,
            f"holds states of {kept.get('target')} (fingerprint {kept.get('fingerprint')}), this target is "
            f"{target.name} ({target.fingerprint}): {other}",
        )
    for fact, key, done in (("computed_in", "model.dtype", "computed"), ("dtype", "states.dtype", "kept")):
        if kept.get(fact) != own[fact]:
            was = kept.get(fact)
            _refuse(folder, f"its states were {done} in {was}, not {own[fact]}: set {key}={was}, or {other}")
    for group in groups:
        for layer in group:
            if block(layer) not in index.columns:
                held = f"it holds {_layers(index.columns)}: train groups of these, or {other}"
                _refuse(folder, f"lacks layer {layer} of group {list(group)}, {held}")
    if any(index.columns.get(name) != column for name, column in columns.items()):
        was, wants = _kept_as(index.columns), _kept_as(columns)
        _refuse(folder, f"lacks what {wants} reads: set {was}, with which it was captured, or {other}")


def _kept_as(columns: dict[str, Column]) -> str:
    top = columns.get(_TOP[0])
    return f"states.targets=top_k states.k={top.width}" if top else "states.targets=recompute"


def _facts(target: Target, settings: StatesConfig) -> dict[str, Any]:
    return {
        "target": target.name,
        "fingerprint": target.fingerprint,  # tokenizer and chat template are part of it
        "computed_in": str(target.dtype).removeprefix("torch."),
        "dtype": settings.dtype,
        "layer_convention": LAYER_CONVENTION,
    }


def _refuse(folder: Path, why: str) -> NoReturn:
    raise UserError("states.path", folder, why)


class _Capture:
    """One run's states: what it needs, what the folder holds, and the passes of the target that make the rest."""

    def __init__(self, target: Target, data: Prepared, groups: Sequence[Sequence[int]], settings: StatesConfig):
        self.target, self.data, self.settings = target, data, settings
        self.columns = wanted_columns(target, list(itertools.chain(*groups)), settings)
        self.plan = Plan(sample.ids for sample in itertools.chain(data.train, data.validation))
        self.facts = _facts(target, settings)
        self.folder = Path(settings.path) if settings.path is not None else self._own_folder()
        self.index = Index.load(self.folder, "states.path")

    def _own_folder(self) -> Path:
        widths = {name: [column.width, column.dtype] for name, column in self.columns.items()}
        facts = json.dumps([self.facts, widths, self.plan.sha256], sort_keys=True)
        return cache_dir() / "states" / f"{self.target.name}-{hashlib.sha256(facts.encode()).hexdigest()[:24]}"

    def new_index(self) -> Index:
        each = sum(column.bytes for column in self.columns.values())
        tokens = max(1, self.settings.shard_mib * 2**20 // each)
        return Index(self.facts, self.columns, self.plan.sha256, tokens, len(self.plan.shards(tokens)))

    # ---------------------------------------------------------------- what the folder holds

    def check_foreign(self, index: Index) -> None:
        """Refuses states captured for another run where this one could neither use them nor make them whole."""
        if not index.complete:
            there = f"{len(index.shards)} of {index.total} shards are there"
            _refuse(
                self.folder,
                f"its capture for other samples or layers was never finished ({there}): finish or delete it",
            )
        for number, why in damaged(self.folder, index, self.settings.verify).items():
            _refuse(
                self.folder,
                f"{name_of(number)} is damaged: {why}; a run with the samples and layers it was captured for makes "
                "it again, or delete the folder",
            )
        if index.samples == self.plan.sha256:
            return
        reader = Reader(self.folder, index, "states.path")
        lacking = [place for key, place in zip(self.plan.digests, self.plan.places, strict=True) if key not in reader]
        if lacking:
            named = f"{len(lacking)} of {len(self.plan.places)} samples, {self._sample(lacking[0]).id!r} among them"
            _refuse(
                self.folder, f"lacks {named}: name another folder, or the data and data.max_length it was captured for"
            )

    # ---------------------------------------------------------------- the rest is made

    def fill(self, index: Index, say: Callable[[str], None]) -> Index:
        """Captures the shards that are missing or damaged; finished ones are checked byte by byte before it goes on."""
        seen, shards = dict(index.shards), self.plan.shards(index.shard_tokens)
        going_on = bool(seen) and not index.complete
        bad = damaged(self.folder, index, self.settings.verify or going_on)
        todo = [number for number in range(index.total) if number not in seen or number in bad]
        for number, why in bad.items():
            say(f"states: {name_of(number)} is damaged ({why}) and is made again")
        if not todo:
            say(f"states: re-used from {self.folder}")
            return index
        counts = [(len(shards[number]), self._tokens(shards[number])) for number in todo]
        needed = size(self.columns.values(), counts)
        say(
            f"states: {self.plan.tokens} tokens of {index.bytes_per_token} bytes ({_layers(self.columns)}), "
            f"{len(todo)} of {index.total} shards to make: {_readable(needed)} in {self.folder}, "
            f"{_readable(free_bytes(self.folder))} free"
        )
        check_room(self.folder, needed, "states.path")
        with alone(self.folder, "states.path"):
            index = Index.load(self.folder, "states.path") or index
            todo = [number for number in todo if index.shards.get(number) == seen.get(number)]  # made meanwhile: kept
            if bad:  # they are listed no more, whatever happens now
                index.shards = {number: entry for number, entry in index.shards.items() if number not in todo}
                index.save(self.folder)
            done = sum(self._tokens(shards[number]) for number in index.shards)
            shown = {"desc": "states", "unit": "token", "unit_scale": True}
            with tqdm(total=self.plan.tokens, initial=done, disable=None, **shown) as bar:
                for number in todo:
                    rows = shards[number]
                    columns = self._shard(rows, bar)
                    samples = [(self.plan.digests[row], self.plan.lengths[row]) for row in rows]
                    write_shard(self.folder, index, number, samples, columns)
        return index

    def _tokens(self, rows: range) -> int:
        return sum(self.plan.lengths[row] for row in rows)

    def _sample(self, place: int) -> Sample:
        first = len(self.data.train)
        return self.data.train[place] if place < first else self.data.validation[place - first]

    def _passes(self, rows: range) -> Iterator[list[int]]:
        """Samples that are forwarded together; they come by length, so little is padded."""
        batch: list[int] = []
        for row in rows:
            if batch and (len(batch) + 1) * self.plan.lengths[row] > _TOKENS:
                yield batch
                batch = []
            batch.append(row)
        yield batch

    def _shard(self, rows: range, bar: tqdm) -> dict[str, Tensor]:
        columns = {name: column.empty(self._tokens(rows)) for name, column in self.columns.items()}
        last, start = self.target.num_layers - 1, 0
        kept = [layer for layer in range(self.target.num_layers) if block(layer) in columns]
        for batch in self._passes(rows):
            samples = [self._sample(self.plan.places[row]) for row in batch]
            lengths = torch.tensor([len(sample.ids) for sample in samples])
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sample.ids) for sample in samples], batch_first=True)
            real = (torch.arange(ids.shape[1]) < lengths[:, None]).to(self.target.device)
            states = self.target.states(ids.to(self.target.device), sorted({*kept, last}))
            end = start + int(lengths.sum())
            for layer in kept:
                self._finite(states[layer], layer, real, samples)
                columns[block(layer)][start:end] = states[layer][real]
            if _TOP[0] in columns:
                self._finite(states[last], last, real, samples)
                for name, found in zip(_TOP, self._top(states[last][real]), strict=True):
                    columns[name][start:end] = found
            bar.update(end - start)
            start = end
        return columns

    def _top(self, last_nD: Tensor) -> tuple[Tensor, Tensor]:
        parts = [top_k(self.target.logits(rows), self.settings.k) for rows in last_nD.split(_ROWS)]
        logs, ids = zip(*parts, strict=True)
        return torch.cat(logs), torch.cat(ids)

    def _finite(self, state_BTD: Tensor, layer: int, real_BT: Tensor, samples: Sequence[Sample]) -> None:
        bad = (~state_BTD.isfinite().all(-1) & real_BT).any(-1).nonzero().flatten().tolist()
        if bad:
            remedy = f"layer {layer} of the target is not finite on this sample: leave it out, or load with "
            raise UserError("data", samples[bad[0]].id, remedy + "model.dtype=float32")


# ---------------------------------------------------------------- the likeliest tokens


def top_k(scores_nV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, k] of the k likeliest tokens and their ids [n, k]; the argmax is one of them.

    Of equals, any are the k likeliest; which of them is the argmax decides whether a slot counts.
    """
    values, ids = scores_nV.topk(k, -1)
    best = scores_nV.argmax(-1, keepdim=True)
    ids[:, :1] = torch.where((ids == best).any(-1, keepdim=True), ids[:, :1], best)
    return values - scores_nV.logsumexp(-1, keepdim=True), ids


def completed(top_n2k: Tensor, vocab_size: int) -> Tensor:
    """Log-probabilities [n, V] from those of k tokens and their ids, side by side; others share the rest equally."""
    logs, ids = top_n2k.chunk(2, -1)
    rest = 1 - logs.double().exp().sum(-1, keepdim=True)
    share = rest / max(vocab_size - logs.shape[-1], 1)
    # Never quite zero: a draft vocabulary that has none of the k must still get a distribution.
    floor = share.clamp(min=torch.finfo(torch.float32).tiny).log().to(logs.dtype)
    return floor.expand(-1, vocab_size).scatter(-1, ids.long(), logs)


# ---------------------------------------------------------------- reading


class Offline:
    """A `Source` (targets.py): a batch's states from disk. Samples are found by their tokens, padding gets zeros."""

    def __init__(self, target: Target, reader: Reader, layers: Sequence[int], settings: StatesConfig):
        self.reader, self.layers, self.dtype, self.last = reader, layers, target.dtype, target.num_layers - 1
        self.recompute = settings.targets == "recompute"
        self.logits = target.logits if self.recompute else partial(completed, vocab_size=target.vocab_size)

    def read(self, batch: dict[str, Any]) -> tuple[dict[int, Tensor], Tensor, Callable[[Tensor], Tensor]]:
        ids, device = batch["ids"].cpu(), batch["ids"].device
        if batch.get("documents") is not None:
            spans = document_spans(batch["documents"].cpu())
        else:
            spans = [(row, 0, length) for row, length in enumerate(batch["lengths"])]
        places = [(row, slice(start, end), digest(ids[row, start:end].tolist())) for row, start, end in spans]

        def laid_out(name: str) -> Tensor:
            column = self.reader.index.columns[name]
            found = torch.zeros(*ids.shape, column.width, dtype=getattr(torch, column.dtype))
            for row, where, key in places:
                found[row, where] = self.reader.rows(name, key)
            return found.to(device)

        states = {layer: laid_out(block(layer)).to(self.dtype) for layer in self.layers}
        if not self.recompute:  # ids are below 2^24: float32 holds them exactly
            return states, torch.cat([laid_out(name).float() for name in _TOP], -1), self.logits
        last = states[self.last] if self.last in states else laid_out(block(self.last)).to(self.dtype)
        return states, last, self.logits


def _layers(columns: dict[str, Column]) -> str:
    layers = [name.partition(".")[2] for name in columns if name.startswith("block.")]
    top = columns.get(_TOP[0])
    return f"layers {', '.join(layers)}" + (f" and the {top.width} likeliest tokens" if top else "")


def _readable(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
