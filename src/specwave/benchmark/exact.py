"""Is an output the target's own output? The float32 equality contract, for greedy decoding and keyed sampling.

Matrix shapes change the order of sums, so logits computed in another shape differ by a *noise*, and where two tokens
score within it either may win. The contract: no divergence where the scores differ by more than 10 times the measured
noise; each other one is listed as a near-tie and decoding is compared again from the reference's token on:

    reference   a b c d e f          k = 2 is a near-tie: c and x score alike
    candidate   a b x p q r
    again       prompt a b c →  d e f    compared with the reference's rest, and so on

Scores are what the argmax is taken of: logits after the repetition penalty; when sampling also after the temperature,
with the position's keyed noise, among the tokens that top-k, top-p and min-p keep. A token may cross their border
within the noise too: it then counts as kept for being chosen, and as ruled out for being overlooked.

Knows nothing about proposals, text or questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specwave.decoding import Sampling
from specwave.decoding.processors import penalise
from specwave.decoding.sampling import TARGET, keyed_gumbel
from specwave.target import Target

GREEDY = Sampling()
TOLERANCE = 10.0  # methods.md: near-ties are judged at 10 times the measured noise


@dataclass(frozen=True)
class Divergence:
    """Where a candidate left the reference.

    Attributes:
        position: index among the new tokens.
        reference, candidate: the tokens; None where one of the outputs had already ended.
        top2_gap: the two largest scores' difference, at this position.
        gap: the largest score less the lower of the two tokens' scores: how far from the top the worse of them is.
            When sampling, the largest of those tokens that no noise rules out, and at least 0. None where one output
            had ended.
        noise: the largest difference between one-shot and incremental scores over the whole reference, the keyed noise
            apart; None where it was not measured.
        near_tie: gap ≤ 10 × noise, and neither token is ruled out by more than that.
    """

    position: int
    reference: int | None
    candidate: int | None
    top2_gap: float
    gap: float | None
    noise: float | None
    near_tie: bool


@dataclass(frozen=True)
class Comparison:
    """`divergences` in order; all but a last true one are near-ties."""

    divergences: list[Divergence] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Equal, near-ties excused."""
        return all(divergence.near_tie for divergence in self.divergences)

    @property
    def near_ties(self) -> list[Divergence]:
        return [divergence for divergence in self.divergences if divergence.near_tie]


class Scorer(Protocol):
    """Logits of the reference model for a whole sequence."""

    def one_shot(self, ids: Sequence[int], start: int) -> Tensor:
        """float32 [len(ids) − start, V]: logits after positions start … of `ids`, from one forward."""

    def incremental(self, ids: Sequence[int], start: int) -> Tensor:
        """The same logits, token by token with a cache, as plain decoding computes them."""


def first_divergence(reference: Sequence[int], candidate: Sequence[int]) -> int | None:
    """The first index where the two differ, the shorter's length where it is a prefix, None where they are equal."""
    for index, (expected, found) in enumerate(zip(reference, candidate, strict=False)):
        if expected != found:
            return index
    return None if len(reference) == len(candidate) else min(len(reference), len(candidate))


def judge(
    scores_V: Tensor,
    position: int,
    reference: int | None,
    candidate: int | None,
    noise: float | None,
    surely_V: Tensor | None = None,
    possibly_V: Tensor | None = None,
) -> Divergence:
    """A near-tie or a true divergence, by the scores [V] at that position; `surely`, `possibly`: see `kept`, all tokens
    by default.

    A candidate that stopped early, or went on after the reference's end, is never a near-tie: both obey one limit and
    one set of end tokens. A token far below two tying leaders is none either.
    """
    everything = torch.ones_like(scores_V, dtype=torch.bool)
    surely, possibly = (everything if mask is None else mask for mask in (surely_V, possibly_V))
    top = scores_V.masked_fill(~possibly, -math.inf).topk(2).values
    if not bool(top[1].isfinite()):  # one token is left: the next one is ruled out, wherever it scores
        top = scores_V.topk(2).values
    gap, near = None, False
    if reference is not None and candidate is not None:
        worse = torch.minimum(scores_V[reference], scores_V[candidate])
        gap = max(0.0, float(scores_V.masked_fill(~surely, -math.inf).amax() - worse))
        if noise is not None:
            near = bool(possibly[reference] & possibly[candidate]) and gap <= TOLERANCE * noise
    return Divergence(position, reference, candidate, float(top[0] - top[1]), gap, noise, near)


