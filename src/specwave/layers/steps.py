"""Drafting steps of calibration answers: what a drafter would see at a position, and what the target says next.

Shapes: S rows (steps), N layers, D hidden size, p directions kept of a layer, e of the next token's embedding, F =
e + N·p columns, V tokens of the vocabulary, T positions of a conversation, B conversations of a batch.

EAGLE's alignment at its first step, prompt x_0…x_4, answer x_5…x_8:

    row of position t              3            4            5            6            7
    states of t, next token       h_3, x_4     h_4, x_5     h_5, x_6     h_6, x_7     h_7, x_8
    foretells the target's word    at 4 (x_5)   at 5 (x_6)   at 6 (x_7)   at 7 (x_8)   at 8
    is a row                       no           yes          yes          yes          no

so t is one where x_{t+1} and x_{t+2} are answer text: the slots that a drafter's first step is trained on.

The pass is apart from the one that leaves Grams: only this selector reads single positions, and it must know directions
before it keeps anything. A first, short stream over some of the conversations finds them (the principal directions of
each layer's states, which hold more of what can be foretold than as many random ones); the second projects all.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import UserError
from specwave.layers.calibrate import check_finite, forwards
from specwave.target.decoder import rms_norm

if TYPE_CHECKING:
    from specwave.data.conversations import Sample
    from specwave.target import Target

BASIS_ROWS = 1024  # behind the directions, at least, where there are so many; about four times as many at most
BASIS_SAMPLES = 16  # conversations that they come from, at least: short ones and long ones
_AT_ONCE = 256  # rows whose logits exist together


@dataclass(frozen=True)
class Sampling:
    """What a pass keeps of the steps."""

    positions: int = 8192
    width: int = 64
    token_width: int = 64
    vocabulary: int = 4096
    seed: int = 0


@dataclass
class Steps:
    """What a pass leaves."""

    inputs: Tensor  # float32 [S, F]: the next token's directions, then each layer's; of mean 0, variance 1 nearly
    states: Tensor  # float32 [S, D]: what the target's head reads one position later, after the final norm
    tokens: Tensor  # int64 [S]: its most likely token there, as a place in `vocabulary`; −1 outside
    conversations: Tensor  # int64 [S]
    vocabulary: Tensor  # int64 [V] token ids, those that the target says most often first
    head: Tensor  # float32 [V, D]: their rows of the head
    width: int
    token_width: int
    seen: int  # steps there were
    cached: bool = False  # read from the cache of an earlier pass

    num_layers = property(lambda self: (self.inputs.shape[1] - self.token_width) // self.width)

    def columns(self, layers: Sequence[int]) -> Tensor:
        """Places [e + |layers|·p] of the columns a drafter of these layers would see: the next token's come along."""
        own = [torch.arange(self.token_width)]
        own += [self.token_width + layer * self.width + torch.arange(self.width) for layer in layers]
        return torch.cat(own)


def step_places(answer: Sequence[bool]) -> Tensor:
    """The positions t of the table above: int64, ascending."""
    told = torch.tensor(answer, dtype=torch.bool)
    return (told[1:-1] & told[2:]).nonzero()[:, 0] if len(told) > 2 else torch.empty(0, dtype=torch.int64)


