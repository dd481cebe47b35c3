"""Worker: specwave, plain, with EAGLE-3 chains and with drafts by the clock."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from wire import Decode, serve

from specwave.decoding import generate
from specwave.eagle import load_drafter
from specwave.target import load_target


def load(settings: dict[str, Any]) -> Decode:
    torch.set_num_threads(settings["threads"])
    target = load_target(settings["folder"], settings["dtype"], "cpu")

    @cache
    def proposer(method: str, drafts: int) -> Any:
        if method == "plain":
            return None
        how = {"total_token": "auto"} if method == "auto" else {"levels": drafts}
        return load_drafter(settings["checkpoint"], target, **how)

    def decode(method: str, drafts: int, ids: list[int], new_tokens: int) -> list[int]:
        made = generate(target, proposer(method, drafts), ids, max_new_tokens=new_tokens, eos_ids=settings["eos"])
        return made.tokens

    return decode


if __name__ == "__main__":
    serve(load, "torch", "transformers", "specwave")
