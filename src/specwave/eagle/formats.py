"""Drafters in other tools' formats: written for `vllm serve <drafter>` (speculators), read from speculators, SpecForge
and EAGLE's own checkpoints.

Layer ids are ours (output of block i) on this side. speculators counts block inputs, so its ids are ours + 1; SpecForge
nests ids that are ours; EAGLE's checkpoints have none, because its code reads the inputs of blocks 2, N//2 and N−3,
which are ours [1, N//2−1, N−4]. A checkpoint without ids is refused: whoever reads it would guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specwave.artifacts import UserError, check_layers, read_json, reading
from specwave.eagle.drafter import SWITCHES, DrafterConfig, Eagle3Drafter
from specwave.eagle.engines import engine_config
from specwave.eagle.vocab import check_vocab_map, draft_ids

FORMATS = ("engines", "speculators")
SPECULATORS_VERSION = "0.9.0"  # whose config.json is written
_IDS = "eagle_aux_hidden_state_layer_ids"
_OUTER = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", *SWITCHES)
_DROPPED = ("architectures", "num_aux_hidden_states", "eagle_config", "torch_dtype", _IDS, *_OUTER)
_OURS, _THEIRS = "midlayer.", "layers.0."


# ---------------------------------------------------------------- speculators


def speculators_config(
    config: DrafterConfig, layers: Sequence[int], dtype: torch.dtype, verifier: str, drafts: int
) -> dict[str, Any]:
    """Its `config.json`; `layers` are ours, the padding included, `verifier` the target's hub id or folder."""
    whole = engine_config(config, layers, dtype)
    method = {"proposal_type": "greedy", "speculative_tokens": drafts, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "has_no_defaults_at_init": False,
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        **{key: whole[key] for key in _OUTER},
        _IDS: whole[_IDS],
        "transformer_layer_config": {key: value for key, value in whole.items() if key not in _DROPPED},
        "torch_dtype": whole["torch_dtype"],
    }


def flattened(content: dict[str, Any]) -> dict[str, Any]:
    """speculators' `config.json` with the keys of `engine_config`."""
    ids = content.get(_IDS) or []
    return {
        **content["transformer_layer_config"],
        **{key: content[key] for key in _OUTER if content.get(key) is not None},
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_aux_hidden_states": len(ids),
        _IDS: ids,
        "eagle_config": {_IDS: [layer - 1 for layer in ids], "use_aux_hidden_state": True},
        "torch_dtype": content.get("torch_dtype"),
    }


