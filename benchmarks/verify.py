"""Every token against Hugging Face: plain decoding, eagle3 and coached trees, float32, greedy, built-in benchmark.

    python benchmarks/verify.py [--checkpoint <drafter folder>] [--limit n] [--thorough] [--results parts.jsonl]
        [--workers 2]

The reference is `AutoModelForCausalLM.generate` on the same weights; logits of near-ties and their noise are measured
on that model too. Every method must give its tokens. A divergence passes only as a near-tie, where the tokens' logits
differ by at most 10 times the noise; decoding is then compared again from the reference's token on. Exit code 1 on
anything else. *Coached* drafts are the reference's own tokens for two in three, each beside a random sibling: long
acceptances, rejections in every place and trees are met whatever the drafter is worth.

`--thorough` adds the drafter's trees of 30 and 60, all of these in batches of four prompts, and *sampling*: drafts must
not change a token that plain sampling with the same keyed noise draws (there the reference is our own plain decoding).
Questions are looked at four by four, by as many processes as `--workers` says, which share the cores; with `--results`
what is finished is kept in that file and a stopped run goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from specwave.artifacts import UserError, append_line, drop_torn_line, read_jsonl, write_text
from specwave.benchmark import Benchmark, Question
from specwave.benchmark.exact import Divergence, TargetScorer, compare
from specwave.data.conversations import builtin_training_prompts, prompt_ids
from specwave.decoding import BaseProposer, Context, Sampling, Tree, generate
from specwave.decoding.loop import GREEDY
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.proposer import Eagle3, Eagle3Decoding
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map
from specwave.target import Target, load_target

GROUP = 4  # questions that are looked at, and turns that a batch decodes, together


class HuggingFace:
    """The reference: greedy output and logits of the same weights in transformers."""

    def __init__(self, folder: Any):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], limit: int) -> list[int]:
        ids_BT = torch.tensor([list(ids)])
        made = self.model.generate(
            ids_BT, attention_mask=torch.ones_like(ids_BT), do_sample=False, max_new_tokens=limit
        )
        return made[0, len(ids) :].tolist()

    @torch.inference_mode()
    def one_shot(self, ids: Sequence[int], start: int) -> Tensor:
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0, start:].float()

    @torch.inference_mode()
    def incremental(self, ids: Sequence[int], start: int) -> Tensor:
        ids_BT, cache, rows = torch.tensor([list(ids)]), None, []
        pieces = [ids_BT[:, :start], *ids_BT[:, start:].split(1, dim=1)] if start else ids_BT.split(1, dim=1)
        for piece in pieces:
            output = self.model(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0, -1:].float())
        return torch.cat(rows[1:] if start else rows)


@dataclass
class Case:
    """A turn to decode, and what Hugging Face makes of it."""

    question: Question
    turn: int
    ids: list[int]
    expected: list[int]


@dataclass
class Tally:
    """What one method did, `batch` cases at a time."""

    proposer: Any
    batch: int = 1
    sampling: Sampling = GREEDY
    tokens: int = 0
    rounds: int = 0
    turns: int = 0
    near_ties: int = 0
    wrong: int = 0

    def decode(self, target: Target, prompts: Sequence[list[int]], limit: int) -> Any:
        """All rows draw with the noise of sequence 0, whatever they are decoded beside."""
        options = {"max_new_tokens": limit, "sampling": self.sampling, "sequence_ids": [0] * len(prompts)}
        return generate(target, self.proposer, list(prompts), **options)

    def add(self, counts: Sequence[int]) -> None:
        """turns, tokens, rounds, near-ties, wrong ones"""
        self.turns, self.tokens, self.rounds, self.near_ties, self.wrong = (
            old + new
            for old, new in zip((self.turns, self.tokens, self.rounds, self.near_ties, self.wrong), counts, strict=True)
        )


class Coached(BaseProposer):
    """Drafts a chain of what comes next in `text`, every third token wrong by chance, a random sibling beside each."""

    def __init__(self, levels: int, vocab: int):
        self.levels, self.vocab, self.texts = levels, vocab, list[list[int]]()
        self.generator = torch.Generator().manual_seed(0)

    def propose_row(self, context: Context) -> Tree:
        done = len(context.tokens)
        right = torch.tensor(self.texts[context.row][done : done + self.levels], dtype=torch.int64)
        wrong, siblings = torch.randint(self.vocab, (2, len(right)), generator=self.generator)
        chain = torch.where(torch.rand(len(right), generator=self.generator) < 1 / 3, wrong, right)
        parents = torch.arange(len(right)) * 2 - 2  # drafts 0, 2, 4, … are the chain, 1, 3, 5, … the siblings
        parents[:1] = -1
        return Tree(torch.stack([chain, siblings], 1).flatten(), parents.repeat_interleave(2))


def untrained(target: Target, levels: int) -> Eagle3:
    """A drafter that starts from the target's last block. Hardly a draft of it is accepted: coached trees make up."""
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    for _, _, text in builtin_training_prompts():
        ids = torch.tensor(target.tokenizer(text, add_special_tokens=False)["input_ids"])
        counts += torch.bincount(ids, minlength=target.vocab_size)
    d2t, t2d = build_vocab_map(counts, min(4096, target.vocab_size))
    last = target.num_layers - 1
    drafter = Eagle3Drafter(DrafterConfig.of_target(target.arch, [last // 2, last], d2t.numel()), d2t, t2d)
    initialise(drafter, target, "target", seed=0)
    return Eagle3(drafter, target, levels)


def cases(target: Target, reference: HuggingFace, questions: Sequence[Question], limit: int) -> Iterator[list[Case]]:
    """The first turns of the questions, then their second ones, …; the reference's answers make the conversations."""
    talks: dict[int, list[dict[str, str]]] = {number: [] for number in range(len(questions))}
    for turn in range(max(len(question.turns) for question in questions)):
        found = []
        for number, question in enumerate(questions):
            if turn >= len(question.turns):
                continue
            talks[number].append({"role": "user", "content": question.turns[turn]})
            ids = prompt_ids(target, talks[number])
            expected = reference.greedy(ids, limit)
            talks[number].append(
                {"role": "assistant", "content": target.tokenizer.decode(expected, skip_special_tokens=True)}
            )
            found.append(Case(question, turn, ids, expected))
        yield found


def verify(
    target: Target, reference: HuggingFace, tallies: dict[str, Tally], group: Sequence[Case], limit: int
) -> tuple[dict[str, list[int]], list[str]]:
    """Decodes a group of cases with every method: (what is to be added to the tallies, a line per divergence)."""
    lines = list[str]()
    drawn = TargetScorer(target)
    wanted = {GREEDY: [case.expected for case in group]}
    for sampling in {tally.sampling for tally in tallies.values()} - {GREEDY}:
        plain = Tally(None, sampling=sampling)
        wanted[sampling] = [plain.decode(target, [case.ids], limit).tokens[0] for case in group]
    found = {}
    for name, tally in tallies.items():
        found[name] = [0] * 5
        for start in range(0, len(group), tally.batch):
            some = group[start : start + tally.batch]
            expected = wanted[tally.sampling][start : start + tally.batch]
            prompts = [case.ids for case in some]
            if isinstance(tally.proposer, Coached):
                tally.proposer.texts = [[*ids, *own] for ids, own in zip(prompts, expected, strict=True)]
            made = tally.decode(target, prompts, limit)
            for row, case in enumerate(some):

                def again(
                    ids: list[int], limit: int, tally: Tally = tally, prompts: Any = prompts, row: int = row
                ) -> list[int]:
                    beside = [*prompts[:row], ids, *prompts[row + 1 :]]
                    return tally.decode(target, beside, limit).tokens[row]

                comparison = compare(
                    case.ids,
                    expected[row],
                    made.tokens[row],
                    scorer=reference if tally.sampling.greedy else drawn,
                    again=again,
                    max_new_tokens=limit,
                    sampling=tally.sampling,
                )
                for each in comparison.divergences:
                    lines.append(describe(target, name, case, each))
                ties, every = len(comparison.near_ties), len(comparison.divergences)
                new = (1, len(made.tokens[row]), len(made.accept_lengths[row]), ties, every - ties)
                found[name] = [old + more for old, more in zip(found[name], new, strict=True)]
    return found, lines


class Results:
    """What was found of each group of questions, a JSON line each; in a file it outlives the run.

    Raises:
        UserError: the file is of another run.
    """

    def __init__(self, path: str | None, facts: dict[str, Any]):
        self.path, self.found = None if path is None else Path(path), dict[int, Any]()
        if self.path is not None and self.path.exists():
            drop_torn_line(self.path)
            rows = [row for _, row in read_jsonl(self.path, "--results")]
            if rows and rows[0] != facts:
                raise UserError("--results", path, f"it is of another run ({rows[0]}): name another file")
            self.found = {row["group"]: row for row in rows[1:]}
        if self.path is not None and not self.found:
            write_text(self.path, json.dumps(facts) + "\n")

    def add(self, row: dict[str, Any]) -> None:
        self.found[row["group"]] = row
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as stream:
                append_line(stream, row)


def describe(target: Target, name: str, case: Case, found: Divergence) -> str:
    def token(value: int | None) -> str:
        return "the end" if value is None else repr(target.tokenizer.decode([value]))

    gap = "" if found.gap is None else f", gap {found.gap:.2e} (top two {found.top2_gap:.2e})"
    kind = "near-tie" if found.near_tie else "DIVERGENCE"
    place = f"question {case.question.id}, turn {case.turn + 1}, token {found.position}"
    words = f"{token(found.candidate)} for {token(found.reference)}"
    return f"{kind}: {name}, {place}: {words}{gap}, noise {found.noise:.2e}"


def questions_of(options: argparse.Namespace) -> list[list[Question]]:
    """The questions, in groups that are looked at together."""
    questions = Benchmark(options.benchmark).questions(options.limit)
    if options.first_turns:
        questions = [replace(question, turns=question.turns[:1]) for question in questions]
    return [questions[start : start + GROUP] for start in range(0, len(questions), GROUP)]


def methods_of(target: Target, options: argparse.Namespace) -> dict[str, Tally]:
    if options.checkpoint:
        drafter = Eagle3Decoding(options.levels).build(target, options.checkpoint)
    else:
        drafter = untrained(target, options.levels)
    tallies = {
        "plain": Tally(None),
        "eagle3": Tally(drafter),
        "coached": Tally(Coached(4, target.vocab_size)),
    }
    if not options.thorough:
        return tallies
    trees = {total: Eagle3(drafter.drafter, target, levels=6, top_k=10, total_token=total) for total in (30, 60)}
    sampling = Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=0)
    tallies |= {f"eagle3, tree of {total}": Tally(tree) for total, tree in trees.items()}
    return tallies | {
        "plain, batch of 4": Tally(None, GROUP),
        "eagle3, batch of 4": Tally(drafter, GROUP),
        "eagle3, tree of 30, batch of 4": Tally(trees[30], GROUP),
        "eagle3, tree of 60, batch of 4": Tally(trees[60], GROUP),
        "sampled eagle3": Tally(drafter, sampling=sampling),
        "sampled coached": Tally(Coached(4, target.vocab_size), sampling=sampling),
        "sampled eagle3, tree of 30": Tally(trees[30], sampling=sampling),
        "sampled eagle3, tree of 60, batch of 4": Tally(trees[60], GROUP, sampling),
    }


@functools.cache
def loaded(model: str) -> tuple[Target, HuggingFace]:
    """Once per process."""
    disable_progress_bar()
    target = load_target(model, dtype="float32", device="cpu")
    return target, HuggingFace(target.folder)


def end_with_parent() -> None:
    """A worker whose run was killed would finish its group for nobody."""

    def wait() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def look_at(number: int, questions: list[Question], options: argparse.Namespace) -> dict[str, Any]:
    """What was found of one group of questions: a row of `Results`."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    target, reference = loaded(options.model)
    tallies, lines = methods_of(target, options), list[str]()
    for turns in cases(target, reference, questions, options.max_new_tokens):
        found, divergences = verify(target, reference, tallies, turns, options.max_new_tokens)
        lines += divergences
        for name, counts in found.items():
            tallies[name].add(counts)
    counts = {
        name: [tally.turns, tally.tokens, tally.rounds, tally.near_ties, tally.wrong] for name, tally in tallies.items()
    }
    return {"group": number, "counts": counts, "divergences": lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m", help="name of a conf/model file, hub id or folder")
    parser.add_argument("--checkpoint", help="a drafter's folder; without one an untrained drafter is made")
    parser.add_argument("--levels", type=int, default=Eagle3Decoding.levels, help="drafts per round")
    parser.add_argument("--limit", type=int, help="this many questions, spread over the categories (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--benchmark", help="a question file of Spec-Bench's schema instead of the built-in benchmark")
    parser.add_argument("--first-turns", action="store_true", help="leave out what follows a question's first turn")
    parser.add_argument("--thorough", action="store_true", help="trees, batches and sampling too")
    parser.add_argument("--results", help="a .jsonl file that keeps what is finished; a stopped run goes on there")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the cores and the questions")
    options = parser.parse_args()
    if options.workers < 1:
        raise UserError("--workers", options.workers, "must be at least 1")
    groups = questions_of(options)
    target = load_target(options.model, dtype="float32", device="cpu")
    tallies = methods_of(target, options)  # or a complaint about the checkpoint
    source = options.checkpoint or "untrained, started from the target's last block"
    print(f"{target.name} in float32 against Hugging Face generate; drafter of eagle3: {source}")
    print(f"{sum(map(len, groups))} questions, up to {options.max_new_tokens} tokens a turn, greedy")
    facts = {key: value for key, value in vars(options).items() if key not in ("results", "workers")}
    results = Results(options.results, facts | {"target": target.fingerprint, "torch": torch.__version__})
    del target
    waiting = [number for number in range(len(groups)) if number not in results.found]
    work = functools.partial(look_at, options=options)
    # Spawned: a fork of a process whose thread pool has started hangs.
    with (
        ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn"), end_with_parent) as pool,
        tqdm(total=len(groups), initial=len(results.found), desc="groups of questions", disable=None) as progress,
    ):
        for row in pool.map(work, waiting, [groups[number] for number in waiting]):
            results.add(row)
            for line in row["divergences"]:
                tqdm.write(line)
            progress.update()
    for row in results.found.values():
        for name, counts in row["counts"].items():
            tallies[name].add(counts)
    for name, tally in tallies.items():
        print(
            f"{name}: {tally.turns} turns, {tally.tokens} tokens, τ {tally.tokens / tally.rounds:.3f}; "
            f"{tally.near_ties} near-ties, {tally.wrong} divergences"
        )
    wrong = sum(tally.wrong for tally in tallies.values())
    ties = "near-ties listed" if any(tally.near_ties for tally in tallies.values()) else "no near-ties"
    print(f"every token is Hugging Face's ({ties})" if not wrong else f"{wrong} outputs differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
