"""Small drafters with random weights, and contexts that need no target."""

from types import SimpleNamespace

import pytest
import torch

from specwave.decoding import Context
from specwave.eagle import Eagle3
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map


@pytest.fixture(scope="session")
def drafter_of():
    """Makes a drafter of some layers for a target."""

    def make(target, layers=(1, 4), size=200):
        size = min(size, target.vocab_size)
        counts = torch.randint(0, 9, (target.vocab_size,), generator=torch.Generator().manual_seed(3))
        drafter = Eagle3Drafter(DrafterConfig.of_target(target.arch, layers, size), *build_vocab_map(counts, size))
        initialise(drafter, target, "target", 0)
        return drafter

    return make


@pytest.fixture(scope="session")
def neural(drafter_of):
    """Makes an EAGLE-3 proposer for a target."""

    def make(target, levels=3, **tree):
        layers = (1, 4) if target.num_layers > 4 else (0, 1)
        return Eagle3(drafter_of(target, layers), target, levels=levels, **tree)

    return make


@pytest.fixture
def context_of():
    """Makes a context of given tokens."""

    def make(tokens, limit=1_000, row=0, sequence=0):
        session = SimpleNamespace(target=SimpleNamespace(device=torch.device("cpu")))
        return Context(row, sequence, list(tokens), len(tokens), limit, session, row)

    return make
