"""What training costs: one drafter's step, eight behind one pass, captured states, two processes, memory by length.

    python benchmarks/training.py [speed] [joint] [capture] [processes] [memory]        # all five without arguments

speed: tokens/s of forward and backward of one drafter at SmolLM2-135M's shape (random states, 4,096 draft tokens, two
rows of 512, the first quarter prompt), three ways: `used`; `whole`, the same with all scores of attention and all
logits kept; `loops`, the plain loops that the tests hold it against. In float32, and in bf16 autocast where the CPU
multiplies it. Order-balanced, medians.
joint: a step of eight drafters behind one pass of the target, against that pass and the eight drafters each timed
alone, and against eight single runs. Real target, random tokens.
capture: the target's pass that hands out three layers and the last one, against one that hands out the last one.
processes: `train.py` with four rows a step, in one process on one thread and in two of DDP on a thread each that share
the rows; tokens of a second of training steps, in turns, the best of each.
memory: peak above what stands before the step, at a tiny width, each length and way in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import yaml

from specwave.app.preflight import cpu_bf16
from specwave.app.run import peak_memory
from specwave.eagle.attention import attend_merged
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.gradients import take
from specwave.eagle.loss import ttt_loss
from specwave.eagle.reference import ttt_loss_reference
from specwave.eagle.targets import TargetBatch, read_target
from specwave.eagle.vocab import build_vocab_map
from specwave.target import load_target

ROOT = Path(__file__).parents[1]
LAYERS = (2, 15, 27)
EIGHT = ((2, 15, 27), (29,), (1, 14, 26), (0, 10, 20), (5, 17, 29), (9, 19, 28), (4, 12, 24), (3, 15, 29))

SHORT = ["model=smollm2_135m", "groups=[[2,15,27]]", "data.limit=48", "data.validation=4", "data.max_new_tokens=96"]
SHORT += ["drafter.steps=3", "trainer.max_steps=12", "trainer.save_every=99", "trainer.validate_every=99"]
SHORT += ["trainer.decode=0"]


def dense_attention(query, key0, value0, own, last, chunks):
    """`merged_attention` with all scores of a document at once."""
    parts = []
    for first in dict.fromkeys(c for _, _, c, _ in chunks):
        mine = [chunk for chunk in chunks if chunk[2] == first]
        a, b, d = mine[0][0], mine[-1][1], mine[-1][3]
        visible = torch.arange(first, d, device=last.device) <= last[a:b, None]
        pairs = [(key[None, :, a:b], value[None, :, a:b]) for key, value in own]
        past = (key0[None, :, first:d], value0[None, :, first:d])
        parts.append(attend_merged(query[None, :, a:b], *past, pairs, visible[None])[0])
    return torch.cat(parts, 1)


def whole_logits(logits, head, hidden, target, mass, row, weight, loss):
    """`chunked_loss` (soft cross-entropy) with all logits at once, by autograd."""
    scores = logits(hidden)
    losses = torch.logsumexp(scores, -1) - (target[row] * scores).sum(-1)
    return (weight * losses).sum(), losses.detach(), scores.argmax(-1)


def whole(drafter: Eagle3Drafter, batch: TargetBatch, steps: int):
    with (
        mock.patch("specwave.eagle.loss.merged_attention", dense_attention),
        mock.patch("specwave.eagle.loss.chunked_loss", whole_logits),
    ):
        return ttt_loss(drafter, batch, steps)


class Synthetic:
    """A drafter and random tensors to hold it against."""

    def __init__(self, rows: int, length: int, width: int, heads: int, kv: int, middle: int, vocab: int, draft: int):
        torch.manual_seed(0)
        config = DrafterConfig(
            layers=LAYERS,
            target_hidden_size=width,
            hidden_size=width,
            num_heads=heads,
            num_kv_heads=kv,
            head_dim=width // heads,
            intermediate_size=middle,
            vocab_size=vocab,
            draft_vocab_size=draft,
            rms_eps=1e-5,
            max_length=length,
            rope={"rope_type": "default", "rope_theta": 1e5},
        )
        self.drafter = Eagle3Drafter(config, *build_vocab_map(torch.randint(0, 5, (vocab,)), draft))
        self.ids = torch.randint(0, vocab, (rows, length))
        self.answer = torch.zeros(rows, length, dtype=torch.bool)
        self.answer[:, length // 4 :] = True
        self.states = {layer: torch.randn(rows, length, width) for layer in LAYERS}
        self.last, self.embedding = torch.randn(rows, length, width), torch.randn(vocab, width)
        self.head = torch.randn(vocab, width) * width**-0.5
        names, marks = self.drafter.draft_ids, self.drafter.t2d
        given = (self.ids, self.answer, self.states, self.last, self.embedding, self.logits, names, marks)
        self.batch = read_target(*given)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T

    def loops(self, drafter: Eagle3Drafter, batch: TargetBatch, steps: int):
        return ttt_loss_reference(
            drafter, self.ids, self.answer, self.states, self.embedding, self.logits(self.last), steps
        )


def seconds(ways: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Medians; the order rotates from turn to turn, so that a machine that slows down slows all of them."""
    for run in ways.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(repeat):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            ways[name]()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def learn(drafter: Eagle3Drafter, outcome) -> None:
    drafter.zero_grad()
    outcome.loss.backward()


