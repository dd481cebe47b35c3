"""Every token against Hugging Face: plain decoding, eagle3 and coached trees, float32, greedy, built-in benchmark.

    python benchmarks/verify.py [--checkpoint <drafter folder>] [--limit n] [--model smollm2_135m]

The reference is `AutoModelForCausalLM.generate` on the same weights; logits of near-ties and their noise are measured
on that model too. Every method must give its tokens. A divergence passes only as a near-tie, where the tokens' logits
differ by at most 10 times the noise; decoding is then compared again from the reference's token on. Exit code 1 on
anything else. *Coached* drafts are the reference's own tokens for two in three, each beside a random sibling: long
acceptances, rejections in every place and trees are met whatever the drafter is worth.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from specwave.artifacts import UserError
from specwave.benchmark import Benchmark, Question
from specwave.benchmark.exact import Comparison, Divergence, compare
from specwave.data.conversations import builtin_training_prompts, prompt_ids
from specwave.decoding import BaseProposer, Context, Tree, generate
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
    """What one method did."""

    proposer: Any
    tokens: int = 0
    rounds: int = 0
    turns: int = 0
    near_ties: list[Divergence] = field(default_factory=list)
    wrong: list[Divergence] = field(default_factory=list)

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
    target: Target, reference: HuggingFace, methods: dict[str, Any], questions: Sequence[Question], limit: int
) -> dict[str, Tally]:
    """Decodes every turn with every method; the reference's own answers make the conversations."""
    tallies = {name: Tally(proposer) for name, proposer in methods.items()}
    with tqdm(total=sum(len(question.turns) for question in questions), desc="turns", disable=None) as progress:
        for question in questions:
            messages: list[dict[str, str]] = []
            for number, text in enumerate(question.turns):
                messages.append({"role": "user", "content": text})
                ids = prompt_ids(target, messages)
                expected = reference.greedy(ids, limit)
                for name, tally in tallies.items():
                    if isinstance(tally.proposer, Coached):
                        tally.proposer.text = [*ids, *expected]

                    def again(ids: list[int], limit: int, proposer: Any = tally.proposer) -> list[int]:
                        return generate(target, proposer, ids, max_new_tokens=limit).tokens

                    made = generate(target, tally.proposer, ids, max_new_tokens=limit)
                    tally.tokens, tally.rounds = tally.tokens + len(made.tokens), tally.rounds + made.rounds
                    comparison = compare(
                        ids, expected, made.tokens, scorer=reference, again=again, max_new_tokens=limit
                    )
                    tally.add(comparison)
                    for found in comparison.divergences:
                        tqdm.write(describe(target, name, question, number, found))
                answer = target.tokenizer.decode(expected, skip_special_tokens=True)
                messages.append({"role": "assistant", "content": answer})
                progress.update()
    return tallies


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
    options = parser.parse_args()
    questions = Benchmark().questions(options.limit)
    disable_progress_bar()
    target = load_target(options.model, dtype="float32", device="cpu")
    reference = HuggingFace(target.folder)
    if options.checkpoint:
        drafter, source = Eagle3Decoding(options.levels).build(target, options.checkpoint), options.checkpoint
    else:
        drafter, source = untrained(target, options.levels), "untrained, started from the target's last block"
    print(f"{target.name} in float32 against Hugging Face generate; drafter of eagle3: {source}")
    print(f"{len(questions)} questions, up to {options.max_new_tokens} tokens a turn, greedy")
    methods = {"plain": None, "eagle3": drafter, "coached": Coached(4, target.vocab_size)}
    tallies = verify(target, reference, methods, questions, options.max_new_tokens)
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
