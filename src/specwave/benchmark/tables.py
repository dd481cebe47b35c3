"""Results as tables: a header and rows of cells, each cell a number or a text. `writers` puts them into words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specwave.benchmark.results import Result

Cell = str | int | float | None
MISSING = "–"
ROUNDING = 1.0  # logits of a bfloat16 model are some tens: their own steps are up to 0.25
MIXED = "Where several machines are named, tokens/s mixes their clocks; a question was answered by all methods on one."
METHODS = {  # by their names in configs; others go by those
    "autoregressive": "plain decoding",
    "eagle3": "EAGLE-3 drafter",
    "pld": "PLD",
    "copyspec": "CopySpec",
    "suffix": "suffix automaton",
    "banditspec": "BanditSpec",
    "switchsd": "SwitchSD",
    "oracle": "oracle",
    "knapspec": "KnapSpec",
    "swift": "SWIFT",
    "clasp": "CLaSp",
    "layerskip": "LayerSkip",
    "kangaroo": "Kangaroo",
    "del": "DEL",
    "asd": "ASD",
    "draft_verify": "Draft & Verify",
}
SETTINGS = {  # what may differ between runs, and how a column that tells them apart is called
    "target": "target",
    "dtype": "dtype",
    "device": "device",
    "device_name": "processor",
    "threads": "threads",
    "devices": "devices",
    "repeat": "repetitions",
    "max_new_tokens": "max tokens",
    "sampling.temperature": "T",
    "sampling.top_k": "top-k",
    "sampling.top_p": "top-p",
    "sampling.min_p": "min-p",
    "sampling.repetition_penalty": "penalty",
    "batch_invariant": "invariant",
    "decoding.levels": "levels",
    "decoding.top_k": "children",
    "decoding.total_token": "nodes",
    "decoding.tree": "tree",
    "decoding.n": "n",
    "decoding.length": "copies",
    "decoding.factor": "factor",
    "decoding.policy": "policy",
    "decoding.gamma": "γ",
    "decoding.fixed_gamma": "fixed γ",
    "decoding.adapt": "adapts",
    "decoding.plan_share": "plan share",
    "benchmark.questions": "asked",
    "benchmark.fingerprint": "question set",
}

ONES = ("devices", "repeat")  # 1 where a result's settings do not name them


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[Cell]]
    digits: list[int]  # decimals per column, for the floats in it
    names: int = 1  # the leading columns that say whose row it is
    blocks: dict[int, str] = field(default_factory=dict)  # headings between the rows, by the row they stand above
    note: str = ""  # a sentence below


def setting(result: Result, dotted: str) -> Any:
    """A value of the settings by its dotted name; None where there is none."""
    value: Any = result.settings
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return 1 if value is None and dotted in ONES and result.settings else value


def varying(results: Sequence[Result]) -> dict[str, str]:
    """The settings (of SETTINGS) in which these results differ; a method without a setting differs in nothing."""
    found = {}
    for dotted, name in SETTINGS.items():
        values = {str(value) for result in results if (value := setting(result, dotted)) is not None}
        if len(values) > 1:
            found[dotted] = name
    if _one_set_of_each_size(results):
        found.pop("benchmark.fingerprint", None)
    return found


def _one_set_of_each_size(results: Sequence[Result]) -> bool:
    """Whether numbers of questions tell sets of questions apart, which are else named by their hashes."""
    sets = {(setting(result, "benchmark.questions"), setting(result, "benchmark.fingerprint")) for result in results}
    sizes = {size for size, _ in sets}
    return None not in sizes and len(sizes) == len(sets)


def ranged(value: float | None, interval: Sequence[float] | None, digits: int) -> str | None:
    """1.35 [1.31, 1.40]"""
    if value is None:
        return None
    return " ".join(filter(None, [f"{value:.{digits}f}", bracketed(interval, digits)]))


def bracketed(interval: Sequence[float] | None, digits: int = 3) -> str | None:
    """[1.310, 1.400]"""
    return None if interval is None else f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def names(result: Result) -> list[Cell]:
    """Method, layers, rule."""
    content = result.content
    layers = content.get("layers")
    return [
        METHODS.get(content["method"], content["method"]),
        ", ".join(map(str, layers)) if layers else None,
        ", ".join(result.rules) or None,
    ]


def clocks(results: Sequence[Result]) -> list[str | None]:
    """Of each result the machines that timed it, where these results know of more than one; else None."""
    several = len({mark for result in results for mark in result.machines}) > 1
    return [", ".join(result.machines) or None if several else None for result in results]


def summary(results: Sequence[Result]) -> Table:
    """One row per method, over all questions; columns without any value are left out."""
    extra = varying(results)
    figures = ["questions", "τ", "tokens/s", "speedup", "exact", "near-ties", "machines"]
    header = ["method", "layers", "rule", *extra.values(), *figures]
    digits = [0, 0, 0, *(2 for _ in extra), 0, 2, 1, 2, 0, 0, 0]
    rows: list[list[Cell]] = []
    for result, timed_on in zip(results, clocks(results), strict=True):
        overall = result.content["overall"]
        exact = overall["exact_match_rate"]
        rows.append(
            [
                *names(result),
                *(setting(result, dotted) for dotted in extra),
                _count(overall),
                overall["tau"],
                overall["tokens_per_second"],
                overall["speedup"],
                None if exact is None else _share(exact),
                overall["near_ties"],
                timed_on,
            ]
        )
    kept = [place for place in range(len(header)) if any(row[place] is not None for row in rows)]
    return Table(
        "Overall",
        [header[place] for place in kept],
        [[row[place] for place in kept] for row in rows],
        [digits[place] for place in kept],
        note=" ".join(filter(None, [_mixed(results), _rounded(results)])),
    )


def _mixed(results: Sequence[Result]) -> str:
    return MIXED if any(len(result.machines) > 1 for result in results) else ""


def _rounded(results: Sequence[Result]) -> str:
    """Why answers of a narrow dtype are not plain decoding's; nothing for float32, where they have to be."""
    gaps = [
        max(known)
        for result in results
        if result.settings.get("dtype") not in (None, "float32") and not result.settings.get("batch_invariant")
        for entry in result.content.get("divergences", [])
        if (known := [gap for gap in (entry["top2_gap"], entry.get("gap")) if gap is not None])
    ]
    if not gaps:
        return ""
    parted = f"Where answers left plain decoding's, both tokens' logits were at most {max(gaps):.2g} below the largest"
    if max(gaps) > ROUNDING:
        return f"{parted}: more than rounding explains. Try model.dtype=float32, where they have to be equal."
    return f"{parted}: rounding below float32. decoding.batch_invariant=true makes them equal."


def _share(exact: float) -> str:
    """100 % is said of all only."""
    return f"{100 * exact if exact == 1 else min(100 * exact, 99.9):.1f} %"


def _count(overall: dict[str, Any]) -> Cell:
    lost = overall.get("failed", 0)
    return f"{overall.get('questions', 0)} (+{lost} failed)" if lost else overall.get("questions")


def answered(results: Sequence[Result]) -> list[str]:
    """The categories any result has answers in, in Spec-Bench's order."""
    every = dict.fromkeys(category for result in results for category in result.content["categories"])
    return [
        category
        for category in every
        if any(result.content["categories"].get(category, {}).get("tokens") for result in results)
    ]


def upright(table: Table, labels: Sequence[str]) -> Table:
    """A table of categories on its side: a row per category, a column per method."""
    figures, digits = table.header[table.names :], table.digits[-1]
    rows: list[list[Cell]] = [
        [name.replace("_", " "), *(row[place] for row in table.rows)] for place, name in enumerate(figures, table.names)
    ]
    return Table(table.title, ["category", *labels], rows, [0] + [digits] * len(labels))
