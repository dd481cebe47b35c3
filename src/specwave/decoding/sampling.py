"""From logits to the token that is committed: the one function every committed token passes through.

Randomness is keyed noise: the Gumbel noise of a token depends only on (seed, sequence, purpose, absolute position,
token id), so a method that verifies in other batches or shapes still draws the same token for the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specwave.artifacts import UserError
from specwave.decoding.arguments import whole
from specwave.decoding.processors import keep_min_p, keep_top_k, keep_top_p, penalise

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)  # purposes: noise is never used twice (it would bias residuals)
NO_TOKEN = -2  # where no score is a number; equal to no draft and no pad
_COLDEST = torch.finfo(torch.float32).tiny  # below it a temperature divides nothing by nothing


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen by the target's logits; the processors are those of Hugging Face, in its order.

    Attributes:
        temperature: 0 is greedy, whatever top_k, top_p and min_p say; else tokens are drawn from softmax(scores / T).
        seed: of the noise.
        top_k: only the so many likeliest tokens; 0 or None is all.
        top_p: only the likeliest tokens that hold this much probability together; 1 is all.
        min_p: only tokens at least this share as likely as the likeliest; 0 is all.
        repetition_penalty: tokens of prompt and output so far have their logits divided by it (negative ones
            multiplied), when greedy too; 1 is none.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int | None = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", whole("sampling.seed", self.seed, "must be a whole number"))
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError("sampling.temperature", self.temperature, "must be 0 (greedy) or a positive number")
        remedy = "must be a whole number, 0 for all tokens"
        count = 0 if self.top_k is None else whole("sampling.top_k", self.top_k, remedy)
        if count < 0:
            raise UserError("sampling.top_k", count, remedy)
        object.__setattr__(self, "top_k", count)  # one value for off: settings are compared
        if not 0.0 < self.top_p <= 1.0:
            raise UserError("sampling.top_p", self.top_p, "must be above 0 and at most 1, which is all tokens")
        if not 0.0 <= self.min_p < 1.0:
            raise UserError("sampling.min_p", self.min_p, "must be at least 0, which is all tokens, and below 1")
        if not 0.0 < self.repetition_penalty < float("inf"):
            key, remedy = "sampling.repetition_penalty", "must be a positive number, 1 for none"
            raise UserError(key, self.repetition_penalty, remedy)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_ADD, _FIRST, _SECOND = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)  # int64 shifts carry the sign: mask it off


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64, whose products wrap as they should."""
    x = x + _ADD
    x ^= _shift(x, 30)
    x *= _FIRST
    x ^= _shift(x, 27)
    x *= _SECOND
    x ^= _shift(x, 31)
    return x


def keyed_uniform(seed: int, sequences: Tensor, purpose: int, positions: Tensor, tokens: Tensor) -> Tensor:
    """float64 in (0, 1), a function of the key alone; the int64 arguments broadcast."""
    key = _mix(_mix(sequences + _signed(seed * 0x9E3779B97F4A7C15)) + positions * 4 + purpose)
    bits = _shift(_mix(key + tokens * _FIRST), 11)
    return bits.double().add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-53)  # the last half would round to 1


def keyed_gumbel(seed: int, sequences: Tensor, purpose: int, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [..., V] for the keys [...]."""
    tokens = torch.arange(vocab, device=positions.device)
    uniform = keyed_uniform(seed, sequences[..., None], purpose, positions[..., None], tokens)
    return uniform.log_().neg_().log_().neg_()


def tempered(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Logits [..., V] after penalty and temperature, before anything is ruled out; `seen` as in `scores`."""
    if sampling.penalised:
        if seen is None:
            raise ValueError("a repetition penalty needs to know the tokens so far")
        logits = penalise(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return logits
    # At most 0: what a tiny temperature makes overflow is impossible.
    return (logits - logits.amax(-1, keepdim=True)) / max(sampling.temperature, _COLDEST)


def scores(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Logits [..., V] after every processor: softmax of the result is the target's distribution, its argmax the greedy
    token. `seen` (bool [..., V]): the tokens before each position, needed under a repetition penalty only."""
    result = tempered(logits, sampling, seen)
    if sampling.greedy:
        return result
    if sampling.top_k:
        result = keep_top_k(result, sampling.top_k)
    if sampling.top_p < 1.0:
        result = keep_top_p(result, sampling.top_p)
    if sampling.min_p > 0.0:
        result = keep_min_p(result, sampling.min_p)
    return result


def pick(processed: Tensor, sampling: Sampling, sequences: Tensor, positions: Tensor, purpose: int = TARGET) -> Tensor:
    """The token [...] by processed scores [..., V]: the argmax, or a draw with the noise of these keys."""
    return perturbed(processed, sampling, sequences, positions, purpose).argmax(-1)


def perturbed(
    processed: Tensor, sampling: Sampling, sequences: Tensor, positions: Tensor, purpose: int = TARGET
) -> Tensor:
    """Processed scores [..., V] with the noise of these keys, whose argmax is a draw; as they are when greedy."""
    if sampling.greedy:
        return processed
    noise = keyed_gumbel(sampling.seed, sequences, purpose, positions, processed.shape[-1])
    return processed + noise  # in float64


def largest(values: Tensor) -> Tensor:
    """The argmax [...] of [..., V]; `NO_TOKEN` where NaN (which counts as the largest) or an infinity is in its
    place."""
    value, token = values.max(-1)
    return torch.where(value.isfinite(), token, NO_TOKEN)


def choose(
    logits: Tensor, sampling: Sampling, sequences: Tensor, positions: Tensor, seen: Tensor | None = None
) -> Tensor:
    """The target's token [...] at each position; `NO_TOKEN` where its logits are no numbers."""
    return largest(perturbed(scores(logits, sampling, seen), sampling, sequences, positions))
