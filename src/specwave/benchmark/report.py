"""`report.html`: one file that holds everything it shows and asks the network for nothing; and the tables beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from specwave import __version__
from specwave.artifacts import write_text
from specwave.benchmark import paper, sizes, tables, writers
from specwave.benchmark.diagrams import Point, positions, scatter, stacks
from specwave.benchmark.exhibits import pictures, training_curves
from specwave.benchmark.figures import Plot, dots
from specwave.benchmark.results import Result
from specwave.benchmark.svg import SQUARE, colour, shape


def write_report(folder: Path, results: Sequence[Result]) -> Path:
    """Writes report.html and table.md/.tex/.csv of these results (plain decoding first) into `folder`."""
    labels = unique_labels(results)
    certain = certainty(results, labels)
    write_text(folder / "table.md", writers.markdown(paper.tables(results, certain)))
    write_text(folder / "table.tex", writers.latex(paper.tables(results, certain)))
    write_text(folder / "table.csv", writers.as_csv(results))
    write_text(folder / "report.html", render(results, certain))
    return folder / "report.html"


def certainty(results: Sequence[Result], labels: Sequence[str]) -> list[tables.Table]:
    """The tables with intervals, which take a while: how sure figures are, differences, drafters by their layers."""
    return [*paper.certainty(results, labels), *sizes.table(results, labels)]


@dataclass(frozen=True)
class Shown:
    """A table of the page: its cells as texts, and which columns stand to the right."""

    title: str
    header: list[str]
    body: list[list[str]]
    right: list[bool]
    note: str


def shown(table: tables.Table) -> Shown:
    return Shown(table.title, table.header, writers.cells(table), writers.numeric(table), table.note)


@lru_cache
def template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"shape": shape, "colour": colour, "square": SQUARE}
    return environment.get_template(name)


def render(results: Sequence[Result], certain: Sequence[tables.Table] | None = None) -> str:
    """The page as text.

    Args:
        certain: what `certainty` gave for these results, where that was asked before.
    """
    labels = unique_labels(results)
    methods = methods_of(results, labels)
    left = divergence_table(results, labels)
    return template("report.html.j2").render(
        subject=subject(results),
        headline=headline(list(methods.values()), list(methods)),
        tables=[shown(table) for table in page_tables(results, certain)],
        plots=plots(results, labels),
        pictures=pictures(list(methods.values()), list(methods)),
        settings=settings(results),
        definitions=results[0].content.get("definitions", {}),
        failures=[
            (label, failure["question_id"], failure["error"])
            for label, result in zip(labels, results, strict=True)
            for failure in result.content.get("failures", [])
        ],
        divergences=shown(left) if left.rows else None,
        version=__version__,
    )


def plot_pages(results: Sequence[Result]) -> dict[str, str]:
    """Every plot of the report as a page of its own, by its title."""
    drawn = plots(results, unique_labels(results))
    return {plot.title: template("plot.html.j2").render(plot=plot) for plot in drawn}


def methods_of(results: Sequence[Result], labels: Sequence[str]) -> dict[str, Result]:
    """By label, all results but plain decoding's; where there is nothing else, those."""
    every = dict(zip(labels, results, strict=True))
    return {label: result for label, result in every.items() if not paper.is_plain(result)} or every


def page_tables(results: Sequence[Result], certain: Sequence[tables.Table] | None = None) -> list[tables.Table]:
    """The summary, how sure it is, and each figure with a row per category: long rather than wide, for screens. A
    table of its own for each block of nodes and temperature."""
    labels = unique_labels(results)
    named = {id(result): label for result, label in zip(results, labels, strict=True)}
    found = [tables.summary(results), *(certainty(results, labels) if certain is None else certain)]
    for figure, title, digits, with_plain in paper.FIGURES:
        of = [result for result in results if with_plain or not paper.is_plain(result)]
        parts = paper.blocks(of)  # without any method there is nothing to say of τ and speedup: both are 1
        for heading, group in parts:
            whole = f"{title}: {heading}" if len(parts) > 1 else title
            table = paper.by_category(group, figure, whole, digits)
            found.append(tables.upright(table, [named[id(result)] for result in group]))
    return found


def subject(results: Sequence[Result]) -> str:
    """What was evaluated on what, for the title. Spec-Bench's files do not say their target."""
    targets = list(dict.fromkeys(str(result.settings["target"]) for result in results if result.settings.get("target")))
    asked = max(result.content["overall"].get("questions") or 0 for result in results)
    questions = "1 question" if asked == 1 else f"{asked} questions"
    return f"{', '.join(targets)} on {questions}" if targets else f"Answers to {questions}"


def divergence_table(results: Sequence[Result], labels: Sequence[str]) -> tables.Table:
    """Every divergence: near-ties, and in dtypes below float32 the first of each question with its gap."""
    header = ["method", "question", "turn", "token", "top-2 gap", "gap", "noise", "verdict"]
    rows: list[list[tables.Cell]] = []
    for label, result in zip(labels, results, strict=True):
        for entry in result.content.get("divergences", []):
            verdict = "near-tie" if entry["near_tie"] else "other output"
            numbers = [None if entry[name] is None else f"{entry[name]:.2e}" for name in ("top2_gap", "gap", "noise")]
            rows.append([label, str(entry["question_id"]), entry["turn"], entry["position"], *numbers, verdict])
    return tables.Table("Where outputs left the target's own", header, rows, [0] * len(header))


