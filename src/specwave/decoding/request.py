"""What one call of the loop is to decode, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specwave.artifacts import UserError
from specwave.decoding.arguments import whole, wholes
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
            context, not a noise key for every prompt, an empty stop string, what is no whole number.
    """
    known = f"token ids are whole numbers 0 to {target.vocab_size - 1}"
    prompts, single = _prompts(input_ids, known)
    max_new_tokens = whole("max_new_tokens", max_new_tokens, "must be a whole number, at least 1")
    if max_new_tokens < 1:
        raise UserError("max_new_tokens", max_new_tokens, "must be at least 1")
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > target.max_length:
        rule = f"prompt ({longest} tokens) and new tokens must fit the target's {target.max_length} positions"
        if target.arch.window == target.max_length:
            rule += f": {target.name}'s attention slides over so many ({target.arch.family}, sliding_window)"
        raise UserError("max_new_tokens", max_new_tokens, rule)
    for prompt in prompts:
        if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
            raise UserError("input_ids", prompt[:8], known)
    keys = list(range(len(prompts))) if sequence_ids is None else noise_keys(sequence_ids)
    if len(keys) != len(prompts):
        raise UserError("sequence_ids", f"{len(keys)} ids", f"there are {len(prompts)} prompts: one for each")
    ends = Ends(target.eos_ids if eos_ids is None else eos_ids, check_stop(stop), lambda: target.tokenizer)
    return Request(prompts, keys, single, max_new_tokens, sampling, ends, batch_invariant)


def noise_keys(sequence_ids: Any) -> list[int]:
    """`sequence_ids` as 64-bit numbers."""
    remedy = "noise keys are whole numbers of 64 bits"
    keys = wholes("sequence_ids", sequence_ids, remedy)
    for key in keys:
        if not -(1 << 63) <= key < 1 << 63:
            raise UserError("sequence_ids", key, remedy)
    return keys


def _prompts(input_ids: Any, known: str) -> tuple[list[list[int]], bool]:
    """Lists, tuples, tensors and arrays of ids, or of rows of them; `known` says what an id is."""
    array = hasattr(input_ids, "tolist")
    given = input_ids.tolist() if array else input_ids
    if not isinstance(given, Iterable):
        raise UserError("input_ids", given, "give a prompt's ids, or several prompts'")
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in given]
    if not rows:
        raise UserError("input_ids", "[]", "a prompt of at least one token is needed")
    if not isinstance(rows[0], (list, tuple)):
        return [[whole("input_ids", token, known) for token in rows]], True
    if not all(isinstance(row, (list, tuple)) for row in rows):
        raise UserError("input_ids", rows[:8], "give a prompt's ids, or several prompts', not both")
    if not all(rows):
        raise UserError("input_ids", "[]", "each prompt needs at least one token")
    return [[whole("input_ids", token, known) for token in row] for row in rows], array and len(rows) == 1
