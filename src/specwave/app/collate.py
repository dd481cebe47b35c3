"""A sweep as one table and one picture: what was swept, how each job ended, and the facts its `main` noted.

Reads nothing but the run.yaml of the jobs, so it does not matter which process ran a job, or when.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specwave.app.run import OWN_KEYS, RUN_FILE, read_yaml
from specwave.artifacts import write_text

MEASURED = ("wall_seconds", "peak_memory_bytes", "peak_gpu_memory_bytes")
LONGEST = 16  # entries of a list that a column can hold
ERROR_WIDTH = 90  # letters of an error in sweep.md; sweep.csv has all of them
WIDEST_VALUE = 22  # letters of a swept value in a label
BUILT = re.compile(r"\{\s*_target_\s*:\s*(?:\w+\.)*(\w+)\s*,?(.*)\}")  # {_target_: package.Class, key: value}
UNITS = {"_seconds": ("s", 1.0), "_bytes": ("GiB", 2.0**30)}
Row = dict[str, Any]


# ---------------------------------------------------------------- rows


def rows(folder: Path) -> list[Row]:
    """One row for each job below a sweep's folder, in the order of their numbers, all with the same keys:

    job (its folder), the swept keys (keys and values as typed), status, the facts noted (numbers, texts, lists of at
    most 16 of them), wall_seconds, peak_memory_bytes, peak_gpu_memory_bytes where a GPU was used, error. None where a
    job has no such thing; a run.yaml that cannot be read is a row of status `unreadable`.
    """
    return table_of(records(folder))


def table_of(found: Mapping[str, dict[str, Any]]) -> list[Row]:
    """The same for jobs (folder → run.yaml) that may lie anywhere."""
    typed = {job: dict(_typed(record)) for job, record in found.items()}
    swept = _swept([typed[job] for job, record in found.items() if "overrides" in record])
    facts = list(dict.fromkeys(key for record in found.values() for key in _facts(record)))
    ends = [name for name in MEASURED if any(name in record for record in found.values())]
    table = []
    for job, record in found.items():
        noted = _facts(record)
        row = {"job": job, **{key: typed[job].get(key) for key in swept}, "status": record["status"]}
        row |= {key if key not in row else f"noted {key}": noted.get(key) for key in facts}
        table.append(row | {name: record.get(name) for name in ends} | {"error": record.get("error")})
    return table


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Job (its folder below a sweep's) → its run.yaml, in the order of their numbers."""
    found = {}
    for place, below, files in os.walk(folder, followlinks=True):  # chain.py links to the folders of its jobs
        if RUN_FILE in files and Path(place) != folder:
            below.clear()  # what lies inside a job is the job's own affair
            found[Path(place).relative_to(folder).as_posix()] = read_record(Path(place) / RUN_FILE)
    return {job: found[job] for job in sorted(found, key=_natural)}


def read_record(path: Path) -> dict[str, Any]:
    """A run.yaml as a row, of a job too that failed before it wrote anything else."""
    record = read_yaml(path)
    if isinstance(record, dict) and {"app", "status", "config"} <= record.keys():
        return record
    return {"status": "unreadable", "error": f"{path.name} is damaged"}


def _natural(job: str) -> list[tuple[bool, int, str]]:
    """A key that puts 2 before 10, numbers before names."""
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in job.split("/")]


def _typed(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, value) of a job's overrides."""
    for override in record.get("overrides", []):
        key, _, value = override.partition("=")
        yield key, value


def _swept(jobs: Sequence[dict[str, str]]) -> list[str]:
    """The keys whose values differ, or that some jobs lack."""
    keys = dict.fromkeys(key for job in jobs for key in job)
    return [key for key in keys if len({job.get(key) for job in jobs}) > 1]


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in OWN_KEYS and _fits(value)}


def _fits(value: Any) -> bool:
    """Whether a fact is short enough for a column: no mappings, no long or nested lists."""
    if isinstance(value, list):
        return len(value) <= LONGEST and all(_fits(entry) and not isinstance(entry, list) for entry in value)
    return isinstance(value, str | int | float)  # bool is an int


def facts_of(table: Sequence[Row]) -> list[str]:
    """The columns that hold facts."""
    names = list(table[0]) if table else []
    end = next(name for name in names if name in MEASURED or name == "error") if names else ""
    return names[names.index("status") + 1 : names.index(end)] if names else []


def swept_of(table: Sequence[Row]) -> list[str]:
    """The columns that hold swept keys."""
    names = list(table[0]) if table else []
    return names[1 : names.index("status")] if names else []


def first_number(table: Sequence[Row]) -> str:
    """The fact to draw where no layers were chosen; the time a job took when none noted a number."""
    return next((name for name in facts_of(table) if any(is_number(row[name]) for row in table)), "wall_seconds")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# ---------------------------------------------------------------- texts