def measure_speed(arguments) -> None:
    case = Synthetic(2, 512, 576, 9, 3, 1536, 8192, 4096)
    tokens = case.ids.numel()
    print(f"one drafter's step, {torch.get_num_threads()} threads: tokens/s (ratio to `used`)")
    ways = {"used": ttt_loss, "whole": whole} | ({"loops": case.loops} if arguments.loops else {})
    for mixed, steps in itertools.product([False, True] if cpu_bf16() else [False], (3, 7)):

        def step(way, steps=steps, mixed=mixed) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):  # as trainer.precision=bf16-mixed
                outcome = way(case.drafter, case.batch, steps)
            learn(case.drafter, outcome)

        found = seconds({name: partial(step, way) for name, way in ways.items()}, arguments.repeat)
        rates = (f"{name} {tokens / took:.0f} ({found['used'] / took:.3f})" for name, took in found.items())
        print(f"  {'bf16-mixed' if mixed else 'float32'}, {steps} steps: " + ", ".join(rates), flush=True)


def measure_joint(arguments) -> None:
    target = load_target("smollm2_135m", dtype=arguments.dtype)
    torch.manual_seed(0)
    counts, ids = torch.randint(0, 5, (target.vocab_size,)), torch.randint(0, target.vocab_size, (2, 512))
    answer = torch.zeros_like(ids, dtype=torch.bool)
    answer[:, 128:] = True
    drafters = [
        Eagle3Drafter(DrafterConfig.of_target(target.arch, layers, 4096), *build_vocab_map(counts, 4096))
        for layers in EIGHT
    ]
    last = target.num_layers - 1
    union = sorted({last}.union(*EIGHT))

    def read(layers=union) -> TargetBatch:
        states = target.states(ids, layers)
        names, marks = drafters[0].draft_ids, drafters[0].t2d
        return read_target(ids, answer, states, states[last], target.embedding, target.logits, names, marks)

    def joint() -> None:
        batch, losses = read(), []
        for drafter in drafters:  # as training does: the gradients of one before the graph of the next
            drafter.zero_grad()
            losses.append(take(ttt_loss(drafter, batch, 3).loss, list(drafter.parameters())))
        torch.stack(losses).sum().backward()

    batch = read()
    own = {str(d.config.layers): lambda d=d: learn(d, ttt_loss(d, batch, 3)) for d in drafters}
    found = seconds({"pass": read, "joint": joint} | own, arguments.repeat)
    alone = sum(found[name] for name in own)
    print(f"a step of eight drafters, 3 steps unrolled, 2 rows of 512, {target.dtype} target")
    print(f"  target's pass {found['pass']:.2f} s, the drafters alone {alone:.2f} s, together {found['joint']:.2f} s")
    print(f"  together / (pass + drafters): {found['joint'] / (found['pass'] + alone):.3f}")
    print(f"  eight single runs / together: {(8 * found['pass'] + alone) / found['joint']:.2f}")


