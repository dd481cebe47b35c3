"""What a training run will need: bytes in each process and on disk, operations for a token. Arithmetic only.

B rows, T tokens of a row, t = B·T tokens of a process's step, n live slots (about the answers' tokens), S steps, K
drafters of P parameters each, W processes; D width and V vocabulary of the target, H, Q = n_q·hd, C = n_kv·hd, I
widths and V_d vocabulary of a drafter, k layers it reads, U all layers that are read. a bytes of an activation: 2 where
products are bf16, else 4; b bytes of a number of the target.

    target         b·parameters, and b·V·D more where a tied head is packed beside the embedding (CPU)
    weights        4·P; 2·P with DeepSpeed in bf16, and 1/W of it under ZeRO-3; 4·P and 1/W of it under FSDP
    gradients      as many; 1/W of it under ZeRO-3, and under ZeRO-2 for one drafter
    optimiser      8·P for the two moments, 4·P for float32 weights where the others are bf16; 1/W of it when cut up
    cast weights   2·P where autocast keeps bf16 copies
    states         b·t·D for each layer of U and block N−1, and for the embedding
    distributions  4·n·V_d, float32, shared by all drafters
    activations    of one drafter: per key k·D·a + (8·H + 2·C)·a; per slot and step what `per_slot` counts
    head           of one drafter: its gradient, made on the way forward, 4·V_d·H; and 16·V_d for each row of a chunk

A sum of what lives at the same time at the end of the last drafter's forward pass, which is where the peak is; the
target's own pass lies before it. Each of several drafters takes its gradients before the next one begins, so that of
activations and heads the largest counts; under ZeRO-3 and FSDP, where all share one backward pass, their sum does.
`test_preflight.py` holds it against measured peaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from specwave.eagle.drafter import DrafterConfig

CHUNK = {"cpu": 256, "cuda": 2048}  # rows of the head's loss taken at once, as in divergence.py


@dataclass(frozen=True)
class Plan:
    """What is to be trained, and how."""

    arch: Any  # an Arch
    drafters: Sequence[DrafterConfig]
    steps: int
    rows: int
    length: int
    answered: float = 1.0  # share of the tokens that are answers
    target_bytes: int = 2  # of a number of the target
    mixed: bool = True  # products in bf16
    checkpointing: bool = False
    zero: int = 0  # stage of DeepSpeed; 0: all is in every process
    offload: str = "none"  # none | optimizer | all
    sharded: bool = False  # FSDP: cut up between steps, whole within one
    processes: int = 1
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        """Of a step in one process, padding included."""
        return self.rows * self.length

    @property
    def slots(self) -> float:
        return self.tokens * self.answered

    @property
    def layers(self) -> int:
        """Block outputs that are kept of the target's pass."""
        return len({*chain.from_iterable(drafter.layers for drafter in self.drafters), self.arch.num_layers - 1})


def block_parameters(arch: Any) -> int:
    """Of one block of the target, norms included."""
    heads, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    own = arch.hidden_size * (2 * heads + 2 * kv + 3 * arch.intermediate_size + 2)
    return (
        own + 2 * arch.head_dim * arch.qk_norm + (heads + 2 * kv) * arch.qkv_bias + arch.hidden_size * arch.output_bias
    )


def target_parameters(arch: Any) -> int:
    """Of the whole target."""
    tables = 1 if arch.tie_embeddings else 2
    return tables * arch.vocab_size * arch.hidden_size + arch.num_layers * block_parameters(arch) + arch.hidden_size


def target_memory(arch: Any, number: int, device: str) -> int:
    """Bytes of the whole target, `number` for each of its numbers."""
    packed = arch.vocab_size * arch.hidden_size if device == "cpu" and arch.tie_embeddings else 0
    return number * (target_parameters(arch) + packed)


def target_operations(arch: Any, length: int, answered: float) -> float:
    """Floating-point operations of the target's pass for one token of a row of `length`, this share of them answers."""
    heads = arch.num_heads * arch.head_dim
    blocks = 2.0 * arch.num_layers * (block_parameters(arch) + heads * length)
    return blocks + 2.0 * arch.vocab_size * arch.hidden_size * answered


def drafter_parameters(config: DrafterConfig) -> int:
    """Of one drafter, the shared embedding not among them."""
    size, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    joined = len(config.layers) * config.target_hidden_size
    attention = 2 * size * (heads + 2 * kv) + heads * size
    norms = 4 * size + joined * (config.fc_norm or config.norm_before_fc)
    return joined * size + attention + 3 * size * config.intermediate_size + config.draft_vocab_size * size + norms


