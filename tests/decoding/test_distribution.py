"""Sampled output has the target's distribution: chi-square on a vocabulary of five tokens, exact probabilities.

Seeds are fixed, so the outcome is too; the bound on p says that the draws at these seeds are unsuspicious.
"""

import itertools
import math

import pytest
import torch
from stubs import RandomTrees, SampledChain
from transformers.generation import logits_process as hf

from specwave.decoding import Sampling, generate
from specwave.decoding.accept import accept_chain, match_tree
from specwave.decoding.sampling import DRAFT, choose, keyed_gumbel, keyed_uniform
from specwave.decoding.tree import ancestors

DRAWS = 200_000


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Upper tail of the chi-square statistic, by the regularised incomplete gamma function."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((observed.numel() - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic.double() / 2))


def exact(target, prompt, length, sampling):
    """Probability of every continuation of `length` tokens, the processors being transformers'."""
    sequences = torch.tensor(list(itertools.product(range(5), repeat=length)))
    whole = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences], 1)
    logits, total = target.logits(target.states(whole, [1])[1]), 0
    for place in range(len(prompt), whole.shape[1]):
        scores, ids = logits[:, place - 1], whole[:, :place]
        scores = hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
        scores = hf.TopPLogitsWarper(sampling.top_p)(ids, scores.double() / sampling.temperature)
        total = total + scores.log_softmax(-1).gather(1, whole[:, place : place + 1])[:, 0]
    return total.exp()


def proposer_of(kind):
    q = torch.tensor([0.35, 0.05, 0.3, 0.2, 0.1])
    return {
        "chain": RandomTrees(5, size=3, layers=(), chain=True),
        "tree": RandomTrees(5, size=6, layers=()),
        "sampled chain": SampledChain(q, 2, seed=9),
        "plain": None,
    }[kind]


SETTINGS = {
    "temperature": Sampling(1.0, seed=3),
    "top-p": Sampling(1.4, seed=3, top_p=0.8),
    "penalty": Sampling(1.0, seed=3, repetition_penalty=1.6),
}


@pytest.mark.parametrize("kind", ["chain", "tree", "sampled chain", "plain"])
@pytest.mark.parametrize("name", SETTINGS)
def test_generated_text_has_the_targets_distribution(kind, name, five):
    """The whole loop, drafts at random, continuations of three tokens (benchmarks/distribution.py draws more)."""
    prompt, length, sequences, sampling = [1, 4, 2], 3, 10_000, SETTINGS[name]
    out = generate(five, proposer_of(kind), [prompt] * sequences, max_new_tokens=length, sampling=sampling)
    codes = torch.tensor(out.tokens) @ torch.tensor([25, 5, 1])
    counts = torch.bincount(codes, minlength=5**length).double()
    p = exact(five, prompt, length, sampling)
    assert float(p.sum()) == pytest.approx(1, abs=1e-6)
    assert not counts[p == 0].any()
    value = chi_square_p(counts[p > 0], p[p > 0] * sequences)
    assert value > 1e-3, f"{kind}, {name}: p = {value}"


def test_the_processors_settings_are_different_distributions(five):
    """What the test above tells apart: each processor moves the probabilities by far more than the draws' noise."""
    every = [exact(five, [1, 4, 2], 3, sampling) for sampling in (*SETTINGS.values(), Sampling(1.4))]
    for one, other in itertools.combinations(every, 2):
        assert float((one - other).abs().sum()) > 0.1


def test_chain_acceptance_alone_has_the_right_distribution_and_rate():
    """Speculative sampling on given p and q: the first token is distributed as p, accepted with Σ min(p, q)."""
    logits, q = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5]), torch.tensor([0.5, 0.2, 0.2, 0.05, 0.05])
    sequences, one = torch.arange(DRAWS), torch.ones(DRAWS, 1, dtype=torch.int64)
    drafts = (q.log() + keyed_gumbel(0, sequences, DRAFT, one[:, 0], 5)).argmax(-1)
    tokens = torch.stack([torch.full((DRAWS,), -1), drafts], 1)
    q_BKV = torch.stack([q, torch.zeros(5)]).expand(DRAWS, -1, -1)
    positions = torch.stack([one[:, 0], one[:, 0] + 1], 1)
    end, final = accept_chain(tokens, q_BKV, logits.expand(DRAWS, 2, -1), Sampling(1.0), sequences, positions)
    first = torch.where(end > 0, drafts, final)
    p = logits.softmax(-1).double()
    assert chi_square_p(torch.bincount(first, minlength=5).double(), p * DRAWS) > 1e-3
    rate = float(torch.minimum(p, q.double()).sum())
    assert abs(float((end > 0).double().mean()) - rate) < 4 * math.sqrt(rate * (1 - rate) / DRAWS)
    bonus = final[end > 0]
    assert chi_square_p(torch.bincount(bonus, minlength=5).double(), p * len(bonus)) > 1e-3


def test_matching_alone_has_the_right_distribution():
    """Sample-and-match below a fixed tree commits p whatever the tree holds."""
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    sequences = torch.arange(DRAWS)
    parents = torch.tensor([[0, 0, 0, 1]]).expand(DRAWS, -1)
    tokens = torch.tensor([[-1, 3, 0, 3]]).expand(DRAWS, -1)
    sees = ancestors(parents[:1]).expand(DRAWS, -1, -1)
    positions = torch.tensor([5, 6, 6, 7]).expand(DRAWS, -1)
    chosen = choose(logits.expand(DRAWS, 4, -1), Sampling(1.0), sequences[:, None], positions)
    end, on_path = match_tree(tokens, parents, sees, chosen)
    first = torch.where(on_path[:, 1], 3, torch.where(on_path[:, 2], 0, chosen.gather(1, end[:, None])[:, 0]))
    p = logits.softmax(-1).double()
    assert chi_square_p(torch.bincount(first, minlength=5).double(), p * DRAWS) > 1e-3


def test_keyed_noise_is_uniform_and_a_function_of_its_key():
    keys = torch.arange(DRAWS)
    for varied in range(3):
        key = [torch.tensor(5), torch.tensor(3), torch.tensor(0)]
        key[varied] = keys
        u = keyed_uniform(1, key[0], 2, key[1], key[2])
        counts = torch.histc(u, bins=50, min=0, max=1)
        assert chi_square_p(counts, torch.full((50,), DRAWS / 50, dtype=torch.float64)) > 1e-3
        lag = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]
        assert abs(float(lag)) < 4 / math.sqrt(DRAWS)
    one, two = torch.tensor(7), torch.tensor(9)
    assert keyed_uniform(1, one, 0, two, one) == keyed_uniform(1, one, 0, two, one)
    assert len({float(keyed_uniform(1, one, purpose, two, one)) for purpose in range(4)}) == 4
