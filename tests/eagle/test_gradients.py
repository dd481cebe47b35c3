"""Gradients taken at once are those of a later backward pass, and free what the forward pass kept."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from specwave.eagle.gradients import take


def a_loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


@pytest.fixture
def nets():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)]


def gradients(nets):
    return [parameter.grad for net in nets for parameter in net.parameters()]


def test_the_same_gradients_bit_for_bit(nets):
    x = torch.randn(8, 16)
    torch.stack([a_loss(net, x) for net in nets]).sum().backward()
    expected = [gradient.clone() for gradient in gradients(nets)]
    for net in nets:
        net.zero_grad()
    losses = [take(a_loss(net, x), list(net.parameters())) for net in nets]
    assert [loss.item() for loss in losses] == [a_loss(net, x).item() for net in nets]
    torch.stack(losses).sum().backward()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients(nets), expected, strict=True))


def test_what_comes_from_above_multiplies_and_gradients_add_up(nets):
    net, x = nets[0], torch.randn(8, 16)
    a_loss(net, x).backward()
    once = [gradient.clone() for gradient in gradients([net])]
    (3.0 * take(a_loss(net, x), list(net.parameters()))).backward()
    assert all(torch.allclose(mine, 4.0 * one) for mine, one in zip(gradients([net]), once, strict=True))


def test_a_parameter_out_of_reach_gets_none(nets):
    used, idle = nets[:2]
    take(a_loss(used, torch.randn(8, 16)), [*used.parameters(), *idle.parameters()]).backward()
    assert all(gradient is not None for gradient in gradients([used]))
    assert gradients([idle]) == [None] * 4


def test_an_infinite_loss_left_out_touches_nothing(nets):
    x = torch.randn(8, 16)
    losses = [take(a_loss(net, x) * (float("inf") if net is nets[1] else 1.0), list(net.parameters())) for net in nets]
    torch.stack([loss for loss in losses if loss.isfinite()]).sum().backward()
    assert gradients([nets[1]]) == [None] * 4
    assert all(bool(gradient.isfinite().all()) for net in (nets[0], *nets[2:]) for gradient in gradients([net]))


def test_activations_of_one_net_at_a_time(nets):
    """What backward passes keep, counted while four losses are built: all four nets', or one's."""

    def peak(once) -> int:
        kept: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        most = 0

        def pack(tensor):
            nonlocal most
            held = tensor.detach().clone()
            kept.add(held)
            most = max(most, len(kept))
            return held

        with saved_tensors_hooks(pack, lambda held: held):
            losses = [once(a_loss(net, torch.randn(8, 16)), list(net.parameters())) for net in nets]
            torch.stack(losses).sum().backward()
        return most

    assert peak(lambda loss, _: loss) == 4 * peak(take) > 4
