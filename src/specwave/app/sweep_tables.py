"""A sweep's table for LaTeX, and its jobs of several seeds as means with intervals.

Seeds are runs of one setting that differ in `seed` alone. An interval is of their mean, by Student's t at 95 %: what
other seeds would give, not other data.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from specwave.app.collate import UNITS, Row, facts_of, head, is_number, swept_of
from specwave.benchmark.bootstrap import mean_interval
from specwave.benchmark.tables import Table
from specwave.benchmark.writers import latex

SEED = "seed"


def over_seeds(table: Sequence[Row]) -> list[Row]:
    """A row for each setting of the other swept keys, where seeds were swept; else nothing.

    Columns: those keys, `seeds` (finished jobs), `failed` (others), then of every fact that is a number in all of them
    its mean, `<fact> low` and `<fact> high`: the ends of the interval, None for a single seed.
    """
    keys = swept_of(table)
    if SEED not in keys:
        return []
    own = [key for key in keys if key != SEED]
    settings: dict[tuple[Any, ...], list[Row]] = {}
    for row in table:
        settings.setdefault(tuple(row[key] for key in own), []).append(row)
    done = [row for row in table if row["status"] == "finished"]
    facts = [name for name in facts_of(table) if done and all(is_number(row[name]) for row in done)]
    return [_averaged(dict(zip(own, values, strict=True)), jobs, facts) for values, jobs in settings.items()]


def _averaged(setting: Row, jobs: Sequence[Row], facts: Sequence[str]) -> Row:
    done = [job for job in jobs if job["status"] == "finished"]
    row = {**setting, "seeds": len(done), "failed": len(jobs) - len(done)}
    for name in facts:
        values = [job[name] for job in done]
        low, high = mean_interval(values) or (None, None)
        row |= {name: math.fsum(values) / len(values) if values else None, f"{name} low": low, f"{name} high": high}
    return row


# ---------------------------------------------------------------- texts


def seeds_csv(rows: Sequence[Row]) -> str:
    """All columns at full precision, None as an empty field."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(rows[0])
    for row in rows:
        writer.writerow("" if x is None else x if isinstance(x, str) else json.dumps(x) for x in row.values())
    return stream.getvalue()


def seeds_markdown(rows: Sequence[Row]) -> str:
    """To read: each figure as mean [low, high]; facts that are the same in every job left out."""
    names = [name for name in rows[0] if not name.endswith((" low", " high"))]
    names = [name for name in names if name != "failed" or any(row[name] for row in rows)]
    names = [name for name in names if f"{name} low" not in rows[0] or _varies(rows, name)]
    lines = [[head(name) for name in names], ["---"] * len(names)]
    lines += [[_ranged(row, name) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _varies(rows: Sequence[Row], name: str) -> bool:
    ends = {
        value for row in rows for value in (row[name], row[f"{name} low"], row[f"{name} high"]) if value is not None
    }
    return len(ends) > 1


def _ranged(row: Row, name: str) -> str:
    value, low, high = (row.get(key) for key in (name, f"{name} low", f"{name} high"))
    if not isinstance(value, float):
        return "–" if value is None else str(value).replace("|", "\\|")
    size = _size(name)
    shown = f"{value / size:.4g}"
    return shown if low is None or high is None else f"{shown} [{low / size:.4g}, {high / size:.4g}]"


def _size(name: str) -> float:
    return next((size for ending, (_, size) in UNITS.items() if name.endswith(ending)), 1.0)


def sweep_latex(title: str, table: Sequence[Row], seeds: Sequence[Row]) -> str:
    """The jobs, and below them the means over seeds, as tables of LaTeX; lists as 0,15,29, booleans as words."""
    found = [_as_table(title, table)]
    if seeds:
        found.append(_as_table(f"{title}; means over seeds, 95 % intervals", seeds))
    return latex(found)


def _as_table(title: str, rows: Sequence[Row]) -> Table:
    names = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    body: list[list[Any]] = [[_plain(name, row[name]) for name in names] for row in rows]
    return Table(title, [head(name) for name in names], body, [2 if _size(name) > 1 else 4 for name in names])


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return ",".join(f"{entry:.4g}" if isinstance(entry, float) else str(entry) for entry in value)
    if is_number(value):
        return value / _size(name) if _size(name) > 1 else value
    return None if value is None else " ".join(str(value).split())
