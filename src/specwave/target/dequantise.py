"""A GGUF file as a safetensors folder: done once, so that every later load takes a fraction of a second."""

from __future__ import annotations

from pathlib import Path

import torch


def dequantise(gguf: Path, folder: Path) -> None:
    """Writes config, tokenizer and float32 weights of `gguf` into `folder`, loadable by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # What was dequantised is an ordinary model, but transformers still takes it for a quantised one.
    model.hf_quantizer = None  # type: ignore[assignment]
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.config._name_or_path = gguf.stem
    model.save_pretrained(folder)
