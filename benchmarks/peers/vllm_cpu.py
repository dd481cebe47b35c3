"""Our drafters in vLLM on this machine's CPU: do they load, is the text the target's, is as much accepted as here?

    python benchmarks/peers/vllm_cpu.py <drafter folder> … [--untrained] [--benchmark question.jsonl] [--drafts 3]

Float32, greedy, one prompt at a time: first turns of 20 questions of Spec-Bench, spread over its categories. vLLM runs
in an environment of its own (made on first use) and drafts chains of `--drafts` tokens, as specwave does here. Gates
for each drafter: vLLM loads it and names the layers of its config.json; its text with drafts is its own without and
ours (a divergence passes where our logits make it a near-tie); the mean acceptance lengths differ by `--tolerance` per
cent at most. served.py says what is compared with what. Exit code 1 where a gate fails.

`--untrained` adds drafters of one, two and three layers and one with EAGLE-3.1's switches, at their first weights:
little of theirs is accepted, but they are loaded and run. What each engine did with each drafter is kept in `--out`; a
stopped run goes on behind the last of them. Timings are not the point: the machine may be busy.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from run import HERE, Parser, positive
from served import Part, listed, markdown, named_layers, of_counters, of_lengths, unexplained, verdict
from table import cut
from tqdm import tqdm
from venvs import interpreter
from wire import PATIENCE, PeerError, Worker

from specwave.artifacts import UserError, group_name, read_json, write_json, write_text
from specwave.benchmark import Benchmark, Question
from specwave.benchmark.exact import TargetScorer, compare
from specwave.benchmark.questions import SpecBench, fingerprint
from specwave.data.conversations import builtin_training_prompts, prompt_ids
from specwave.decoding import generate
from specwave.eagle import load_drafter
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.export import TargetFacts, check_target, read_drafter, write_drafter
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map
from specwave.target import Target, load_target

PLAIN = "plain"
DRAFT_VOCABULARY = 4096  # of untrained drafters


class Results:
    """What was done so far, in a file: parts by engine and drafter.

    Raises:
        UserError: the file is of other questions, another target or other lengths.
    """

    def __init__(self, path: Path, facts: dict[str, Any]):
        self.path, self.content = path, {"facts": facts, "parts": {}}
        if path.is_file():
            kept = read_json(path, "--out")
            if kept.get("facts") != facts:
                raise UserError("--out", path, "it is of another run: name another file, or remove it")
            self.content = kept

    def part(self, key: str, make: Callable[[], Part]) -> Part:
        """As kept, else made now and kept."""
        parts = self.content["parts"]
        if key not in parts:
            parts[key] = make().packed()
            write_json(self.path, self.content)
        return Part.unpacked(parts[key])


class Bench:
    """The questions and both engines."""

    def __init__(self, target: Target, questions: Sequence[Question], options: argparse.Namespace):
        self.target, self.questions, self.options = target, questions, options
        self.prompts = [prompt_ids(target, [{"role": "user", "content": each.turns[0]}]) for each in questions]
        self.room = max(map(len, self.prompts)) + options.new_tokens
        if self.room > target.max_length:
            remedy = f"the longest prompt and its answer need {self.room} tokens, the model has {target.max_length}"
            raise UserError("--new-tokens", options.new_tokens, f"{remedy}: ask for fewer")
        self.eos = list(target.eos_ids)
        self.scorer = TargetScorer(target)

    # ---------------------------------------------------------------- engines

    def vllm(self, label: str, folder: Path | None) -> Part:
        """All questions in a vLLM of its own, with the drafter of `folder` or without one."""
        options, method = self.options, PLAIN if folder is None else "eagle3"
        log = options.out.with_name(f"{options.out.stem}-{label}.log")
        log.unlink(missing_ok=True)
        settings = {
            "folder": str(self.target.folder),
            "dtype": "float32",
            "eos": self.eos,
            "checkpoint": str(folder),
            "room": self.room,
            "method": method,
            "drafts": options.drafts,
            "counted": folder is not None,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}
        python = interpreter("vllm", options.venvs)
        command = [str(python), str(HERE / "peer_vllm.py")]
        worker = Worker(command, environment, log, settings, options.patience)
        part = Part(versions=worker.versions)
        try:
            for ids in tqdm(self.prompts, desc=f"vLLM, {label}", disable=None):
                before = self._counters(worker, folder)
                tokens, seconds, _ = worker.decode(method, options.drafts, ids, options.new_tokens)
                rounds, accepted = of_counters(before, self._counters(worker, folder))
                part.answers.append(cut(tokens, self.eos, options.new_tokens))
                part.rounds.append(rounds)
                part.accepted.append(accepted)
                part.seconds += seconds
        finally:
            worker.close()
        if folder is not None:
            part.layers = named_layers(log.read_text(encoding="utf-8", errors="replace"))
        return part

    def _counters(self, worker: Worker, folder: Path | None) -> list[int]:
        return [0] * 3 if folder is None else worker.decode("counters", 0, [], 0)[0]

    def ours(self, label: str, folder: Path | None, plain: Part | None) -> Part:
        """The same here. With drafts, decoding begins behind the first token of the plain answers, as vLLM's does."""
        options, part, began = self.options, Part(), time.perf_counter()
        proposer = None if folder is None else load_drafter(folder, self.target, levels=options.drafts)
        for place, ids in enumerate(tqdm(self.prompts, desc=f"specwave, {label}", disable=None)):
            given = [] if plain is None else plain.answers[place][:1]
            left = 0 if given and given[0] in self.eos else options.new_tokens - len(given)
            tokens, lengths = given, list[int]()
            if left:
                made = generate(self.target, proposer, [*ids, *given], max_new_tokens=left, eos_ids=self.eos)
                tokens, lengths = [*given, *made.tokens], made.accept_lengths
            rounds, accepted = of_lengths(lengths, 0 if folder is None else options.drafts)
            part.answers.append(tokens)
            part.rounds.append(rounds)
            part.accepted.append(accepted)
        part.seconds = time.perf_counter() - began
        return part

    # ---------------------------------------------------------------- texts

    def divergences(self, pair: str, candidates: Part, references: Part) -> list[dict[str, Any]]:
        """Where texts first differ, judged by our logits of the reference's text. What follows is another text, and is
        not compared again."""
        found = []
        for question, ids, candidate, reference in zip(
            self.questions, self.prompts, candidates.answers, references.answers, strict=True
        ):
            start = len(ids)
            comparison = compare(
                ids,
                reference,
                candidate,
                scorer=self.scorer,
                again=lambda text, _, start=start, reference=reference: reference[len(text) - start :],
                max_new_tokens=self.options.new_tokens,
            )
            found += [{"pair": pair, "question": question.id, **asdict(each)} for each in comparison.divergences]
        return found


