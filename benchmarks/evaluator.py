"""What evaluating costs beside decoding: per answer, per report, and what a second process is worth.

    python benchmarks/evaluator.py [overhead] [report] [devices]        # all three without arguments

overhead: the wall time of a set of questions, warm-up apart, less the wall times of its turns: templates, tokenising,
text, Lightning's loop, writing each answer to disk. Goal: at most 1 %.
report: `evaluate.py report=[…]` over result folders of 480 questions each, made by rule: the command from its start to
its end, on the clock and in seconds of CPU. Goal: 20 folders in 5 s.
devices: the same questions answered by one process and by two that share them, each on one thread, and by one on all
threads. From the first question's start to the last one's end; loading is not in it. Goal: two halve one, within 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from specwave.app.door import prepare_environment

ROOT = Path(__file__).resolve().parents[1]


def measure_overhead(arguments: argparse.Namespace) -> None:
    from specwave.benchmark import Benchmark
    from specwave.benchmark.answering import Answerer, Method
    from specwave.benchmark.answers import AnswerFile
    from specwave.benchmark.evaluator import Evaluator, predict
    from specwave.decoding import Sampling
    from specwave.target import load_target

    target = load_target(arguments.model)
    questions = Benchmark().questions(arguments.questions)
    answerer = Answerer(target, arguments.new_tokens, Sampling())
    with tempfile.TemporaryDirectory() as folder:
        answers = AnswerFile(Path(folder), {})
        method = Method("plain", "autoregressive", None, answers)
        answerer.warm_up(method)
        answerer.warm_up = lambda _: None  # type: ignore[method-assign] # done: the clock starts now
        start = time.perf_counter()
        predict(Evaluator(answerer, [method], questions))
        wall = time.perf_counter() - start
    decoding = sum(sum(choice["wall_time"]) for row in answers.rows for choice in row["choices"])
    each = 1000 * (wall - decoding) / len(questions)
    print(
        f"overhead: {len(questions)} questions of {arguments.model} in {wall:.2f} s, {wall - decoding:.3f} s of it "
        f"outside decoding: {100 * (wall - decoding) / wall:.2f} %, {each:.1f} ms a question"
    )


# ---------------------------------------------------------------- report


def measure_report(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        folders = [str(_result(Path(folder) / f"run{number}", number)) for number in range(arguments.folders)]
        keys = [f"report=[{','.join(folders)}]", f"hydra.run.dir={folder}/report"]
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, str(ROOT / "evaluate.py"), *keys], check=True, stdout=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        size = (Path(folder) / "report" / "report.html").stat().st_size
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"report: {arguments.folders} folders of 480 questions in {seconds:.2f} s, imports included, {busy:.2f} s of "
        f"them on a CPU ({size >> 10} KiB)"
    )


def _result(folder: Path, number: int) -> Path:
    """A run folder with one result: 480 questions of 13 categories, rounds drawn by chance."""
    from specwave.benchmark.questions import CATEGORIES
    from specwave.benchmark.results import Baseline, build_results, save_results

    draw = random.Random(number)
    rows, plain = [], []
    for place in range(480):
        lengths = [draw.randint(1, 6) for _ in range(30)]
        rows.append(_row(place, CATEGORIES[place % 13], lengths, [6] * 30, 0.02 * len(lengths)))
        plain.append(_row(place, CATEGORIES[place % 13], [1] * 100, [0] * 100, 2.0))
    settings = {
        "target": "target",
        "fingerprint": "f",
        "sampling": {"temperature": float(number % 2)},
        "decoding": {"name": "eagle3", "levels": 6, "top_k": 10, "total_token": (30, 60)[number // 2 % 2]},
        "benchmark": {"fingerprint": "g"},
    }
    layers = sorted(draw.sample(range(30), 3))
    content = build_results(
        label=f"L{'-'.join(map(str, layers))}",
        method="eagle3",
        rows=rows,
        baseline=Baseline(plain),
        verdicts=None,
        divergences=[],
        settings=settings,
        layers=layers,
    )
    save_results(folder, content)
    return folder


def _row(number: int, category: str, lengths: list[int], levels: list[int], seconds: float) -> dict:
    choice = {
        "index": 0,
        "turns": [""],
        "decoding_steps": [len(lengths)],
        "new_tokens": [sum(lengths)],
        "wall_time": [seconds],
        "accept_lengths": lengths,
    }
    shares = {"prefill": 0.1, "draft": 0.2, "verify": 0.6, "accept": 0.05}
    own = {f"{name}_seconds": [share * seconds] for name, share in shares.items()} | {"draft_levels": levels}
    return {"question_id": number, "category": category, "choices": [choice], "specwave": own}


# ---------------------------------------------------------------- devices


def measure_devices(arguments: argparse.Namespace) -> None:
    ways = {"one process": (1, 1), "two processes": (2, 1), "one on all threads": (1, os.cpu_count() or 1)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(arguments.repeat):  # the order rotates
        for name in names[turn % 3 :] + names[: turn % 3]:
            devices, threads = ways[name]
            found[name].append(_answered(arguments, devices, threads * devices))
    one = min(found["one process"])
    for name, seconds in found.items():
        print(f"devices: {name} {min(seconds):.2f} s, {min(seconds) / one:.3f} of one process on one thread")


def _answered(arguments: argparse.Namespace, devices: int, threads: int) -> float:
    """Seconds from the first question's start to the last one's end; `threads` in all."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [
            f"model={arguments.model}",
            f"limit={arguments.questions}",
            f"max_new_tokens={arguments.new_tokens}",
            f"devices={devices}",
            f"hydra.run.dir={folder}",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([sys.executable, str(ROOT / "evaluate.py"), *keys], check=True, env=environment, stdout=-3)
        rows = [json.loads(line) for line in (Path(folder) / "answers.jsonl").read_text().splitlines()]
    starts = [row["tstamp"] - sum(row["choices"][0]["wall_time"]) for row in rows]
    return max(row["tstamp"] for row in rows) - min(starts)


def main(argv: Sequence[str] | None = None) -> None:
    measures = {"overhead": measure_overhead, "report": measure_report, "devices": measure_devices}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*measures, []], default=[])
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--questions", type=int, default=26)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--folders", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args(argv)
    prepare_environment()
    for part in arguments.parts or measures:
        measures[part](arguments)


if __name__ == "__main__":
    main()