def measure_capture(arguments) -> None:
    target = load_target("smollm2_135m", dtype=arguments.dtype)
    ids, last = torch.randint(0, target.vocab_size, (2, 512)), target.num_layers - 1
    ways = {
        "three layers and the last": lambda: target.states(ids, [*LAYERS, last]),
        "the last": lambda: target.states(ids, [last]),
    }
    captured, plain = seconds(ways, 2 * arguments.repeat + 1).values()
    print(f"a pass over 2 rows of 512 that captures, against one that does not: {captured / plain:.3f}")


def measure_processes(arguments) -> None:
    ways = {"one process": ["trainer=cpu", "data.batch_size=4"], "two of DDP": ["trainer=ddp", "data.batch_size=2"]}
    ways["two of DDP"] += ["trainer.accelerator=cpu", "trainer.devices=2"]
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2):
            for name, own in list(ways.items())[:: 1 - 2 * turn]:
                run = Path(folder) / f"{turn}-{name.replace(' ', '-')}"
                command = [sys.executable, str(ROOT / "train.py"), *own, *SHORT, f"hydra.run.dir={run}"]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                record = yaml.safe_load((run / "run.yaml").read_text(encoding="utf-8"))
                rates[name].append(record["tokens"] / record["training_seconds"])
    one, two = (max(found) for found in rates.values())
    print("training steps of one drafter, 3 steps unrolled, 4 rows a step, a thread for each process: tokens/s")
    print(f"  one process {one:.0f}, two of DDP {two:.0f}; two / one: {two / one:.3f}")


def measure_memory(arguments) -> None:
    lengths = (512, 1024, 2048, 4096, 8192)
    print("peak of a step of 3, one row, 64 wide, 4 heads, 512 draft tokens, above what stands before it, MiB")
    print(f"  {'tokens':<14}" + "".join(f"{length:>8}" for length in lengths))
    for way in ("used", "checkpointing", "whole"):
        line = f"  {way:<14}"
        for length in lengths:
            command = [sys.executable, __file__, "memory", "--way", way, "--length", str(length)]
            made = subprocess.run(command, capture_output=True, text=True, check=True)
            line += f"{float(made.stdout):8.1f}"
        print(line, flush=True)


def peak_of(way: str, length: int) -> float:
    """MiB of one step in this process above what stood before it; a short step before that loads the libraries."""
    for size in (64, length):
        case = Synthetic(1, size, 64, 4, 2, 128, 1024, 512)
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what there is now
        before = peak_memory()["peak_memory_bytes"]
        if way == "whole":
            outcome = whole(case.drafter, case.batch, 3)
        else:
            outcome = ttt_loss(case.drafter, case.batch, 3, checkpointing=way == "checkpointing")
        learn(case.drafter, outcome)
    return (peak_memory()["peak_memory_bytes"] - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = {"speed": measure_speed, "joint": measure_joint, "capture": measure_capture}
    kinds |= {"processes": measure_processes, "memory": measure_memory}
    parser.add_argument("kinds", nargs="*", help=f"{', '.join(kinds)}; all without")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="of the target")
    parser.add_argument("--loops", action="store_true", help="time the plain loops too: minutes")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(peak_of(arguments.way, arguments.length))
        return
    for kind in arguments.kinds or kinds:
        if kind not in kinds:
            parser.error(f"{kind}: choose {', '.join(kinds)}")
        kinds[kind](arguments)


if __name__ == "__main__":
    main()