def digest(folder: Path) -> str:
    """Of what is served."""
    content = (folder / "config.json").read_bytes() + (folder / "model.safetensors").read_bytes()
    return hashlib.sha256(content).hexdigest()[:12]


def untrained(target: Target, folder: Path) -> list[Path]:
    """Drafters of every layout at their first weights."""
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for _, _, text in builtin_training_prompts():
        ids = torch.tensor(target.tokenizer(text, add_special_tokens=False)["input_ids"])
        counts += torch.bincount(ids, minlength=target.vocab_size)
    d2t, t2d = build_vocab_map(counts, min(DRAFT_VOCABULARY, target.vocab_size))
    blocks = target.num_layers
    three = [2, blocks // 2, blocks - 3]
    layouts: list[tuple[list[int], dict[str, bool]]] = [
        (three[1:2], {}),
        (three[1:], {}),
        (three, {}),
        (three, {"fc_norm": True, "norm_output": True}),
    ]
    facts, made = TargetFacts(target.name, target.fingerprint, blocks, target.config.source), []
    for layers, switches in layouts:
        drafter = Eagle3Drafter(DrafterConfig.of_target(target.arch, layers, d2t.numel(), **switches), d2t, t2d)
        initialise(drafter, target, "target", seed=0)
        made.append(folder / f"untrained-{group_name(layers, switches)}")
        write_drafter(made[-1], drafter, facts, dtype=torch.float32)
    return made


def judge(bench: Bench, results: Results, label: str, folder: Path, plains: dict[str, Part]) -> dict[str, Any]:
    """Serves one drafter in both engines and compares."""
    mark = f"{label}@{digest(folder)}"
    layers = read_json(folder / "config.json", "drafter")["eagle_aux_hidden_state_layer_ids"]
    try:
        vllm = results.part(f"vllm {mark}", lambda: bench.vllm(label, folder))
    except PeerError as error:
        return verdict(None, None, layers, [], 0.0, " ".join(str(error).split())[:300])
    ours = results.part(f"specwave {mark}", lambda: bench.ours(label, folder, plains["specwave"]))
    divergences = [
        *bench.divergences("vllm", vllm, plains["vllm"]),
        *bench.divergences("ours", ours, plains["specwave"]),
        *bench.divergences("engines", vllm, plains["specwave"]),
    ]
    return verdict(vllm, ours, layers, divergences, bench.options.tolerance / 100)


def arguments() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="*", type=Path, help="folders that train.py wrote (…/drafters/L…)")
    parser.add_argument("--untrained", action="store_true", help="drafters of every layout at their first weights, too")
    parser.add_argument("--model", default="smollm2_135m", help="name of a conf/model file, hub id or folder")
    parser.add_argument("--benchmark", help="a question file, or builtin; by default Spec-Bench's, fetched once")
    parser.add_argument("--questions", type=positive, default=20, help="first turns, spread over the categories")
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--drafts", type=positive, default=3, help="a round")
    parser.add_argument("--tolerance", type=float, default=5.0, help="of the mean acceptance length, per cent")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--patience", type=positive, default=PATIENCE, help="seconds that vLLM has for one answer")
    parser.add_argument("--venvs", type=Path, default=Path("runs/peers"), help="vLLM's environment is <here>/vllm")
    parser.add_argument("--out", type=Path, help="a .json file; the table goes beside it as .md, vLLM's words as .log")
    options = parser.parse_intermixed_args()
    options.out = options.out or options.venvs / "vllm_cpu.json"
    if options.out.suffix != ".json":
        parser.error(f"--out must end with .json, got {options.out}")
    if not options.drafters and not options.untrained:
        parser.error("name a drafter's folder, or --untrained")
    names = [folder.name for folder in options.drafters]
    if len(set(names)) < len(names):
        parser.error(f"two drafters are called {max(names, key=names.count)}: their folders' names tell them apart")
    return options


