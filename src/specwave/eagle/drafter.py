"""The EAGLE-3 drafter: one decoder block that reads the target's hidden states.

B rows, T positions, H hidden width, d width of a head, V_d draft vocabulary. Heads stand before positions: BHTd.

One step: `z = cat(input_layernorm(embedding), hidden_norm(h))`, `h += attention(z)`, `h += mlp(h)`; the state handed on
is that h, before the final norm. The first h is `fc` of the captured layers. Parameter names are those the serving
engines load; `embed_tokens` is the target's and handed in.

Three switches, all off in EAGLE-3; the first two are EAGLE-3.1 (arXiv 2605.09992):

    fc_norm          an RMSNorm of its own for each captured layer, then fc: layers count alike whatever their size
    norm_output      the state handed on is h after the final norm, which lm_head reads too: h keeps its size at depth
    norm_before_fc   one RMSNorm over all captured layers joined, `input_norm`, then fc; excludes fc_norm

Knows nothing about where keys come from: `attend` decides, so that unrolled training and decoding with a cache share
this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specwave.artifacts import UserError
from specwave.eagle.vocab import draft_ids
from specwave.target.rope import inverse_frequencies, rotate

SWITCHES = ("fc_norm", "norm_output", "norm_before_fc")  # names of options, of config fields and of the engines' keys
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # rotated q [B,H,T,d], rotated k and v [B,K,T,d] → [B,H,T,d]


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a drafter; `layers` are block outputs of the target, ascending."""

    layers: tuple[int, ...]
    target_hidden_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_eps: float
    max_length: int
    rope: dict[str, Any]  # rope_type, rope_theta and the parameters of the scaling, whole
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise UserError("drafter.norm_before_fc", "true", "excludes drafter.fc_norm: set one of the two to false")
        if self.norm_before_fc and len(self.layers) == 1 and self.hidden_size == self.target_hidden_size:
            remedy = f"SGLang serves one layer ({self.layers[0]}) as two, and one norm over two is another function"
            remedy += ": set drafter.fc_norm=true in its place, which is the same for one layer"
            raise UserError("drafter.norm_before_fc", "true", remedy)

    @property
    def switches(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in SWITCHES}

    @classmethod
    def of_target(cls, arch: Any, layers: Sequence[int], draft_vocab_size: int, **switches: bool) -> DrafterConfig:
        """A drafter as wide as its target: the embedding is shared. `switches`: of `SWITCHES`, those that are on."""
        if not 1 <= draft_vocab_size <= arch.vocab_size:
            raise UserError("drafter.draft_vocab_size", draft_vocab_size, f"must be 1 to {arch.vocab_size}")
        return cls(
            layers=tuple(sorted(layers)),
            target_hidden_size=arch.hidden_size,
            hidden_size=arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            intermediate_size=arch.intermediate_size,
            vocab_size=arch.vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_eps=arch.rms_eps,
            max_length=arch.max_length,
            rope=dict(arch.rope),
            **switches,
        )


