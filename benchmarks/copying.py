"""What copying costs, and what the bandits lose: the indexes' time and memory, a round's look-up, regret over time.

    python benchmarks/copying.py [--model smollm2_135m] [--questions 6] [--new-tokens 64]

Quiet machine. Prints four tables: microseconds and bytes a token of both indexes on texts of 1,024 to 32,768 tokens
(the package's own sources as the model tokenises them, random tokens, loops), the look-up's time behind them, the share
of a round that drafting takes in real decoding (SwitchSD's look-up with its probe too), and regret on seeded streams
against the bounds of the theorems.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging

import specwave
from specwave.benchmark import Benchmark
from specwave.copying import LastN, PldDecoding, SuffixAutomaton, SuffixDecoding
from specwave.copying.bandit import Exp3, Policy, Ucb
from specwave.copying.hindsight import Hindsight
from specwave.copying.lookup import Lookup
from specwave.copying.match import Index, continuation
from specwave.copying.switch import Probe, Switch
from specwave.data.conversations import prompt_ids
from specwave.decoding import generate
from specwave.target import Target, load_target

SIZES = (1_024, 4_096, 16_384, 32_768)
INDEXES: dict[str, Callable[[], Index]] = {
    "last 3 down to 1, first": lambda: LastN(3),
    "last 8 down to 1, recent": lambda: LastN(8, 1, "recent"),
    "automaton, first": lambda: SuffixAutomaton("first"),
    "automaton, recent": lambda: SuffixAutomaton("recent"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--questions", type=int, default=6, help="0 decodes nothing")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable_progress_bar()

    target = load_target(arguments.model, dtype=arguments.dtype)
    found = texts(target, max(SIZES))
    print_indexes(found, arguments.repeat)
    print_lookups(found)
    if arguments.questions:
        print_rounds(target, arguments.questions, arguments.new_tokens)
    print_regret()


def texts(target: Target, size: int) -> dict[str, list[int]]:
    """Texts of `size` tokens."""
    draw = random.Random(0)
    files = sorted(Path(specwave.__file__).parent.rglob("*.py"))
    code: list[int] = []
    for file in files:
        code += target.tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
        if len(code) >= size:
            break
    return {
        "Python sources": code[:size],
        "random tokens": [draw.randrange(target.vocab_size) for _ in range(size)],
        "a loop of 50": [draw.randrange(target.vocab_size)] + [place % 50 for place in range(size - 1)],
    }


def print_indexes(found: dict[str, list[int]], repeat: int) -> None:
    print("microseconds a token / bytes a token")
    print(f"{'index':<26} {'text':<16}" + "".join(f"{size:>15,}" for size in SIZES))
    for (name, make), (kind, text) in itertools.product(INDEXES.items(), found.items()):
        cells = []
        for size in SIZES:
            times = []
            for _ in range(repeat):
                index = make()
                start = time.perf_counter()
                index.extend(text[:size])
                times.append(time.perf_counter() - start)
            tracemalloc.start()
            index = make()
            index.extend(text[:size])
            held = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
            cells.append(f"{1e6 * statistics.median(times) / size:8.2f} /{held / size:5.0f}")
        print(f"{name:<26} {kind:<16}" + "".join(cells))


def print_lookups(found: dict[str, list[int]]) -> None:
    """A round's work: three committed tokens taken up, the match, ten tokens copied."""
    print("microseconds of a round's look-up: 3 tokens taken up, the match, 10 copied; median of 200")
    print(f"{'index':<26} {'text':<16}" + "".join(f"{size:>15,}" for size in SIZES))
    for (name, make), (kind, text) in itertools.product(INDEXES.items(), found.items()):
        cells = []
        for size in SIZES:
            index, times, at = make(), [], size - 600
            index.extend(text[:at])
            while at < size:
                start = time.perf_counter()
                index.extend(text[at : at + 3])
                match = index.find()
                if match is not None:
                    continuation(text, match.start, 10)
                times.append(time.perf_counter() - start)
                at += 3
            cells.append(f"{1e6 * statistics.median(times):15.1f}")
        print(f"{name:<26} {kind:<16}" + "".join(cells))


