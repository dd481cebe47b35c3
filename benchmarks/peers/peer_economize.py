"""Worker: economize, plain, with prompt lookup and with an EAGLE-3 drafter of ours.

Its `generate` does not take the `cache` argument of transformers 5.24; its own `decode` does not need it.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import economize
import torch
from economize.core.model import build_model
from economize.techniques.eagle3.formats import config_from_eagle3, state_from_eagle3
from economize.techniques.lookup import LookupConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from wire import NGRAM, Decode, serve


def load(settings: dict[str, Any]) -> Decode:
    torch.set_num_threads(settings["threads"])
    base = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=getattr(torch, settings["dtype"])).eval()

    @cache
    def model(method: str) -> Any:
        if method == "eagle3":
            return with_drafter(base, Path(settings["checkpoint"]))
        return economize.apply(base, *([LookupConfig(max_ngram=NGRAM)] if method == "lookup" else []))

    def decode(method: str, drafts: int, ids: list[int], new_tokens: int) -> list[int]:
        config = economize.DecodeConfig(cycle_length=drafts + 1)
        made = model(method).decode(torch.tensor(ids), new_tokens, decoding=config, stop=settings["eos"])
        return made.tokens.tolist()

    return decode


def with_drafter(base: Any, folder: Path) -> Any:
    """The model with the drafter of `folder`. economize counts layers from 1, as the top-level ids of our config.json
    do, but would read the nested ids, which count from 0."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del content["eagle_config"]
    config = dataclasses.replace(config_from_eagle3(content, draft_layers=1), param_dtype="model")
    state = state_from_eagle3(load_file(folder / "model.safetensors"), content["vocab_size"])
    return build_model(base, [config], states={"eagle3": state})


if __name__ == "__main__":
    serve(load, "torch", "transformers", "economize")
