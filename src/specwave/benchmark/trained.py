"""Evaluated drafters with what their cards say of the training: whose seed, which set of layers, which τ̂."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specwave.artifacts import UserError, group_name, read_json, reading
from specwave.benchmark.association import Measured
from specwave.benchmark.bootstrap import Floats
from specwave.benchmark.comparisons import Sums
from specwave.benchmark.results import Result

Layers = tuple[int, ...]
Asked = tuple[str, str]  # a question's id and category


@dataclass(frozen=True)
class Trained:
    """A drafter and, where it was evaluated, its results."""

    label: str  # layers and switches
    layers: Layers
    seed: int
    step: int  # of its training, at which it validated best
    tau_hat: float | None  # on held-out prompts, at that step
    fingerprint: str  # of its target
    result: Result | None = None

    @cached_property
    def sums(self) -> Sums:
        return Sums.of(self.result.content.get("per_question") or [] if self.result is not None else [])


def read_card(path: object, key: str, result: Result | None = None) -> Trained:
    """What the card.json of a drafter's folder says.

    Raises:
        UserError: there is none, or it lacks what is needed here.
    """
    place = f"{path}/card.json"
    card = read_json(place, key)
    with reading(key, place, "export the drafter again"):
        training = card["training"]
        found = (training["validation"] or {}).get("tau_hat")
        return Trained(
            label=group_name(card["layers"], card.get("switches")),
            layers=tuple(int(layer) for layer in card["layers"]),
            seed=int(card["data"]["seed"]),
            step=int(training["step"]),
            tau_hat=None if found is None else float(found),
            fingerprint=str(card["target"]["fingerprint"]),
            result=result,
        )


def trained(results: Sequence[Result], key: str = "report") -> list[Trained]:
    """Of the results that were decoded with a drafter; a card that is not there, or says no seed, is passed over."""
    found = []
    for result in results:
        if result.drafter is not None and result.content.get("per_question"):
            try:
                found.append(read_card(result.drafter, key, result))
            except UserError:
                continue
    return found


def shared_questions(drafters: Sequence[Trained]) -> list[Asked]:
    """Those that all of them answered with at least one round, in the order of the first."""
    known = [
        {name for name, place in one.sums.places.items() if one.sums.columns["rounds"][place] > 0} for one in drafters
    ]
    first = drafters[0].sums.places if drafters else {}
    return [name for name in first if all(name in names for names in known)]


def measured(drafters: Sequence[Trained], questions: Sequence[Asked]) -> Measured:
    """Accepted tokens and rounds, a row for each drafter."""

    def column(name: str) -> Floats:
        places = [[one.sums.places[each] for each in questions] for one in drafters]
        return np.array([one.sums.at(own)[name] for one, own in zip(drafters, places, strict=True)], float)

    return Measured(column("accepted"), column("rounds"))