def per_slot(config: DrafterConfig, a: int) -> int:
    """Bytes that one slot keeps of one step for the backward pass.

    The embedding and its norm's two products; the state's norm: input and product in float32; z; q, k, v and what is
    attended; the second norm: input, product, output; gate, up, silu(gate) and their product; what is handed on,
    stacked, picked for the head, and its gradient there.
    """
    size, heads, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    wide = 4 if a < 4 else 0  # a float32 copy of what is narrower
    norms = size * ((a + 4) + (wide + 4) + (wide + 4 + a))
    return norms + a * (2 * size + 4 * heads + 2 * kv + 4 * config.intermediate_size + 4 * size)


def memory(plan: Plan) -> dict[str, int]:
    """Bytes in each process, by what they are for; the sum is the peak but for the libraries themselves."""
    arch, a = plan.arch, 2 if plan.mixed else 4
    parameters = sum(map(drafter_parameters, plan.drafters))
    narrow = 2 if plan.zero and plan.mixed else 4
    share = plan.processes if plan.zero or plan.sharded else 1
    own = 4 * parameters // plan.processes if plan.sharded else 0  # the own part beside what is whole
    weights = 0 if plan.offload == "all" else narrow * parameters // (share if plan.zero == 3 else 1)
    states = (8 if narrow == 4 else 12) * parameters // share
    activations, heads = [], []
    for config in plan.drafters:
        keys = a * (len(config.layers) * config.target_hidden_size + 8 * config.hidden_size)
        keys += 2 * a * config.num_kv_heads * config.head_dim
        kept = per_slot(config, a) * (1 if plan.checkpointing else plan.steps)
        kept += a * config.hidden_size * plan.steps * plan.checkpointing
        activations.append(plan.tokens * keys + plan.slots * kept)
        heads.append(4 * config.draft_vocab_size * config.hidden_size)
    together = sum if plan.zero == 3 or plan.sharded else max
    widest = max(config.draft_vocab_size for config in plan.drafters)
    rows = min(CHUNK[plan.device], int(plan.slots * plan.steps) or 1)
    return {
        "target": target_memory(arch, plan.target_bytes, plan.device),
        "weights": weights + own,
        "gradients": narrow * parameters // (share if plan.zero > (1 if len(plan.drafters) == 1 else 2) else 1) + own,
        "optimiser": states if plan.offload == "none" else 0,
        "cast weights": 2 * parameters if plan.mixed and not plan.zero else 0,
        "states": plan.target_bytes * plan.tokens * arch.hidden_size * (plan.layers + 1),
        "distributions": int(4 * plan.slots * widest),
        "activations": int(together(activations)),
        "head": int(together(heads)) + 16 * widest * rows,
    }


def disk(plan: Plan, export_bytes: int) -> dict[str, int]:
    """Bytes in the run's folder. A checkpoint is there twice while the new one replaces the old."""
    parameters = sum(map(drafter_parameters, plan.drafters))
    maps = sum(8 * config.draft_vocab_size + config.vocab_size for config in plan.drafters)
    checkpoint = (14 if plan.zero and plan.mixed else 12) * parameters
    return {"checkpoints": 2 * checkpoint, "drafters and last": 2 * (export_bytes * parameters + maps)}


def state_bytes(plan: Plan, kept: int, top_k: int | None = None) -> int:
    """Bytes of one token's states on disk (`states.mode=offline`); `kept` bytes of a number."""
    own = plan.layers if top_k is None else len({*chain.from_iterable(d.layers for d in plan.drafters)})
    return kept * plan.arch.hidden_size * own + 8 * (top_k or 0)


def operations(plan: Plan) -> tuple[float, float]:
    """Floating-point operations for one token: (the target's pass, all drafters forward and backward).

    A product of a weight is 2 for each of its numbers forward, 6 with backward; a slot's attention sees half a row.
    """
    drafted = 0.0
    for config in plan.drafters:
        size, own, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        once = len(config.layers) * config.target_hidden_size * size + 4 * size * kv
        each = 3 * size * own + 3 * size * config.intermediate_size + config.draft_vocab_size * size
        each += own * plan.length + 4 * size * kv
        drafted += 6.0 * (once + plan.steps * plan.answered * each) * (4 / 3 if plan.checkpointing else 1)
    return target_operations(plan.arch, plan.length, plan.answered), drafted
