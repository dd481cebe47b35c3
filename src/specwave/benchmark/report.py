"""`report.html`: one file that holds everything it shows and asks the network for nothing; and the tables beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specwave import __version__
from specwave.artifacts import write_text
from specwave.benchmark import paper, tables, writers
from specwave.benchmark.diagrams import Point, positions, scatter, stacks
from specwave.benchmark.exhibits import pictures, training_curves
from specwave.benchmark.figures import Plot, dots
from specwave.benchmark.results import Result


def write_report(folder: Path, results: Sequence[Result]) -> Path:
    """Writes report.html and table.md/.tex/.csv of these results (plain decoding first) into `folder`."""
    found = paper.tables(results, unique_labels(results))
    write_text(folder / "table.md", writers.markdown(found))
    write_text(folder / "table.tex", writers.latex(found))
    write_text(folder / "table.csv", writers.as_csv(results))
    write_text(folder / "report.html", render(results))
    return folder / "report.html"


def render(results: Sequence[Result]) -> str:
    """The page as text."""
    methods = [result for result in results if result.content["method"] != "autoregressive"] or list(results)
    labels = unique_labels(methods)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    left = divergence_table(results)
    return environment.get_template("report.html.j2").render(
        subject=subject(results),
        headline=headline(methods, labels),
        tables=[(table, writers.cells(table), writers.numeric(table)) for table in page_tables(results)],
        plots=plots(results, methods, labels),
        pictures=pictures(methods, labels),
        settings=settings(results),
        definitions=results[0].content.get("definitions", {}),
        failures=[
            (label, failure["question_id"], failure["error"])
            for label, result in zip(unique_labels(results), results, strict=True)
            for failure in result.content.get("failures", [])
        ],
        divergences=left if left.rows else None,
        divergence_cells=writers.cells(left),
        divergence_numeric=writers.numeric(left),
        version=__version__,
    )


def page_tables(results: Sequence[Result]) -> list[tables.Table]:
    """The summary, how sure it is, and each figure with a row per category: long rather than wide, for screens. A
    table of its own for each block of nodes and temperature."""
    labels = unique_labels(results)
    named = {id(result): label for result, label in zip(results, labels, strict=True)}
    found = [tables.summary(results), paper.spread(results, labels), *paper.differences(results, labels)]
    for figure, title, digits, with_plain in paper.FIGURES:
        shown = [result for result in results if with_plain or not paper.is_plain(result)]
        parts = paper.blocks(shown)  # without any method there is nothing to say of τ and speedup: both are 1
        for heading, group in parts:
            whole = f"{title}: {heading}" if len(parts) > 1 else title
            table = paper.by_category(group, figure, whole, digits)
            found.append(tables.upright(table, [named[id(result)] for result in group]))
    return found


def subject(results: Sequence[Result]) -> str:
    """What was evaluated on what, for the title."""
    targets = list(dict.fromkeys(str(result.settings.get("target", "?")) for result in results))
    asked = max(result.content["overall"].get("questions") or 0 for result in results)
    return f"{', '.join(targets)} on {asked} questions"


def divergence_table(results: Sequence[Result]) -> tables.Table:
    """Every divergence: near-ties, and in dtypes below float32 the first of each question with its gap."""
    header = ["method", "question", "turn", "token", "top-2 gap", "gap", "noise", "verdict"]
    rows: list[list[tables.Cell]] = []
    for label, result in zip(unique_labels(results), results, strict=True):
        for entry in result.content.get("divergences", []):
            verdict = "near-tie" if entry["near_tie"] else "other output"
            numbers = [None if entry[name] is None else f"{entry[name]:.2e}" for name in ("top2_gap", "gap", "noise")]
            rows.append([label, str(entry["question_id"]), entry["turn"], entry["position"], *numbers, verdict])
    return tables.Table("Where outputs left the target's own", header, rows, [0] * len(header))


def unique_labels(results: Sequence[Result]) -> list[str]:
    """A label per result; equal ones are told apart by what differs, or numbered."""
    extra = tables.varying(results)
    labels = []
    for result in results:
        label = "plain" if result.content["method"] == "autoregressive" else result.label
        rule = result.content.get("rule")
        label = f"{label} ({rule})" if rule else label
        same = [other for other in results if other.label == result.label]
        if len(same) > 1 and extra:
            label += ", " + ", ".join(f"{name} {tables.setting(result, key)}" for key, name in extra.items())
        labels.append(label)
    return [label if labels.count(label) == 1 else f"{label} #{index + 1}" for index, label in enumerate(labels)]


def headline(methods: Sequence[Result], labels: Sequence[str]) -> str:
    """The main finding in one sentence."""
    rated = [
        (result.content["overall"], label)
        for result, label in zip(methods, labels, strict=True)
        if result.content["overall"]["tokens_per_second"] is not None
    ]
    if not rated:
        return "No question was answered."
    overall, label = max(rated, key=lambda entry: entry[0]["speedup"] or 0.0)
    rate = f"{overall['tokens_per_second']:.1f} tokens per second"
    if only_plain(methods):
        return f"Plain decoding makes {rate}."
    speed = f", {overall['speedup']:.2f} times plain decoding" if overall["speedup"] is not None else ""
    first = "Fastest is" if (overall["speedup"] or 0.0) >= 1 else "Nothing here beats plain decoding; next to it comes"
    return f"{first} {label}: {rate}{speed}, with {overall['tau']:.2f} tokens per verification."


def only_plain(methods: Sequence[Result]) -> bool:
    return all(result.content["method"] == "autoregressive" for result in methods)


def plots(results: Sequence[Result], methods: Sequence[Result], labels: Sequence[str]) -> list[Plot]:
    """τ and speedup by category, one against the other, acceptance by position, time, training; what there is data
    for."""
    shown = tables.answered(methods)
    found = []
    kinds = [
        ("tau", "Tokens per verification by category", "τ", "nothing accepted"),
        ("speedup", "Speedup by category", "speedup", "plain decoding"),
    ]
    if only_plain(methods):  # both are 1 everywhere
        kinds = [("tokens_per_second", "Tokens per second by category", "tokens/s", "")]
    for figure, title, unit, one in kinds:
        values = {
            label: [
                *(result.content["categories"].get(category, {}).get(figure) for category in shown),
                result.content["overall"][figure],
            ]
            for label, result in zip(labels, methods, strict=True)
        }
        rows = [*(category.replace("_", " ") for category in shown), "overall"]
        found.append(dots(figure, title, unit, rows, values, one))
    found += [] if only_plain(methods) else _tradeoffs(methods, labels)
    split = {
        label: {name: 1000 * seconds / tokens for name, seconds in time.items()}
        for label, result in zip(unique_labels(results), results, strict=True)
        if (time := result.content["overall"].get("time")) and (tokens := result.content["overall"]["tokens"])
    }
    found += [stacks("Where the time of a token goes", "milliseconds per token", split)] if split else []
    trained = training_curves(methods, labels)
    return [*found, *([trained] if trained else [])]


def _tradeoffs(methods: Sequence[Result], labels: Sequence[str]) -> list[Plot]:
    points, lines = {}, {}
    for label, result in zip(labels, methods, strict=True):
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