def print_rounds(target: Target, questions: int, new_tokens: int) -> None:
    prompts = [
        prompt_ids(target, [{"role": "user", "content": question.turns[0]}])
        for question in Benchmark().questions(limit=questions)
    ]
    print(f"{target.name}, {target.dtype}, {torch.get_num_threads()} threads: drafting's share of a round")
    methods = PldDecoding(), SuffixDecoding()
    proposers = {method.label: method.build(target) for method in methods}
    proposers["look-up and probe"] = probing(target)
    for name, proposer in proposers.items():
        generate(target, proposer, prompts[0], max_new_tokens=8)
        spent = whole = rounds = tokens = 0.0
        for ids in prompts:
            made = generate(target, proposer, ids, max_new_tokens=new_tokens)
            tallies = proposer.ledger.of(0).values()
            spent += sum(tally["draft_seconds"] for tally in tallies)
            whole += sum(tally["seconds"] for tally in tallies)
            rounds, tokens = rounds + made.rounds, tokens + len(made.tokens)
        print(
            f"{name:<18} {1e6 * spent / rounds:7.1f} µs of {1e3 * whole / rounds:6.2f} ms:"
            f" {100 * spent / whole:.2f} %; {tokens / rounds:.2f} tokens a round"
        )
    rounds = tokens = 0.0
    best = Hindsight({method.label: method.build(target) for method in methods})
    for ids in prompts:
        made = generate(target, best, ids, max_new_tokens=new_tokens)
        rounds, tokens = rounds + made.rounds, tokens + len(made.tokens)
    print(f"the better of them in every round, known afterwards: {tokens / rounds:.2f} tokens a round")


def probing(target: Target) -> Switch:
    """SwitchSD without a drafter and with a probe of random weights: it says anything, in the time of a trained one."""
    copy = Lookup(partial(LastN, 8, 1, "recent"), lambda _: 10)
    weights = torch.randn(target.hidden_size, generator=torch.Generator().manual_seed(0)).to(target.device)
    return Switch(copy, None, Probe(weights, "attention", target.num_layers // 2, 0.5))


def print_regret() -> None:
    """Means over ten seeds."""
    steps, seeds = (100, 1_000, 10_000), range(10)
    means = [0.4, 0.7, 0.5, 0.6]
    print("regret after so many pulls: mean of 10 seeds / the theorem's bound")
    print(f"{'policy, stream':<44}" + "".join(f"{pulls:>18,}" for pulls in steps))
    gaps = [max(means) - mean for mean in means if mean < max(means)]
    bounds = [sum(8 * math.log(n) / gap for gap in gaps) + (1 + math.pi**2 / 3) * sum(gaps) for n in steps]
    for c in (2.0, 0.1):
        name = f"UCB, c = {c}, four coins 0.4 to 0.7"
        ours = [_mean_regret(lambda n, seed, c=c: Ucb(4, c), means, None, n, seeds) for n in steps]
        _line(name, ours, bounds if c == 2.0 else None)
    arms = 4
    bounds = [2 * math.sqrt((math.e - 1) * n * arms * math.log(arms)) for n in steps]
    first, second = [0.1, 0.7, 0.1, 0.1], [0.5, 0.1, 0.1, 0.1]
    ours = [_mean_regret(_exp3, first, second, n, seeds) for n in steps]
    _line("EXP3, the best arm changes at 3/5", ours, bounds)


def _exp3(pulls: int, seed: int) -> Policy:
    return Exp3(4, min(1.0, math.sqrt(4 * math.log(4) / ((math.e - 1) * pulls))), seed)


def _mean_regret(
    make: Callable[[int, int], Policy], first: list[float], second: list[float] | None, pulls: int, seeds: range
) -> float:
    """Against the arm that was best in hindsight, its rewards drawn from `first`, and from `second` after 3/5."""
    total = 0.0
    for seed in seeds:
        draw, policy, gained, sums = random.Random(seed), make(pulls, seed), 0.0, [0.0] * len(first)
        for turn in range(pulls):
            means = first if second is None or turn < pulls * 3 // 5 else second
            rewards = [float(draw.random() < mean) for mean in means]
            arm = policy.choose()
            policy.update(arm, rewards[arm])
            gained += rewards[arm]
            sums = [old + new for old, new in zip(sums, rewards, strict=True)]
        total += max(sums) - gained
    return total / len(seeds)


def _line(name: str, ours: list[float], bounds: list[float] | None) -> None:
    cells = [f"{value:.0f}" + (f" / {bounds[place]:.0f}" if bounds else "") for place, value in enumerate(ours)]
    print(f"{name:<44}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
