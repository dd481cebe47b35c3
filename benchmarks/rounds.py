"""Does a round of self-speculation take what its parts take? The clock of each method against the sum of its parts.

    python benchmarks/rounds.py [--methods swift clasp …] [--questions 4] [--new-tokens 64] [--turns 3]

Every method decodes the same questions once watched: which forwards it asks for, over how many tokens and sub-layers,
which searches, heads, choices of tokens. Each kind of call is then repeated alone, in turn with the others, behind the
tokens that the middle one stood behind, and its median is counted as often as it was called ("alone"); and it is timed
where it is called ("in place"). What is left of the clock is what no part explains; the goal is within 10 %. Clock and
parts take turns. Kangaroo drafts with an adapter that has learned nothing, which takes as long. Draft & Verify's plan
is searched first (minutes once, noted in the cache). Quiet machine.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from specwave.artifacts import UserError
from specwave.benchmark import Benchmark
from specwave.data.conversations import prompt_ids
from specwave.decoding import generate, loop
from specwave.skipping import (
    AsdDecoding,
    ClaspDecoding,
    DelDecoding,
    DraftVerifyDecoding,
    KangarooDecoding,
    KnapSpecDecoding,
    LayerSkipDecoding,
    SwiftDecoding,
    clasp,
    del_,
    drafting,
    early_exit,
    planner,
    swift,
)
from specwave.skipping.adapter import Adapter, AdapterConfig, initialise
from specwave.skipping.exits import exit_block
from specwave.skipping.kangaroo import DoubleExit, Readings
from specwave.skipping.measure import medians
from specwave.skipping.options import Kangaroo
from specwave.target import Session, Target, load_target
from specwave.target.clock import wait
from specwave.target.sublayers import Trial

METHODS = {
    "draft_verify": DraftVerifyDecoding(),
    "swift": SwiftDecoding(),
    "clasp": ClaspDecoding(),
    "asd": AsdDecoding(),
    "layerskip": LayerSkipDecoding(),
    "kangaroo": KangarooDecoding(),
    "del": DelDecoding(),
    "knapspec": KnapSpecDecoding(plan_share=None),
}
KINDS = ("draft", "verify", "search", "head", "choice")
GOAL = 0.1
Key = tuple[Any, ...]  # a kind, then what its time depends on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    target = load_target(arguments.model, dtype=arguments.dtype)
    print(f"{target.name}, {target.dtype}, {target.device}, {torch.get_num_threads()} threads; ms per round")
    chosen = Benchmark().questions(limit=arguments.questions)
    prompts = [prompt_ids(target, [{"role": "user", "content": question.turns[0]}]) for question in chosen]
    print(f"{'':28} {'in place':^15} {'alone':^15}  in place")
    heads = f"{'parts':>8} {'ratio':>6}"
    print(f"{'method':<13} {'rounds':>6} {'clock':>8} {heads} {heads}  " + " ".join(f"{kind:>8}" for kind in KINDS))
    outside = []
    for name in arguments.methods:
        try:
            found = measure(target, name, prompts, arguments.new_tokens, arguments.turns)
        except UserError as error:
            print(f"{name:<13} {error}")
            continue
        both = zip((found.placed.total(), found.alone), found.ratios, strict=True)
        sums = " ".join(f"{1e3 * total:8.2f} {ratio:6.3f}" for total, ratio in both)
        shares = " ".join(f"{1e3 * found.placed[kind]:8.2f}" for kind in KINDS)
        print(f"{name:<13} {found.rounds:6} {1e3 * found.clock:8.2f} {sums}  {shares}")
        outside += [f"{name} ({how})" for how, ratio in zip(("in place", "alone"), found.ratios, strict=True)
                    if abs(ratio - 1) > GOAL]  # fmt: skip
    print(f"not within {GOAL:.0%} of their parts: {', '.join(outside) or 'none'}")


def build(target: Target, name: str) -> Any:
    """A proposer that has learned nothing yet."""
    if name != "kangaroo":
        return METHODS[name].build(target)
    block = exit_block(Kangaroo().exit, target.num_layers, "drafter.exit")
    adapter = Adapter(AdapterConfig.of_target(target.arch, block))
    initialise(adapter, target)
    return DoubleExit(target, adapter, KangarooDecoding())


class Measured(NamedTuple):
    """Seconds of a mean round: by the clock, of its parts by kind where they are called, and of all of them alone; and
    the clock over both sums, by turns."""

    rounds: int
    clock: float
    placed: Counter[str]
    alone: float
    ratios: tuple[float, float]


def measure(target: Target, name: str, prompts: Sequence[Sequence[int]], new_tokens: int, turns: int) -> Measured:
    """Watched once; then parts alone, in place and the clock, `turns` times: medians of each. A ratio is of neighbours,
    since machines drift. What a method does before it decodes is no part of a round."""

    def decode() -> float:
        proposer, seconds, rounds = build(target, name), 0.0, 0
        for prompt in prompts:
            made = generate(target, proposer, prompt, max_new_tokens=new_tokens, eos_ids=())
            seconds, rounds = seconds + made.seconds - made.prefill_seconds, rounds + made.rounds
        counts.append(rounds)
        return seconds

    def settle() -> None:
        wait(target)

    counts: list[int] = []
    with watched(settle) as seen:
        decode()
    middle = {key: again[len(again) // 2] for key, again in seen.calls.items()}
    alone, placed, clocked = [], [], [decode()]
    for _ in range(turns):
        with torch.inference_mode():
            taken = medians(middle, settle)
        alone.append(sum(len(calls) * taken[key] for key, calls in seen.calls.items()))
        with watched(settle) as timed:
            decode()
        placed.append(timed.seconds)
        clocked.append(decode())
    rounds = counts[0]
    if set(counts) != {rounds}:
        raise RuntimeError(f"{name} took {rounds} rounds at first, then {counts[1:]}")
    around = [(before + after) / 2 for before, after in pairwise(clocked)]
    sums = [once.total() for once in placed], alone
    return Measured(
        rounds,
        median(clocked) / rounds,
        Counter({kind: median(once[kind] for once in placed) / rounds for kind in KINDS}),
        median(alone) / rounds,
        (ratio_of(around, sums[0]), ratio_of(around, sums[1])),
    )


def ratio_of(clocks: Sequence[float], sums: Sequence[float]) -> float:
    return median(clock / parts for clock, parts in zip(clocks, sums, strict=True))


# ---------------------------------------------------------------- watching


class Seen(NamedTuple):
    """Calls of parts: by key, how to make each again; by kind, the seconds they took."""

    calls: dict[Key, list[Callable[[], Any]]]
    seconds: Counter[str]


@contextmanager
def watched(settle: Callable[[], None]) -> Iterator[Seen]:
    """While it lasts, notes every call of a part that is not within another part; `settle` waits for the device."""
    seen = Seen({}, Counter())
    inside: list[Key] = []
    originals = [(place, name, getattr(place, name)) for place, name, _, _ in PARTS]

    def noting(function: Any, key_of: Any, state_of: Any) -> Any:
        @wraps(function)
        def noted(*given: Any, **named: Any) -> Any:
            if inside:
                return function(*given, **named)
            key = key_of(*given, **named)
            if key[0] == "prompt":
                return function(*given, **named)
            restore = state_of(given[0])

            def again() -> None:
                restore()
                settled(function(*given, **named))

            seen.calls.setdefault(key, []).append(again)
            inside.append(key)
            settle()
            began = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                settle()
                seen.seconds[key[0]] += time.perf_counter() - began
                inside.pop()

        return noted

    try:
        for (place, name, function), (_, _, key_of, state_of) in zip(originals, PARTS, strict=True):
            setattr(place, name, noting(function, key_of, state_of))
        yield seen
    finally:
        for place, name, function in originals:
            setattr(place, name, function)
        inside.append(("over",))  # what was handed on while this lasted, as a search's sub-layers, notes nothing more


def settled(result: Any) -> None:
    """What decoding does with chosen tokens and probabilities: it looks at them."""
    for one in result if isinstance(result, tuple) else (result,):
        if isinstance(one, torch.Tensor) and one.numel() < 256:
            one.tolist()


def of_forward(session: Session, tokens: Any, *given: Any, **named: Any) -> Key:
    """Tokens, attentions and MLPs that run, the blocks between which, whether there are logits."""
    new = (named["hidden"] if tokens is None else tokens).shape[1]
    depth, plan = session.target.num_layers, named.get("plan")
    scored, start, end = named.get("logits", True), named.get("start_block", 0), named.get("end_block") or depth
    if not scored and end == depth:
        return ("prompt",)
    kept = (depth, depth) if plan is None else (sum(plan[::2]), sum(plan[1::2]))
    drafts = plan is not None or end < depth
    return "draft" if drafts else "verify", new, *kept, start, end, scored


def lengths_of(session: Session) -> Callable[[], None]:
    lengths = list(session.cache.lengths)
    return lambda: setattr(session.cache, "lengths", list(lengths))


def readings_of(readings: Readings) -> Callable[[], None]:
    """The adapter's cache, whose row is whose, and what waits to be read."""
    lengths, known, places = list(readings.cache.lengths), list(readings.known), dict(readings.places)
    waiting = {row: list(states) for row, states in readings.waiting.items()}

    def restore() -> None:
        readings.cache.lengths, readings.known, readings.places = list(lengths), list(known), dict(places)
        readings.waiting = {row: list(states) for row, states in waiting.items()}

    return restore


