"""Does what is known of a set of layers beforehand buy acceptance? Evaluated drafters against the predictors of
`select.py selector=spread`.

read → associate (association.py) and seed noise (seeds.py) → rows for CSV, text (worth_text.py), picture
(worth_figures.py). The unit is the set of layers; its τ is that of the drafter of the first seed, which all have had.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from specwave.artifacts import Selection, UserError, reading
from specwave.benchmark.association import Association, Measured, associate
from specwave.benchmark.comparisons import asked
from specwave.benchmark.drafters import find_drafters
from specwave.benchmark.results import Result
from specwave.benchmark.seeds import SeedNoise, seed_noise
from specwave.benchmark.tables import setting
from specwave.benchmark.trained import Asked, Layers, Trained, measured, read_card, shared_questions, trained

FEWEST_SETS = 8
SHORT = "short"  # the predictor that `Worth.short` gives


@dataclass
class Worth:
    """The key `worth` of evaluate.py: what τ is held against.

    Args:
        groups: run folder of select.py selector=spread, whose sets were trained.
        short: run folders of train.py: the same sets trained briefly, with another seed.
    """

    groups: str
    short: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Predictor:
    """`step`: the difference that a sentence speaks of, in words `per`."""

    name: str
    label: str
    step: float
    per: str


PREDICTORS = (
    Predictor("entropy", "raw entropy (nats)", 0.1, "0.1 nat of raw entropy"),
    Predictor("entropy_frobenius", "entropy, Frobenius (nats)", 0.1, "0.1 nat of Frobenius-scaled entropy"),
    Predictor("entropy_centred", "entropy, centred (nats)", 0.1, "0.1 nat of centred entropy"),
    Predictor(
        "entropy_centred_frobenius", "centred + Frobenius (nats)", 0.1,
        "0.1 nat of centred, Frobenius-scaled entropy",
    ),
    Predictor("cka", "mean CKA between layers", 0.1, "0.1 of mean CKA between the layers"),
    Predictor("ridge", "ridge agreement", 0.01, "0.01 of agreement of the ridge regression"),
    Predictor(SHORT, "τ̂ of a short training", 0.1, "0.1 of τ̂ after a short training"),
)  # fmt: skip
OUTCOMES = {"tau": "τ", "tau_hat": "τ̂"}
ONE_SIZE, ALL_SIZES, RANDOM = "sets of one size", "all sets", "random sets of one size"


@dataclass(frozen=True)
class Set:
    """A set of layers, and what was known before its drafter was trained to the end; None where it cannot be said."""

    layers: Layers
    origin: tuple[str, ...]
    predictors: Mapping[str, float | None]
    drafters: Mapping[int, Trained]  # by seed

    @property
    def m(self) -> int:
        return len(self.layers)


@dataclass(frozen=True)
class Study:
    """All sets have a drafter of seed `first`; some one of another seed."""

    sets: list[Set]
    first: int
    questions: list[Asked]

    @cached_property
    def outcomes(self) -> dict[str, Measured]:
        """Of the first seed, in the order of `sets`. Of τ̂ only the figure is known, not its prompts."""
        drafters = [one.drafters[self.first] for one in self.sets]
        return {name: self._figures(name, drafters) for name in OUTCOMES}

    def _figures(self, outcome: str, drafters: Sequence[Trained]) -> Measured:
        if outcome == "tau":
            return measured(drafters, self.questions)
        return Measured.of([math.nan if one.tau_hat is None else one.tau_hat for one in drafters])

    def predictor(self, name: str) -> dict[int, float]:
        """Place of a set → the predictor's figure, where it has one."""
        every = ((place, one.predictors.get(name)) for place, one in enumerate(self.sets))
        return {place: value for place, value in every if value is not None}

    @cached_property
    def sizes(self) -> list[int]:
        return [one.m for one in self.sets]

    @cached_property
    def seeds(self) -> list[int]:
        """The first, then those that can be held against it: of the seed with most sets, and of all others that have
        drafters of the same sets."""
        places: dict[int, set[int]] = {}
        for place, one in enumerate(self.sets):
            for seed in one.drafters:
                places.setdefault(seed, set()).add(place)
        others = sorted((seed for seed in places if seed != self.first), key=lambda seed: (-len(places[seed]), seed))
        return [self.first, *(seed for seed in others if places[others[0]] <= places[seed])]

    @cached_property
    def repeated(self) -> list[int]:
        """Places of the sets that have a drafter of each of `seeds`."""
        return [place for place, one in enumerate(self.sets) if all(seed in one.drafters for seed in self.seeds)]

    def by_seed(self, outcome: str) -> list[list[float]]:
        """[repeated sets, seeds] figures."""
        sets = [self.sets[place] for place in self.repeated]
        if not sets:
            return []
        by_seed = [self._figures(outcome, [one.drafters[seed] for one in sets]).values for seed in self.seeds]
        return np.stack(by_seed, 1).tolist()

    def spread(self, outcome: str) -> float:
        """The variance between sets of one size, all sizes pooled; NaN where no size has two sets."""
        figures, sizes = self.outcomes[outcome].values, np.array(self.sizes)
        parts = [figures[sizes == size] for size in np.unique(sizes)]
        freedom = len(figures) - len(parts)
        return float(sum(((part - part.mean()) ** 2).sum() for part in parts) / freedom) if freedom else math.nan

    def noise(self, outcome: str) -> SeedNoise | None:
        return seed_noise(self.by_seed(outcome)) if len(self.seeds) > 1 and len(self.repeated) > 1 else None


