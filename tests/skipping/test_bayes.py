"""The Gaussian process on masks against its formulas, written out; which candidate it hopes for."""

import math

import pytest
import torch

from specwave.skipping.bayes import KAPPA, NOISE, matern, most_hopeful, posterior


def kernel(differing, length):
    r = math.sqrt(differing) / length
    return (1 + math.sqrt(5) * r + 5 / 3 * r * r) * math.exp(-math.sqrt(5) * r)


def test_the_kernel_falls_with_the_members_that_differ():
    masks = torch.tensor([[0, 0, 0], [0, 0, 1], [1, 1, 1]]).double()
    found = matern(masks, masks, 1.3)
    for i in range(3):
        for j in range(3):
            differing = int((masks[i] != masks[j]).sum())
            assert float(found[i, j]) == pytest.approx(kernel(differing, 1.3))
    assert float(found[0, 0]) == 1.0


def test_two_trials_by_hand():
    """Masks 00 and 11 with values 1 and 3: mean 2, spread 1, standardised −1 and 1. At 11 and 10, with the kernel
    matrix [[1 + σ², b], [b, 1 + σ²]], whose inverse is [[1 + σ², −b], [−b, 1 + σ²]] / d."""
    tried, values = torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 3.0])
    candidates, length = torch.tensor([[1, 1], [1, 0]]), 1.7
    one, b = 1 + NOISE, kernel(2, length)
    d = one * one - b * b
    means, deviations = [], []
    for near in ((b, 1.0), (kernel(1, length), kernel(1, length))):  # to 00 and to 11
        weights = [(one * near[0] - b * near[1]) / d, (one * near[1] - b * near[0]) / d]
        means.append(2 + (weights[1] - weights[0]))
        deviations.append(math.sqrt(1 - weights[0] * near[0] - weights[1] * near[1]))
    mean, deviation = posterior(tried, values, candidates, length)
    assert mean.tolist() == pytest.approx(means)
    assert deviation.tolist() == pytest.approx(deviations)
    assert means[1] == pytest.approx(2.0)  # as far from both


def test_what_was_tried_is_nearly_known_and_what_is_far_is_not():
    draw = torch.Generator().manual_seed(0)
    tried = (torch.rand(12, 20, generator=draw) < 0.4).double()
    values = torch.rand(12, generator=draw)
    mean, deviation = posterior(tried, values, torch.cat([tried, 1 - tried[:1]]), 1.0)
    spread = float(values.std(correction=0))
    assert (mean[:12] - values).abs().max() < 0.05 * spread + NOISE
    assert deviation[:12].max() < 0.11 * spread  # √NOISE, about
    assert float(deviation[12]) == pytest.approx(spread, rel=0.01)
    assert float(mean[12]) == pytest.approx(float(values.mean()), abs=0.01)


def test_hope_lies_near_what_was_good_and_far_from_what_was_bad():
    tried = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]])
    candidates = torch.tensor([[0, 0, 0, 1, 0, 1], [1, 0, 1, 0, 0, 0]])  # one swap from the second, from the first
    assert most_hopeful(tried, torch.tensor([0.9, 0.1]), candidates) == 1
    assert most_hopeful(tried, torch.tensor([0.1, 0.9]), candidates) == 0


def test_hope_is_the_mean_and_so_many_deviations():
    draw = torch.Generator().manual_seed(3)
    tried = (torch.rand(9, 10, generator=draw) < 0.5).double()
    values, candidates = torch.rand(9, generator=draw), (torch.rand(40, 10, generator=draw) < 0.5).double()
    length = float(torch.cdist(tried, candidates).median())
    mean, deviation = posterior(tried, values, candidates, length)
    assert most_hopeful(tried, values, candidates) == int((mean + KAPPA * deviation).argmax())


def test_one_trial_or_equal_values_have_no_spread():
    mean, deviation = posterior(torch.ones(1, 3), torch.tensor([0.4]), torch.eye(3), 1.0)
    assert mean.tolist() == pytest.approx([0.4] * 3)
    assert (deviation > 0).all()
    assert most_hopeful(torch.eye(3), torch.zeros(3), torch.cat([torch.eye(3), torch.ones(1, 3)])) == 3
