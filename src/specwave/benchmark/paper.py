"""The layout of the papers' tables: a row per method and layers, a column per category and their average, in blocks of
nodes × temperature; beside it how sure the figures are and who drafted, which the papers do not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specwave.benchmark import accounts
from specwave.benchmark.comparisons import Contrast, contrasts
from specwave.benchmark.results import Result
from specwave.benchmark.seed_tables import over_seeds_table
from specwave.benchmark.tables import Cell, Table, answered, bracketed, names, ranged, setting, summary, varying

ONE_DRAFTER = "Rows of one method with the same layers are one drafter, measured once: several rules choose its layers."
UNKNOWN = -1.0  # the temperature of a file that does not say
OWN = ("sampling.temperature", "decoding.total_token")  # what blocks are made of is no column
FIGURES = (  # figure, title, decimals, plain decoding included
    ("tau", "τ (tokens per verification) by category", 2, False),
    ("speedup", "Speedup over plain decoding by category", 2, False),
    ("tokens_per_second", "Tokens per second by category", 1, True),
)


def nodes(result: Result) -> int | None:
    """Tokens that a round verifies at most, the root included: the papers' 30 or 60. None where a method draws no
    such line."""
    decoding = result.settings.get("decoding")
    if not isinstance(decoding, dict):
        return None
    total, tree, levels, width = (decoding.get(key) for key in ("total_token", "tree", "levels", "top_k"))
    if isinstance(total, int):
        return total
    if isinstance(tree, list):
        return len(tree) + 1
    return levels + 1 if isinstance(levels, int) and width in (None, 1) else None


def is_plain(result: Result) -> bool:
    return result.content["method"] == "autoregressive"


def blocks(results: Sequence[Result]) -> list[tuple[str, list[Result]]]:
    """(heading, its results): by temperature, then by nodes, those without a number of nodes first. Plain decoding,
    which has none, stands in the first block of its temperature."""
    keys = {id(result): (setting(result, OWN[0]), -1 if is_plain(result) else nodes(result) or 0) for result in results}
    keys = {name: (UNKNOWN if heat is None else heat, count) for name, (heat, count) in keys.items()}
    first: dict[Any, int] = {}
    for heat, count in sorted(keys.values()):
        if count >= 0:
            first.setdefault(heat, count)
    groups: dict[tuple[Any, int], list[Result]] = {}
    for result in results:
        heat, count = keys[id(result)]
        groups.setdefault((heat, first.get(heat, 0) if count < 0 else count), []).append(result)
    return [(_heading(heat, count), groups[heat, count]) for heat, count in sorted(groups)]


def _heading(heat: Any, count: int) -> str:
    known = "T unknown" if heat == UNKNOWN else f"T = {heat:g}"
    return f"{count} nodes, {known}" if count else known


def by_category(results: Sequence[Result], figure: str, title: str, digits: int, printed: bool = False) -> Table:
    """One figure per method and category; then the mean of the categories, each alike, and the figure over all
    questions. In blocks, where there are several.

    Args:
        printed: as papers have it, a row for each rule that chooses a drafter's layers; and with the interval of the
            figure over all questions.
    """
    extra = {key: name for key, name in varying(results).items() if key not in OWN}
    shown, rows, headings = answered(results), list[list[Cell]](), dict[int, str]()
    parts = blocks(results)
    for heading, group in parts:
        if len(parts) > 1:
            headings[len(rows)] = heading
        for result in group:
            values = [result.content["categories"].get(category, {}).get(figure) for category in shown]
            known = [value for value in values if value is not None]
            average = sum(known) / len(known) if known and len(known) == len(values) else None
            own = [setting(result, dotted) for dotted in extra]
            overall = result.content["overall"]
            spread = [bracketed((overall.get("intervals") or {}).get(figure), digits)] if printed else []
            method, layers, rule = names(result)
            chosen: list[Cell] = [*result.rules] if printed and result.rules else [rule]
            for one in chosen:
                rows.append([method, layers, one, *own, *values, average, overall[figure], *spread])
    header = ["method", "layers", "rule", *extra.values(), *shown, "average", "overall", *["95 %"] * printed]
    note = ONE_DRAFTER if printed and any(len(result.rules) > 1 for result in results) else ""
    return Table(title, header, rows, [digits] * len(header), names=3 + len(extra), blocks=headings, note=note)


def tables(results: Sequence[Result], certain: Sequence[Table]) -> list[Table]:
    """Everything that table.md and table.tex hold; `certain` is `certainty`'s."""
    found = [summary(results)]
    for figure, title, digits, with_plain in FIGURES:
        shown = results if with_plain else [result for result in results if not is_plain(result)] or results
        found.append(by_category(shown, figure, title, digits, printed=True))
    return [*found, *certain]


def certainty(results: Sequence[Result], labels: Sequence[str]) -> list[Table]:
    """How sure the figures are, and which differences between methods are; who drafted, where that is known."""
    found = [spread(results, labels), *differences(results, labels), *over_seeds_table(results)]
    return [*found, *accounts.tables(results, labels)]


def spread(results: Sequence[Result], labels: Sequence[str]) -> Table:
    """The overall figures with their intervals over questions, and over repetitions where there were several."""
    header = ["method", "τ", "τ per question", "tokens/s", "speedup", "speedup per question", "speedup of repetitions"]
    rows: list[list[Cell]] = []
    for label, result in zip(labels, results, strict=True):
        overall = result.content["overall"]
        known, again = overall.get("intervals") or {}, overall.get("repetitions") or {}
        means = again.get("speedup")
        rows.append(
            [
                label,
                ranged(overall["tau"], known.get("tau"), 2),
                overall.get("tau_per_question"),
                ranged(overall["tokens_per_second"], known.get("tokens_per_second"), 1),
                ranged(overall["speedup"], known.get("speedup"), 2),
                overall.get("speedup_per_question"),
                ranged(sum(means) / len(means), again.get("speedup_interval"), 2) if means else None,
            ]
        )
    kept = [place for place in range(len(header)) if any(row[place] is not None for row in rows)]
    return Table(
        "How sure (95 % intervals over questions)",
        [header[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        [2] * len(kept),
    )


def differences(results: Sequence[Result], labels: Sequence[str]) -> list[Table]:
    """Method against method over the same questions; [] where no two can be compared."""
    found = contrasts(results, labels)
    if not found:
        return []
    header = ["method", "against", "questions", "τ more", "τ interval", "speed ratio", "speed interval", "sure"]
    rows: list[list[Cell]] = [
        [
            one.first,
            one.second,
            one.questions,
            f"{one.tau:+.3f}",
            bracketed(one.tau_interval),
            None if one.speed is None else f"{one.speed:.3f}",
            bracketed(one.speed_interval),
            sure(one),
        ]
        for one in found
    ]
    title = "Differences between methods (paired by question, 95 % intervals)"
    return [Table(title, header, rows, [0] * len(header))]


def sure(one: Contrast) -> str:
    """Which of the two differences the questions tell apart from none."""
    said = []
    if one.tau_interval is not None and not one.tau_interval[0] <= 0 <= one.tau_interval[1]:
        said.append("τ")
    if one.speed_interval is not None and not one.speed_interval[0] <= 1 <= one.speed_interval[1]:
        said.append("speed")
    return " and ".join(said) or "neither"
