"""`decoding.total_token=auto`: how much this drafter should draft for this target on this device.

Watches the drafter with a large tree on a few built-in prompts, times its levels, reads T(k) from the target's clock
and takes what `decoding.tune` says is fastest. Noted in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specwave.artifacts import cache_dir, write_json
from specwave.data.conversations import builtin_calibration_prompts, user_prompt_ids
from specwave.data.sources import spread
from specwave.decoding import generate
from specwave.decoding.protocol import Verdict
from specwave.decoding.tune import Choice, Round, choose
from specwave.eagle.proposer import Eagle3
from specwave.target import Target
from specwave.target.clock import Clock, clock

if TYPE_CHECKING:
    from specwave.eagle.drafter import Eagle3Drafter

LEVELS, TOP_K = 8, 10  # the largest tree that is considered
SIZES = (3, 4, 5, 6, 7, 9, 11, 13, 15, 19, 23, 27, 31, 39, 47, 55, 63)  # drafts; with the root mostly even numbers
_WIDE, _WIDE_CPU = 63, 31  # drafts watched at once: a CPU pays for every token of a forward
_PROMPTS, _TOKENS = 6, 48
_SCHEME = 1


class _Watched(Eagle3):
    """Keeps what became of every tree."""

    def __init__(self, drafter: Eagle3Drafter, target: Target, levels: int, top_k: int, drafts: int | None):
        super().__init__(drafter, target, levels, top_k=top_k, total_token=None if drafts is None else drafts + 1)
        self.rounds: list[Round] = []

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        super().observe(verdicts)
        self.rounds += [Round.of(verdict) for verdict in verdicts if len(verdict.tree)]


def tune(drafter: Eagle3Drafter, target: Target, name: str, invariant: bool = False) -> list[Choice]:
    """The choices by expected tokens per second, best first.

    Args:
        name: of the drafter, for the note's file name.
        invariant: of batch-invariant decoding, whose forwards take another time.
    """
    digest = hashlib.sha256()
    for weight in drafter.state_dict().values():
        digest.update(weight.detach().float().cpu().flatten()[:4096].numpy().tobytes())
    times = clock(target, invariant=invariant)
    facts = [_SCHEME, target.fingerprint, str(target.dtype), digest.hexdigest(), times.sizes, times.seconds]
    facts += ["batch_invariant"] * invariant
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    path = cache_dir() / "tuned" / f"{name}-{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # a damaged note is made again
        noted = [Choice(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["choices"]]
        if any(map(_drafts, noted)):
            return noted
    found = _tune(drafter, target, times, invariant)
    with contextlib.suppress(OSError):
        write_json(path, {"choices": [asdict(choice) for choice in found], "clock": asdict(times)})
    return found


def _tune(drafter: Eagle3Drafter, target: Target, times: Clock, invariant: bool) -> list[Choice]:
    decode = partial(generate, batch_invariant=invariant)
    every = [ids for _, _, ids in user_prompt_ids(target, builtin_calibration_prompts())]
    room = max(2, min(target.max_length, drafter.config.max_length) // 2)
    prompts = spread([ids for ids in every if len(ids) <= room] or [every[0][:room]], _PROMPTS)
    limit = min(_TOKENS, room)
    wide = _WIDE_CPU if target.device.type == "cpu" else _WIDE
    vocabulary = drafter.config.draft_vocab_size
    top_k = min(TOP_K, vocabulary)
    watched = _Watched(drafter, target, LEVELS, top_k, None if top_k == 1 else wide)
    decode(target, watched, prompts, max_new_tokens=limit)

    def level_time(chain: bool) -> tuple[float, float, float]:
        """(seconds of a round's first level, of each further one, of a round outside draft and forward)."""
        taken, outside = {}, 0.0
        for levels in (1, 4):
            own = _Watched(drafter, target, levels, 1 if chain else top_k, None if chain or top_k == 1 else 9)
            decode(target, own, prompts[0], max_new_tokens=min(8, limit))  # warms up
            made = decode(target, own, prompts[0], max_new_tokens=min(24, limit))
            taken[levels] = made.draft_seconds / made.rounds
            tokens = 1 + max((len(one.depths) for one in own.rounds), default=0)
            outside = max(0.0, made.verify_seconds / made.rounds - times(tokens))
        each = max(0.0, (taken[4] - taken[1]) / 3)
        return taken[1], each, outside

    costs = {chain: level_time(chain) for chain in (True, False)}

    def draft(levels: int, chain: bool) -> float:
        first, each, _ = costs[chain]
        return first + (levels - 1) * each

    overhead = min(cost[2] for cost in costs.values())
    sizes = [size for size in SIZES if size <= wide and top_k > 1]
    return choose(watched.rounds, times, draft, sizes, LEVELS, overhead)


def _drafts(choice: Choice) -> bool:
    """Whether it is a way to draft, and one that could have been found."""
    if not 0 < choice.seconds < float("inf") or not 1 <= choice.tokens <= LEVELS + 1:
        raise ValueError(f"no choice of ours: {choice}")
    return 1 <= choice.levels <= LEVELS and choice.drafts in (SIZES if not choice.chain else range(1, LEVELS + 1))


def tuned_settings(path: Path | str, drafter: Eagle3Drafter, target: Target, invariant: bool = False) -> dict[str, Any]:
    """`levels`, `top_k` and `total_token` of the fastest way to draft, even where plain decoding is faster still."""
    with torch.inference_mode():
        best = next(filter(_drafts, tune(drafter, target, Path(path).name, invariant)))
    if best.chain:
        return {"levels": best.levels, "top_k": 1, "total_token": None}
    return {"levels": best.levels, "top_k": min(TOP_K, drafter.config.draft_vocab_size), "total_token": best.drafts + 1}
