"""Is what comes out of the loop distributed as the target says? Chi-square on a vocabulary of five tokens.

    python benchmarks/distribution.py [--draws 200000] [--seed 0]

Continuations of three tokens are drawn through the whole loop with random drafts (chains, trees, chains sampled from a
drafter of their own) under temperature, top-p and repetition penalty. The probability of each of the 125 continuations
is computed from the target's logits with transformers' processors. One line a cell: p of the draws, τ, and as a control
p of the same draws against a target 3 % hotter, which must be rejected. Exit code 1 where a p is below 1e-4, or a
control's is not: with too few draws. Takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers.generation import logits_process as hf
from transformers.utils.logging import disable_progress_bar

from specwave.decoding import BaseProposer, Context, Sampling, Tree, draw_drafts, generate
from specwave.target import Target, load_target
from specwave.target.tiny import make_tiny

V, LENGTH, PROMPT, BATCH = 5, 3, [1, 4, 2], 5000
REJECTED = 1e-4
SETTINGS = {
    "temperature": Sampling(0.8),
    "top-p": Sampling(1.3, top_p=0.8),
    "penalty": Sampling(1.0, repetition_penalty=1.6),
    "all of them": Sampling(1.2, top_k=4, top_p=0.95, min_p=0.02, repetition_penalty=1.4),
}


class Guesses(BaseProposer):
    """Random chains or trees, as deep as there is room for; 64 different ones a round, shared among the rows."""

    def __init__(self, kind: str, seed: int):
        self.kind, self.generator = kind, torch.Generator().manual_seed(seed)

    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        trees = {room: [self._tree(room - 1) for _ in range(64)] for room in {each.remaining for each in contexts}}
        return [trees[context.remaining][place % 64] for place, context in enumerate(contexts)]

    def _tree(self, levels: int) -> Tree:
        if levels == 0:
            return Tree.empty()
        parents, depths = list[int](), {-1: 0}
        for place in range(levels if self.kind == "chain" else 6):
            above = place - 1 if self.kind == "chain" else int(torch.randint(-1, place, (1,), generator=self.generator))
            above = above if depths[above] < levels else -1
            depths[place] = depths[above] + 1
            parents.append(above)
        tokens = torch.randint(V, (len(parents),), generator=self.generator)
        return Tree(tokens, torch.tensor(parents), depth=levels)


class Bigrams(BaseProposer):
    """Sampled chains: a drafter whose logits depend on the last token alone, drawn as `draw_drafts` says."""

    def __init__(self, seed: int):
        self.logits = torch.randn(V, V, generator=torch.Generator().manual_seed(seed))

    def propose(self, contexts: Sequence[Context]) -> list[Tree]:
        last = torch.tensor([context.tokens[-1] for context in contexts])
        tokens, rows = last[:, None], list[Tensor]()
        for _ in range(LENGTH - 1):
            token, q = draw_drafts(self.logits[tokens[:, -1]], contexts, tokens[:, 1:])
            assert q is not None
            tokens = torch.cat([tokens, token[:, None]], 1)
            rows.append(q)
        return [Tree.chain(chain, q=q) for chain, q in zip(tokens[:, 1:], torch.stack(rows, 1), strict=True)]


def exact(target: Target, sampling: Sampling) -> Tensor:
    """Probability [125] of every continuation."""
    ends = torch.tensor(list(itertools.product(range(V), repeat=LENGTH)))
    whole = torch.cat([torch.tensor(PROMPT).expand(len(ends), -1), ends], 1)
    last = target.num_layers - 1
    logits, total = target.logits(target.states(whole, [last])[last]), torch.zeros(len(ends), dtype=torch.float64)
    for place in range(len(PROMPT), whole.shape[1]):
        ids, scores = whole[:, :place], logits[:, place - 1].double()
        scores = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores) / sampling.temperature
        if sampling.top_k:
            scores = hf.TopKLogitsWarper(sampling.top_k)(ids, scores)
        for step in (hf.TopPLogitsWarper(sampling.top_p), hf.MinPLogitsWarper(sampling.min_p)):
            scores = step(ids, scores)
        total += scores.log_softmax(-1).gather(1, whole[:, place : place + 1])[:, 0]
    return total.exp()


def chi_square_p(counts: Tensor, probability: Tensor) -> float:
    """Upper tail of the statistic; 0 where something came that cannot come."""
    possible = probability > 0
    if bool(counts[~possible].any()):
        return 0.0
    expected = probability[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def draw(target: Target, kind: str, sampling: Sampling, draws: int) -> tuple[Tensor, float]:
    """(how often each continuation came [125], τ)."""
    counts, rounds = torch.zeros(V**LENGTH, dtype=torch.float64), 0
    proposer = Bigrams(sampling.seed) if kind == "sampled chain" else Guesses(kind, sampling.seed)
    for start in range(0, draws, BATCH):
        rows = range(start, min(start + BATCH, draws))
        keys = {"max_new_tokens": LENGTH, "sampling": sampling, "sequence_ids": rows}
        made = generate(target, proposer, [PROMPT] * len(rows), **keys)
        codes = torch.tensor(made.tokens) @ V ** torch.arange(LENGTH - 1, -1, -1)
        counts += torch.bincount(codes, minlength=V**LENGTH)
        rounds += sum(map(len, made.accept_lengths))
    return counts, draws * LENGTH / rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=200_000, help="continuations per cell")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.draws < 1:
        parser.error(f"--draws must be at least 1, got {options.draws}")
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        keys = {"vocab_size": V, "num_hidden_layers": 2, "eos_token_id": None, "initializer_range": 0.1}
        target = load_target(make_tiny(folder, **keys), dtype="float32", device="cpu")
    print(f"{options.draws} continuations of {LENGTH} tokens a cell, {V} tokens in the vocabulary")
    print(f"{'drafts':<15} {'setting':<12} {'p':>9} {'τ':>6} {'control':>9} {'seconds':>8}")
    failed = blind = 0
    for number, kind in enumerate(("chain", "tree", "sampled chain")):
        for name, setting in SETTINGS.items():
            # Noise of their own: with the same, chains and trees give the same continuations, draw by draw.
            start, sampling = time.perf_counter(), replace(setting, seed=3 * options.seed + number)
            counts, tau = draw(target, kind, sampling, options.draws)
            p = chi_square_p(counts, exact(target, sampling))
            control = chi_square_p(counts, exact(target, replace(sampling, temperature=1.03 * sampling.temperature)))
            failed += p < REJECTED
            blind += control >= REJECTED
            seconds = time.perf_counter() - start
            print(f"{kind:<15} {name:<12} {p:9.4f} {tau:6.3f} {control:9.1e} {seconds:8.1f}", flush=True)
    print(f"no p below {REJECTED}" if not failed else f"{failed} cells are not distributed as the target says")
    if blind:
        print(f"{blind} cells cannot tell a target 3 % hotter from this one: give more --draws")
    return 1 if failed or blind else 0


if __name__ == "__main__":
    sys.exit(main())
