"""What training an adapter will need: bytes of its one process and on disk, operations for a token. Arithmetic only.

B rows, T tokens of a row, t = B·T tokens of a step, n live slots (about the answers' tokens), P parameters of the
adapter; D width and V vocabulary of the target, H, C widths of all its heads and of its key/value heads. a bytes of an
activation: 2 where products are bf16, else 4; b bytes of a number of the target.

    weights        4·P, as many gradients, 8·P for the optimiser's two moments
    cast weights   2·P where autocast keeps bf16 copies
    states         b·t·D for the exit, block N−1 and the embedding
    activations    per token: the exit's state in float32, two norms' products, what is added up; q, k, v as projected
                   and turned, k and v once more as wide as all heads, which grouped attention spreads them to, and
                   what is attended, twice
    head           4·D for each slot of the adapter's state, the target's, and the gradient, made on the way forward; of
                   a chunk's rows (b + 16)·V: both sides' scores and distributions, and their difference

A sum of what lives at the same time at the end of the forward pass. `test_preflight.py` holds it against a measured
peak. What the target takes itself is counted elsewhere: it is the same for everything that is taught by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from specwave.skipping.adapter import AdapterConfig
from specwave.skipping.distil import CHUNK


@dataclass(frozen=True)
class AdapterPlan:
    """What is to be trained, and how; always in one process."""

    arch: Any  # an Arch
    adapter: AdapterConfig
    rows: int
    length: int
    answered: float = 1.0  # share of the tokens that are answers
    target_bytes: int = 2  # of a number of the target
    mixed: bool = True  # products in bf16
    device: str = "cuda"

    processes: ClassVar[int] = 1
    zero: ClassVar[int] = 0
    sharded: ClassVar[bool] = False

    @property
    def tokens(self) -> int:
        """Of a step, padding included."""
        return self.rows * self.length


def widths(config: AdapterConfig) -> tuple[int, int]:
    """(H, C)."""
    return config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim


def adapter_parameters(config: AdapterConfig) -> int:
    heads, kv = widths(config)
    return config.hidden_size * (2 * heads + 2 * kv + 2)


def memory(plan: AdapterPlan) -> dict[str, int]:
    """Bytes by what they are for, beside the target; the sum is the peak but for the libraries themselves."""
    config, a = plan.adapter, 2 if plan.mixed else 4
    size, parameters, slots = config.hidden_size, adapter_parameters(config), plan.tokens * plan.answered
    heads, kv = widths(config)
    norms = size * (4 + (4 + a) + 4 + 4)
    return {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "optimiser": 8 * parameters,
        "cast weights": 2 * parameters if plan.mixed else 0,
        "states": 3 * plan.target_bytes * plan.tokens * size,
        "activations": plan.tokens * (norms + a * (2 * (heads + 2 * kv) + 4 * heads)),
        "head": int(12 * slots * size) + (plan.target_bytes + 16) * config.vocab_size * min(CHUNK, int(slots) or 1),
    }


def disk(plan: AdapterPlan, export_bytes: int) -> dict[str, int]:
    """Bytes in the run's folder. A checkpoint is there twice while the new one replaces the old."""
    parameters = adapter_parameters(plan.adapter)
    return {"checkpoints": 24 * parameters, "drafters and last": 2 * export_bytes * parameters}


def state_bytes(plan: AdapterPlan, kept: int, top_k: int | None = None) -> int:
    """Bytes of one token's states on disk (`states.mode=offline`): of the exit, and of block N−1 or its top k logits;
    `kept` bytes of a number."""
    return kept * plan.adapter.hidden_size * (2 if top_k is None else 1) + 8 * (top_k or 0)


def operations(plan: AdapterPlan) -> float:
    """Floating-point operations for one token, forward and backward, beside the target's pass. A product of a weight is
    2 for each of its numbers forward, 6 with backward, with the frozen head 4; a slot's attention sees half a row."""
    config = plan.adapter
    own = adapter_parameters(config) + widths(config)[0] * plan.length
    return 6.0 * own + 4.0 * plan.answered * config.vocab_size * config.hidden_size
