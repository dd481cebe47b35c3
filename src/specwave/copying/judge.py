"""How well scores tell copied tokens from others: AUC, precision and recall, calibration, thresholds.

Letters: N tokens; what comes before N in a shape (layers, sites) is judged all at once. Pure functions on tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def auc(scores: Tensor, labels_N: Tensor) -> Tensor:
    """The probability that a copied token scores higher than another, ties counting half (Mann & Whitney 1947).

    Args:
        scores: [..., N].
        labels_N: bool [N].

    Returns:
        float64 [...]; NaN where all labels are alike.
    """
    labels = labels_N.bool()
    positives, negatives = int(labels.sum()), int((~labels).sum())
    order = scores.argsort(-1)
    ordered = scores.gather(-1, order)
    # Ranks from 1 on, those of a tie averaged: halfway between the first and the last of its run.
    first = torch.searchsorted(ordered, ordered, right=False)
    last = torch.searchsorted(ordered, ordered, right=True)
    ranks = (first + 1 + last).double() / 2
    held = (ranks * labels[order]).sum(-1)
    pairs = positives * negatives
    return (held - positives * (positives + 1) / 2) / pairs if pairs else torch.full_like(held, torch.nan)


@dataclass(frozen=True)
class Curve:
    """Precision and recall of "copied when the score is at least the threshold", [K] each, thresholds ascending: one
    for every distinct score. Ends at the threshold that the highest score alone reaches."""

    thresholds: Tensor
    precision: Tensor
    recall: Tensor

    @property
    def average_precision(self) -> float:
        """Precision averaged over recall, a step for each threshold (no interpolation)."""
        steps = self.recall - torch.cat([self.recall[1:], self.recall.new_zeros(1)])
        return float((self.precision * steps).sum())

    def best_f1(self) -> tuple[float, float]:
        """(threshold, F1), the higher threshold of equals."""
        sums = self.precision + self.recall
        f1 = torch.where(sums > 0, 2 * self.precision * self.recall / sums.clamp(min=1e-300), 0.0)
        place = len(f1) - 1 - int(f1.flip(0).argmax())
        return float(self.thresholds[place]), float(f1[place])


def precision_recall(scores_N: Tensor, labels_N: Tensor) -> Curve:
    """The curve of one set of scores.

    Raises:
        ValueError: no token, or none that is copied: recall has no meaning then.
    """
    labels = labels_N.bool()
    if not bool(labels.any()):
        raise ValueError("precision and recall need at least one copied token")
    ordered, order = scores_N.sort()
    held = labels[order].flip(0).cumsum(0).flip(0).double()  # copied tokens that score at least as much
    reached = torch.arange(len(ordered), 0, -1, device=ordered.device)
    new = torch.ones_like(labels)
    new[1:] = ordered[1:] != ordered[:-1]
    return Curve(ordered[new], (held / reached)[new], (held / held[0])[new])


@dataclass(frozen=True)
class Calibration:
    """Tokens in bins of equal width by probability: what was said, what came, how many; bins without tokens are NaN."""

    said: Tensor
    came: Tensor
    counts: Tensor

    @property
    def error(self) -> float:
        """Expected calibration error: the mean distance of the two, tokens weighing alike."""
        gaps = torch.where(self.counts > 0, (self.said - self.came).abs(), 0.0)
        return float((gaps * self.counts).sum() / self.counts.sum())


def calibration(probabilities_N: Tensor, labels_N: Tensor, bins: int = 10) -> Calibration:
    """Bin b of B holds the probabilities in [b/B, (b+1)/B), the last one 1 too."""
    place = (probabilities_N.double() * bins).long().clamp(0, bins - 1)
    counts = torch.bincount(place, minlength=bins)
    said = torch.bincount(place, weights=probabilities_N.double(), minlength=bins) / counts
    came = torch.bincount(place, weights=labels_N.double(), minlength=bins) / counts
    return Calibration(said, came, counts)