def read(results: Sequence[Result], worth: Worth) -> Study:
    """The drafters of an evaluation beside what was foretold of their sets.

    Raises:
        UserError: a selection without predictors, drafters or short trainings of another target, drafters that were
            asked different questions or never validated, too few sets.
    """
    selection = Selection.load(Path(worth.groups).expanduser(), "worth.groups")
    begun: list[tuple[Path, int]] = []  # folders and seeds of the short trainings
    short: dict[Layers, float | None] = {}
    for path, one in _short(worth.short, selection):
        if one.layers in short:
            raise UserError("worth.short", path, f"a drafter of {one.label} is there twice: name one of each")
        short[one.layers] = one.tau_hat
        begun.append((path, one.seed))
    with reading("worth.groups", worth.groups, "select again with selector=spread"):
        foretold = {
            tuple(entry["layers"]): (tuple(entry["origin"]), dict(entry["predictors"])) for entry in selection.beam
        }
    drafters = [one for one in trained(results) if one.layers in foretold and "+" not in one.label]
    _check(drafters, selection)
    own_seeds = {one.seed for one in drafters}
    if clash := next((path for path, seed in begun if seed in own_seeds), None):
        remedy = "it has the seed of the drafters it shall foretell, and their luck: train it with another"
        raise UserError("worth.short", clash, remedy)
    seeds = Counter(one.seed for one in drafters)
    if not seeds or max(seeds.values()) < FEWEST_SETS:
        remedy = f"at least {FEWEST_SETS} sets of the selection must have been trained and evaluated"
        raise UserError("worth.groups", worth.groups, remedy)
    first = min(seeds, key=lambda seed: (-seeds[seed], seed))
    sets = []
    for layers, (origin, known) in foretold.items():
        own = {one.seed: one for one in drafters if one.layers == layers}
        if first in own:
            sets.append(Set(layers, origin, known | ({SHORT: short.get(layers)} if short else {}), own))
    questions = shared_questions([one for each in sets for one in each.drafters.values()])
    if not questions:
        raise UserError("report", "…", "no question was answered with all drafters: evaluate the failed ones again")
    return Study(sets, first, questions)


def _short(folders: Sequence[str], selection: Selection) -> Iterator[tuple[Path, Trained]]:
    for folder in find_drafters(list(folders)) if folders else []:
        one = read_card(folder.path, "worth.short")
        if one.fingerprint != selection.fingerprint:
            raise UserError("worth.short", folder.path, "it is of another target than the selection: train its sets")
        if "+" not in one.label:  # drafters with switches are no part of the study
            yield folder.path, one


