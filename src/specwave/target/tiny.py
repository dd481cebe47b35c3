"""Random tiny checkpoints of every supported family, for tests and for trying the doors in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _tokenizer(vocab_size: int) -> Any:
    """Bytes as tokens, three special tokens, and filler up to the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"<unused{i}>" for i in range(vocab_size - len(pieces))]
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces[:vocab_size])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([piece for piece in SPECIAL if piece in pieces[:vocab_size]])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_tiny(folder: Path | str, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Writes a random checkpoint: 8 blocks, D = 64, 4 heads of 16, 2 key/value heads, V = 512.

    Weights are drawn wide enough that the next token depends on the context. `overrides` are keys of the family's
    Hugging Face config; `vocab_size` may be as small as wanted when no text is met.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    settings.update(overrides)
    config = AutoConfig.for_model(family, **settings)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases start at 1 and 0: make them tell
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    _tokenizer(config.vocab_size).save_pretrained(folder)
    return folder