def to_speculators(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {_renamed(name, _OURS, _THEIRS): tensor for name, tensor in tensors.items()}


def from_speculators(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {_renamed(name, _THEIRS, _OURS): tensor for name, tensor in tensors.items()}


def _renamed(name: str, before: str, after: str) -> str:
    return after + name.removeprefix(before) if name.startswith(before) else name


# ---------------------------------------------------------------- drafters of other tools


def read_foreign(
    path: Path | str, key: str, num_layers: int, layers: Sequence[int] | None = None
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """(sizes, tensors by our names) of a drafter that another tool wrote, for a target of `num_layers` blocks.

    Args:
        key: of the config, which named the folder.
        layers: ours; needed where the checkpoint names none, and must agree where it does.
    Raises:
        UserError: no ids and no `layers`; ids that do not fit; a block that is computed otherwise than here (more than
            one, `norm_before_residual`, another family); tensors that are missing, damaged or of other shapes.
    """
    folder = Path(path)
    with reading(key, folder, "fetch the checkpoint again"):
        content = read_json(folder / "config.json", key)
        tool = "another tool"
        if "speculators_model_type" in content:
            if content["speculators_model_type"] != "eagle3":
                raise UserError(key, folder, f"it is a {content['speculators_model_type']} drafter: eagle3 is read")
            content, tool = flattened(content), "speculators"
        tensors = from_speculators(_stored(folder, key))
        found = _layers(content, folder, key, num_layers, layers)
        if content.get("norm_before_residual"):
            remedy = (
                f"{tool} trained it with norm_before_residual=true, whose residual is the normed state: not computed"
            )
            raise UserError(key, folder, f"{remedy} here; train with it set to false")
        if content.get("num_hidden_layers", 1) != 1:
            raise UserError(key, folder, f"it has {content['num_hidden_layers']} blocks: one is read")
        config = _config(content, found, tensors)
    return config, _fitting(config, tensors, folder, key)


def _layers(
    content: dict[str, Any], folder: Path, key: str, num_layers: int, given: Sequence[int] | None
) -> tuple[int, ...]:
    nested = list((content.get("eagle_config") or {}).get(_IDS) or [])
    shifted = [layer - 1 for layer in content.get(_IDS) or []]
    named = nested or shifted
    if shifted and shifted != named:
        remedy = (
            f"its nested ids name outputs of blocks {named}, those for vLLM {shifted}: engines would read different "
        )
        raise UserError(key, folder, f"{remedy}ones; correct config.json")
    if not named and given is None:
        release = [1, num_layers // 2 - 1, num_layers - 4]
        remedy = "it names no layers, and tools guess differently: name those it was trained on (counted as outputs of "
        remedy += f"blocks), {release} if EAGLE's own code trained it, with convert.layers=[…]"
        raise UserError(key, folder, remedy)
    if named and list(named) != sorted(named):
        raise UserError(key, folder, f"its layers {named} are in another order than ascending: fc's columns would mix")
    if named and given is not None and sorted(named) != sorted(given):
        raise UserError("convert.layers", list(given), f"the checkpoint itself names {named} (outputs of blocks)")
    return check_layers(named or list(given or ()), num_layers, key)


def _config(content: dict[str, Any], layers: tuple[int, ...], tensors: dict[str, Tensor]) -> DrafterConfig:
    size, heads = int(content["hidden_size"]), int(content["num_attention_heads"])
    rope = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    rope.setdefault("rope_theta", content.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    return DrafterConfig(
        layers=layers,
        target_hidden_size=int(content.get("target_hidden_size") or tensors["fc.weight"].shape[1] // len(layers)),
        hidden_size=size,
        num_heads=heads,
        num_kv_heads=int(content.get("num_key_value_heads") or heads),
        head_dim=int(content.get("head_dim") or size // heads),
        intermediate_size=int(content["intermediate_size"]),
        vocab_size=int(content["vocab_size"]),
        draft_vocab_size=int(content.get("draft_vocab_size") or tensors["lm_head.weight"].shape[0]),
        rms_eps=float(content.get("rms_norm_eps", 1e-6)),
        max_length=int(content["max_position_embeddings"]),
        rope=rope,
        **{name: bool(content.get(name, False)) for name in SWITCHES},
    )


def _stored(folder: Path, key: str) -> dict[str, Tensor]:
    """All tensors of `model.safetensors` or its shards, else of EAGLE's `pytorch_model.bin`."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        if files:
            return {name: tensor for file in files for name, tensor in load_file(file).items()}
        if (folder / "pytorch_model.bin").is_file():
            return torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(key, folder, f"its weights cannot be read ({str(error)[:200]}): fetch it again") from None
    raise UserError(key, folder, "no weights are here (model.safetensors or pytorch_model.bin)")


def _fitting(config: DrafterConfig, tensors: dict[str, Tensor], folder: Path, key: str) -> dict[str, Tensor]:
    """The tensors that a drafter of these sizes has; refuses missing ones and other shapes."""
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    if "d2t" in tensors and "t2d" not in tensors:
        marks = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"] = marks.index_fill(0, draft_ids(tensors["d2t"].to(torch.int64)), True)
    with torch.device("meta"):
        expected = Eagle3Drafter(config).state_dict()
    found = {}
    for name, wanted in expected.items():
        if name not in tensors:
            raise UserError(key, folder, f"its weights lack {name}")
        if tensors[name].shape != wanted.shape:
            raise UserError(key, folder, f"{name} is {list(tensors[name].shape)}, expected is {list(wanted.shape)}")
        if tensors[name].is_floating_point() and not bool(tensors[name].isfinite().all()):
            raise UserError(key, folder, f"{name} holds NaN or infinity")
        found[name] = tensors[name] if tensors[name].is_floating_point() else tensors[name].to(wanted.dtype)
    check_vocab_map(found["d2t"], found["t2d"], config.vocab_size, key)
    return found
