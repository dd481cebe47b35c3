"""Gradients taken as soon as a loss is there, so that its graph is gone before the next one is built.

K drafters behind one target pass have K losses and, with one backward pass for their sum, K graphs of activations at a
time. Taken one by one there is one graph, and K sets of gradients, which the sum's backward would have made anyway. The
engines (DDP, ZeRO) still see one backward pass over one sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def take(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """`loss` with its gradients taken now: its backward hands them over, times what comes from above, and can run once.

    Args:
        loss: a scalar.
        parameters: all leaves that it is to be differentiated for; one that it does not reach gets no gradient.
    """
    with torch.autocast(loss.device.type, enabled=False):  # it is for forward passes
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return _Taken.apply(loss.detach(), list(gradients), *parameters)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, []  # in place, and let go of: they become .grad, not a copy of it
        return None, None, *(None if gradient is None else gradient.mul_(above[0]) for gradient in gradients)