def kept(scores_V: Tensor, sampling: Sampling, tolerance: float) -> tuple[Tensor, Tensor]:
    """Which tokens top-k, top-p and min-p keep when no difference of two scores is off by more than `tolerance`:
    (surely, possibly).

    `scores` [V] after penalty and temperature. Both are the set that is drawn from when the tolerance is 0 and none
    tie; else the true set lies between them.
    """
    scores = scores_V.double()
    surely = possibly = torch.ones_like(scores, dtype=torch.bool)
    if sampling.greedy:
        return surely, possibly
    if sampling.top_k and sampling.top_k < len(scores):
        last, next_one = scores.topk(sampling.top_k + 1).values[-2:]
        surely, possibly = scores > next_one + tolerance, scores >= last - tolerance
    if sampling.top_p < 1:
        mass = (scores - scores.amax()).exp()
        ordered, order = scores.sort(descending=True)

        def ahead(counted: Tensor, border: Tensor) -> Tensor:
            """Mass of the counted tokens that score above each token's border."""
            sums = torch.cat([mass.new_zeros(1), (mass * counted)[order].cumsum(0)])
            return sums[torch.searchsorted(-ordered, -border)]

        def share(part: Tensor, rest: Tensor, shift: float) -> Tensor:
            return part / (part + rest * math.exp(min(-shift, 700.0)))  # beyond, it overflows

        few, many = ahead(surely, scores + tolerance), ahead(possibly, scores - tolerance)
        many = many - torch.where(possibly & (tolerance > 0), mass, 0)  # a token is not ahead of itself
        all_few, all_many = (mass * surely).sum(), (mass * possibly).sum()
        possibly = possibly & (share(few, all_many - few, -tolerance) < sampling.top_p)
        surely = surely & (share(many, (all_few - many).clamp(min=mass), tolerance) < sampling.top_p)
    if sampling.min_p > 0:
        border = scores.amax() + math.log(sampling.min_p)
        surely, possibly = surely & (scores >= border + tolerance), possibly & (scores >= border - tolerance)
    return surely, possibly


def compare(
    prompt: Sequence[int],
    reference: Sequence[int],
    candidate: Sequence[int],
    *,
    scorer: Scorer,
    again: Callable[[list[int], int], Sequence[int]] | None,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    sequence: int = 0,
) -> Comparison:
    """Compares two outputs of one prompt under the contract.

    Args:
        prompt: the prompt's ids.
        reference: the target's own output.
        candidate: the output to judge.
        scorer: gives the reference model's logits; called only where the outputs differ.
        again: decodes with the candidate's method: (ids, max_new_tokens) → new tokens. None: no noise is measured and
            nothing excused (dtypes below float32), the first divergence is described.
        max_new_tokens: the limit under which both were made.
        sampling, sequence: how both were drawn, and the key of their noise.
    """
    divergences: list[Divergence] = []
    scores_TV, noise = None, None  # row k: the reference's scores for new token k
    done = 0  # reference tokens behind us
    while True:
        index = first_divergence(reference[done:], candidate)
        if index is None:
            return Comparison(divergences)
        if scores_TV is None:
            ids, start = [*prompt, *reference], len(prompt) - 1
            scores_TV = tempered(scorer.one_shot(ids, start), prompt, reference, sampling)
            if again is not None:
                other = tempered(scorer.incremental(ids, start), prompt, reference, sampling)
                noise = float((scores_TV - other).abs().max())
        position = done + index
        expected = reference[position] if position < len(reference) else None
        found = candidate[index] if index < len(candidate) else None
        row = scores_TV[position]
        masks = kept(row, sampling, TOLERANCE * (noise or 0.0))
        if not sampling.greedy:
            place = torch.tensor(len(prompt) + position, device=row.device)
            row = row + keyed_gumbel(sampling.seed, torch.tensor(sequence).to(place), TARGET, place, len(row))
        divergences.append(judge(row, position, expected, found, noise, *masks))
        done = position + 1
        if again is None or not divergences[-1].near_tie or done == len(reference):
            return Comparison(divergences)
        candidate = again([*prompt, *reference[:done]], max_new_tokens - done)


def tempered(logits_TV: Tensor, prompt: Sequence[int], reference: Sequence[int], sampling: Sampling) -> Tensor:
    """Logits for each new token of the reference (and the one behind) after repetition penalty and temperature."""
    scores_TV = logits_TV
    if sampling.penalised:
        seen = torch.zeros_like(logits_TV, dtype=torch.bool)
        seen[:, list(prompt)] = True
        for place, token in enumerate(reference, 1):
            seen[place:, token] = True
        scores_TV = penalise(logits_TV, seen, sampling.repetition_penalty)
    return scores_TV if sampling.greedy else scores_TV.double() / sampling.temperature  # a tiny one overflows float32


class TargetScorer:
    """Our own target as reference."""

    def __init__(self, target: Target):
        self.target = target

    def one_shot(self, ids: Sequence[int], start: int) -> Tensor:
        last = self.target.num_layers - 1
        ids_BT = torch.tensor([list(ids)], device=self.target.device)
        return self.target.logits(self.target.states(ids_BT, [last])[last][0, start:])

    def incremental(self, ids: Sequence[int], start: int) -> Tensor:
        session = self.target.session(1, len(ids))
        ids_BT = torch.tensor([list(ids)], device=self.target.device)
        if start:
            session.forward(ids_BT[:, :start], logits=False)
            session.advance([start])
        rows = []
        for position in range(start, len(ids)):
            rows.append(session.forward(ids_BT[:, position : position + 1]).logits[0])
            session.advance([1])
        return torch.cat(rows)
