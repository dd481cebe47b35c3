"""What the serving engines read: one `config.json` for vLLM and SGLang, whose layer ids differ.

Nested ids are ours (output of block i), top-level ids are ours + 1 (input of block i). A single layer is written as
two, because SGLang passes over `fc` where it would not change the width: the second layer is unused, its columns of
`fc` are zero, and specwave's own reading takes it out again. One norm over both (`norm_before_fc`) would see the second
layer, so `DrafterConfig` refuses it for a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specwave.eagle.drafter import DrafterConfig


def padding_layer(config: DrafterConfig, num_layers: int) -> int | None:
    """The unused second layer of a one-layer drafter; never block N−1, which SGLang cannot capture."""
    if len(config.layers) > 1 or config.hidden_size != config.target_hidden_size or num_layers < 3:
        return None
    return config.layers[0] - 1 if config.layers[0] > 0 else 1


def served_by(layers: Sequence[int], num_layers: int) -> tuple[list[str], list[str]]:
    """(engines that serve these layers, warnings)."""
    if num_layers - 1 in layers:
        return ["vllm"], [f"layer {num_layers - 1} is the last block: SGLang cannot capture it, vLLM can"]
    return ["vllm", "sglang"], []


def engine_config(config: DrafterConfig, layers: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    """`config.json`; `layers` are ours, the padding included."""
    scaled = config.rope.get("rope_type", "default") != "default"
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_length,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": dict(config.rope) if scaled else None,  # read by engines older than rope_parameters
        "rope_parameters": dict(config.rope),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        **config.switches,
        "num_aux_hidden_states": len(layers),
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
