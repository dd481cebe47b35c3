"""A small drafter with random weights, and random target tensors to hold it against."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.targets import TargetBatch, read_target
from specwave.eagle.vocab import build_vocab_map

sys.path.insert(0, str(Path(__file__).parent))  # kept.py is shared by this folder's tests

VOCAB, DRAFT = 23, 9


@dataclass
class Case:
    drafter: Eagle3Drafter
    ids: Tensor  # [B, T]
    answer: Tensor  # bool [B, T]
    states: dict[int, Tensor]
    embedding: Tensor  # [V, H]
    logits: Tensor  # the target's, [B, T, V]
    documents: Tensor | None = None  # int64 [B, T]

    def batch(self, rows: slice = slice(None), length: int | None = None, count_from: str = "ours") -> TargetBatch:
        """The target's side as training reads it."""
        cut = slice(length)
        table = self.logits[rows, cut]
        return read_target(
            self.ids[rows, cut],
            self.answer[rows, cut],
            {layer: state[rows, cut] for layer, state in self.states.items()},
            table,  # stands for block N-1's output: the head below is the identity
            self.embedding,
            lambda x: x,
            self.drafter.draft_ids,
            self.drafter.t2d,
            chunk=3,
            count_from=count_from,
            with_mass=True,
            documents_BT=None if self.documents is None else self.documents[rows, cut],
        )


@pytest.fixture
def make_case():
    def make(
        layers: tuple[int, ...] = (1, 4),
        lengths: tuple[int, ...] = (9, 12, 7),
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        width: int = 12,
    ) -> Case:
        torch.manual_seed(seed)
        config = DrafterConfig(
            layers=layers,
            target_hidden_size=width,
            hidden_size=width,
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,  # 4 heads of 6 are wider than 12: the two sizes must not be mixed up
            intermediate_size=20,
            vocab_size=VOCAB,
            draft_vocab_size=DRAFT,
            rms_eps=1e-5,
            max_length=64,
            rope={"rope_type": "default", "rope_theta": 100.0},
        )
        drafter = Eagle3Drafter(config, *build_vocab_map(torch.randint(0, 5, (VOCAB,)), DRAFT)).to(dtype)
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        rows, length = len(lengths), max(lengths)
        ids = torch.randint(0, VOCAB, (rows, length))
        answer = torch.zeros(rows, length, dtype=torch.bool)
        for row, size in enumerate(lengths):
            answer[row, 3:size] = torch.rand(size - 3) < 0.9  # holes stand for several turns
            answer[row, size:] = False
        logits = torch.randn(rows, length, VOCAB, dtype=dtype) * 2
        logits[..., drafter.draft_ids] += 1.5  # so that most argmaxes have a draft id, and some have not
        return Case(
            drafter,
            ids,
            answer,
            {layer: torch.randn(rows, length, width, dtype=dtype) for layer in layers},
            torch.randn(VOCAB, width, dtype=dtype),
            logits,
        )

    return make
