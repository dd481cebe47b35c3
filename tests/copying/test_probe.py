"""Probes trained together and in batches, against one logistic regression at a time."""

import math

import pytest
import torch

from specwave.copying.judge import auc
from specwave.copying.probe import L2, Classes, Probes, fit, gradient, held_out_loss, root_mean_square

SITES, WIDTH = 3, 6


def made(count, seed, share=0.15):
    """States of three sites, [P, N, D]: the first tells copies well, the second a little, the third not at all."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.rand(count, generator=draw) < share
    states = torch.randn(SITES, count, WIDTH, generator=draw)
    sign = labels.float() * 2 - 1
    direction = torch.linspace(-1, 1, WIDTH)
    states[0] += 1.5 * sign[:, None] * direction
    states[1] += 0.3 * sign[:, None] * direction
    states[..., 0] *= 100  # the dimensions of a real model differ as much
    return states, labels


def batches_of(states, labels, size=64):
    def batches():
        for start in range(0, len(labels), size):
            yield states[:, start : start + size], labels[start : start + size]

    return batches


def loss(weights, states, labels, penalty):
    """The objective, written out: float64, one probe, weights for scaled states."""
    counts = labels.sum(), (~labels).sum()
    importance = torch.where(labels, 0.5 / counts[0], 0.5 / counts[1])
    logits = states @ weights
    each = torch.nn.functional.softplus(logits) - labels * logits
    return (importance * each).sum() + penalty / 2 * weights.square().sum()


def optimum(states, labels, penalty):
    """By Newton's method on the whole set."""
    weights = torch.zeros(states.shape[1], dtype=torch.float64)
    for _ in range(30):
        slope = torch.func.grad(loss)(weights, states, labels, penalty)
        weights = weights - torch.linalg.solve(torch.func.hessian(loss)(weights, states, labels, penalty), slope)
    return weights


def test_the_gradient_is_that_of_the_loss():
    states, labels = made(50, 1)
    states, penalty = states.double(), torch.tensor([0.0, 0.3], dtype=torch.float64)
    scale = torch.rand(SITES, WIDTH, dtype=torch.float64) + 0.5
    weights = torch.randn(SITES, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    classes = Classes.of([labels])
    scaled = states / scale[:, None]
    total = sum(loss(weights[p, k], scaled[p], labels, float(penalty[k])) for p in range(SITES) for k in range(2))
    total.backward()
    ours = gradient(weights.detach(), states, labels, classes.weights(labels).double(), penalty, scale)
    torch.testing.assert_close(ours, weights.grad)


def test_training_in_batches_comes_to_the_optimum_of_each_probe_alone():
    states, labels = made(2_000, 2)
    training = batches_of(states, labels, 2_000)  # one batch an epoch: no noise of batches
    scale = root_mean_square(training, 1)
    found = fit(training, training, Classes.of([labels]), l2=(0.05,), epochs=1_500, rate=0.05, scale_batches=1)
    for site in range(SITES):
        wanted = optimum((states[site] / scale[site]).double(), labels, 0.05)
        torch.testing.assert_close(found.weights[site] * scale[site], wanted.float(), atol=2e-3, rtol=2e-2)


def test_the_states_are_read_once_an_epoch():
    """They may be some gigabytes: beside the epochs there is a look at the first batches, for their size."""
    states, labels = made(500, 11)
    read = []

    def training():
        for batch in batches_of(states, labels, 50)():
            read.append(len(batch[1]))
            yield batch

    fit(training, batches_of(states, labels), Classes.of([labels]), epochs=3, scale_batches=2)
    assert sum(read) <= 3 * 500 + 3 * 50


def test_the_probes_tell_what_can_be_told():
    training, held = made(20_000, 3), made(5_000, 4)
    found = fit(batches_of(*training), batches_of(*held), Classes.of([training[1]]))
    assert isinstance(found, Probes)
    areas = auc(found.logits(held[0]), held[1])
    # Two normals d apart along the best direction: AUC = Φ(d / √2), d = 2 · strength · ‖direction‖.
    norm = float(torch.linspace(-1, 1, WIDTH).norm())
    best = [0.5 * (1 + math.erf(strength * norm)) for strength in (1.5, 0.3)]
    # A bias may be what separates them best; here the classes lie on both sides of zero, so none is needed.
    assert float(areas[0]) == pytest.approx(best[0], abs=0.01)
    assert float(areas[1]) == pytest.approx(best[1], abs=0.03)
    assert 0.45 < float(areas[2]) < 0.55
    assert float(found.loss[0]) < float(found.loss[1]) < math.log(2) < float(found.loss[2]) + 0.02
    assert set(found.l2.tolist()) <= set(torch.tensor(L2).tolist())


def test_each_probe_gets_the_penalty_that_is_best_for_it():
    """Few tokens and many penalties: the site that says nothing wants the largest one, the clear one a small one."""
    training, held = made(150, 5), made(5_000, 6)
    penalties = (1e-4, 1e-2, 1.0, 100.0)
    together = fit(batches_of(*training), batches_of(*held), Classes.of([training[1]]), l2=penalties, epochs=60)
    assert together.l2[2] == 100.0
    assert together.l2[0] < 100.0
    for site in range(SITES):  # what is chosen is the best of those trained one by one
        alone = [
            fit(
                batches_of(training[0][site : site + 1], training[1]),
                batches_of(held[0][site : site + 1], held[1]),
                Classes.of([training[1]]),
                l2=(penalty,),
                epochs=60,
            )
            for penalty in penalties
        ]
        best = min(alone, key=lambda probe: float(probe.loss))
        assert float(best.l2) == float(together.l2[site])
        torch.testing.assert_close(best.weights[0], together.weights[site], atol=1e-5, rtol=1e-4)


def test_classes_weigh_alike():
    """Twice the tokens of one class, doubled: nothing changes."""
    states, labels = made(400, 7)
    doubled = torch.cat([states, states[:, ~labels]], 1), torch.cat([labels, labels[~labels]])
    weights = torch.randn(SITES, 1, WIDTH) / 100
    once, twice = (held_out_loss(weights, batches_of(*pair, size=97)) for pair in ((states, labels), doubled))
    torch.testing.assert_close(once, twice)
    for pair in ((states, labels), doubled):
        classes = Classes.of([pair[1][:13], pair[1][13:]])
        each = classes.weights(pair[1])
        assert float(each[pair[1]].sum()) == pytest.approx(float(each[~pair[1]].sum()))


def test_what_has_one_class_only_is_refused():
    states, labels = made(60, 8)
    none = torch.zeros(60, dtype=torch.bool)
    with pytest.raises(ValueError, match="0 copied tokens and 60 others: a probe needs some of both"):
        fit(batches_of(states, none), batches_of(states, labels), Classes.of([none]))
    with pytest.raises(ValueError, match="0 copied held-out tokens and 60 others"):
        fit(batches_of(states, labels), batches_of(states, none), Classes.of([labels]))
    with pytest.raises(ValueError, match="no training tokens"):
        fit(batches_of(states[:, :0], labels[:0]), batches_of(states, labels), Classes.of([labels]))


def test_half_precision_states_are_enough():
    training, held = made(4_000, 9), made(2_000, 10)
    rounded = training[0].bfloat16(), training[1]
    whole, half = (fit(batches_of(*pair), batches_of(*held), Classes.of([pair[1]])) for pair in (training, rounded))
    torch.testing.assert_close(
        auc(whole.logits(held[0]), held[1]), auc(half.logits(held[0]), held[1]), atol=3e-3, rtol=0
    )