def basis(rows_RD: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(mean [D], axes [D, p]): `(rows − mean) @ axes` are the `width` principal components, each of variance 1.

    Directions without variance (of constant rows, or beyond the rank) are axes of zero. Float64 inside and out.
    """
    rows = rows_RD.double()
    mean = rows.mean(0)
    rows = rows - mean
    few = len(rows) < rows.shape[1]
    values, vectors = torch.linalg.eigh(rows @ rows.T if few else rows.T @ rows)
    values, vectors = values[-width:].flip(0), vectors[:, -width:].flip(1)
    sound = values > 1e-9 * values[0].clamp_min(0)
    scale = torch.where(sound, values, 1.0).rsqrt()
    axes = (rows.T @ vectors * scale if few else vectors) * scale * len(rows) ** 0.5
    axes = torch.where(sound, axes, 0.0)
    missing = max(0, width - axes.shape[1])  # fewer rows than directions
    return mean, torch.nn.functional.pad(axes, (0, missing))


@torch.inference_mode()
def collect(target: Target, samples: Sequence[Sample], own: Sampling, batch_size: int = 4) -> Steps:
    """Two streams over the samples, the first over some of them.

    Raises:
        UserError: there are fewer than two steps; a layer holds NaN or Inf.
    """
    ordered = sorted(samples, key=lambda sample: len(sample.ids))  # stable; little padding
    every = [step_places(sample.answer) for sample in ordered]
    seen = sum(map(len, every))
    if seen < 2:
        rule = f"the answers hold {seen} steps of a drafter, at least 2 are needed: use more conversations"
        raise UserError("calibration", f"{len(samples)} conversations", f"{rule} or longer answers")
    places = _thinned(every, own.positions, own.seed)
    width, token_width = (min(size, target.hidden_size) for size in (own.width, own.token_width))
    axes = _axes(target, ordered, every, width, token_width, batch_size)
    columns, states, tokens, conversations = [], [], [], []
    wanted = [place for place, own_places in enumerate(places) if len(own_places)]
    bar = tqdm(total=len(wanted), desc="drafting steps", unit="prompt", disable=None)
    for first, batch, states_NBTD in forwards(target, [ordered[place] for place in wanted], batch_size):
        for row, sample in enumerate(batch):
            place = wanted[first + row]
            at = places[place].to(target.device)
            own_NTD = [hidden[row, : len(sample.ids)] for hidden in states_NBTD]
            check_finite(target, sample, own_NTD)
            seen_by_drafter = [_next_embedding(target, sample, at), *(hidden[at] for hidden in own_NTD)]
            parts = zip(seen_by_drafter, axes, strict=True)
            projected = [(rows.double() - mean) @ axis for rows, (mean, axis) in parts]
            columns.append(torch.cat(projected, 1).float().cpu())
            last_SD = own_NTD[-1][at + 1]
            states.append(rms_norm(last_SD, target.final_norm, target.arch.rms_eps).float().cpu())
            tokens.append(torch.cat([target.logits(part).argmax(-1) for part in last_SD.split(_AT_ONCE)]).cpu())
            conversations += [place] * len(at)
        del states_NBTD, own_NTD
        bar.update(len(batch))
    bar.close()
    ids = torch.cat(tokens)
    vocabulary = frequent(ids, own.vocabulary)
    lookup = torch.full((target.vocab_size,), -1)
    lookup[vocabulary] = torch.arange(len(vocabulary))
    head = target.head[vocabulary.to(target.head.device)].float().cpu()
    return Steps(
        torch.cat(columns), torch.cat(states), lookup[ids], torch.tensor(conversations), vocabulary, head,
        width, token_width, seen,
    )  # fmt: skip


def frequent(ids: Tensor, count: int) -> Tensor:
    """The `count` most frequent of the ids, at most all that occur: the most frequent first, ties by id."""
    times = torch.bincount(ids)
    order = torch.sort(times, descending=True, stable=True).indices
    return order[: min(count, int((times > 0).sum()))]


def _thinned(every: Sequence[Tensor], count: int, seed: int) -> list[Tensor]:
    """At most `count` of all places, a seeded sample without replacement, each list in order."""
    total = sum(map(len, every))
    if total <= count:
        return list(every)
    kept = torch.zeros(total, dtype=torch.bool)
    kept[random.Random(seed).sample(range(total), count)] = True
    parts = kept.split([len(places) for places in every])
    return [places[part] for places, part in zip(every, parts, strict=True)]


def _axes(
    target: Target,
    ordered: Sequence[Sample],
    every: Sequence[Tensor],
    width: int,
    token_width: int,
    batch_size: int,
) -> list[tuple[Tensor, Tensor]]:
    """`basis` of the next token's embeddings, then of each layer's states, from conversations evenly spread."""
    telling = [place for place, places in enumerate(every) if len(places)]
    steps = sum(len(every[place]) for place in telling)
    number = min(len(telling), max(BASIS_SAMPLES, math.ceil(BASIS_ROWS * len(telling) / max(1, steps))))
    some = [telling[(2 * place + 1) * len(telling) // (2 * number)] for place in range(number)]  # short and long ones
    kept: list[list[Tensor]] = [[] for _ in range(1 + target.num_layers)]
    bar = tqdm(total=len(some), desc="directions of the states", unit="prompt", disable=None)
    for first, batch, states_NBTD in forwards(target, [ordered[place] for place in some], batch_size):
        for row, sample in enumerate(batch):
            at = every[some[first + row]]
            at = at[:: max(1, len(at) * number // (4 * BASIS_ROWS))].to(target.device)  # of long ones some steps
            own_NTD = [hidden[row, : len(sample.ids)] for hidden in states_NBTD]
            check_finite(target, sample, own_NTD)
            for rows, found in zip(kept, [_next_embedding(target, sample, at), *(h[at] for h in own_NTD)], strict=True):
                rows.append(found)
        del states_NBTD, own_NTD
        bar.update(len(batch))
    bar.close()
    widths = [token_width, *[width] * target.num_layers]
    return [basis(torch.cat(rows), size) for rows, size in zip(kept, widths, strict=True)]


def _next_embedding(target: Target, sample: Sample, at: Tensor) -> Tensor:
    """[S, D] of the tokens behind the positions `at`."""
    return target.embed(torch.tensor(sample.ids, device=target.device)[at + 1])
