"""First weights of a drafter, seeded by its group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from specwave.eagle.drafter import Eagle3Drafter


def group_seed(seed: int, layers: Sequence[int]) -> int:
    """A seed of the group itself, so that a drafter starts alike alone or in any company."""
    digest = hashlib.sha256(f"{seed}:{','.join(map(str, sorted(layers)))}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


@torch.no_grad()
def initialise(drafter: Eagle3Drafter, target: Any, how: str, seed: int) -> None:
    """First weights, in place.

    `target`: the block is the target's last one, blind to the embedding at first; `fc` is near the identity on the
    last captured layer (1 % of noise on all of them); `lm_head` is the target's rows. Two norms are not the target's:
    the embedding's is 1, because weights that begin at zero learn slowly from small inputs (the target's first norm is
    0.04 on SmolLM2), and the final one is halved, because the copied block is sure of x_{t+1} and is asked for x_{t+2}.
    `random`: normal, deviation 0.02.
    """
    config = drafter.config
    generator = torch.Generator().manual_seed(group_seed(seed, config.layers))
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        else:
            parameter.fill_(1.0)
    if how == "random":
        return
    fc, size = drafter.fc.weight, config.hidden_size
    fc.mul_(0.5 / fc.shape[1] ** 0.5)  # 0.02·0.5/√n per entry: about 1 % of the input's size in every output
    fc[:, -config.target_hidden_size :] += torch.eye(size, config.target_hidden_size)
    block, middle = target.block_weights(target.num_layers - 1), drafter.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = middle.self_attn[name].weight
        weight[:, :size] = 0.0
        weight[:, size:] = block[f"self_attn.{name}.weight"]
    middle.self_attn["o_proj"].weight.copy_(block["self_attn.o_proj.weight"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        middle.mlp[name].weight.copy_(block[f"mlp.{name}.weight"])
    middle.hidden_norm.weight.copy_(block["input_layernorm.weight"])
    middle.post_attention_layernorm.weight.copy_(block["post_attention_layernorm.weight"])
    drafter.norm.weight.copy_(0.5 * target.final_norm)
    drafter.lm_head.weight.copy_(target.head[drafter.draft_ids.to(target.head.device)])
