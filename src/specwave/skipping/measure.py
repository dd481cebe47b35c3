"""Taking the times of the latency model on this device: once per target, dtype, device and number of threads.

Sub-layers are timed in their places, not alone: a step with all attentions and no MLP, one with all MLPs and no
attention, one with neither. So every sub-layer's weights come from memory, as they do when decoding, and what a step
costs beside its sub-layers is their difference to the last of the three, which is t_0.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specwave.artifacts import UserError, cache_dir
from specwave.skipping.knapsack import integer_weights
from specwave.skipping.latency import Latency, read_latency
from specwave.skipping.search import forced_ends, largest_batches, search
from specwave.target import Session, Target
from specwave.target.clock import device_facts, wait
from specwave.target.sublayers import Window

SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192)
_REPEAT = 5
_WINDOW = 5  # tokens of the search that is timed
_LEAST = 1e-9  # seconds: a difference of two medians may come out negative, where a sub-layer costs nearly nothing
_SCHEME = 1


def spread_contexts(max_length: int, sizes: Sequence[int] = SIZES) -> tuple[int, ...]:
    """The contexts measured by default: 128, 512, 2,048 and 8,192, none beyond what a forward over the largest size
    leaves of the target's positions."""
    room = max(1, max_length - max(sizes))
    return tuple(sorted({min(context, room) for context in CONTEXTS}))


def latency(
    target: Target,
    contexts: Sequence[int] | None = None,
    path: str | None = None,
    invariant: bool = False,
    again: bool = False,
) -> Latency:
    """The latency model of this target on this device: from `path`, the cache, or measured now (seconds) and noted.

    A poor fit warns, is recorded in the note, and is not used: measured medians are.

    Args:
        contexts: cached tokens to measure behind; by default `spread_contexts`.
        path: a latency file to use instead.
        invariant: of batch-invariant decoding.
        again: measure even where a note exists.

    Raises:
        UserError: contexts beyond the target's positions; a latency file of another device.
    """
    sizes = tuple(size for size in SIZES if size < target.max_length // 2) or (1,)
    facts = {**device_facts(target), "batch_invariant": invariant}
    if path is not None:
        return _warned(read_latency(path, facts))
    places = spread_contexts(target.max_length, sizes) if contexts is None else tuple(sorted(set(contexts)))
    room = target.max_length - max(sizes)
    if not places or places[0] < 1 or places[-1] > room:
        rule = f"contexts to measure are 1 to {room} tokens: {target.name} has {target.max_length} positions"
        raise UserError("decoding.contexts", list(contexts or places), f"{rule}, {max(sizes)} of them for new tokens")
    digest = hashlib.sha256(json.dumps([_SCHEME, facts, places, sizes]).encode()).hexdigest()[:16]
    note = cache_dir() / "latency" / f"{target.name}-{digest}.json"
    if not again and note.is_file():
        with contextlib.suppress(UserError):  # damaged: measured again
            return _warned(read_latency(note, facts))
    found = _measure(target, places, sizes, invariant, facts)
    with contextlib.suppress(OSError):
        found.save(note)
    return _warned(found)


def _warned(found: Latency) -> Latency:
    if found.poor is not None:
        warnings.warn(f"the latency model is not believed ({found.poor}): measured medians are used", stacklevel=3)
    return found


@torch.inference_mode()
def _measure(
    target: Target, contexts: Sequence[int], sizes: Sequence[int], invariant: bool, facts: dict[str, Any]
) -> Latency:
    blocks = target.num_layers
    attention, mlp, rest, forward, sessions = [], [], [], [], []
    for context in contexts:
        session = target.session(1, context + max(sizes), invariant)
        _fill(session, context)
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, target.vocab_size, (1, max(sizes)), generator=draw).to(target.device)
        plans = {"attention": [True, False] * blocks, "mlp": [False, True] * blocks, "rest": [False] * (2 * blocks)}
        jobs: dict[Any, Callable[[], Any]] = {
            name: partial(_step, session, tokens[:, :1], kept) for name, kept in plans.items()
        }
        for size in sizes:
            jobs[size] = partial(session.forward, tokens[:, :size])
        taken = medians(jobs, lambda: wait(target))
        rest.append(max(taken["rest"], _LEAST))
        attention.append(max((taken["attention"] - taken["rest"]) / blocks, _LEAST))
        mlp.append(max((taken["mlp"] - taken["rest"]) / blocks, _LEAST))
        forward.append(tuple(taken[size] for size in sizes))
        sessions.append(session)
    costs = Latency(
        contexts=tuple(contexts),
        attention=tuple(attention),
        mlp=tuple(mlp),
        rest=tuple(rest),
        sizes=tuple(sizes),
        forward=tuple(forward),
        search=(1.0,) * len(contexts),
        num_layers=blocks,
        facts=facts,
    )
    places = zip(sessions, contexts, strict=True)
    return replace(costs, search=tuple(_search_factor(session, costs, context) for session, context in places))


def _search_factor(session: Session, costs: Latency, context: int) -> float:
    """A search on made-up states, no branch pruned, over what the model takes it for: it copies and compares states,
    and its attention is no forward's."""
    target, length = session.target, min(_WINDOW, context)
    pair = integer_weights(costs.t_attention(context), costs.t_mlp(context))
    weights, forced = [*pair] * target.num_layers, forced_ends(target.num_layers)
    limit, trial = sum(weights) // 2, session.trial([Window(0, context - length, length)])
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(length, target.hidden_size, generator=draw).to(target.device, target.dtype)

    def job() -> None:
        _, final = search(trial.run, [states] * (len(weights) + 1), weights, limit, forced, prune=-1.0)
        target.logits(final)

    taken = medians({"search": job}, lambda: wait(target), repeat=1)
    tokens = [length * count for count in largest_batches(weights, limit, forced)]
    return taken["search"] / costs.t_search(tokens, tokens[-1], context)


def _step(session: Session, token: torch.Tensor, kept: list[bool]) -> None:
    """One draft step, to its end: the choice of a token, and how probable it was."""
    logits = session.forward(token, plan=kept).logits
    assert logits is not None
    logits[:, 0].softmax(-1).max(-1).values.tolist()


def _fill(session: Session, context: int) -> None:
    """`context` committed tokens of noise: what they are costs no time, but memory that was never written is read
    faster than real memory."""
    cache, arch = session.cache, session.arch
    draw = torch.Generator().manual_seed(0)
    for layer in range(arch.num_layers):
        noise = torch.randn(2, 1, context, arch.num_kv_heads, arch.head_dim, generator=draw)
        key, value = noise.to(session.target.device, session.target.dtype)
        cache.write(layer, key, value, 0)
    session.advance([context])


def medians(jobs: dict[Any, Callable[[], Any]], settle: Callable[[], None], repeat: int = _REPEAT) -> dict[Any, float]:
    """Median seconds of each job. Every round gives each its turn, so that a machine that slows down slows them all;
    two rounds warm up, since forwards are recorded when they are met for the second time."""
    taken: dict[Any, list[float]] = {name: [] for name in jobs}
    for turn in range(-2, repeat):
        for name, job in list(jobs.items())[:: 1 if turn % 2 else -1]:
            settle()
            began = time.perf_counter()
            job()
            settle()
            if turn >= 0:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in taken.items()}
