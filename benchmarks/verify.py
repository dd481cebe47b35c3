"""Every token against Hugging Face: plain decoding, eagle3 and coached trees, float32, greedy, built-in benchmark.

    python benchmarks/verify.py [--checkpoint <drafter folder>] [--limit n] [--model smollm2_135m] [--thorough]

The reference is `AutoModelForCausalLM.generate` on the same weights; logits of near-ties and their noise are measured
on that model too. Every method must give its tokens. A divergence passes only as a near-tie, where the tokens' logits
differ by at most 10 times the noise; decoding is then compared again from the reference's token on. Exit code 1 on
anything else. *Coached* drafts are the reference's own tokens for two in three, each beside a random sibling: long
acceptances, rejections in every place and trees are met whatever the drafter is worth.

`--thorough` adds the drafter's trees of 30 and 60, all of these in batches of four prompts, and *sampling*: drafts must
not change a token that plain sampling with the same keyed noise draws (there the reference is our own plain decoding).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from specwave.artifacts import UserError
from specwave.benchmark import Benchmark, Question
from specwave.benchmark.exact import Comparison, Divergence, TargetScorer, compare
from specwave.data.conversations import builtin_training_prompts, prompt_ids
from specwave.decoding import BaseProposer, Context, Sampling, Tree, generate
from specwave.decoding.loop import GREEDY
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.proposer import Eagle3, Eagle3Decoding
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map
from specwave.target import Target, load_target


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
class Tally:
    """What one method did; `batch` prompts at a time, of which the first is looked at."""

    proposer: Any
    batch: int = 1
    sampling: Sampling = GREEDY
    tokens: int = 0
    rounds: int = 0
    turns: int = 0
    near_ties: list[Divergence] = field(default_factory=list)
    wrong: list[Divergence] = field(default_factory=list)

    def decode(self, target: Target, ids: Sequence[int], limit: int, others: Sequence[list[int]]) -> list[int]:
        """New tokens of `ids`, decoded beside `batch` − 1 of the other prompts."""
        prompts = [list(ids), *others[: self.batch - 1]]
        made = generate(target, self.proposer, prompts, max_new_tokens=limit, sampling=self.sampling)
        self.tokens, self.rounds = self.tokens + len(made.tokens[0]), self.rounds + len(made.accept_lengths[0])
        return made.tokens[0]

    def add(self, comparison: Comparison) -> None:
        self.turns += 1
        for divergence in comparison.divergences:
            (self.near_ties if divergence.near_tie else self.wrong).append(divergence)


class Coached(BaseProposer):
    """Drafts a chain of what comes next in `text`, every third token wrong by chance, a random sibling beside each."""

    def __init__(self, levels: int, vocab: int):
        self.levels, self.vocab, self.text = levels, vocab, list[int]()
        self.generator = torch.Generator().manual_seed(0)

    def propose_row(self, context: Context) -> Tree:
        done = len(context.tokens)
        right = torch.tensor(self.text[done : done + self.levels], dtype=torch.int64)
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


def verify(
    target: Target,
    reference: HuggingFace,
    tallies: dict[str, Tally],
    questions: Sequence[Question],
    limit: int,
) -> None:
    """Decodes every turn with every method; the reference's own answers make the conversations."""
    others = [prompt_ids(target, [{"role": "user", "content": text}]) for _, _, text in builtin_training_prompts()[:3]]
    drawn = TargetScorer(target)
    with tqdm(total=sum(len(question.turns) for question in questions), desc="turns", disable=None) as progress:
        for question in questions:
            messages: list[dict[str, str]] = []
            for number, text in enumerate(question.turns):
                messages.append({"role": "user", "content": text})
                ids = prompt_ids(target, messages)
                expected = reference.greedy(ids, limit)
                plain = {
                    sampling: generate(target, None, ids, max_new_tokens=limit, sampling=sampling).tokens
                    for sampling in {tally.sampling for tally in tallies.values()} - {GREEDY}
                }
                for name, tally in tallies.items():
                    own = plain.get(tally.sampling, expected)
                    if isinstance(tally.proposer, Coached):
                        tally.proposer.text = [*ids, *own]

                    def again(ids: list[int], limit: int, tally: Tally = tally, beside: Any = others) -> list[int]:
                        silent = Tally(tally.proposer, tally.batch, tally.sampling)
                        return silent.decode(target, ids, limit, beside)

                    made = tally.decode(target, ids, limit, others)
                    scorer = reference if tally.sampling.greedy else drawn
                    comparison = compare(
                        ids, own, made, scorer=scorer, again=again, max_new_tokens=limit, sampling=tally.sampling
                    )
                    tally.add(comparison)
                    for found in comparison.divergences:
                        tqdm.write(describe(target, name, question, number, found))
                others = [ids, *others[:2]]
                answer = target.tokenizer.decode(expected, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
                progress.update()


def describe(target: Target, name: str, question: Question, turn: int, found: Divergence) -> str:
    def token(value: int | None) -> str:
        return "the end" if value is None else repr(target.tokenizer.decode([value]))

    gap = "" if found.gap is None else f", gap {found.gap:.2e} (top two {found.top2_gap:.2e})"
    kind = "near-tie" if found.near_tie else "DIVERGENCE"
    place = f"question {question.id}, turn {turn + 1}, token {found.position}"
    words = f"{token(found.candidate)} for {token(found.reference)}"
    return f"{kind}: {name}, {place}: {words}{gap}, noise {found.noise:.2e}"


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
    options = parser.parse_args()
    questions = Benchmark(options.benchmark).questions(options.limit)
    if options.first_turns:
        questions = [replace(question, turns=question.turns[:1]) for question in questions]
    disable_progress_bar()
    target = load_target(options.model, dtype="float32", device="cpu")
    reference = HuggingFace(target.folder)
    if options.checkpoint:
        drafter, source = Eagle3Decoding(options.levels).build(target, options.checkpoint), options.checkpoint
    else:
        drafter, source = untrained(target, options.levels), "untrained, started from the target's last block"
    print(f"{target.name} in float32 against Hugging Face generate; drafter of eagle3: {source}")
    print(f"{len(questions)} questions, up to {options.max_new_tokens} tokens a turn, greedy")
    tallies = {
        "plain": Tally(None),
        "eagle3": Tally(drafter),
        "coached": Tally(Coached(4, target.vocab_size)),
    }
    if options.thorough:
        trees = {total: Eagle3(drafter.drafter, target, levels=6, top_k=10, total_token=total) for total in (30, 60)}
        sampling = Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=0)
        tallies |= {f"eagle3, tree of {total}": Tally(tree) for total, tree in trees.items()}
        tallies |= {
            "plain, batch of 4": Tally(None, 4),
            "eagle3, batch of 4": Tally(drafter, 4),
            "eagle3, tree of 30, batch of 4": Tally(trees[30], 4),
            "sampled eagle3": Tally(drafter, sampling=sampling),
            "sampled coached": Tally(Coached(4, target.vocab_size), sampling=sampling),
            "sampled eagle3, tree of 30": Tally(trees[30], sampling=sampling),
            "sampled eagle3, tree of 60, batch of 4": Tally(trees[60], 4, sampling),
        }
    verify(target, reference, tallies, questions, options.max_new_tokens)
    for name, tally in tallies.items():
        print(
            f"{name}: {tally.turns} turns, {tally.tokens} tokens, τ {tally.tokens / tally.rounds:.3f}; "
            f"{len(tally.near_ties)} near-ties, {len(tally.wrong)} divergences"
        )
    wrong = sum(len(tally.wrong) for tally in tallies.values())
    print("every token is Hugging Face's (near-ties listed above)" if not wrong else f"{wrong} outputs differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
