"""What choosing a drafter per category or per question is worth, and how much of that is hindsight.

A way to choose names a drafter for every question. Its τ is Σ tokens / Σ rounds over the questions, each under the
drafter named. Outputs are the target's own whoever drafts, so tokens are alike and the drafter with the fewest rounds
per token is the best. Whoever looks for the best one in the rounds that are scored finds luck too: of D equal drafters
one is ahead on every question. So every choice stands twice,

    hindsight   chosen on what is scored: no choice is better, and beside it what it would be worth by chance
    held out    chosen on other questions (a category's) or on the other half of the answer (a question's)

and what can be had lies between the two. Held out, a difference is trusted as far as it repeats (`reliability`): a
choice on noise alone would be worse than none.

Letters: D drafters, Q questions, G groups of them, P pieces of an answer, F features. `counts` [2, D, …]: tokens
committed and rounds. Knows nothing of files, layers or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specwave.benchmark.bootstrap import Floats, interval, resampled
from specwave.benchmark.rows import failed
from specwave.layers.ridge import Ridge, Sums

PIECES = 8  # of an answer, which is halved by drawing pieces
FOLDS, INNER = 10, 4  # of questions; of a fold's training questions, by which the router's damping is found
REPEATS = 20  # of halving, and of dealing questions to folds
SHUFFLES = 200
DAMPINGS = (1e4, 1e3, 1e2, 1e1, 1.0)  # of the router's regression, from hardly any trust in features to much
Places = NDArray[np.intp]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Answers:
    """The questions that every drafter answered. `counts`: a round counts in the piece its first token lies in."""

    drafters: list[str]
    ids: list[Any]
    category: Places  # [Q]: its number
    counts: Floats  # [2, D, Q, P]

    @classmethod
    def of(cls, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Answers:
        """From the rows of `answers.jsonl` by drafter. Of repetitions the first counts: greedy ones are copies."""
        found = [
            {row["question_id"]: row for row in own if not failed(row) and sum(row["choices"][0]["accept_lengths"])}
            for own in rows.values()
        ]
        ids = [name for name in found[0] if all(name in own for own in found)]
        _, category = np.unique([found[0][name]["category"] for name in ids], return_inverse=True)
        counts = [[pieces(own[name]["choices"][0]["accept_lengths"]) for name in ids] for own in found]
        return cls(
            list(rows), ids, category, np.array(counts).reshape(len(found), len(ids), 2, PIECES).transpose(2, 0, 1, 3)
        )

    @property
    def whole(self) -> Floats:
        """[2, D, Q]"""
        return self.counts.sum(3)


def pieces(lengths: Sequence[int]) -> Floats:
    """[2, P]: tokens and rounds of an answer's P parts of equal length."""
    ends = np.cumsum(lengths)
    place = np.minimum((ends - lengths) * PIECES // ends[-1], PIECES - 1).astype(int)
    return np.stack([np.bincount(place, lengths, PIECES), np.bincount(place, minlength=PIECES)])


@dataclass(frozen=True)
class Outcome:
    """A way to choose beside the best fixed drafter, which was found on the same rounds: sums [2, Q] of both.
    `trust`: the mean reliability behind the choices."""

    chosen: Floats
    fixed: Floats
    trust: float = 1.0

    @property
    def tau(self) -> float:
        return ratio(self.chosen)

    @property
    def gain(self) -> float:
        return self.tau - ratio(self.fixed)

    @property
    def gain_interval(self) -> list[float] | None:
        """Over questions, the choices as they were; None for fewer than two questions."""
        if self.chosen.shape[1] < 2:
            return None
        return interval(resampled(*self.chosen) - resampled(*self.fixed))


def ratio(sums_2Q: Floats) -> float:
    tokens, rounds = sums_2Q.sum(1)
    return float(tokens / rounds)


# ---------------------------------------------------------------- choosing


def leads(counts_2DG: Floats) -> tuple[Floats, Floats]:
    """Rounds per token: of each drafter overall [D], and how far it is from that in each group [D, G] beyond what all
    drafters are there. 0 where a group shows nothing."""
    tokens, rounds = counts_2DG
    with np.errstate(divide="ignore", invalid="ignore"):
        overall = rounds.sum(1) / tokens.sum(1)
        own = rounds / tokens - overall[:, None]
        own = own - own.mean(0)
    return overall, np.where(np.isfinite(own).all(0), own, 0.0)


def choose(counts_2DG: Floats, trust: float = 1.0) -> Places:
    """The drafter of each group, [G]. `trust` 1: that of fewest rounds per token there; 0: the best fixed one."""
    overall, own = leads(counts_2DG)
    return (overall[:, None] + trust * own).argmin(0)


def reliability(one_2DG: Floats, other_2DG: Floats) -> float:
    """How far leads repeat in another half of the same groups: their correlation, groups weighted by tokens. It is the
    share of a lead that is no noise, by which it is to be shrunk. At least 0."""
    (_, first), (_, second) = leads(one_2DG), leads(other_2DG)
    weight = (one_2DG + other_2DG)[0].mean(0)
    spread = np.sqrt((weight * first**2).sum() * (weight * second**2).sum())
    return max(0.0, float((weight * first * second).sum() / spread)) if spread else 0.0


def grouped(counts_2DQ: Floats, group_Q: Places) -> Floats:
    """Sums by group: [2, D, G]."""
    return counts_2DQ @ np.eye(group_Q.max() + 1)[group_Q]


def taken(counts_2DQ: Floats, pick_Q: Places) -> Floats:
    return counts_2DQ[:, pick_Q, np.arange(len(pick_Q))]


def best_fixed(counts_2DQ: Floats) -> int:
    return int(leads(counts_2DQ)[0].argmin())


# ---------------------------------------------------------------- in hindsight, and by chance


def hindsight(counts_2DQ: Floats, group_Q: Places | None = None) -> Outcome:
    """The best drafter of every group, of every question where there are none, on the rounds that are scored."""
    pick_Q = choose(counts_2DQ) if group_Q is None else choose(grouped(counts_2DQ, group_Q))[group_Q]
    return Outcome(taken(counts_2DQ, pick_Q), counts_2DQ[:, best_fixed(counts_2DQ)])


def chance_of_categories(answers: Answers, shuffles: int = SHUFFLES) -> Floats:
    """Gains of `hindsight` by category when categories are dealt out anew, [shuffles]."""
    draw = np.random.default_rng(0)
    return np.array([hindsight(answers.whole, draw.permutation(answers.category)).gain for _ in range(shuffles)])


def chance_of_questions(answers: Answers, shuffles: int = SHUFFLES) -> Floats:
    """Gains of `hindsight` by question when answers are put together from pieces of any question, [shuffles]. A piece
    keeps the counts of all drafters, whose overall τ stay."""
    draw, shape = np.random.default_rng(0), answers.counts.shape
    flat = answers.counts.reshape(*shape[:2], -1)
    return np.array([hindsight(draw.permutation(flat, axis=2).reshape(shape).sum(3)).gain for _ in range(shuffles)])


# ---------------------------------------------------------------- held out


def by_question(answers: Answers, repeats: int = REPEATS) -> Outcome:
    """Every answer is cut into two halves of drawn pieces; the drafter is chosen on one and scored on the other, and
    the other way round."""
    draw, counts = np.random.default_rng(0), answers.counts
    tally = _Tally(len(answers.ids))
    for _ in range(repeats):
        first_QP = draw.permuted(np.tile(np.arange(PIECES) < PIECES // 2, (len(answers.ids), 1)), axis=1)
        one, other = (counts * first_QP).sum(3), (counts * ~first_QP).sum(3)
        trust = reliability(one, other)
        for seen, scored in ((one, other), (other, one)):
            tally.add(scored, choose(seen, trust), best_fixed(seen), trust)
    return tally.outcome()


def by_category(answers: Answers, repeats: int = REPEATS) -> Outcome:
    """The drafter of a question's category is chosen on the questions of the other folds. A category with fewer than
    three questions is not worth a choice: there leads have no second half to repeat in."""
    counts, tally = answers.whole, _Tally(len(answers.ids))
    for rank_Q, train_Q, test_Q in _folds(answers.category, repeats):
        half_Q = _halves(answers.category, rank_Q, train_Q)
        halves = [grouped(counts * (half_Q == half), answers.category) for half in (0, 1)]
        half = reliability(*halves)
        trust = 2 * half / (1 + half)  # of both halves together (Spearman and Brown)
        picks = choose(halves[0] + halves[1], trust)[answers.category[test_Q]]
        tally.add(counts[..., test_Q], picks, best_fixed(counts[..., train_Q]), trust, test_Q)
    return tally.outcome()


def by_router(answers: Answers, features_QF: Floats, repeats: int = REPEATS) -> Outcome:
    """A ridge regression foretells from a question's features by how much each drafter will be ahead; it is fitted on
    the questions of the other folds, and how much it is damped is found among these alone. Three questions or more."""
    counts, tally = answers.whole, _Tally(len(answers.ids))
    alike_Q = np.zeros(len(answers.ids), np.intp)  # a fold is of any questions: the router knows no categories
    for _, train_Q, test_Q in _folds(alike_Q, repeats):
        known, features = counts[..., train_Q], features_QF[train_Q]
        inner = [
            (within, _routes(known, features, held, within)) for _, held, within in _folds(alike_Q[train_Q], 1, INNER)
        ]
        taus = [
            ratio(np.concatenate([taken(known[..., within], picks[place]) for within, picks in inner], 1))
            for place in range(len(DAMPINGS))
        ]
        best = int(np.argmax(taus))  # of equal ones the most damped
        (picks,) = _routes(counts, features_QF, train_Q, test_Q, DAMPINGS[best : best + 1])
        tally.add(counts[..., test_Q], picks, best_fixed(known), 1.0, test_Q)
    return tally.outcome()


def _routes(
    counts_2DQ: Floats, features_QF: Floats, train_Q: Flags, test_Q: Flags, dampings: Sequence[float] = DAMPINGS
) -> list[Places]:
    """For each damping the drafters of the test questions."""
    overall, own = leads(counts_2DQ[..., train_Q])
    centred_QF = features_QF - features_QF[train_Q].mean(0)
    spread_F, size_F = centred_QF[train_Q].std(0), np.abs(features_QF).max(0)
    scaled_QF = torch.from_numpy(centred_QF / np.where(spread_F > 1e-9 * size_F, spread_F, np.inf))  # constants are 0
    sums = Sums.of(scaled_QF[train_Q], torch.from_numpy(own.T))
    columns = torch.arange(scaled_QF.shape[1])
    foretold = (Ridge(sums, damping).foretell(scaled_QF[test_Q], columns).numpy() for damping in dampings)
    return [(overall + leads_QD).argmin(1) for leads_QD in foretold]


def _halves(category_Q: Places, rank_Q: Places, train_Q: Flags) -> Places:
    """0 and 1 in turns for the training questions of each category, in the drawn order; −1 for the others."""
    half_Q = np.full(len(category_Q), -1)
    for category in np.unique(category_Q):
        own = np.flatnonzero(train_Q & (category_Q == category))
        half_Q[own[np.argsort(rank_Q[own])]] = np.arange(len(own)) % 2
    return half_Q


def _folds(category_Q: Places, repeats: int, folds: int = FOLDS) -> Iterator[tuple[Places, Flags, Flags]]:
    """(ranks, training questions, test questions) of every fold of every deal. A rank is a question's place in the
    drawn order of its category, so that each fold has its share of every category."""
    for seed in range(repeats):
        order = np.random.default_rng(seed).permutation(len(category_Q))
        rank_Q = np.empty(len(category_Q), np.intp)
        for category in np.unique(category_Q):
            own = order[category_Q[order] == category]
            rank_Q[own] = np.arange(len(own))
        for fold in np.unique(rank_Q % folds):
            test_Q = rank_Q % folds == fold
            if not test_Q.all():
                yield rank_Q, ~test_Q, test_Q


class _Tally:
    """Sums of what was chosen, question by question, over repeats."""

    def __init__(self, questions: int):
        self.chosen, self.fixed = np.zeros((2, questions)), np.zeros((2, questions))
        self.trusts: list[float] = []

    def add(
        self, scored_2DQ: Floats, pick_Q: Places, fixed: int, trust: float, where: Flags | slice = slice(None)
    ) -> None:
        self.chosen[:, where] += taken(scored_2DQ, pick_Q)
        self.fixed[:, where] += scored_2DQ[:, fixed]
        self.trusts.append(trust)

    def outcome(self) -> Outcome:
        return Outcome(self.chosen, self.fixed, float(np.mean(self.trusts)))
