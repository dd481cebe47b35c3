"""Our decoding beside its peers, on this machine's CPU: Hugging Face generate, economize and vLLM, greedy, one prompt.

    python benchmarks/peers/run.py [--checkpoint runs/demo/train/drafters/L2-15-27] [--questions 12] [--repeat 5]

Every peer decodes the same token ids in a process of its own, in the environment it needs (made on first use from the
requirements file beside this one). Drafts a round are searched for every method that drafts, on the same grid and the
same prompts, which are not those measured. Then repetition by repetition and question by question every method decodes
in an order that rotates, while the other processes wait. Quiet machine; a peer that cannot run becomes a row that says
why.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import torch
from table import Method, best, cut, markdown, raw, rotate
from tqdm import tqdm
from venvs import interpreter
from wire import NGRAM, PeerError, Worker

from specwave.artifacts import UserError, write_json, write_text
from specwave.benchmark import Benchmark, Question
from specwave.benchmark.questions import choose
from specwave.benchmark.settings import device_name
from specwave.data.conversations import prompt_ids
from specwave.eagle.export import check_target, read_drafter
from specwave.target import Target, load_target

HERE = Path(__file__).resolve().parent
GRID = (1, 2, 3, 4, 6, 8, 12)  # drafts a round
TUNING = 4  # prompts that the search decodes
WARM_UP = 8  # tokens decoded before a method is timed

SCRIPTS = {"hf": "hf.py", "economize": "peer_economize.py", "vllm": "peer_vllm.py", "ours": "ours.py"}
FIXED = ("vllm",)  # drafts a round are settled when it loads: a process for each number


def methods_of(peers: Sequence[str], checkpoint: str | None) -> list[Method]:
    found = [
        Method("hf", "generate", "Hugging Face generate"),
        Method("hf", "lookup", "Hugging Face, prompt lookup", searched=True),
        Method("economize", "plain", "economize, plain"),
        Method("economize", "lookup", "economize, prompt lookup", searched=True),
        Method("economize", "eagle3", "economize, EAGLE-3 chain", searched=True),
        Method("vllm", "plain", "vLLM, plain"),
        Method("vllm", "lookup", "vLLM, prompt lookup", searched=True),
        Method("vllm", "eagle3", "vLLM, EAGLE-3 chain", searched=True),
        Method("ours", "plain", "specwave, plain"),
        Method("ours", "eagle3", "specwave, EAGLE-3 chain", searched=True),
        Method("ours", "auto", "specwave, EAGLE-3 auto"),
    ]
    drafted = () if checkpoint else ("eagle3", "auto")
    return [method for method in found if method.peer in peers and method.name not in drafted]


class Crew:
    """The peers' processes, each started when it is first asked for something."""

    def __init__(self, venvs: Path, threads: int, settings: dict[str, Any]):
        self.venvs, self.settings = venvs, settings
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.workers: dict[tuple[Any, ...], Worker] = {}
        self.versions: dict[str, dict[str, str]] = {}

    def decode(
        self, method: Method, drafts: int, ids: list[int], new_tokens: int
    ) -> tuple[list[int], float, float] | None:
        """(new tokens, seconds, processor seconds), or None: the method cannot run, and says why from now on."""
        if method.failure:
            return None
        try:
            tokens, seconds, cpu = self._worker(method, drafts).decode(method.name, drafts, ids, new_tokens)
        except PeerError as error:
            method.failure = " ".join(str(error).split())[:160]
            return None
        return cut(tokens, self.settings["eos"], new_tokens), seconds, cpu

    def _worker(self, method: Method, drafts: int) -> Worker:
        key = self._key(method, drafts)
        if key not in self.workers:
            python = interpreter(method.peer, self.venvs)
            settings = {**self.settings, "method": method.name, "drafts": drafts}
            command = [str(python), str(HERE / SCRIPTS[method.peer])]
            self.workers[key] = Worker(command, self.environment, self.venvs / f"{method.peer}.log", settings)
            self.versions[method.peer] = self.workers[key].versions
        return self.workers[key]

    def _key(self, method: Method, drafts: int) -> tuple[Any, ...]:
        return (method.peer, method.name, drafts) if method.peer in FIXED else (method.peer,)

    def dismiss(self, method: Method, drafts: int) -> None:
        """Ends a process that serves only these drafts."""
        if method.peer in FIXED and (worker := self.workers.pop(self._key(method, drafts), None)) is not None:
            worker.close()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def tune(crew: Crew, methods: Sequence[Method], prompts: Sequence[list[int]], new_tokens: int) -> None:
    """Sets the drafts a round of every method that drafts; starts and warms up all of them."""
    steps = sum(len(GRID) if method.searched else 1 for method in methods)
    with tqdm(total=steps, desc="search", disable=None) as progress:
        for method in methods:
            for drafts in GRID if method.searched else (0,):
                crew.decode(method, drafts, prompts[0], WARM_UP)
                if method.searched:
                    answers = [crew.decode(method, drafts, ids, new_tokens) for ids in prompts]
                    if not method.failure:
                        made = [answer for answer in answers if answer is not None]
                        method.search[drafts] = sum(len(one[0]) for one in made) / sum(one[1] for one in made)
                    crew.dismiss(method, drafts)
                progress.update()
            if method.search and not method.failure:
                method.drafts = best(method.search)
                crew.decode(method, method.drafts, prompts[0], WARM_UP)
                rates = ", ".join(f"{drafts}: {rate:.1f}" for drafts, rate in method.search.items())
                tqdm.write(f"{method.label}: {method.drafts} drafts a round (tokens/s at {rates})")


