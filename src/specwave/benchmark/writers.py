"""Tables for the console, Markdown, LaTeX and CSV: every writer formats the same cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from specwave.benchmark.paper import nodes
from specwave.benchmark.results import Result
from specwave.benchmark.tables import MISSING, SETTINGS, Cell, Table, answered, setting


def text(cell: Cell, digits: int) -> str:
    if cell is None:
        return MISSING
    return f"{cell:.{digits}f}" if isinstance(cell, float) else str(cell)


def cells(table: Table) -> list[list[str]]:
    return [[text(cell, digits) for cell, digits in zip(row, table.digits, strict=True)] for row in table.rows]


def numeric(table: Table) -> list[bool]:
    """Which columns hold numbers, and so stand to the right."""
    return [
        any(isinstance(row[column], int | float) for row in table.rows)
        and not any(isinstance(row[column], str) for row in table.rows)
        for column in range(len(table.header))
    ]


def console(table: Table) -> str:
    body = cells(table)
    widths = [max(len(line[column]) for line in [table.header, *body]) for column in range(len(table.header))]
    right = numeric(table)

    def line(entries: list[str]) -> str:
        padded = (
            entry.rjust(width) if flush else entry.ljust(width)
            for entry, width, flush in zip(entries, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    lines = [line(table.header), line(["─" * width for width in widths])]
    for place, entries in enumerate(body):
        lines += [table.blocks[place]] if place in table.blocks else []
        lines.append(line(entries))
    return "\n".join([*lines, *[table.note] * bool(table.note)])


def markdown(found: Sequence[Table]) -> str:
    parts = []
    for table in found:
        marks = ["---:" if flush else "---" for flush in numeric(table)]
        lines = [[_cell(name) for name in table.header], marks]
        for place, row in enumerate(cells(table)):
            if place in table.blocks:
                lines.append([f"**{table.blocks[place]}**", *[""] * (len(table.header) - 1)])
            lines.append([_cell(entry) for entry in row])
        parts.append(f"## {table.title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
        parts += [table.note] if table.note else []
    return "\n\n".join(parts) + "\n"


def _cell(entry: str) -> str:
    """Labels and categories are the user's: a bar or a new line would end the cell."""
    return " ".join(entry.split()).replace("|", "\\|")


def latex(found: Sequence[Table]) -> str:
    """Tables for `\\usepackage{booktabs,graphicx}`; each is scaled to the width of the text."""
    parts = ["% needs \\usepackage{booktabs,graphicx}"]
    for table in found:
        columns = "".join("r" if flush else "l" for flush in numeric(table))
        lines = [" & ".join(map(_escaped, table.header)) + r" \\\midrule"]
        for place, row in enumerate(cells(table)):
            if place in table.blocks:
                lines += [r"\midrule"] if place else []
                lines.append(rf"\multicolumn{{{len(table.header)}}}{{l}}{{{_escaped(table.blocks[place])}}} \\")
            lines.append(" & ".join(map(_escaped, row)) + r" \\")
        parts.append(
            "\n".join(
                [
                    r"\begin{table}[t]\centering",
                    rf"\caption{{{_escaped('. '.join(filter(None, (table.title, table.note))))}}}",
                    rf"\resizebox{{\linewidth}}{{!}}{{\begin{{tabular}}{{{columns}}}\toprule",
                    *lines,
                    r"\bottomrule\end{tabular}}",
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "τ": r"$\tau$", "–": "--", "×": r"$\times$",
    "γ": r"$\gamma$", "α": r"$\alpha$", "ρ": r"$\rho$", "≥": r"$\geq$", "≤": r"$\leq$", "−": "$-$", "·": r"$\cdot$",
    "…": r"\dots{}", "→": r"$\to$", "[": "{[}",  # behind the end of a row a bracket would be its option
}  # fmt: skip


def _escaped(entry: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(entry.split()))


def as_csv(results: Sequence[Result]) -> str:
    """One line per result, as `records` has them."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerows(records(results))
    return stream.getvalue()


DRAFTER = ("drafter_parameters", "drafter_bytes")


def records(results: Sequence[Result]) -> list[list[Any]]:
    """A header and a row per result: every figure at full precision, the settings beside them."""
    shown = answered(results)
    figures = ("tau", "tau_per_question", "tokens", "rounds", "tokens_per_second", "tokens_per_second_per_question",
               "seconds_per_token", "speedup", "speedup_per_question", "peak_memory_bytes", "exact_match_rate",
               "near_ties")  # fmt: skip
    spread = ("tau", "tokens_per_second", "speedup")
    found: list[list[Any]] = [
        ["label", "method", "layers", "rule", "machines", *SETTINGS, "tokens_a_round", *DRAFTER]
        + ["questions", "failed", *figures]
        + [f"{figure}.{end}" for figure in spread for end in ("low", "high")]
        + [f"{figure}.{category}" for figure in spread for category in shown]
    ]
    for result in results:
        content, overall = result.content, result.content["overall"]
        layers = " ".join(map(str, content.get("layers") or []))
        row: list[Any] = [result.label, content["method"], layers, ", ".join(result.rules) or None]
        row.append(" ".join(result.machines) or None)
        row += [setting(result, dotted) for dotted in SETTINGS]
        row += [nodes(result), *((content.get("drafter") or {}).get(name) for name in ("parameters", "bytes"))]
        row += [*(overall.get(name) for name in ("questions", "failed", *figures))]
        for figure in spread:
            row += (overall.get("intervals") or {}).get(figure) or [None, None]
        for figure in spread:
            row += [content["categories"].get(category, {}).get(figure) for category in shown]
        found.append(row)
    return found


BLOCK = ("questions", "failed", "tau", "tokens", "rounds", "tokens_per_second", "speedup", "exact_match_rate")


def by_category(results: Sequence[Result]) -> list[list[Any]]:
    """A header and a row per result and category with answers, at full precision."""
    found: list[list[Any]] = [["label", "method", "category", *BLOCK]]
    for result in results:
        for category, part in result.content["categories"].items():
            if part.get("tokens"):
                figures = (part.get(name) for name in BLOCK)
                found.append([result.label, result.content["method"], category, *figures])
    return found


def figures(results: Sequence[Result]) -> dict[str, float]:
    """The main figures of every method by `<label>/<figure>`; of equal labels the last one's."""
    return {
        f"{result.label}/{name}": value
        for result in results
        for name in ("tau", "tokens_per_second", "speedup", "exact_match_rate")
        if (value := result.content["overall"].get(name)) is not None
    }
