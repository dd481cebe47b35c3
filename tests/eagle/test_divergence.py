"""Closed forms of the losses: worked numbers, autograd, and what the acceptance rate is."""

from __future__ import annotations

import math

import pytest
import torch

from specwave.eagle import divergence
from specwave.eagle.divergence import FORMS, chunked_loss, cross_entropy, forward_kl, lk


def draw(rows=6, size=9, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    logits, y = (
        torch.randn(rows, size, dtype=dtype) * 2,
        torch.softmax(torch.randn(rows, 2 * size, dtype=dtype) * 2, -1),
    )
    mass = y[:, :size].sum(-1)
    return logits, y[:, :size] / mass[:, None], mass


def test_worked_numbers():
    """q = (1/4, 3/4); the target gives the two tokens 0.4 and 0.4, and 0.2 to tokens without a draft id."""
    logits, target, mass = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[0.5, 0.5]]), torch.tensor([0.8])
    soft = -0.5 * math.log(0.25) - 0.5 * math.log(0.75)
    assert cross_entropy(logits, target, mass)[0].item() == pytest.approx(soft)
    assert forward_kl(logits, target, mass)[0].item() == pytest.approx(soft - math.log(2))
    assert lk(logits, target, mass)[0].item() == pytest.approx(-math.log(0.25 + 0.4))


def test_lk_is_what_speculative_sampling_accepts():
    """A draft v ~ q is accepted with probability min(1, y_v/q_v), y the target's whole distribution."""
    logits, target, mass = draw()
    q, y = torch.softmax(logits, -1), target * mass[:, None]
    accepted = (q * (y / q).clamp(max=1)).sum(-1)
    torch.testing.assert_close(lk(logits, target, mass)[0].neg().exp(), accepted)


def test_a_perfect_draft():
    _, target, mass = draw()
    logits = target.log() + 3.0
    assert forward_kl(logits, target, mass)[0].abs().max() < 1e-12
    torch.testing.assert_close(lk(logits, target, mass)[0], -mass.log())  # no draft is ever accepted more often
    for form in (cross_entropy, forward_kl):  # the other's gradient jumps where q and p meet
        assert form(logits, target, mass)[1].abs().max() < 1e-12


def plain(name, logits, target, mass):
    log_q = torch.log_softmax(logits, -1)
    if name == "lk":
        return -torch.minimum(target * mass[:, None], log_q.exp()).sum(-1).log()
    soft = -(target * log_q).sum(-1)
    return soft + (target * target.log()).sum(-1) if name == "forward_kl" else soft


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_that_of_autograd(name, seed):
    logits, target, mass = draw(seed=seed)
    logits.requires_grad_()
    expected = plain(name, logits, target, mass)
    loss, gradient = FORMS[name](logits.detach(), target, mass)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), logits)[0])


@pytest.mark.parametrize("name", FORMS)
def test_drafts_that_are_wholly_wrong_stay_finite(name):
    """q is 1 on a token the target never says, and 0 in float32 on all others."""
    logits, target, mass = torch.tensor([[200.0, -200.0, -200.0]]), torch.tensor([[0.0, 1.0, 0.0]]), torch.ones(1)
    loss, gradient = FORMS[name](logits, target, mass)
    assert loss.isfinite().all()
    assert loss.item() > 80
    assert gradient.isfinite().all()


@pytest.mark.parametrize("chunk", [1, 4, 5, 100])
def test_chunks_give_one_sum(chunk, monkeypatch):
    """Any chunk, a zero weight and a row used twice: values and gradients of plain autograd."""
    monkeypatch.setitem(divergence._ROWS, "cpu", chunk)
    _, target, mass = draw()
    head = torch.nn.Linear(4, 9, bias=False, dtype=torch.float64)
    hidden = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    row, weight = torch.tensor([0, 1, 2, 2, 3, 4, 5, 0]), torch.rand(8, dtype=torch.float64)
    weight[3] = 0.0
    total, losses, drafts = chunked_loss(head, [head.weight], hidden, target, mass, row, weight, "lk")
    expected = plain("lk", head(hidden), target[row], mass[row])
    torch.testing.assert_close(losses, expected.detach())
    assert torch.equal(drafts, head(hidden).argmax(-1))
    for got, want in zip(
        torch.autograd.grad(3 * total, [hidden, head.weight]),
        torch.autograd.grad(3 * (weight * expected).sum(), [hidden, head.weight]),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_small_weights_do_not_underflow_float16():
    """Weights of 1e-6 times gradients of 1e-3 are below float16's 6e-8: they must come in last."""
    torch.manual_seed(0)
    head = torch.nn.Linear(4, 9, bias=False, dtype=torch.float16)
    hidden = torch.randn(3, 4, dtype=torch.float16, requires_grad=True)
    target, row = torch.softmax(torch.randn(3, 9), -1), torch.arange(3)
    found = []
    for weight in (1.0, 1e-6):
        total = chunked_loss(head, [], hidden, target, None, row, torch.full((3,), weight))[0]
        found.append(torch.autograd.grad(total / weight, hidden)[0])
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=1e-5)  # float16 keeps 11 bits
