"""What a selection costs: the pass against a plain forward, the exhaustive search, the proxy, a cached job, memory.

    python benchmarks/selection.py [pass] [exhaustive] [proxy] [job] [memory]        # all five without arguments

pass: the built-in conversations through SmolLM2-135M with all layers, filter, block means and Grams, as a ratio to the
same forward with logits of every position and nothing kept; order-balanced, medians.
exhaustive: every set of 3 of 36 layers on 200 rows, one thread, against float64 throughout.
proxy: drafting steps of the built-in conversations of SmolLM2-135M, then every set of 3 of its 30 layers, by the
defaults of selector=proxy.
job: `select.py` on a cached pass, from the shell: all of it, and until its `main` begins.
memory: peak above the model of a pass over 200 conversations of 2,048 tokens at Qwen3-4B's shape (36 layers, 2,560
wide, 151,936 tokens); the states are random, the shapes real. In a process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from specwave.app.run import peak_memory
from specwave.data.conversations import Sample
from specwave.layers.calibrate import calibrate
from specwave.layers.groups import entropies
from specwave.layers.proxy import Proxy
from specwave.layers.ranking import Ranking
from specwave.layers.rows import Rows
from specwave.layers.settings import Calibration
from specwave.layers.steps import collect
from specwave.target import load_target

ROOT = Path(__file__).resolve().parents[1]


def measure_pass(repeat: int) -> None:
    target, settings = load_target("smollm2_135m"), Calibration()
    samples = sorted(settings.samples(target, settings.conversations()), key=lambda sample: len(sample.ids))

    @torch.inference_mode()
    def plain() -> None:
        for start in range(0, len(samples), settings.batch_size):
            batch = samples[start : start + settings.batch_size]
            ids = torch.zeros(len(batch), len(batch[-1].ids), dtype=torch.int64)
            for row, sample in enumerate(batch):
                ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
            last = target.states(ids, [target.num_layers - 1])[target.num_layers - 1]
            for row, sample in enumerate(batch):
                for part in last[row, : len(sample.ids)].split(256):
                    target.logits(part)

    ways = {
        "plain forward with logits": plain,
        "calibration, 1 setting": lambda: calibrate(target, samples, [Rows()], settings.batch_size),
        "calibration, 9 settings": lambda: calibrate(
            target,
            samples,
            [Rows(rho=rho, block_size=size) for rho in (0.1, 0.3, 1.0) for size in (8, 32, 64)],
            settings.batch_size,
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 1):  # the first warms up
        names = list(ways) if turn % 2 else list(ways)[::-1]
        for name in names:
            began = time.perf_counter()
            ways[name]()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    tokens = sum(len(sample.ids) for sample in samples)
    base = seconds["plain forward with logits"]
    print(f"pass: {len(samples)} conversations, {tokens} tokens, {torch.get_num_threads()} threads, {target.dtype}")
    for name, values in seconds.items():
        ratio = statistics.median(value / one for value, one in zip(values, base, strict=True))
        print(f"  {name:<28} {statistics.median(values):7.2f} s   {ratio:5.2f}×")


def measure_exhaustive() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    z = torch.randn(36, 200, 600, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = z * torch.logspace(0, -3, 600, dtype=torch.float64)  # spectra that fall, as those of hidden states do
    grams = z @ z.mT
    began = time.perf_counter()
    ranking = Ranking(grams, 3)
    best = ranking.top(10)[0]
    ours = time.perf_counter() - began
    began = time.perf_counter()
    exact = entropies(grams, ranking.sets)
    double = time.perf_counter() - began
    assert ranking.sets[exact.argmax()].tolist() == list(best.layers)
    print(f"exhaustive: {len(ranking):,} sets, 200 rows, one thread")
    print(f"  float32, then {int(ranking.exact.sum())} sets in float64   {ours:7.2f} s")
    print(f"  float64 throughout                  {double:7.2f} s")
    torch.set_num_threads(threads)


def measure_proxy() -> None:
    target, settings, proxy = load_target("smollm2_135m"), Calibration(), Proxy()
    samples = settings.samples(target, settings.conversations())
    began = time.perf_counter()
    steps = collect(target, samples, proxy.sampling(), settings.batch_size)
    collected = time.perf_counter() - began
    flat = torch.eye(2, dtype=torch.float64).expand(target.num_layers, 2, 2)  # entropies play no part in the ranking
    outcome = proxy.select(flat, steps)
    found = outcome.foretold
    assert found is not None
    print(f"proxy: {len(steps.tokens):,} steps, {len(found.sets):,} sets of 3, {torch.get_num_threads()} threads")
    print(f"  the pass over drafting steps        {collected:7.2f} s")
    print(f"  all sets compared, {len(found.known()):>3} scored whole  {found.seconds:7.2f} s")
    print(f"  Spearman's of both orders, {len(found.audited)} sets  {found.fidelity():7.2f}")


def measure_job(repeat: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "select.py")]
        subprocess.run([*command, f"hydra.run.dir={folder}/first"], check=True, capture_output=True)  # fills the cache
        ways = {
            "cached job": [],
            "cached job, analysis=none": ["analysis=none"],
            "until main begins": ["--probe"],
            "--help": ["--help"],
        }
        print("job: select.py on a cached pass, whole process")
        for place, (name, extra) in enumerate(ways.items()):
            values = []
            for turn in range(repeat):
                environment = dict(os.environ)
                arguments = [*extra, f"hydra.run.dir={folder}/{place}-{turn}"]
                if extra == ["--help"]:
                    arguments = extra
                line = [*command, *arguments]
                if extra == ["--probe"]:  # the same program, ended where `main` would begin
                    stop = "import os, specwave.app.select as s; s.main = lambda *a: os._exit(0)"
                    run = f"import sys; sys.argv[1:] = {arguments[1:]!r}; {stop}; from specwave.app.door import door"
                    line = [sys.executable, "-c", f"{run}; door('select')"]
                began = time.perf_counter()
                subprocess.run(line, check=True, capture_output=True, env=environment)
                values.append(time.perf_counter() - began)
            print(f"  {name:<28} {statistics.median(values):7.2f} s")


def measure_memory(prompts: int) -> None:
    """Stand-in for a target: states and logits of Qwen3-4B's shape, allocated anew for each batch as real ones are."""
    layers, width, vocabulary, length = 36, 2560, 151_936, 2048
    draw = torch.Generator().manual_seed(0)
    block = torch.randn(length, width, generator=draw).bfloat16()
    head = torch.randn(16, vocabulary, generator=draw).bfloat16()

    def states(ids, wanted):
        return {layer: block.expand(len(ids), -1, -1).roll(layer, 1).mul_(1 + layer) for layer in wanted}

    def logits(part):
        return head.repeat(-(-len(part) // 16), 1)[: len(part)].float()

    target = SimpleNamespace(
        num_layers=layers, hidden_size=width, vocab_size=vocabulary, dtype=torch.bfloat16,
        device=torch.device("cpu"), states=states, logits=logits,
    )  # fmt: skip
    sample = Sample(list(range(length)), [True] * length, "random", "")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    (found,) = calibrate(target, [sample] * prompts, [Rows()])
    above = peak_memory()["peak_memory_bytes"] - before
    print(f"memory: {prompts} conversations of {length} tokens, {layers} layers, {width} wide: {found.rows} rows")
    print(f"  peak above the model         {above / 2**30:7.2f} GiB   ({time.perf_counter() - began:.0f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=[], help="pass, exhaustive, proxy, job, memory")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=200, help="of the memory measurement")
    arguments = parser.parse_args()
    wanted = arguments.what or ["pass", "exhaustive", "proxy", "job", "memory"]
    if wanted == ["memory"]:
        measure_memory(arguments.prompts)
        return
    for name in wanted:
        if name == "pass":
            measure_pass(arguments.repeat)
        elif name == "exhaustive":
            measure_exhaustive()
        elif name == "proxy":
            measure_proxy()
        elif name == "job":
            measure_job(arguments.repeat)
        elif name == "memory":
            command = [sys.executable, __file__, "memory", "--prompts", str(arguments.prompts)]
            subprocess.run(command, check=True)
        else:
            parser.error(f"{name}: choose pass, exhaustive, proxy, job or memory")


if __name__ == "__main__":
    main()
