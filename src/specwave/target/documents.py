"""Several documents packed behind each other in one row: where each begins, and the positions it has for itself.

B rows, T positions. A document is a run of one number ≥ 0; negative numbers are padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specwave.target.decoder import Attend, attend_causal


def _begins(documents_BT: Tensor) -> Tensor:
    """Whether another document is at t than at t − 1, bool [B, T]."""
    first = torch.ones_like(documents_BT, dtype=torch.bool)
    first[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return first


def document_positions(documents_BT: Tensor) -> Tensor:
    """Place of every token within its document, from 0: int64 [B, T]."""
    place = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand(documents_BT.shape)
    return place - place.masked_fill(~_begins(documents_BT), 0).cummax(1).values


def document_spans(documents_BT: Tensor) -> list[tuple[int, int, int]]:
    """(row, first position, position behind the last) of every document, in order; padding is none."""
    length = documents_BT.shape[1]
    starts = _begins(documents_BT).flatten().nonzero().flatten()
    numbers = documents_BT.flatten()[starts].tolist()
    bounds = [*starts.tolist(), documents_BT.numel()]
    pieces = zip(bounds[:-1], bounds[1:], numbers, strict=True)
    return [(a // length, a % length, a % length + b - a) for a, b, number in pieces if number >= 0]


def attend_within(spans: Sequence[tuple[int, int, int]]) -> Attend:
    """Causal attention that sees its own document only; padding attends to nothing and gets zeros."""

    def attend(query_BTHh: Tensor, key_BTGh: Tensor, value_BTGh: Tensor) -> Tensor:
        mixed = torch.zeros_like(query_BTHh)
        for row, start, end in spans:
            own = (slice(row, row + 1), slice(start, end))
            mixed[own] = attend_causal(query_BTHh[own], key_BTGh[own], value_BTGh[own])
        return mixed

    return attend
