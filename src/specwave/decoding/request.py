"""What one call of the loop is to decode, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specwave.artifacts import UserError
from specwave.decoding.sampling import Sampling
from specwave.decoding.stops import Ends, check_stop
from specwave.target import Target

Prompts = Tensor | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Request:
    """`prompts` with their noise `keys`, a limit of new tokens for each, how tokens are drawn and what ends a row.
    `single`: the caller gave one prompt and wants flat lists."""

    prompts: list[list[int]]
    keys: list[int]
    single: bool
    limit: int
    sampling: Sampling
    ends: Ends
    batch_invariant: bool = False

    @property
    def longest(self) -> int:
        return max(len(prompt) for prompt in self.prompts)


def check_request(
    target: Target,
    input_ids: Prompts,
    max_new_tokens: int,
    sampling: Sampling,
    sequence_ids: Sequence[int] | None,
    eos_ids: Sequence[int] | None,
    stop: Sequence[str] | str | None,
    batch_invariant: bool = False,
) -> Request:
    """The arguments of `generate` as a request.

    Raises:
        UserError: no prompt or an empty one, ids outside the vocabulary, a limit below 1 or beyond the target's
            context, an empty stop string.
    """
    prompts, single = _prompts(input_ids)
    if max_new_tokens < 1:
        raise UserError("max_new_tokens", max_new_tokens, "must be at least 1")
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > target.max_length:
        rule = f"prompt ({longest} tokens) and new tokens must fit the target's {target.max_length} positions"
        raise UserError("max_new_tokens", max_new_tokens, rule)
    for prompt in prompts:
        if not all(isinstance(token, int) and 0 <= token < target.vocab_size for token in prompt):
            raise UserError("input_ids", prompt[:8], f"token ids are whole numbers 0 to {target.vocab_size - 1}")
    if sequence_ids is not None and len(sequence_ids) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts need as many sequence_ids, got {len(sequence_ids)}")
    keys = list(sequence_ids) if sequence_ids is not None else list(range(len(prompts)))
    ends = Ends(target.eos_ids if eos_ids is None else eos_ids, check_stop(stop), lambda: target.tokenizer)
    return Request(prompts, keys, single, max_new_tokens, sampling, ends, batch_invariant)


def _prompts(input_ids: Any) -> tuple[list[list[int]], bool]:
    rows = input_ids.tolist() if isinstance(input_ids, Tensor) else [*input_ids]
    rows = [row.tolist() if isinstance(row, Tensor) else row for row in rows]
    if not rows:
        raise UserError("input_ids", "[]", "a prompt of at least one token is needed")
    if not isinstance(rows[0], (list, tuple)):
        return [list(rows)], True
    prompts = [list(row) for row in rows]
    if not all(prompts):
        raise UserError("input_ids", "[]", "each prompt needs at least one token")
    return prompts, isinstance(input_ids, Tensor) and len(prompts) == 1
