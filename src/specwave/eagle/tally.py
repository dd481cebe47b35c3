"""Sums of the objective over batches, the figures they mean, and the stop where one is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from specwave.artifacts import UserError
from specwave.data import world
from specwave.eagle.loss import Outcome, acceptance, weighted

SUMS = ("losses", "counts", "hits", "slots")


class Tally:
    """Adds outcomes; a mean over batches is a sum divided by a sum, so batches weigh by their slots."""

    def __init__(self, steps: int):
        self.losses = torch.zeros(steps, dtype=torch.float64)
        self.counts, self.hits, self.slots = (torch.zeros(steps, dtype=torch.int64) for _ in range(3))

    def add(self, outcome: Outcome) -> None:
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(outcome, name).cpu())

    def state(self) -> dict[str, list[float]]:
        """Plain data for a checkpoint."""
        return {name: getattr(self, name).tolist() for name in SUMS}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        for name, values in state.items():
            setattr(self, name, torch.tensor(values, dtype=getattr(self, name).dtype))

    def figures(self, decay: float) -> dict[str, float]:
        """loss (nats, weighted over steps), a_0 … a_{S−1}, tau_hat."""
        shares, tau = acceptance(self.hits, self.slots)
        loss = float(weighted(list(self.losses), self.counts, decay))
        return {"loss": loss, **{f"a_{step}": share for step, share in enumerate(shares)}, "tau_hat": tau}


def summed(tallies: Mapping[str, Tally]) -> Mapping[str, Tally]:
    """Those of all processes together, in each of them."""
    if world.size() == 1:
        return tallies
    own = [torch.stack([getattr(tally, name).double() for name in SUMS]) for tally in tallies.values()]
    found = {}
    for (key, tally), sums in zip(tallies.items(), world.total(torch.stack(own)), strict=True):
        found[key] = Tally(len(tally.losses))
        found[key].restore(dict(zip(SUMS, sums.tolist(), strict=True)))
    return found


def columns(figures: Mapping[str, Mapping[str, float]], prefix: str = "") -> dict[str, float]:
    """drafter → figures as columns of metrics.csv: "L2-15-27/loss", or with a prefix "L2-15-27/val_loss"."""
    return {f"{name}/{prefix}{key}": value for name, found in figures.items() for key, value in found.items()}


def not_finite(value: float, what: str, step: int, samples: Sequence[str]) -> UserError:
    """What is to be said of a value that is NaN or infinite, before it reaches weights or a checkpoint."""
    return UserError(
        "training",
        value,
        f"the {what} is not finite at step {step} in the batch of {', '.join(samples)}; the last checkpoint is as "
        "it was: lower drafter.lr, or look at these samples",
    )
