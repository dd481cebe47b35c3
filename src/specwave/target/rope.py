"""Rotary position embedding in the half-rotation layout of Llama: dimension i turns with dimension i + hd/2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from specwave.artifacts import UserError

ROPE_TYPES = ("default", "linear", "llama3")


def inverse_frequencies(head_dim: int, rope: dict[str, Any]) -> Tensor:
    """Angle per position and pair of dimensions, float32 [hd/2], radians.

    `rope` holds `rope_type` and its parameters as in Hugging Face's `rope_parameters`. `llama3` is Llama 3.1's scaling:
    wavelengths beyond the old context are divided by `factor`, those well inside are kept, those between are blended.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise UserError("rope_type", kind, f"this scaling is not supported; these are: {', '.join(ROPE_TYPES)}")
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency = 1.0 / (float(rope["rope_theta"]) ** exponent)
    if kind == "linear":
        return frequency / float(rope["factor"])
    if kind == "llama3":
        context = float(rope["original_max_position_embeddings"])
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        turns = context * frequency / (2 * math.pi)  # full turns within the old context
        blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * frequency / float(rope["factor"]) + blend * frequency
    return frequency


def rope_tables(head_dim: int, rope: dict[str, Any], length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) [length, hd] with the sign of the half rotation folded into sin: see `rotate`."""
    angle = torch.outer(torch.arange(length).float(), inverse_frequencies(head_dim, rope))
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., hd] turned by tables that broadcast to it: x·cos + roll(x)·sin."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
