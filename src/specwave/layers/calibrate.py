"""Calibration: the target's answers to a set of prompts, reduced to one Gram matrix per layer.

Shapes: B rows of a batch, T positions, K kept positions, R block means, N layers, D hidden size, P prompts.
Token states live only while their batch does; what stays is at most `max_rows` block means per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import UserError
from specwave.layers.blocks import SCALES, Reservoir, block_means, keep_positions, prepare_grams
from specwave.layers.entropy import matrix_entropy, predictive_entropy

if TYPE_CHECKING:
    from specwave.data.conversations import Sample
    from specwave.target import Target

SPREAD_TOKENS = 32  # kept token states per prompt behind the spread: fewer rows alone lower an entropy
_LOGIT_CHUNK = 256  # positions whose logits exist at once


@dataclass
class Calibration:
    """`conf/calibration/builtin.yaml`: the built-in prompts, answered by the target, and how states become rows."""

    rho: float = 0.3
    block_size: int = 32
    skip_first: int = 1
    scale: Literal["none", "frobenius"] = "none"
    centre: bool = False
    max_rows: int = 512
    seed: int = 0
    limit: int | None = None
    max_new_tokens: int = 96
    answer_batch_size: int = 64
    batch_size: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.rho <= 1:
            raise UserError("calibration.rho", self.rho, "must be in (0, 1]: the share of positions that is kept")
        least = {"skip_first": 0, "max_rows": 2}
        sizes = ("block_size", "skip_first", "max_rows", "limit", "max_new_tokens", "answer_batch_size", "batch_size")
        for key in sizes:
            value, floor = getattr(self, key), least.get(key, 1)
            if value is not None and value < floor:
                raise UserError(f"calibration.{key}", value, f"must be ≥ {floor}")
        if self.scale not in SCALES:
            raise UserError("calibration.scale", self.scale, f"must be one of {', '.join(SCALES)}")

    def samples(self, target: Target) -> list[Sample]:
        """The conversations: built-in prompts with the target's greedy answers (cached)."""
        from specwave.data.conversations import builtin_calibration_prompts, user_prompt_ids
        from specwave.data.regenerate import answered

        prompts = builtin_calibration_prompts()
        count = min(self.limit or len(prompts), len(prompts))
        spread = [prompts[place * len(prompts) // count] for place in range(count)]  # evenly over the categories
        return answered(
            target,
            user_prompt_ids(target, spread),
            max_new_tokens=self.max_new_tokens,
            batch_size=self.answer_batch_size,
            label="calibration answers",
        )


@dataclass
class Calibrated:
    """What a pass over the calibration set leaves."""

    grams: Tensor  # float64 [N, R, R], scale and centre applied
    prompt_entropy: Tensor  # float64 [P, N], nats, over SPREAD_TOKENS kept token states of each prompt long enough
    tokens_seen: int  # positions of all conversations
    tokens_kept: int  # of them, kept by the filter
    prompts: int
    prompts_dropped: int  # gave no block
    rows_seen: int  # block means before the reservoir

    @property
    def rows(self) -> int:
        return self.grams.shape[-1]

    def counts(self) -> dict[str, int]:
        names = ("rows", "rows_seen", "tokens_seen", "tokens_kept", "prompts", "prompts_dropped")
        return {name: getattr(self, name) for name in names}


def _check_finite(target: Target, sample: Sample, states: dict[int, Tensor], row: int) -> None:
    good = torch.stack([hidden[row, : len(sample.ids)].isfinite().all() for hidden in states.values()])
    if not good.all():
        layer = list(states)[int((~good).nonzero()[0])]  # a NaN spreads upwards: the first layer is where it began
        raise UserError(
            "model.dtype", target.dtype, f"layer {layer} holds NaN or Inf in the calibration prompt {sample.id!r}: "
            "use model.dtype=float32 or another model"
        )  # fmt: skip


def _entropy_of_positions(target: Target, hidden_TD: Tensor) -> Tensor:
    """Predictive entropy [T] from the last block's output, a chunk of positions at a time."""
    return torch.cat([predictive_entropy(target.logits(part)) for part in hidden_TD.split(_LOGIT_CHUNK)])


def _spread(kept_NKD: Tensor, settings: Calibration) -> Tensor:
    """Entropy [N] of SPREAD_TOKENS of a prompt's kept token states, evenly spaced."""
    index = torch.linspace(0, kept_NKD.shape[1] - 1, SPREAD_TOKENS).round().long()
    rows = kept_NKD[:, index].double()
    return matrix_entropy(prepare_grams(rows @ rows.mT, settings.scale, settings.centre))


@torch.inference_mode()
def calibrate(target: Target, samples: Sequence[Sample], settings: Calibration) -> Calibrated:
    """One forward over the samples with all layers, the filter, block means, Grams.

    The answer does not depend on `batch_size` beyond rounding: samples are taken by length, rows in that order.

    Raises:
        UserError: a layer holds NaN or Inf, or fewer than two rows are left.
    """
    reservoir = Reservoir(settings.max_rows, settings.seed)
    spread: list[Tensor] = []
    seen = kept_count = dropped = 0
    ordered = sorted(samples, key=lambda sample: len(sample.ids))  # stable; little padding
    progress = tqdm(total=len(ordered), desc="calibration", unit="prompt", disable=None)
    for start in range(0, len(ordered), settings.batch_size):
        batch = ordered[start : start + settings.batch_size]
        ids_BT = torch.zeros(len(batch), len(batch[-1].ids), dtype=torch.int64)
        for row, sample in enumerate(batch):
            ids_BT[row, : len(sample.ids)] = torch.tensor(sample.ids)
        states = target.states(ids_BT.to(target.device), range(target.num_layers))
        for row, sample in enumerate(batch):
            _check_finite(target, sample, states, row)
            last_TD = states[target.num_layers - 1][row, : len(sample.ids)]
            kept = keep_positions(_entropy_of_positions(target, last_TD).cpu(), settings.rho, settings.skip_first)
            index = kept.to(target.device)
            kept_NKD = torch.stack([states[layer][row, index] for layer in range(target.num_layers)]).float().cpu()
            rows_NRD = block_means(kept_NKD, settings.block_size)
            reservoir.offer(rows_NRD.transpose(0, 1))
            seen, kept_count = seen + len(sample.ids), kept_count + len(kept)
            dropped += rows_NRD.shape[1] == 0
            if len(kept) >= SPREAD_TOKENS:
                spread.append(_spread(kept_NKD, settings))
        del states
        progress.update(len(batch))
    progress.close()
    if len(reservoir) < 2:
        raise UserError(
            "calibration.block_size", settings.block_size,
            f"{len(reservoir)} rows are left of {len(samples)} prompts, at least 2 are needed: calibration.rho="
            f"{settings.rho} keeps {kept_count} of {seen} positions, and {dropped} prompts have no whole block of "
            f"{settings.block_size}; use a smaller calibration.block_size, a larger calibration.rho or longer answers",
        )  # fmt: skip
    rows_RND = reservoir.stack()
    grams = torch.stack([rows @ rows.T for rows in rows_RND.double().unbind(1)])
    return Calibrated(
        grams=prepare_grams(grams, settings.scale, settings.centre),
        prompt_entropy=torch.stack(spread) if spread else torch.empty(0, target.num_layers, dtype=torch.float64),
        tokens_seen=seen,
        tokens_kept=kept_count,
        prompts=len(samples),
        prompts_dropped=dropped,
        rows_seen=reservoir.seen,
    )


def record(settings: Calibration, found: Calibrated, fingerprint: str) -> dict[str, Any]:
    """The `calibration` block of selection.json."""
    return {**asdict(settings), **found.counts(), "fingerprint": fingerprint}