def prepared(options: argparse.Namespace) -> tuple[Bench, Results]:
    """The target, the questions and what was done before; refuses what cannot be compared."""
    torch.set_num_threads(options.threads)
    target = load_target(options.model, "float32", "cpu")
    named = {None: SpecBench(), "builtin": Benchmark()}
    questions = named.get(options.benchmark, Benchmark(options.benchmark)).questions(options.questions)
    options.venvs, options.out = options.venvs.resolve(), options.out.resolve()
    for folder in (options.venvs, options.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    options.drafters = [folder.resolve() for folder in options.drafters]
    if options.untrained:
        options.drafters += untrained(target, options.out.parent)
    for folder in options.drafters:
        config, _, card = read_drafter(folder)
        check_target(config, card, target)
    facts = {
        "target": target.fingerprint,
        "questions": [question.id for question in questions],
        "asked": fingerprint(questions),
        "new_tokens": options.new_tokens,
        "drafts": options.drafts,
    }
    return Bench(target, questions, options), Results(options.out, facts)


def main() -> int:
    options = arguments()
    bench, results = prepared(options)
    try:
        plains = {
            "vllm": results.part("vllm plain", lambda: bench.vllm(PLAIN, None)),
            "specwave": results.part("specwave plain", lambda: bench.ours(PLAIN, None, None)),
        }
    except PeerError as error:
        print(f"vLLM does not run here: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return 1
    apart = bench.divergences("plain", plains["vllm"], plains["specwave"])
    verdicts = {folder.name: judge(bench, results, folder.name, folder, plains) for folder in options.drafters}
    title = (
        f"{bench.target.name}, float32, greedy: {len(bench.questions)} questions × {options.new_tokens} tokens, "
        f"{options.drafts} drafts a round"
    )
    lines = [listed(PLAIN, each) for each in apart]
    lines += [listed(label, each) for label, found in verdicts.items() for each in found.get("divergences", [])]
    page = "\n".join([title, "", markdown(verdicts), "", *(lines or ["no text differs"])])
    print(page)
    write_text(options.out.with_suffix(".md"), page + "\n")
    results.content |= {"plain_divergences": apart, "verdicts": verdicts, "load_average": os.getloadavg()}
    write_json(options.out, results.content)
    failed = [*unexplained(apart), *(line for found in verdicts.values() for line in found["failures"])]
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
