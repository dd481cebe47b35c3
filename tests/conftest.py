"""Fixtures shared by all rooms: tiny random targets, made once per session in a cache of their own."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def script(name):
    """A script of benchmarks/, as a module of its own."""
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="script", scope="session")
def _script():
    return script


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Tests neither read nor fill the user's cache of answers; models dequantised before are shared."""
    from specwave.artifacts import cache_dir

    models = cache_dir() / "targets"
    folder = tmp_path_factory.mktemp("cache")
    if models.is_dir():
        (folder / "targets").symlink_to(models, target_is_directory=True)
    before = os.environ.get("SPECWAVE_CACHE")
    os.environ["SPECWAVE_CACHE"] = str(folder)
    yield folder
    if before is None:
        os.environ.pop("SPECWAVE_CACHE")
    else:
        os.environ["SPECWAVE_CACHE"] = before


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory) -> dict[str, Path]:
    """A tiny random checkpoint of every family, and one with Llama 3.1's rope, biases and tied embeddings."""
    from specwave.target.tiny import make_tiny

    root = tmp_path_factory.mktemp("families")
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    made = {family: make_tiny(root / family, family) for family in ("llama", "mistral", "qwen2", "qwen3")}
    made["llama3"] = make_tiny(
        root / "llama3", "llama", rope_parameters=rope, attention_bias=True, tie_word_embeddings=True
    )
    return made


@pytest.fixture(scope="session")
def families(family_folders):
    """The same, loaded in float32."""
    from specwave.target import load_target

    return {name: load_target(folder, dtype="float32") for name, folder in family_folders.items()}


@pytest.fixture(scope="session")
def tiny(families):
    """A tiny Llama in float32."""
    return families["llama"]


@pytest.fixture(scope="session")
def five(tmp_path_factory):
    """A target with a vocabulary of five tokens, for tests of distributions. No end token."""
    from specwave.target import load_target
    from specwave.target.tiny import make_tiny

    folder = make_tiny(
        tmp_path_factory.mktemp("five"), vocab_size=5, num_hidden_layers=2, eos_token_id=None, initializer_range=0.1
    )
    return load_target(folder, dtype="float32")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of shared prompts and questions; tests that need it are skipped without."""
    folder = os.environ.get("SPECWAVE_DATA")
    if not folder:
        pytest.skip("SPECWAVE_DATA is not set")
    return Path(folder)


@pytest.fixture(scope="session")
def given():
    """Makes calibrations of a few short conversations that bring their answers, so that nothing is decoded."""
    from specwave.data.sources import Conversation
    from specwave.layers.settings import Calibration

    class Given(Calibration):
        def source(self):
            turns = [(("user", f"question {place}"), ("assistant", "an answer " * (7 + place))) for place in range(6)]
            return [Conversation(turn, f"q{place}", "ab"[place % 2]) for place, turn in enumerate(turns)]

    return lambda **more: Given(**{"answers": "given", "rho": 0.5, "block_size": 8, **more})
