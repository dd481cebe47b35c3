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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import LAYER_CONVENTION, UserError, cache_dir
from specwave.data.engines import check_vllm
from specwave.data.filling import fill, passes
from specwave.data.producer import VllmStates
from specwave.data.samples import Prepared
from specwave.data.states import Column, Index, Plan, Reader, damaged, digest, name_of
from specwave.eagle.likeliest import completed, top_k
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
    engine: Literal["specwave", "vllm"] = "specwave"

    def __post_init__(self) -> None:
        for key in ("k", "shard_mib"):
            if getattr(self, key) < 1:
                raise UserError(f"states.{key}", getattr(self, key), "must be ≥ 1")
        for key, usual in (("path", None), ("engine", "specwave")):
            if getattr(self, key) != usual and self.mode == "online":
                raise UserError(f"states.{key}", getattr(self, key), "nothing is kept online: add states.mode=offline")
        if self.path is not None:
            self.path = str(Path(self.path).expanduser())

    def described(self) -> str:
        """For the card: what the drafter learnt from."""
        if self.mode == "online":
            return "online"
        by = "" if self.engine == "specwave" else f" by {self.engine}"
        return f"offline{by}, {self.dtype}, " + (f"top_k of {self.k}" if self.targets == "top_k" else self.targets)


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
    if settings.engine == "vllm":
        check_vllm("states.engine")
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
        **({} if settings.engine == "specwave" else {"engine": settings.engine}),
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
        self.producer: VllmStates | None = None  # made when there is something to capture

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
        """Captures the shards that are missing or damaged."""
        begun_by = index.facts.get("engine", "specwave")
        if index.shards and not index.complete and begun_by != self.settings.engine:
            _refuse(self.folder, f"its capture was begun with states.engine={begun_by}: go on with that, or delete it")
        holds, verify = _layers(self.columns), self.settings.verify
        return fill(self.folder, index, self.plan, self._shard, say, key="states.path", holds=holds, verify=verify)

    def _sample(self, place: int) -> Sample:
        first = len(self.data.train)
        return self.data.train[place] if place < first else self.data.validation[place - first]

    def _passes(self, lengths: Sequence[int]) -> Iterable[range]:
        """Which samples of these lengths are forwarded together; vLLM makes batches of its own."""
        return [range(len(lengths))] if self.settings.engine == "vllm" else passes(lengths, _TOKENS)

    def _shard(self, rows: range, bar: tqdm) -> dict[str, Tensor]:
        held = self.plan.lengths[rows.start : rows.stop]
        columns = {name: column.empty(sum(held)) for name, column in self.columns.items()}
        last, start = self.target.num_layers - 1, 0
        kept = [layer for layer in range(self.target.num_layers) if block(layer) in columns]
        for run in self._passes(held):
            samples = [self._sample(self.plan.places[row]) for row in rows[run.start : run.stop]]
            states = self._outputs(samples, sorted({*kept, last}))
            end = start + len(states[last])
            for layer, state_nD in states.items():
                self._finite(state_nD, layer, samples)
            for layer in kept:
                columns[block(layer)][start:end] = states[layer]
            if _TOP[0] in columns:
                for name, found in zip(_TOP, self._top(states[last].to(self.target.device)), strict=True):
                    columns[name][start:end] = found
            bar.update(end - start)
            start = end
        return columns

    def _outputs(self, samples: Sequence[Sample], layers: Sequence[int]) -> dict[int, Tensor]:
        """Block outputs [n, D] of the samples' tokens, one sample behind the other."""
        if self.settings.engine == "vllm":
            self.producer = self.producer or VllmStates(self.target, layers, max(self.plan.lengths))
            return self.producer.outputs([sample.ids for sample in samples])
        lengths = torch.tensor([len(sample.ids) for sample in samples])
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(sample.ids) for sample in samples], batch_first=True)
        real = (torch.arange(ids.shape[1]) < lengths[:, None]).to(self.target.device)
        states = self.target.states(ids.to(self.target.device), layers)
        return {layer: states[layer][real] for layer in layers}

    def _top(self, last_nD: Tensor) -> tuple[Tensor, Tensor]:
        parts = [top_k(self.target.logits(rows), self.settings.k) for rows in last_nD.split(_ROWS)]
        logs, ids = zip(*parts, strict=True)
        return torch.cat(logs), torch.cat(ids)

    def _finite(self, state_nD: Tensor, layer: int, samples: Sequence[Sample]) -> None:
        sound = state_nD.isfinite().all(-1).split([len(sample.ids) for sample in samples])
        for sample, finite in zip(samples, sound, strict=True):
            if not finite.all():
                remedy = f"layer {layer} of the target is not finite on this sample: leave it out, or load with "
                raise UserError("data", sample.id, remedy + "model.dtype=float32")


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