def nothing(_: Any) -> Callable[[], None]:
    """A part whose arguments are all there is to it."""
    return lambda: None


# Where a part is called, what its time depends on, and what it changes.
PARTS: tuple[tuple[Any, str, Callable[..., Key], Callable[[Any], Callable[[], None]]], ...] = (
    (Session, "forward", of_forward, lengths_of),
    (Readings, "read", lambda self, *_: ("head", sum(map(len, self.waiting[0]))), readings_of),
    (Target, "logits", lambda _, hidden: ("head", *hidden.shape), nothing),
    (Trial, "run", lambda _, sub_layer, hidden: ("search", sub_layer % 2, *hidden.shape), nothing),
    (clasp, "search", lambda run, states, *_, **__: ("search", len(states)), nothing),
    (planner, "search", lambda run, states, *_: ("search", len(states), len(states[0])), nothing),
    (swift, "most_hopeful", lambda tried, *_: ("search", len(tried)), nothing),
    *((place, "choose_coupled", lambda logits, *_: ("choice", "draft", *logits.shape), nothing)
      for place in (drafting, early_exit, del_)),
    *((place, "confidence", lambda scores, _: ("choice", "sure", *scores.shape), nothing)
      for place in (drafting, early_exit, del_)),
    (loop, "_accept", lambda drafted, *_: ("choice", "accept", drafted.tokens.shape[1]), nothing),
    (loop, "choose", lambda logits, *_: ("choice", "own", *logits.shape), nothing),
)  # fmt: skip


if __name__ == "__main__":
    main()
