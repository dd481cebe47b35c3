"""The processes that train together, as seen by one of them. Alone, nothing is sent and every number stays as it was.

What is said here is said by all processes in the same order, or they wait for each other for ever. Knows nothing about
drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Engine:
    """What the engine that runs the training takes into its own hands.

    `clips`: gradients are summed, clipped and applied inside it, all drafters' together, and are seen nowhere else
    (ZeRO). `parted`: weights too are whole only while a module runs (ZeRO-3, FSDP), so that gradients come from its own
    backward pass alone. `whole(module)`: within it the module's weights are whole in every process; all of them must
    enter. `norm`: after a step, the norm of all gradients before they were clipped.
    """

    clips: bool = False
    parted: bool = False
    whole: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext
    norm: Callable[[], float] | None = None


def size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This one's number, from 0."""
    return dist.get_rank() if size() > 1 else 0


def total(x: Tensor) -> Tensor:
    """The sum over all processes, where x is."""
    if size() == 1:
        return x
    carried = x.to("cuda" if "nccl" in dist.get_backend() else "cpu", copy=True)
    dist.all_reduce(carried)
    return carried.to(x.device)


def clip_parts(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """`clip_grad_norm_` where each process holds a part of the gradients: their norm, of all parts together."""
    held = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = [part.float().square().sum() for part in held if part.numel()]
    where = held[0].device if held else torch.device("cuda" if "nccl" in dist.get_backend() else "cpu")
    norm = total(torch.stack(own).sum() if own else torch.zeros((), device=where)).sqrt()
    for part in held:
        part.mul_((largest / (norm + 1e-6)).clamp(max=1.0))
    return norm


def anywhere(flags: Tensor) -> Tensor:
    """bool, by place: whether it is so in any process."""
    return flags if size() == 1 else total(flags.to(torch.int32)) > 0


def collected(value: T) -> list[T]:
    """What each process has, by rank. Plain data only: it is pickled."""
    if size() == 1:
        return [value]
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, value)
    return found
