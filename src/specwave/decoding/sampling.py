"""From logits to the token that is committed: the one function every committed token passes through.

Randomness is keyed noise: the Gumbel noise of a token depends only on (seed, sequence, purpose, absolute position,
token id), so a method that verifies in other batches or shapes still draws the same token for the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specwave.artifacts import UserError

TARGET, DRAFT, ACCEPT, RESIDUAL = range(4)  # purposes: noise is never used twice (it would bias residuals)


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; otherwise tokens are drawn from softmax(logits / temperature)."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError("sampling.temperature", self.temperature, "must be 0 (greedy) or a positive number")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_ADD, _FIRST, _SECOND = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts carry the sign: mask it off


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64, whose products wrap as they should."""
    x = x + _ADD
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def keyed_uniform(seed: int, sequences: Tensor, purpose: int, positions: Tensor, tokens: Tensor) -> Tensor:
    """float64 in (0, 1), a function of the key alone; the int64 arguments broadcast."""
    key = _mix(_mix(sequences + _signed(seed * 0x9E3779B97F4A7C15)) + positions * 4 + purpose)
    bits = _shift(_mix(key + tokens * _FIRST), 11)
    return (bits.double() + 0.5) * 2.0**-53


def keyed_gumbel(seed: int, sequences: Tensor, purpose: int, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [..., V] for the keys [...]."""
    tokens = torch.arange(vocab, device=positions.device)
    uniform = keyed_uniform(seed, sequences[..., None], purpose, positions[..., None], tokens)
    return -(-uniform.log()).log()


def scores(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [..., V] after every processor: softmax of the result is the target's distribution."""
    if sampling.greedy:
        return logits
    return (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # at most 0: a tiny temperature overflows


def choose(logits: Tensor, sampling: Sampling, sequences: Tensor, positions: Tensor, purpose: int = TARGET) -> Tensor:
    """The token [...] at each position: the argmax, or a draw from the processed distribution."""
    processed = scores(logits, sampling)
    if sampling.greedy:
        return processed.argmax(-1)
    noise = keyed_gumbel(sampling.seed, sequences, purpose, positions, logits.shape[-1])
    return (processed.double() + noise).argmax(-1)