def short(value: str | None) -> str:
    """A swept value in a label, 22 letters at most; of what has a `_target_`, its class and its other keys."""
    text = "–" if value is None else value
    if built := BUILT.fullmatch(text):
        name, more = built.groups()
        text = f"{name}({more.strip()})" if more.strip() else name
    return text if len(text) <= WIDEST_VALUE else text[: WIDEST_VALUE - 1] + "…"


def csv_text(table: Sequence[Row]) -> str:
    """All columns, numbers to their last digit; lists as JSON, None as an empty field."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(table[0])
    for row in table:
        writer.writerow("" if x is None else x if isinstance(x, str) else json.dumps(x) for x in row.values())
    return stream.getvalue()


def markdown(table: Sequence[Row], limit: int | None = None) -> str:
    """A table to read: rounded numbers, units in the head, columns without any value left out.

    Counts and names that are the same in every job stand in a line below the table; so does the number of rows
    beyond `limit`.
    """
    same = _constant(table)
    names = [key for key in table[0] if key not in same and any(row[key] not in (None, "") for row in table)]
    cells = [[_cell(key, row[key]) for key in names] for row in table]
    heads = [head(key) for key in names]
    right = [all(isinstance(row[key], int | float | None) for row in table) for key in names]
    shown = cells if limit is None else cells[:limit]
    widths = [max(len(cell[place]) for cell in [heads, *shown]) for place in range(len(names))]

    def line(entries: Sequence[str]) -> str:
        fitted = zip(entries, widths, right, strict=True)
        return f"| {' | '.join(text.rjust(width) if number else text.ljust(width) for text, width, number in fitted)} |"

    rules = ["-" * (width - 1) + (":" if number else "-") for width, number in zip(widths, right, strict=True)]
    lines = [line(heads), line(rules), *map(line, shown)]
    if len(shown) < len(cells):
        more = len(cells) - len(shown)
        lines += ["", f"… and {more} more row{'s' * (more > 1)}"]
    if same:
        lines += ["", f"In every job: {', '.join(f'{key} {_cell(key, value)}' for key, value in same.items())}."]
    return "\n".join(lines)


def _constant(table: Sequence[Row]) -> dict[str, Any]:
    """Facts that are one and the same count, text or switch in all jobs that have them (two at least)."""
    same = {}
    for key in facts_of(table):
        values = [row[key] for row in table if row[key] is not None]
        if len(values) > 1 and isinstance(values[0], str | int) and all(value == values[0] for value in values):
            same[key] = values[0]
    return same


def head(key: str) -> str:
    """A column's name with its unit."""
    for ending, (unit, _) in UNITS.items():
        if key.endswith(ending):
            return f"{key.removesuffix(ending)} ({unit})"
    return key.replace("|", "\\|")


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        text = " ".join(value.split())
        if key == "error" and len(text) > ERROR_WIDTH:
            text = text[: ERROR_WIDTH - 1] + "…"
        return text.replace("|", "\\|")
    if isinstance(value, list):
        return ",".join(_cell("", entry) for entry in value)
    if isinstance(value, bool):
        return str(value).lower()
    for ending, (_, size) in UNITS.items():
        if key.endswith(ending):
            return f"{value / size:.2f}"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def standing(table: Sequence[Row]) -> str:
    """How the jobs ended: "27 jobs, 2 failed, 1 running"."""
    ends = [row["status"] for row in table]
    others = [f"{ends.count(end)} {end}" for end in dict.fromkeys(ends) if end != "finished"]
    return ", ".join([f"{len(ends)} job{'s' * (len(ends) != 1)}", *others])


# ---------------------------------------------------------------- files


def write(folder: Path, app: str, table: Sequence[Row], name: str = "sweep") -> list[Path]:
    """<name>.csv, .md, .tex, .png and .svg in the sweep's folder, each whole or absent; with several seeds
    <name>_seeds.csv, with one key or more than two <name>_keys.png and .svg."""
    from specwave.app import sweep_tables
    from specwave.app.sweep_figures import sweep_figure  # matplotlib, which no job of a sweep may need
    from specwave.app.sweep_plots import keys_figure

    title = f"{app}: {standing(table)}"
    pictures = sweep_figure(folder / name, table, title)
    pictures += keys_figure(folder / f"{name}_keys", table, title)
    texts = {f"{name}.csv": csv_text(table)}
    shown = [markdown(table)]
    seeds = sweep_tables.over_seeds(table)
    if seeds:
        texts[f"{name}_seeds.csv"] = sweep_tables.seeds_csv(seeds)
        shown.append(f"Means over seeds [95 % interval]:\n\n{sweep_tables.seeds_markdown(seeds)}")
    shown += [f"![{title}]({picture.name})" for picture in pictures if picture.suffix == ".png"]
    texts[f"{name}.md"] = "\n\n".join([f"# {title}", *shown]) + "\n"
    texts[f"{name}.tex"] = sweep_tables.sweep_latex(title, table, seeds)
    for file, text in texts.items():
        write_text(folder / file, text)
    return [*(folder / file for file in texts), *pictures]
