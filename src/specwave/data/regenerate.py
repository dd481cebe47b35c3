"""On-policy data: answers that the target itself gives, through the decoding loop, in batches, cached on disk.

The cache is keyed by everything that decides an answer. Batches are fixed by the list of prompts and written whole, so
a killed run goes on at the batch it was in and ends with the same answers.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from specwave.artifacts import UserError, append_lines, cache_dir, drop_torn_line, filling_cache, read_jsonl, reading
from specwave.data.conversations import Sample
from specwave.data.locks import wait_for
from specwave.decoding import Sampling, generate
from specwave.target import Target


def answered(
    target: Target,
    prompts: Sequence[tuple[str, str, list[int]]],
    *,
    max_new_tokens: int,
    batch_size: int = 32,
    temperature: float = 0.0,
    seed: int = 0,
    label: str = "answers",
) -> list[Sample]:
    """The prompts (id, category, token ids) with the target's answers, in the order given.

    Prompts that leave no room for `max_new_tokens` in the target's context are passed over, with a warning.

    Raises:
        UserError: no prompt leaves room.
    """
    fitting = [prompt for prompt in prompts if len(prompt[2]) + max_new_tokens <= target.max_length]
    if len(fitting) < len(prompts):
        rule = f"{len(prompts) - len(fitting)} of {len(prompts)} prompts leave no room for so many tokens in the "
        rule += f"{target.max_length} positions of {target.name}"
        if not fitting:
            raise UserError("data.max_new_tokens", max_new_tokens, f"{rule}: lower it")
        warnings.warn(f"data.max_new_tokens={max_new_tokens}: {rule} and are passed over", stacklevel=2)
    path = answers_path(target, fitting, max_new_tokens, batch_size, temperature, seed if temperature else 0)
    order = batches([len(prompt[2]) for prompt in fitting], batch_size)
    with filling_cache():
        path.parent.mkdir(parents=True, exist_ok=True)
    with (
        filling_cache(),
        open(path, "a", encoding="utf-8") as stream,
        tqdm(total=len(fitting), desc=label, unit="prompt", disable=None) as bar,
    ):
        wait_for(stream)  # another process may be answering: a line it has half written is no torn one
        done = _read(path)
        for batch in order:
            if any(fitting[row][0] not in done for row in batch):
                prompted = [fitting[row] for row in batch]
                result = generate(
                    target,
                    None,
                    [ids for *_, ids in prompted],
                    max_new_tokens=max_new_tokens,
                    sampling=Sampling(temperature, seed),
                    sequence_ids=batch,
                )
                found = {name: out for (name, *_), out in zip(prompted, result.tokens, strict=True)}
                append_lines(stream, [{"id": name, "tokens": out} for name, out in found.items()])
                done |= found
            bar.update(len(batch))
    return [
        Sample(ids + done[name], [False] * len(ids) + [True] * len(done[name]), name, category)
        for name, category, ids in fitting
    ]


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Places of prompts of like length together, so that little is padded."""
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    return [order[start : start + size] for start in range(0, len(order), size)]


def answers_path(
    target: Target,
    prompts: Sequence[tuple[str, str, list[int]]],
    max_new_tokens: int,
    batch_size: int,
    temperature: float,
    seed: int,
) -> Path:
    """Where these answers are cached. dtype and batch size count: in bf16 they can turn a near-tie."""
    facts = [target.fingerprint, str(target.dtype), target.device.type, max_new_tokens, batch_size, temperature, seed]
    facts += [list(target.eos_ids)]  # no part of a fingerprint: generation_config.json may be edited
    key = hashlib.sha256(json.dumps([facts, [list(prompt) for prompt in prompts]]).encode()).hexdigest()[:24]
    return cache_dir() / "answers" / f"{target.name}-{key}.jsonl"


def _read(path: Path) -> dict[str, list[int]]:
    if not path.exists():
        return {}
    drop_torn_line(path)
    if path.stat().st_size == 0:
        return {}
    with reading("cache", path, "delete it: the answers are made again"):
        return {str(row["id"]): [int(token) for token in row["tokens"]] for _, row in read_jsonl(path, "cache")}
