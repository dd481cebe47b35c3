"""Worker: Hugging Face `generate`, plain and with prompt lookup."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from wire import NGRAM, Decode, serve


def load(settings: dict[str, Any]) -> Decode:
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=getattr(torch, settings["dtype"])).eval()
    ends = {"eos_token_id": settings["eos"], "pad_token_id": settings["eos"][0]} if settings["eos"] else {}

    @torch.inference_mode()
    def decode(method: str, drafts: int, ids: list[int], new_tokens: int) -> list[int]:
        lookup = {"prompt_lookup_num_tokens": drafts, "max_matching_ngram_size": NGRAM} if method == "lookup" else {}
        ids_BT = torch.tensor([ids])
        made = model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            do_sample=False,
            max_new_tokens=new_tokens,
            **ends,
            **lookup,
        )
        return made[0, len(ids) :].tolist()

    return decode


if __name__ == "__main__":
    serve(load, "torch", "transformers")
