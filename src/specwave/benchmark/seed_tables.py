"""Sets of layers compared over several seeds of their training, for reports that hold such drafters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specwave.benchmark.comparisons import ALL_PAIRS, asked
from specwave.benchmark.results import Result
from specwave.benchmark.seeds import SeedContrast, over_seeds
from specwave.benchmark.tables import Cell, Table, setting
from specwave.benchmark.trained import Asked, Trained, measured, shared_questions, trained

Seeds = dict[int, Trained]


def over_seeds_table(results: Sequence[Result]) -> list[Table]:
    """[] where no two sets were trained with the same two seeds, or more, and asked the same."""
    rows: list[list[Cell]] = []
    for sets in _sets(results):
        pairs = list(itertools.combinations(sets.items(), 2)) if len(sets) <= ALL_PAIRS else _with_best(sets)
        for (one, ours), (other, theirs) in pairs:
            seeds = sorted(ours.keys() & theirs.keys())
            first, second = ([own[seed] for seed in seeds] for own in (ours, theirs))
            questions = shared_questions([*first, *second])
            if len(seeds) > 1 and questions:
                found = contrast(first, second, questions)
                each = ", ".join(f"{tau:+.3f}" for tau in found.each)
                said = [f"{found.tau:+.3f}", each, _range(found.questions), _range(found.interval)]
                rows.append([one, other, ", ".join(map(str, seeds)), len(questions), *said])
    if not rows:
        return []
    header = ["drafter", "against", "seeds", "questions", "τ more", "of each seed", "other questions",
              "other questions and seeds"]  # fmt: skip
    title = "Differences over seeds (paired by seed and question, 95 % intervals)"
    return [Table(title, header, rows, [0] * len(header))]


def contrast(first: Sequence[Trained], second: Sequence[Trained], questions: Sequence[Asked]) -> SeedContrast:
    """The first set's drafters less the second's, seed by seed."""
    ours, theirs = measured(first, questions), measured(second, questions)
    return over_seeds((ours.above, theirs.above), (ours.below, theirs.below))


def _sets(results: Sequence[Result]) -> list[dict[str, Seeds]]:
    """Per way of asking and decoding: set → its drafters by seed. A set with two drafters of one seed, which differ in
    something else, is left out: nothing says which is meant."""
    found: dict[str, dict[str, Seeds]] = {}
    twice = set()
    for one in trained(results):
        assert one.result is not None
        way = repr((asked(one.result), setting(one.result, "decoding")))
        own = found.setdefault(way, {}).setdefault(one.label, {})
        if one.seed in own:
            twice.add((way, one.label))
        own[one.seed] = one
    return [
        {name: seeds for name, seeds in sets.items() if len(seeds) > 1 and (way, name) not in twice}
        for way, sets in found.items()
    ]


def _with_best(sets: dict[str, Seeds]) -> list[tuple[tuple[str, Seeds], tuple[str, Seeds]]]:
    """Of many sets, each against the one of largest mean τ."""

    def tau(entry: tuple[str, Seeds]) -> float:
        values = [one.result.content["overall"]["tau"] or 0.0 for one in entry[1].values() if one.result is not None]
        return sum(values) / len(values)

    best = max(sets.items(), key=tau)
    return [(entry, best) for entry in sets.items() if entry[0] != best[0]]


def _range(interval: Sequence[float] | None) -> str | None:
    return None if interval is None else f"[{interval[0]:+.3f}, {interval[1]:+.3f}]"
