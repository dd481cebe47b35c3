"""Which tokens each row has met, for the repetition penalty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specwave.decoding.protocol import Context


class Presence:
    """The distinct tokens of each row, prompt and output so far: bool [rows, V], kept where the logits are. Each
    context's `seen` is its row."""

    def __init__(self, contexts: Sequence[Context], vocab: int, device: torch.device):
        self.seen = torch.zeros(len(contexts), vocab, dtype=torch.bool, device=device)
        self.add([(context.row, context.tokens) for context in contexts])
        for context in contexts:
            context.seen = self.seen[context.row]

    def add(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Takes up tokens (row, tokens)."""
        pairs = torch.tensor([(row, token) for row, tokens in rows for token in tokens], device=self.seen.device)
        self.seen[pairs[:, 0], pairs[:, 1]] = True

    def of_slots(self, contexts: Sequence[Context], batch: int) -> Tensor:
        """[batch, V] in the order of the session's rows; those that idle may show any."""
        if batch == len(self.seen):
            return self.seen  # the batch never shrank
        rows = [0] * batch
        for context in contexts:
            rows[context.slot] = context.row
        return self.seen[torch.tensor(rows, device=self.seen.device)]