def _check(drafters: Sequence[Trained], selection: Selection) -> None:
    seen: dict[tuple[Layers, int], Trained] = {}
    first = drafters[0].result if drafters else None
    for one in drafters:
        assert one.result is not None
        assert first is not None
        place = one.result.folder
        if one.fingerprint != selection.fingerprint:
            raise UserError("report", place, "its drafter is of another target than worth.groups: evaluate its sets")
        if one.tau_hat is None:
            raise UserError("report", place, "its drafter was never validated: train with validate_every ≤ max_steps")
        if asked(one.result) != asked(first):
            remedy = "other drafters were asked other questions, or under other limits: evaluate all in one way"
            raise UserError("report", place, remedy)
        if setting(one.result, "decoding") != setting(first, "decoding"):
            raise UserError("report", place, "other drafters decoded with other settings: evaluate all in one way")
        if (one.layers, one.seed) in seen:
            remedy = f"a drafter of {one.label} with seed {one.seed} is there twice: name one evaluation of each"
            raise UserError("report", place, remedy)
        seen[one.layers, one.seed] = one


# ---------------------------------------------------------------- estimates


@dataclass(frozen=True)
class Estimate:
    """One association: of which sets, per `predictor.step`."""

    outcome: str
    predictor: Predictor
    scope: str
    found: Association

    def row(self) -> dict[str, Any]:
        step, own = self.predictor.step, self.found
        row: dict[str, Any] = {
            "outcome": self.outcome, "predictor": self.predictor.name, "sets": self.scope, "count": own.groups,
            "step": step,
        }  # fmt: skip
        for name, one, by in (("slope", own.slope, step), ("spearman", own.spearman, 1), ("pearson", own.pearson, 1)):
            low, high = one.interval or (None, None)
            row[name] = one.value * by
            row[f"{name}_low"], row[f"{name}_high"] = (None if end is None else end * by for end in (low, high))
        return row


def scopes(study: Study) -> dict[str, tuple[list[int], bool]]:
    """Name → (places of its sets, whether only sets of one size are compared)."""
    every = list(range(len(study.sets)))
    found = {ONE_SIZE: (every, True), ALL_SIZES: (every, False)}
    for size in sorted(set(study.sizes)):
        found[f"m = {size}"] = ([place for place in every if study.sizes[place] == size], True)
    found[RANDOM] = ([place for place in every if "random" in study.sets[place].origin], True)
    return found


def estimates(study: Study) -> list[Estimate]:
    """Every outcome on every predictor over every scope, where there are sets enough."""
    found = []
    for outcome, figures in study.outcomes.items():
        for predictor in PREDICTORS:
            told = study.predictor(predictor.name)
            for scope, (places, within) in scopes(study).items():
                kept = [place for place in places if place in told]
                sizes = [study.sizes[place] for place in kept]
                values = [told[place] for place in kept]
                one = associate(values, figures.at(np.array(kept, np.intp)), sizes, within) if kept else None
                if one is not None:
                    found.append(Estimate(outcome, predictor, scope, one))
    return found


# ---------------------------------------------------------------- rows to keep


def set_rows(study: Study) -> list[dict[str, Any]]:
    """A row for each drafter: its set, what was foretold, what came."""
    rows = []
    for one in study.sets:
        for seed, drafter in sorted(one.drafters.items()):
            tau = measured([drafter], study.questions).values[0]
            rows.append(
                {
                    "layers": "-".join(map(str, one.layers)), "m": one.m, "origin": "+".join(one.origin),
                    "seed": seed, "step": drafter.step,
                    **{each.name: one.predictors.get(each.name) for each in PREDICTORS},
                    "tau_hat": drafter.tau_hat, "tau": float(tau),
                }
            )  # fmt: skip
    return rows


def question_rows(study: Study) -> list[dict[str, Any]]:
    """A row for each drafter and question: the sums behind τ."""
    rows = []
    for one in study.sets:
        for seed, drafter in sorted(one.drafters.items()):
            sums = measured([drafter], study.questions)
            for place, question in enumerate(study.questions):
                rows.append(
                    {
                        "layers": "-".join(map(str, one.layers)), "seed": seed, "question_id": question[0],
                        "accepted": int(sums.above[0, place]), "rounds": int(sums.below[0, place]),
                    }
                )  # fmt: skip
    return rows