class Norm(nn.Module):
    """RMSNorm, computed in float32 at least, returned in the dtype of x."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Eagle3Drafter(nn.Module):
    """See the head of this file. `d2t`, `t2d`: the vocabulary map (vocab.py)."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig, d2t: Tensor | None = None, t2d: Tensor | None = None):
        super().__init__()
        self.config = config
        size, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        captured, count = config.target_hidden_size, len(config.layers)
        self.fc = _linear(count * captured, size)
        self.fc_norm: Any = nn.ModuleList(Norm(captured, config.rms_eps) for _ in range(count if config.fc_norm else 0))
        self.input_norm = Norm(count * captured, config.rms_eps) if config.norm_before_fc else nn.Identity()
        block = nn.Module()
        block.hidden_norm = Norm(size, config.rms_eps)
        block.input_layernorm = Norm(size, config.rms_eps)
        block.post_attention_layernorm = Norm(size, config.rms_eps)
        block.self_attn = nn.ModuleDict(
            {
                "q_proj": _linear(2 * size, heads),
                "k_proj": _linear(2 * size, kv),
                "v_proj": _linear(2 * size, kv),
                "o_proj": _linear(heads, size),
            }
        )
        block.mlp = nn.ModuleDict(
            {
                "gate_proj": _linear(size, config.intermediate_size),
                "up_proj": _linear(size, config.intermediate_size),
                "down_proj": _linear(config.intermediate_size, size),
            }
        )
        self.midlayer: Any = block
        self.norm = Norm(size, config.rms_eps)
        self.lm_head = _linear(size, config.draft_vocab_size)
        none = torch.zeros(config.draft_vocab_size, dtype=torch.int64), torch.zeros(config.vocab_size, dtype=torch.bool)
        self.register_buffer("d2t", none[0] if d2t is None else d2t.clone())
        self.register_buffer("t2d", none[1] if t2d is None else t2d.clone())
        # No buffer: `.to(torch.bfloat16)` would round the angles.
        self.frequency = inverse_frequencies(config.head_dim, config.rope)

    # ---------------------------------------------------------------- one step, in parts

    def fuse(self, states: Tensor | Sequence[Tensor]) -> Tensor:
        """The first h [.., H] from the captured layers, ascending, each [.., H_t] (or their concatenation)."""
        joined = self.input_norm(self._enter(states if isinstance(states, Tensor) else torch.cat(list(states), -1)))
        if self.config.fc_norm:
            parts = joined.chunk(len(self.fc_norm), -1)
            joined = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(joined)

    def rotary(self, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Tables for `rotate`, [B, 1, T, d] float32 (float64 in a float64 drafter)."""
        if self.frequency.device != positions_BT.device:
            self.frequency = self.frequency.to(positions_BT.device)
        angle = positions_BT[:, None, :, None] * self.frequency.to(torch.promote_types(self.dtype, torch.float32))
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def mix(self, embedding_BTD: Tensor, hidden_BTD: Tensor) -> Tensor:
        """z [B, T, 2H]: what attention reads; the embedding comes first."""
        block = self.midlayer
        return torch.cat([block.input_layernorm(self._enter(embedding_BTD)), block.hidden_norm(hidden_BTD)], -1)

    def queries(self, z: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self._heads(self.midlayer.self_attn["q_proj"](z)), *rotary).to(z.dtype)

    def keys_values(self, z: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        attention = self.midlayer.self_attn
        key = rotate(self._heads(attention["k_proj"](z)), *rotary).to(z.dtype)
        return key, self._heads(attention["v_proj"](z))

    def attention_inputs(self, z: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q and k, and v."""
        return self.queries(z, rotary), *self.keys_values(z, rotary)

    def gated(self, x: Tensor) -> Tensor:
        """What the MLP's down-projection reads."""
        mlp = self.midlayer.mlp
        return F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x)

    def finish(self, hidden_BTD: Tensor, attended_BHTd: Tensor) -> Tensor:
        """The block behind attention, both residual branches: the state handed on."""
        block = self.midlayer
        hidden = hidden_BTD + block.self_attn["o_proj"](attended_BHTd.transpose(1, 2).flatten(2))
        x = block.post_attention_layernorm(hidden)
        hidden = hidden + block.mlp["down_proj"](self.gated(x))
        return self.norm(hidden) if self.config.norm_output else hidden

    def forward_step(self, embedding_BTD: Tensor, hidden_BTD: Tensor, attend: Attend, positions_BT: Tensor) -> Tensor:
        """One step of the drafter: the state handed on, [B, T, H].

        Args:
            embedding_BTD: the target's embedding of the input tokens (the token *after* the hidden state's).
            hidden_BTD: `fuse` of the target's states, or what the step before handed on.
            attend: gets the rotated q and k and the v of this step, returns the attended values per head.
            positions_BT: for the rotary embedding, int64.
        """
        z, rotary = self.mix(embedding_BTD, hidden_BTD), self.rotary(positions_BT)
        return self.finish(hidden_BTD, attend(*self.attention_inputs(z, rotary)))

    def logits(self, hidden: Tensor) -> Tensor:
        """The state handed on [.., H] → [.., V_d]."""
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft ids, [V_d]."""
        return draft_ids(self.d2t)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _enter(self, x: Tensor) -> Tensor:
        """Tensors of the target take the drafter's dtype, unless autocast is about to choose one."""
        return x if torch.is_autocast_enabled(x.device.type) else x.to(self.dtype)
