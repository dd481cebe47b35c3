"""What a target looks like: the numbers of its architecture, read from a Hugging Face `config.json`.

Knows nothing about weights. Families whose blocks are computed here: Llama, Qwen2, Qwen3, Mistral.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specwave.artifacts import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
MISTRAL_WINDOW = 4096  # of a config without the key; null is none


@dataclass(frozen=True)
class Arch:
    """Architecture of a decoder-only target; sizes in elements, lengths in tokens."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    max_length: int  # positions the model was made for (the window, where attention slides)
    tie_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    rope: dict[str, Any] = field(default_factory=dict)  # HF's rope_parameters, whole
    window: int | None = None  # tokens that attention slides over; `max_length` is no larger

    def describe(self) -> dict[str, Any]:
        """Plain data for fingerprints and cards; the window is in `max_length`."""
        return {key: value for key, value in asdict(self).items() if key != "window"}


def read_arch(config: dict[str, Any], key: str = "model.source") -> Arch:
    """An `Arch` from the content of `config.json`; refuses by name what is not computed here."""
    family = config.get("model_type", "?")
    if family not in FAMILIES:
        raise UserError(key, family, f"this family is not supported; these are: {', '.join(FAMILIES)}")

    def refuse(name: str, remedy: str) -> None:
        raise UserError(key, f"{family} with {name}={config.get(name)}", remedy)

    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "only silu is supported")
    if config.get("mlp_bias"):
        refuse("mlp_bias", "an MLP with bias is not supported")
    max_length = int(config["max_position_embeddings"])
    if family.startswith("qwen") and config.get("use_sliding_window"):
        refuse("use_sliding_window", "sliding-window attention is not supported")
    window = config.get("sliding_window", MISTRAL_WINDOW) if family == "mistral" else None
    if window:
        # Up to the window's length a sliding window hides nothing, so the model is exact there and refused beyond.
        max_length = min(max_length, int(window))
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    heads = int(config["num_attention_heads"])
    attention_bias = bool(config.get("attention_bias", False))
    return Arch(
        family=family,
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=int(config["hidden_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate_size=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_length=max_length,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family in ("llama", "qwen3") and attention_bias,
        qk_norm=family == "qwen3",
        rope=rope,
        window=int(window) if window else None,
    )
