"""Targets whose middle blocks change little, so that a draft without some of them is often right, and made-up costs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specwave.decoding import Context
from specwave.skipping.latency import Latency
from specwave.target import load_target
from specwave.target.tiny import make_tiny

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def make_mild(folder: Path, family: str) -> Path:
    """A tiny checkpoint whose blocks 1 to 6 write little into the residual stream."""
    make_tiny(folder, family)
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    for layer in range(1, 7):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"model.layers.{layer}.{name}.weight"] *= 0.15
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def mild_folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("mild")
    return {family: make_mild(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def mild(mild_folders):
    """The same, loaded in float32, by family."""
    return {family: load_target(folder, dtype="float32") for family, folder in mild_folders.items()}


@pytest.fixture(scope="session")
def costs():
    """Makes costs: sub-layers are all that counts by default, and further tokens of a forward nearly free."""

    def make(attention=0.001, slope=0.0, mlp=0.001, rest=0.001, forward=1.0, per_token=0.01, facts=None):
        contexts, sizes = (16, 128, 1024), (1, 2, 4, 8, 16, 32, 64)
        return Latency(
            contexts=contexts,
            attention=tuple(attention + slope * context for context in contexts),
            mlp=(mlp,) * 3,
            rest=(rest,) * 3,
            sizes=sizes,
            forward=tuple(tuple(forward + per_token * size for size in sizes) for _ in contexts),
            search=(1.0,) * 3,
            num_layers=8,
            facts=facts or {},
        )

    return make


@pytest.fixture
def opened():
    """Opens sessions with committed prompts, one per row: (session, tokens of each row without the last, its root)."""

    def make(target, lengths, seed=0, room=64):
        draw = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(3, target.vocab_size, (length,), generator=draw) for length in lengths]
        session = target.session(len(lengths), max(lengths) + room)
        padded = torch.nn.utils.rnn.pad_sequence([prompt[:-1] for prompt in prompts], batch_first=True)
        session.forward(padded, logits=False)
        session.advance([length - 1 for length in lengths])
        return session, prompts

    return make


@pytest.fixture(scope="session")
def contexts_of():
    """Makes the loop's contexts of a session that `opened` gave: rows 0, 1, …, sequences 70, 71, …"""

    def make(session, prompts, sampling, limit=40):
        found = []
        for row, prompt in enumerate(prompts):
            context = Context(row, 70 + row, prompt.tolist(), len(prompt), limit, session, row, sampling=sampling)
            if sampling.penalised:
                context.seen = torch.zeros(session.target.vocab_size, dtype=torch.bool)
                context.seen[prompt] = True
            found.append(context)
        return found

    return make
