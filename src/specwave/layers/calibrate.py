"""The calibration pass: one forward over conversations, reduced to Gram matrices for any number of settings at once.

Shapes: B conversations of a batch, T positions, R rows of all settings, N layers, D hidden size, P prompts, F filters,
S = SPREAD token states. Token states live only while their batch does; what stays is at most `max_rows` rows per layer
and setting.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import UserError
from specwave.layers.blocks import prepare_grams
from specwave.layers.entropy import matrix_entropy, predictive_entropy
from specwave.layers.rows import Collector, Rows, keep_in_set

if TYPE_CHECKING:
    from specwave.data.conversations import Sample
    from specwave.target import Target

SPREAD = 32  # token states of a prompt behind the spread: equal counts, since fewer rows alone lower an entropy
KINDS = ("filtered", "unfiltered", "random")  # which ones: of those kept, of all evenly, of all at random
_LOGIT_BYTES = 64 << 20  # float32 logits that exist at once
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_STATE_BYTES = 384 << 20  # states of all layers that exist at once, unless a single conversation has more


@dataclass
class Calibrated:
    """What a pass leaves of one setting."""

    grams: Tensor  # float64 [N, R, R] as measured: before scale and centre
    labels: Tensor  # int64 [R], the conversation behind each row; −1 where rows are averages over conversations
    spread: Tensor  # float64 [2, 3, P, N], nats: not centred and centred × KINDS, of prompts with S kept positions
    categories: list[str]  # of the conversations, in the order of `labels`
    tokens_seen: int  # positions of all conversations
    tokens_kept: int  # of them, kept by the filter
    prompts_dropped: int  # gave no block
    rows_seen: int  # before the reservoir
    cached: bool = False  # read from the cache of an earlier pass

    rows = property(lambda self: self.grams.shape[-1])
    prompts = property(lambda self: len(self.categories))

    def prepared(self, scale: str, centre: bool) -> Tensor:
        """The Grams that selectors read: float64 [N, R, R]."""
        return prepare_grams(self.grams, scale, centre)

    def counts(self) -> dict[str, int]:
        names = ("rows", "rows_seen", "tokens_seen", "tokens_kept", "prompts", "prompts_dropped")
        return {name: getattr(self, name) for name in names}


@torch.inference_mode()
def calibrate(
    target: Target, samples: Sequence[Sample], settings: Sequence[Rows], batch_size: int = 4
) -> list[Calibrated | UserError]:
    """One forward over the samples with all layers, the filters, block means and Grams of every setting.

    A setting with filter_scope=set needs all entropies before the first position is kept, hence a forward more.
    The answer does not depend on `batch_size` beyond rounding: samples are taken by length, rows in that order.

    Returns:
        for each setting its result, or the error of a setting that leaves fewer than two rows: others go on.

    Raises:
        UserError: a layer holds NaN or Inf.
    """
    ordered = sorted(samples, key=lambda sample: len(sample.ids))  # stable; little padding
    _map_large_tensors()
    collectors = [Collector(own) for own in settings]
    # Settings that differ in what happens after the filter share its positions and their spread.
    filters = [replace(own, block_size=1, blocks="tokens", ragged_tail="drop", aggregate="concatenate", max_rows=2)
               for own in settings]  # fmt: skip
    distinct = list(dict.fromkeys(filters))
    across = _filter_across(target, ordered, [own for own in distinct if own.filter_scope == "set"], batch_size)
    spreads: dict[Rows, list[Tensor]] = {own: [] for own in distinct}
    progress = tqdm(total=len(ordered), desc="calibration", unit="prompt", disable=None)
    for first, batch, states in forwards(target, ordered, batch_size):
        for row, sample in enumerate(batch):
            index, length = first + row, len(sample.ids)
            own_NTD = [hidden[row, :length] for hidden in states]
            check_finite(target, sample, own_NTD)
            entropy_T = _entropy_of_positions(target, sample, own_NTD[-1])
            kept = {own: across[own][index] if own in across else own.kept(entropy_T, index) for own in distinct}
            plans = [part.plan(kept[own], length) for part, own in zip(collectors, filters, strict=True)]
            measured = [own for own in distinct if len(kept[own]) >= SPREAD]
            places = [_spread_positions(kept[own], length, own, index) for own in measured]
            means, token_grams = _reduce(own_NTD, torch.cat(plans), torch.stack(places) if places else None)
            for part, rows_NRD in zip(collectors, means.split([len(plan) for plan in plans], 1), strict=True):
                part.take(rows_NRD, index)
            for own, gram_N3SS in zip(measured, token_grams, strict=True):
                spreads[own].append(_spread(gram_N3SS))
        del states, own_NTD, means  # before the next batch's are made: they are most of the memory
        progress.update(len(batch))
    progress.close()
    categories = [sample.category for sample in ordered]
    nothing = torch.empty(2, len(KINDS), 0, target.num_layers, dtype=torch.float64)
    results: list[Calibrated | UserError] = []
    for part, own in zip(collectors, filters, strict=True):
        try:
            grams = part.grams()
        except UserError as error:
            results.append(error)
            continue
        spread = torch.stack(spreads[own], 2) if spreads[own] else nothing
        labels, seen = torch.tensor(part.store.labels), part.store.seen
        results.append(Calibrated(grams, labels, spread, categories, part.seen, part.kept, part.dropped, seen))
    return results


def forwards(
    target: Target, ordered: Sequence[Sample], batch_size: int
) -> Iterator[tuple[int, Sequence[Sample], list[Tensor]]]:
    """(place of the first, batch, states [B, T, D] of every layer); batches fit memory and `batch_size`."""
    per_token = target.num_layers * target.hidden_size * target.dtype.itemsize
    start = 0
    while start < len(ordered):
        batch = ordered[start : start + batch_size]
        while len(batch) > 1 and len(batch) * len(batch[-1].ids) * per_token > _STATE_BYTES:
            batch = batch[:-1]
        ids_BT = torch.zeros(len(batch), len(batch[-1].ids), dtype=torch.int64)
        for row, sample in enumerate(batch):
            ids_BT[row, : len(sample.ids)] = torch.tensor(sample.ids)
        states = target.states(ids_BT.to(target.device), range(target.num_layers))
        yield start, batch, [states.pop(layer) for layer in range(target.num_layers)]
        start += len(batch)


def _map_large_tensors() -> None:
    """Has glibc map tensors of 4 MiB and more one by one, so that freeing them gives their memory back.

    Left alone, it learns to keep ones of up to 32 MiB in its heap, where the holes between them add up: 1.3 GiB where
    0.7 are in use at 2,048 tokens × 36 layers. The page faults this costs are nothing beside such a forward.
    """
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 4 << 20)


def _filter_across(
    target: Target, ordered: Sequence[Sample], filters: Sequence[Rows], batch_size: int
) -> dict[Rows, list[Tensor]]:
    """The kept positions of every conversation under filters over the whole set."""
    if not filters:
        return {}
    entropies: list[Tensor] = []
    progress = tqdm(total=len(ordered), desc="entropies of the whole set", unit="prompt", disable=None)
    for _, batch, states in forwards(target, ordered, batch_size):
        for row, sample in enumerate(batch):
            own_NTD = [hidden[row, : len(sample.ids)] for hidden in states]
            check_finite(target, sample, own_NTD)
            entropies.append(_entropy_of_positions(target, sample, own_NTD[-1]))
        del states, own_NTD
        progress.update(len(batch))
    progress.close()
    return {own: keep_in_set(entropies, own.rho, own.skip_first) for own in filters}


def check_finite(target: Target, sample: Sample, states_NTD: Sequence[Tensor]) -> None:
    edges_N2 = torch.stack(
        [torch.stack(torch.aminmax(hidden)) for hidden in states_NTD]
    )  # a NaN passes through, no copy
    bad = ~edges_N2.isfinite().all(1)
    if bad.any():
        layer = int(bad.nonzero()[0])  # a NaN spreads upwards: the first layer is where it began
        raise UserError(
            "model.dtype", target.dtype, f"layer {layer} holds NaN or Inf in the calibration prompt {sample.id!r}: "
            "use model.dtype=float32 or another model"
        )  # fmt: skip


def _entropy_of_positions(target: Target, sample: Sample, hidden_TD: Tensor) -> Tensor:
    """Predictive entropy [T] from the last block's output, a chunk of positions at a time."""
    chunk = max(16, min(256, _LOGIT_BYTES // (4 * target.vocab_size)))
    entropy = torch.cat([predictive_entropy(target.logits(part)) for part in hidden_TD.split(chunk)]).cpu()
    if not entropy.isfinite().all():
        raise UserError(
            "model.dtype", target.dtype, f"the logits (final norm or head) hold NaN or Inf in the calibration prompt "
            f"{sample.id!r}: use model.dtype=float32 or another model"
        )  # fmt: skip
    return entropy


def _spread_positions(kept: Tensor, length: int, own: Rows, index: int) -> Tensor:
    """[3, S]: positions for each of KINDS, the same number of each."""

    def evenly(count: int) -> Tensor:
        return torch.linspace(0, count - 1, SPREAD).round().long()

    rest = length - own.skip_first
    draw = torch.Generator().manual_seed(own.seed * 1_000_003 + index)
    chance = torch.randperm(rest, generator=draw)[:SPREAD].sort().values
    return torch.stack([kept[evenly(len(kept))], evenly(rest) + own.skip_first, chance + own.skip_first])


def _reduce(
    states_NTD: Sequence[Tensor], plan_RT: Tensor, places_F3S: Tensor | None
) -> tuple[Tensor, Sequence[Tensor]]:
    """(block means [N, R, D] float32, Grams of the spread's token states: F of [N, 3, S, S]), layer by layer."""
    device = states_NTD[0].device
    plan_RT = plan_RT.to(device)
    places = None if places_F3S is None else places_F3S.to(device)
    means, grams = [], []
    for hidden_TD in states_NTD:
        wide_TD = hidden_TD.float()
        means.append(plan_RT @ wide_TD)
        if places is not None:
            token = wide_TD[places]
            grams.append(token @ token.mT)
    return torch.stack(means).cpu(), list(torch.stack(grams, 1).cpu()) if grams else []


def _spread(gram_N3SS: Tensor) -> Tensor:
    """Entropy [2, 3, N]: of the token states as they are, and centred."""
    both = torch.stack([prepare_grams(gram_N3SS), prepare_grams(gram_N3SS, centre=True)])
    return matrix_entropy(both).transpose(1, 2)
