"""Speed of decoding, as ratios within one run: plain decoding against Hugging Face's generate, EAGLE-3 against plain.

    python benchmarks/decode.py [--checkpoint runs/demo/train/drafters/L2-15-27] [--questions 12] [--new-tokens 64]

Every method decodes the same first turns of the built-in benchmark; the order rotates from question to question, so
that a machine that slows down slows all of them. Quiet machine, medians over repetitions; prints a table, batches of
several prompts, T(k), a token behind up to 4,096 others, what batch-invariant decoding costs, and where the
milliseconds of a round go.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from specwave.benchmark import Benchmark
from specwave.data.conversations import prompt_ids
from specwave.decoding import generate
from specwave.eagle import load_drafter
from specwave.target import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--checkpoint", help="a drafter's folder; without it only plain decoding is measured")
    parser.add_argument("--levels", type=int, nargs="*", default=[1, 2, 3], help="chain lengths to try")
    parser.add_argument("--trees", type=int, nargs="*", default=[8, 30, 60], help="total_token of dynamic trees to try")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16], help="prompts decoded at once")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable_progress_bar()

    target = load_target(arguments.model, dtype=arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=target.dtype).eval()
    questions = Benchmark().questions(limit=arguments.questions)
    prompts = [prompt_ids(target, [{"role": "user", "content": question.turns[0]}]) for question in questions]

    def hugging_face(ids: list[int]) -> int:
        with torch.inference_mode():
            output = model.generate(torch.tensor([ids]), max_new_tokens=arguments.new_tokens, do_sample=False)
        return output.shape[1] - len(ids)

    def ours(proposer, invariant=False):
        def decode(ids: list[int]) -> int:
            made = generate(target, proposer, ids, max_new_tokens=arguments.new_tokens, batch_invariant=invariant)
            return len(made.tokens)

        return decode

    methods = {"Hugging Face generate": hugging_face, "plain": ours(None)}
    if target.dtype != torch.float32 and target.least_rows is not None:
        methods["plain, batch-invariant"] = ours(None, True)
    drafters = {}
    if arguments.checkpoint:
        for levels in arguments.levels:
            drafters[f"eagle3, chain of {levels}"] = load_drafter(arguments.checkpoint, target, levels=levels)
        for total in arguments.trees:
            levels = 3 if total < 20 else 6
            drafters[f"eagle3, tree of {total}"] = load_drafter(
                arguments.checkpoint, target, levels=levels, top_k=10, total_token=total
            )
        drafters["eagle3, auto"] = load_drafter(arguments.checkpoint, target, total_token="auto")
        print(f"auto: {drafters['eagle3, auto'].settings}")
    methods |= {name: ours(drafter) for name, drafter in drafters.items()}
    for method in methods.values():
        method(prompts[0])
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(arguments.repeat):
        spent, tokens = dict.fromkeys(methods, 0.0), dict.fromkeys(methods, 0)
        for number, ids in enumerate(prompts):
            names = list(methods)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                start = time.perf_counter()
                tokens[name] += methods[name](ids)
                spent[name] += time.perf_counter() - start
        for name in methods:
            rates[name].append(tokens[name] / spent[name])
    base = statistics.median(rates["Hugging Face generate"])
    print(f"{target.name}, {target.dtype}, {target.device}, {torch.get_num_threads()} threads")
    print(f"{'method':<28} {'tokens/s':>9} {'min':>7} {'max':>7} {'× HF':>6}")
    for name, found in rates.items():
        middle = statistics.median(found)
        print(f"{name:<28} {middle:9.1f} {min(found):7.1f} {max(found):7.1f} {middle / base:6.2f}")
    print_batches(target, drafters, prompts, arguments)
    print_row_cost(target)
    print_context_cost(target)
    print_round(target, drafters, prompts, arguments.new_tokens)


def print_batches(target, drafters, prompts, arguments) -> None:
    """Tokens per second of several prompts at once, plain and with the drafter chosen by the clock."""
    if not arguments.batches:
        return
    chosen = drafters.get("eagle3, auto")
    print(f"{'prompts at once':<16} {'plain':>9} {'eagle3':>9} {'ratio':>6}")
    for size in arguments.batches:
        batch = [prompts[place % len(prompts)] for place in range(size)]
        rates: dict[str, list[float]] = {"plain": [], "eagle3": []}
        for turn in range(arguments.repeat + 1):
            ways = [("plain", None)] + ([("eagle3", chosen)] if chosen is not None else [])
            for name, proposer in ways if turn % 2 else ways[::-1]:
                made = generate(target, proposer, batch, max_new_tokens=arguments.new_tokens)
                if turn:
                    rates[name].append(sum(map(len, made.tokens)) / made.seconds)
        plain = statistics.median(rates["plain"])
        line = f"{size:<16} {plain:9.1f}"
        if rates["eagle3"]:
            line += f" {(fast := statistics.median(rates['eagle3'])):9.1f} {fast / plain:6.2f}"
        print(line)


def print_round(target, drafters, prompts, new_tokens: int) -> None:
    """Where a round's milliseconds go: draft, the target's forward, what comes after it (accept, commit, roll back)."""
    parts = ("all", "draft", "forward", "accept")
    print(f"{'a round of':<22} " + " ".join(f"{part:>8}" for part in parts) + f" {'accept %':>9}   tokens")
    for name, proposer in {"plain": None, **drafters}.items():
        spent, rounds, tokens = dict.fromkeys(parts, 0.0), 0, 0
        for ids in prompts:
            made = generate(target, proposer, ids, max_new_tokens=new_tokens)
            spent["all"] += made.seconds - made.prefill_seconds
            spent["draft"] += made.draft_seconds
            spent["forward"] += made.verify_seconds - made.accept_seconds
            spent["accept"] += made.accept_seconds
            rounds += made.rounds
            tokens += len(made.tokens)
        times = " ".join(f"{1000 * seconds / rounds:8.2f}" for seconds in spent.values())
        share = 100 * spent["accept"] / spent["all"]
        print(f"{name:<22} {times} {share:9.1f}   {tokens / rounds:.2f}")


def print_row_cost(target) -> None:
    """T(k): milliseconds of one forward over k tokens behind 256 cached ones."""
    session = target.session(1, 512)
    session.forward(torch.randint(0, target.vocab_size, (1, 256)), logits=False)
    session.advance([256])
    print("k tokens in one forward: " + ", ".join(f"{k}: {_median_ms(session, target, k):.1f} ms" for k in ROWS))
    if target.dtype != torch.float32 and target.least_rows is not None:
        for context in (256, 2048):
            both = []
            for invariant in (False, True):
                session = target.session(1, context + 64, invariant)
                session.forward(torch.randint(0, target.vocab_size, (1, context)), logits=False)
                session.advance([context])
                both.append({k: _median_ms(session, target, k) for k in (1, 4, 16)})
            ratios = ", ".join(f"{k}: {both[1][k] / both[0][k]:.2f}×" for k in both[0])
            print(f"batch-invariant against not, behind {context} tokens: {ratios}")


def print_context_cost(target) -> None:
    """Milliseconds of a token behind a growing context, beside the straight line through them."""
    lengths = [length for length in CONTEXTS if length < target.max_length]
    if len(lengths) < 2:
        print(f"a token behind a growing context: {target.max_length} positions are too few for a line")
        return
    session, found = target.session(1, lengths[-1] + 1), []
    for done, length in zip([0, *lengths], lengths, strict=False):
        for _ in range(done, length, 256):
            session.forward(torch.randint(0, target.vocab_size, (1, 256)), logits=False)
            session.advance([256])
        found.append(_median_ms(session, target, 1))
    slope, base = statistics.linear_regression(lengths, found)
    off = max(abs(each / (base + slope * length) - 1) for length, each in zip(lengths, found, strict=True))
    times = ", ".join(f"{length}: {each:.1f} ms" for length, each in zip(lengths, found, strict=True))
    print(f"a token behind {times}; {base:.1f} ms + {1000 * slope:.2f} ms per 1,000 tokens, off by {100 * off:.0f} %")


ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 512, 1024, 1536, 2048, 3072, 4096)


def _median_ms(session, target, k: int) -> float:
    times = []
    for _ in range(15):
        tokens = torch.randint(0, target.vocab_size, (1, k))
        start = time.perf_counter()
        session.forward(tokens)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


if __name__ == "__main__":
    main()