def measure(crew: Crew, methods: Sequence[Method], prompts: Sequence[list[int]], new_tokens: int, repeat: int) -> None:
    with tqdm(total=repeat * len(prompts) * len(methods), desc="measure", disable=None) as progress:
        for repetition in range(repeat):
            for method in methods:
                method.tokens.append([])
                method.seconds.append([])
                method.cpu_seconds.append([])
            for number, ids in enumerate(prompts):
                for method in rotate(methods, repetition * len(prompts) + number):
                    answer = crew.decode(method, method.drafts, ids, new_tokens)
                    if answer is not None:
                        method.tokens[-1].append(answer[0])
                        method.seconds[-1].append(answer[1])
                        method.cpu_seconds[-1].append(answer[2])
                    progress.update()


def prompts_of(target: Target, options: argparse.Namespace) -> tuple[list[Question], list[list[int]], list[list[int]]]:
    """(questions, their prompts, the search's prompts): first turns, spread over the categories."""
    questions = Benchmark(options.benchmark).questions()
    measured = choose(questions, options.questions)
    rest = [question for question in questions if question not in measured]
    if len(measured) < options.questions or len(rest) < TUNING:
        remedy = f"the benchmark has {len(questions)} questions, {TUNING} of which the search takes: ask for fewer"
        raise UserError("--questions", options.questions, remedy)
    asked, searched = (
        [prompt_ids(target, [{"role": "user", "content": question.turns[0]}]) for question in some]
        for some in (measured, choose(rest, TUNING))
    )
    longest = max(map(len, asked + searched))
    if longest + options.new_tokens > target.max_length:
        remedy = f"the longest prompt has {longest} tokens, the model room for {target.max_length}: ask for fewer"
        raise UserError("--new-tokens", options.new_tokens, remedy)
    return measured, asked, searched


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m", help="name of a conf/model file, hub id or folder")
    parser.add_argument("--dtype", default="auto", help="auto: what load_target takes on this CPU")
    parser.add_argument("--checkpoint", help="a drafter's folder; without it EAGLE-3 is left out")
    parser.add_argument("--benchmark", help="a question file of Spec-Bench's schema instead of the built-in benchmark")
    parser.add_argument("--questions", type=positive, default=12, help="first turns, spread over the categories")
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--repeat", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--peers", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), help="hf always runs")
    parser.add_argument("--venvs", type=Path, default=Path("runs/peers"), help="the peers' environments and logs")
    parser.add_argument("--out", type=Path, help="raw numbers, a .json file; the table goes beside it as .md")
    options = parser.parse_args()
    options.out = options.out or options.venvs / "table.json"
    if options.out.suffix != ".json":
        parser.error(f"--out must end with .json, got {options.out}")
    return options


def main() -> None:
    options = arguments()
    target = load_target(options.model, options.dtype, "cpu")
    if options.checkpoint:
        config, _, card = read_drafter(options.checkpoint)
        check_target(config, card, target)
        options.checkpoint = str(Path(options.checkpoint).resolve())
    questions, prompts, search = prompts_of(target, options)
    settings = {
        "folder": str(target.folder),
        "dtype": str(target.dtype).removeprefix("torch."),
        "eos": list(target.eos_ids),
        "checkpoint": options.checkpoint,
        "threads": options.threads,
        "room": max(map(len, prompts + search)) + options.new_tokens,  # tokens of the longest prompt and its answer
    }
    title = (
        f"{target.name}, {settings['dtype']}, {device_name(torch.device('cpu'))}, {options.threads} threads: "
        f"{len(prompts)} questions × {options.new_tokens} tokens, medians of {options.repeat} repetitions"
    )
    del target
    try:
        options.venvs.mkdir(parents=True, exist_ok=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--venvs and --out", f"{options.venvs}, {options.out}", f"{error.strerror}") from None
    methods = methods_of({"hf", *options.peers}, options.checkpoint)
    print(f"search: {TUNING} other prompts × {options.new_tokens} tokens at {', '.join(map(str, GRID))} drafts a round")
    with closing(Crew(options.venvs.resolve(), options.threads, settings)) as crew:
        tune(crew, methods, search, options.new_tokens)
        measure(crew, methods, prompts, options.new_tokens, options.repeat)
    own = next((method for method in methods if (method.peer, method.name) == ("ours", "plain")), None)
    table = markdown(methods, methods[0], own)
    print(f"{title}\n\n{table}")
    write_text(options.out.with_suffix(".md"), f"{title}\n\n{table}\n")
    content = {
        "title": title,
        "options": {
            key: value if isinstance(value, int | list | None) else str(value) for key, value in vars(options).items()
        },
        "dtype": settings["dtype"],
        "ngram": NGRAM,
        "load_average": os.getloadavg(),
        "versions": crew.versions,
        "questions": [question.id for question in questions],
        "methods": [raw(method) for method in methods],
    }
    write_json(options.out, content)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
