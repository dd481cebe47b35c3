"""SwitchSD's probe: p(copied) = σ(w · h), linear and without bias, one for every layer and site, all trained at once.

Letters: P probes (a layer and a site each), N tokens, B tokens of a batch, K strengths of the penalty, D width.

The states of all sites do not fit into memory, so they come in batches, as often as there are epochs. Every batch
advances P × K logistic regressions with one batched product each way; the gradient is written down below, since that of
a linear probe is one line. Which penalty is best is each probe's own, by loss on held-out tokens.

    loss    Σ c_b [log(1 + exp(z_b)) − y_b z_b] / Σ c_b + λ/2 ‖w‖²,   z = w · h / s
    c       1 / (2 · share of the token's class): both classes weigh alike
    s       the root mean square of each dimension: a few of them are a hundred times larger than the rest

s is put to the weights, which are few, and not to the states: in the end a probe is one dot product with a state.
Nothing is subtracted: a mean would be a bias. Knows nothing about models, files and offsets (`feature of j−1, label of
j` is the batches' affair).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]  # (states [P, B, D], labels bool [B]), afresh at every call
L2 = (1e-4, 1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Probes:
    """Trained probes.

    Attributes:
        weights: float32 [P, D], for states as the target has them.
        l2: [P], the penalty that was best for each.
        loss: [P], its loss on held-out tokens, classes weighing alike; ln 2 = 0.693 is a probe that knows nothing.
    """

    weights: Tensor
    l2: Tensor
    loss: Tensor

    def logits(self, states_PBD: Tensor) -> Tensor:
        """[P, B]; the probability is their sigmoid."""
        return torch.einsum("pbd,pd->pb", states_PBD.float(), self.weights)


@dataclass(frozen=True)
class Classes:
    """How many tokens are copied and how many not."""

    copied: int
    others: int

    @classmethod
    def of(cls, labels: Iterable[Tensor]) -> Classes:
        copied = others = 0
        for labels_B in labels:
            count = int(labels_B.sum())
            copied, others = copied + count, others + len(labels_B) - count
        return cls(copied, others)

    def weights(self, labels_B: Tensor) -> Tensor:
        """[B], each class's sum to half of the tokens.

        Raises:
            ValueError: a class without tokens.
        """
        if not self.copied or not self.others:
            raise ValueError(f"{self.copied} copied tokens and {self.others} others: a probe needs some of both")
        half = (self.copied + self.others) / 2
        return torch.where(labels_B, half / self.copied, half / self.others)


def fit(
    training: Batches,
    held_out: Batches,
    classes: Classes,
    *,
    l2: Sequence[float] = L2,
    epochs: int = 4,
    rate: float = 0.02,
    scale_batches: int = 16,
) -> Probes:
    """Trains all probes and chooses each one's penalty.

    Args:
        training: the batches of an epoch, shuffled by whoever makes them.
        held_out: tokens of other prompts.
        classes: of the training tokens.
        l2: the penalties λ tried, side by side.
        epochs: passes over the training tokens.
        rate: Adam's step at first; it falls to zero along a cosine.
        scale_batches: batches that s is taken from.
    """
    scale_PD = root_mean_square(training, scale_batches)
    penalty_K = torch.tensor(l2, device=scale_PD.device)
    weights_PKD = scale_PD.new_zeros(len(scale_PD), len(penalty_K), scale_PD.shape[1])
    optimiser = torch.optim.Adam([weights_PKD])
    seen, total = 0, epochs * (classes.copied + classes.others)
    for _ in range(epochs):
        for states_PBD, labels_B in training():
            optimiser.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * seen / total)) / 2
            weights_PKD.grad = gradient(weights_PKD, states_PBD.float(), labels_B, classes.weights(labels_B), penalty_K,
                                        scale_PD)  # fmt: skip
            optimiser.step()
            seen += len(labels_B)
    weights_PKD = weights_PKD / scale_PD[:, None]
    loss_PK = held_out_loss(weights_PKD, held_out)
    best_P = loss_PK.argmin(1)
    place = torch.arange(len(best_P), device=best_P.device)
    return Probes(weights_PKD[place, best_P].contiguous(), penalty_K[best_P], loss_PK[place, best_P])


def gradient(
    weights_PKD: Tensor,
    states_PBD: Tensor,
    labels_B: Tensor,
    class_weights_B: Tensor,
    penalty_K: Tensor,
    scale_PD: Tensor,
) -> Tensor:
    """Of the loss above, on one batch: [P, K, D]."""
    scale_P1D = scale_PD[:, None]
    logits_PKB = weights_PKD / scale_P1D @ states_PBD.mT
    residual_PKB = (logits_PKB.sigmoid() - labels_B.to(logits_PKB)) * (class_weights_B / class_weights_B.sum())
    return residual_PKB @ states_PBD / scale_P1D + penalty_K[:, None] * weights_PKD


def held_out_loss(weights_PKD: Tensor, batches: Batches) -> Tensor:
    """Mean loss [P, K] without penalty, classes weighing alike by their shares among these tokens."""
    sums = weights_PKD.new_zeros(2, *weights_PKD.shape[:2], dtype=torch.float64)
    counts = sums.new_zeros(2)
    for states_PBD, labels_B in batches():
        logits_PKB = weights_PKD @ states_PBD.float().mT
        loss_PKB = torch.nn.functional.softplus(torch.where(labels_B, -logits_PKB, logits_PKB)).double()
        for kind, chosen_B in enumerate((~labels_B, labels_B)):
            sums[kind] += loss_PKB[..., chosen_B].sum(-1)
            counts[kind] += chosen_B.sum()
    if not bool((counts > 0).all()):
        found = [int(count) for count in counts]
        raise ValueError(f"{found[1]} copied held-out tokens and {found[0]} others: penalties cannot be compared")
    return (sums / counts[:, None, None]).mean(0).float()


def root_mean_square(batches: Batches, count: int) -> Tensor:
    """[P, D] over the first `count` batches; 1 where a dimension is always zero."""
    total, tokens = torch.zeros(()), 0
    for place, (states_PBD, _) in enumerate(batches()):
        if place == count:
            break
        total = total.to(states_PBD.device) + states_PBD.float().square().sum(1)
        tokens += states_PBD.shape[1]
    if not tokens:
        raise ValueError("there are no training tokens")
    scale_PD = (total / tokens).sqrt()
    return torch.where(scale_PD > 0, scale_PD, 1.0)