def unique_labels(results: Sequence[Result]) -> list[str]:
    """A label per result; equal ones are told apart by their methods, by the settings in which they differ, or numbered
    among each other."""
    labels = []
    for result in results:
        rule, method = ", ".join(result.rules), result.content["method"]
        label = "plain" if paper.is_plain(result) else result.label
        label = f"{label} ({rule})" if rule else label
        same = [other for other in results if other.label == result.label]
        alike = [other for other in same if other.content["method"] == method]
        label = label if len(alike) == len(same) else f"{tables.METHODS.get(method, method)} {label}"
        told = {name: tables.setting(result, dotted) for dotted, name in tables.varying(alike).items()}
        labels.append(", ".join([label, *(f"{name} {value}" for name, value in told.items() if value is not None)]))
    return [
        label if labels.count(label) == 1 else f"{label} #{labels[: place + 1].count(label)}"
        for place, label in enumerate(labels)
    ]


def headline(methods: Sequence[Result], labels: Sequence[str]) -> str:
    """The main finding in one sentence."""
    rated = [
        (result.content["overall"], label)
        for result, label in zip(methods, labels, strict=True)
        if result.content["overall"]["tokens_per_second"] is not None
    ]
    if not rated:
        return "No question was answered."
    compared = [entry for entry in rated if entry[0]["speedup"] is not None]
    figure = "speedup" if compared else "tokens_per_second"
    overall, label = max(compared or rated, key=lambda entry: entry[0][figure])
    rate = f"{overall['tokens_per_second']:.1f} tokens per second"
    if only_plain(methods):
        return f"Plain decoding makes {rate}."
    tau = f", with {overall['tau']:.2f} tokens per verification" if overall["tau"] is not None else ""
    if not compared:
        best = f"Most tokens per second, {label}" if len(rated) > 1 else label
        return f"{best}: {rate}{tau}. Plain decoding was not measured."
    ends = (overall.get("intervals") or {}).get("speedup")
    between = f" (95 % interval {ends[0]:.2f} to {ends[1]:.2f})" if ends else ""
    first = "Fastest is" if overall["speedup"] > 1 else "Nothing here beats plain decoding; next to it comes"
    return f"{first} {label}: {rate}, {overall['speedup']:.2f} times plain decoding{between}{tau}."


def only_plain(methods: Sequence[Result]) -> bool:
    return all(map(paper.is_plain, methods))


def plots(results: Sequence[Result], labels: Sequence[str]) -> list[Plot]:
    """τ and speedup by category, one against the other, acceptance by position, time, training; what there is data
    for."""
    methods = methods_of(results, labels)
    alone, among = only_plain(list(methods.values())), tables.answered(list(methods.values()))
    found = []
    kinds = [
        ("tau", "Tokens per verification by category", "τ", "nothing accepted"),
        ("speedup", "Speedup by category", "speedup", "plain decoding"),
    ]
    if alone:  # both are 1 everywhere
        kinds = [("tokens_per_second", "Tokens per second by category", "tokens/s", "")]
    rows = [*(category.replace("_", " ") for category in among), "overall"]
    for figure, title, unit, one in kinds:
        values = {
            label: [
                *(result.content["categories"].get(category, {}).get(figure) for category in among),
                result.content["overall"][figure],
            ]
            for label, result in methods.items()
        }
        if any(value is not None for column in values.values() for value in column):
            found.append(dots(title, unit, rows, values, one))
    found += [] if alone else _tradeoffs(methods)
    found += sizes.plot(list(methods.values()), list(methods))
    split = {
        label: {name: 1000 * seconds / tokens for name, seconds in time.items()}
        for label, result in zip(labels, results, strict=True)
        if (time := result.content["overall"].get("time")) and (tokens := result.content["overall"]["tokens"])
    }
    found += [stacks("Where the time of a token goes", "milliseconds per token", split)] if split else []
    trained = training_curves(list(methods.values()), list(methods))
    return [*found, *([trained] if trained else [])]


def _tradeoffs(methods: Mapping[str, Result]) -> list[Plot]:
    points, lines = {}, {}
    for label, result in methods.items():
        overall = result.content["overall"]
        known = overall.get("intervals") or {}
        if overall["tau"] is not None and overall["speedup"] is not None:
            points[label] = Point(overall["tau"], overall["speedup"], known.get("tau"), known.get("speedup"))
        if overall.get("acceptance"):
            lines[label] = overall["acceptance"]["conditional"]
    found = [scatter("Speedup against tokens per verification", points)] if points else []
    return found + ([positions("Acceptance by draft position", lines)] if lines else [])


def settings(results: Sequence[Result]) -> list[tuple[str, str]]:
    """The settings that hold for every result that has them, as (name, value)."""

    def flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
        found: dict[str, str] = {}
        for name, value in values.items():
            if isinstance(value, dict):
                found |= flat(value, f"{prefix}{name}.")
            else:
                found[prefix + name] = "none" if value is None else str(value)
        return found

    every = [flat(result.settings) for result in results]
    names = dict.fromkeys(name for one in every for name in one)
    values = {name: {one[name] for one in every if name in one} for name in names}
    return [(name, min(found)) for name, found in values.items() if len(found) == 1]
