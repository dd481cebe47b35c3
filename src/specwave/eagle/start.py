"""First weights of a drafter, seeded by its group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from specwave.data.conversations import builtin_calibration_prompts, user_prompt_ids
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter

_KEPT = 0.3  # of the target's own queries and keys, so that a slot's attention to itself is not drowned


def group_seed(seed: int, layers: Sequence[int]) -> int:
    """A seed of the group itself, so that a drafter starts alike alone or in any company."""
    digest = hashlib.sha256(f"{seed}:{','.join(map(str, sorted(layers)))}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


@torch.no_grad()
def initialise(drafter: Eagle3Drafter, target: Any, how: str, seed: int) -> None:
    """First weights, in place.

    `target`: the block is the target's last one, `lm_head` the target's rows, and `fc` near the identity on the last
    captured layer (1 % of noise on all of them). What it must learn first is to look at the token it has just read,
    which only attention can bring in, so every slot starts out attending to itself: the embedding halves of queries
    and keys are one random map per key head (a token's score with itself is 4·√d, with another about 0 ± 0.5·√d), the
    copied halves count less beside them, and the values' embedding half is random at 0.7 of the target's scale. Two
    norms are not the target's: the embedding's is 1, and the final one is halved, because the copied block is sure of
    x_{t+1} and is asked for x_{t+2}. On SmolLM2 this start reached a_0 = 0.298 where one blind to the embedding
    reached 0.273 (60,000 tokens, S = 2, one seed).

    Behind `fc_norm` or `norm_before_fc`, whose weights start as ones, `fc` gives the states back the size that the
    copied block expects. `norm_output` changes nothing: what later steps read is then small beside what the block adds
    to it, but learns as fast. Held-out loss on SmolLM2 (layers 2, 15, 27, S = 3, 80 of 120 steps, one seed): plain
    9.88; fc_norm 10.00, with the size in the norms' weights 10.11; norm_output 9.88, handing on states of the block's
    own size (`lm_head` scaled to match) 11.56, though that starts lower, 16.5 against 20.4.
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
    if config.fc_norm or config.norm_before_fc:
        fc.mul_(_normed_size(target, config))
    block, middle = target.block_weights(target.num_layers - 1), drafter.midlayer
    shared = torch.randn(config.num_kv_heads, 1, config.head_dim, size, generator=generator) * 2 / size**0.5
    for name, groups in (("q_proj", config.num_heads // config.num_kv_heads), ("k_proj", 1)):
        weight = middle.self_attn[name].weight
        weight[:, :size] = shared.expand(-1, groups, -1, -1).flatten(0, 2)
        weight[:, size:] = _KEPT * block[f"self_attn.{name}.weight"]
    weight, value = middle.self_attn["v_proj"].weight, block["self_attn.v_proj.weight"].float()
    weight[:, :size] = torch.randn(value.shape, generator=generator) * 0.7 * value.square().mean().sqrt()
    weight[:, size:] = value
    middle.self_attn["o_proj"].weight.copy_(block["self_attn.o_proj.weight"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        middle.mlp[name].weight.copy_(block[f"mlp.{name}.weight"])
    middle.hidden_norm.weight.copy_(block["input_layernorm.weight"])
    middle.post_attention_layernorm.weight.copy_(block["post_attention_layernorm.weight"])
    drafter.norm.weight.copy_(0.5 * target.final_norm)
    drafter.lm_head.weight.copy_(target.head[drafter.draft_ids.to(target.head.device)])


def _normed_size(target: Any, config: DrafterConfig) -> float:
    """What the norm in front of `fc` divides the last captured layer by: a root mean square, the median over the tokens
    of a few prompts (a mean would be that of the first token, ten times as large as the others)."""
    layers = config.layers if config.norm_before_fc else config.layers[-1:]
    sizes = []
    for _, _, ids in user_prompt_ids(target, builtin_calibration_prompts()[::13]):
        states = target.states(torch.tensor([ids], device=target.device), layers)
        sizes.append(torch.cat([states[layer][0].float() for layer in layers], -1).square().mean(-1).sqrt())
    return float(torch.cat(sizes).median())
