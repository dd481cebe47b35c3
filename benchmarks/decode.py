"""Speed of decoding, as ratios within one run: plain decoding against Hugging Face's generate, EAGLE-3 against plain.

    python benchmarks/decode.py [--checkpoint runs/demo/train/drafters/L2-15-27] [--questions 12] [--new-tokens 64]

Every method decodes the same first turns of the built-in benchmark; the order rotates from question to question, so
that a machine that slows down slows all of them. Quiet machine, medians over repetitions; prints a table and T(k).
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
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3, 4], help="chain lengths to try")
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

    def ours(proposer):
        return lambda ids: len(generate(target, proposer, ids, max_new_tokens=arguments.new_tokens).tokens)

    methods = {"Hugging Face generate": hugging_face, "specwave plain": ours(None)}
    if arguments.checkpoint:
        for levels in arguments.levels:
            methods[f"specwave eagle3, {levels} levels"] = ours(
                load_drafter(arguments.checkpoint, target, levels=levels)
            )
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
    print_row_cost(target)


def print_row_cost(target) -> None:
    """T(k): milliseconds of one forward over k tokens behind 256 cached ones."""
    session = target.session(1, 512)
    session.forward(torch.randint(0, target.vocab_size, (1, 256)), logits=None)
    session.advance([256])
    print("k tokens in one forward: " + ", ".join(f"{k}: {_median_ms(session, target, k):.1f} ms" for k in ROWS))


ROWS = (1, 2, 4, 8, 16, 32, 64)


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
