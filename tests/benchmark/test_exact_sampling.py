"""The equality contract when sampling: gaps of perturbed processed scores, tokens that cross a border."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specwave.benchmark.exact import TOLERANCE, TargetScorer, compare, kept, tempered
from specwave.decoding import Sampling, generate
from specwave.decoding.sampling import TARGET, choose, keyed_gumbel, scores

V = 12
SETTINGS = [
    Sampling(1.0, top_k=4),
    Sampling(1.3, top_p=0.7),
    Sampling(0.7, min_p=0.2),
    Sampling(1.1, top_k=6, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_without_noise_exactly_the_drawn_set_is_kept(sampling, seed):
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 2
    surely, possibly = kept(logits / sampling.temperature, sampling, 0.0)
    wanted = scores(logits, sampling).isfinite()
    assert torch.equal(surely, wanted)
    assert torch.equal(possibly, wanted)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@given(seed=st.integers(0, 10**6), noise=st.sampled_from([1e-3, 0.05, 0.5]))
@settings(deadline=None, max_examples=60)
def test_whatever_the_noise_does_the_set_lies_between_surely_and_possibly(sampling, seed, noise):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=generator) * 2
    surely, possibly = kept(logits / sampling.temperature, sampling, 2 * noise / sampling.temperature)
    assert bool((surely <= possibly).all())
    for _ in range(20):
        moved = logits + noise * (2 * torch.rand(V, generator=generator) - 1)
        now = scores(moved, sampling).isfinite()
        assert bool((surely <= now).all())
        assert bool((now <= possibly).all())


def test_greedy_keeps_everything():
    surely, possibly = kept(torch.randn(V), Sampling(0.0, top_k=1, top_p=0.1), 0.0)
    assert surely.all()
    assert possibly.all()


# ---------------------------------------------------------------- comparing


class Machine:
    """A reference model with a table of logits by the last token; another machine's logits differ by `noise`."""

    def __init__(self, seed, noise):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(V, V, generator=generator) * 2
        self.other = self.table + noise * (2 * torch.rand(V, V, generator=generator) - 1)

    def one_shot(self, ids, start):
        return self.table[list(ids)[start:]]

    def incremental(self, ids, start):
        return self.other[list(ids)[start:]]

    def draw(self, table, ids, limit, sampling, sequence):
        made = list(ids)
        while len(made) < len(ids) + limit:
            seen = torch.zeros(V, dtype=torch.bool)
            seen[made] = True
            key = torch.tensor(sequence), torch.tensor(len(made))
            made.append(int(choose(table[made[-1]], sampling, *key, seen=seen)))
        return made[len(ids) :]


def judged(machine, table, sampling, limit=40, sequence=5, drawn_with=None):
    def draw(table, ids, limit):
        return machine.draw(table, ids, limit, drawn_with or sampling, sequence)

    return compare(
        [3],
        machine.draw(machine.table, [3], limit, sampling, sequence),
        draw(table, [3], limit),
        scorer=machine,
        again=lambda ids, limit: draw(table, ids, limit),
        max_new_tokens=limit,
        sampling=sampling,
        sequence=sequence,
    )


@pytest.mark.parametrize("sampling", [*SETTINGS, Sampling(0.9, repetition_penalty=1.4)], ids=str)
def test_another_machines_noise_is_excused_and_nothing_else(sampling):
    """With noise this large every draw is turned now and then, borders too: all of it lies within the contract."""
    ties = 0
    for seed in range(12):
        machine = Machine(seed, noise=0.03)
        comparison = judged(machine, machine.other, sampling)
        assert comparison.equal
        ties += len(comparison.near_ties)
        wrong = machine.table.clone()
        wrong[:, 5] += 4.0  # far beyond the noise
        if sampling.temperature and machine.draw(wrong, [3], 40, sampling, 5) != machine.draw(
            machine.table, [3], 40, sampling, 5
        ):
            assert not judged(machine, wrong, sampling).equal
    assert ties > 0


def test_a_token_that_crosses_a_border_within_the_noise_is_a_near_tie():
    """Second and third token score alike, only two are kept: the machine that keeps the third one may draw it."""
    sampling = Sampling(1.0, seed=1, top_k=2)
    for gap, near in ((1e-5, True), (0.5, False)):
        machine = Machine(0, noise=1e-5)
        machine.table[:] = torch.full((V,), -5.0)
        machine.table[:, 0], machine.table[:, 1], machine.table[:, 2] = 1.0, 0.9, 0.9 - gap
        turned = machine.table.clone()
        turned[:, 1], turned[:, 2] = machine.table[:, 2].clone(), machine.table[:, 1].clone()
        machine.other = machine.table + 1e-5
        comparison = judged(machine, turned, sampling)
        assert comparison.divergences
        assert comparison.equal == near
        assert {comparison.divergences[0].reference, comparison.divergences[0].candidate} & {1, 2}
        assert all(math.isfinite(found.gap) for found in comparison.divergences)


def test_other_noise_or_other_settings_are_divergences():
    machine, sampling = Machine(1, noise=1e-5), Sampling(1.0, seed=1, top_p=0.9)
    for other in (Sampling(1.0, seed=2, top_p=0.9), Sampling(1.0, seed=1), Sampling(1.0, seed=1, top_k=2)):
        comparison = judged(machine, machine.other, sampling, drawn_with=other)
        assert not comparison.equal
        assert not comparison.divergences[-1].near_tie


def test_scores_are_those_the_loop_takes_the_largest_of(tiny):
    sampling, prompt = Sampling(0.9, seed=4, top_p=0.9, repetition_penalty=1.3), [5, 9, 200, 31]
    made = generate(tiny, None, prompt, max_new_tokens=16, sampling=sampling, sequence_ids=[8], eos_ids=()).tokens
    rows = tempered(TargetScorer(tiny).one_shot([*prompt, *made], len(prompt) - 1), prompt, made, sampling)
    for place, (row, token) in enumerate(zip(rows, made, strict=False)):
        noise = keyed_gumbel(4, torch.tensor(8), TARGET, torch.tensor(len(prompt) + place), len(row))
        assert int((row + noise).masked_fill(~kept(row, sampling, 0.0)[0], -math.inf).argmax()) == token
    for place in (0, 7, 15):
        changed = list(made)
        changed[place] = (changed[place] + 1) % tiny.vocab_size
        keys = {"max_new_tokens": 16, "sampling": sampling, "sequence": 8}
        comparison = compare(prompt, made, changed, scorer=TargetScorer(tiny), again=lambda *_: [], **keys)
        (found,) = comparison.divergences
        assert (found.position, found.near_tie) == (place, False)
        assert found.gap > TOLERANCE * found.noise
