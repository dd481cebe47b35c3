"""`results.json`: what one method is worth against plain decoding, with its settings and the definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwave.artifacts import SCHEMA, UserError, read_json, reading, write_json
from specwave.benchmark.metrics import DEFINITIONS, Verdict, block, blocks, failed


@dataclass(frozen=True)
class Baseline:
    """Plain decoding's rows and where they were measured ("this run", or the folder of an earlier one)."""

    rows: list[dict[str, Any]]
    source: str = "this run"


def build_results(
    *,
    label: str,
    method: str,
    rows: Sequence[dict[str, Any]],
    baseline: Baseline,
    verdicts: Mapping[Any, Verdict] | None,
    divergences: list[dict[str, Any]],
    settings: dict[str, Any],
    layers: list[int] | None = None,
    rule: str | None = None,
) -> dict[str, Any]:
    """The content of results.json.

    Args:
        label: names the method in tables, e.g. "L2-15-27".
        rows: the answers of the questions of this run.
        verdicts: by question id; None when sampling.
        divergences: where outputs left the target's own, with gaps.
        settings: the run's and the method's settings.
        layers, rule: what the drafter reads and the rule that chose it.
    """
    ties = 0 if settings.get("dtype") == "float32" else None
    itself = None if verdicts is None else {row["question_id"]: Verdict(True, ties) for row in baseline.rows}
    plain = block(baseline.rows, baseline.rows, itself)
    return {
        "schema": SCHEMA,
        "method": method,
        "label": label,
        "layers": layers,
        "rule": rule,
        **blocks(rows, baseline.rows, verdicts),
        "baseline": {"method": "autoregressive", "source": baseline.source, **plain},
        "definitions": DEFINITIONS,
        "settings": settings,
        "divergences": divergences,
        "failures": [
            {"question_id": row["question_id"], "error": row["specwave"]["error"]} for row in rows if failed(row)
        ],
    }


@dataclass(frozen=True)
class Result:
    """One results.json and where it lies."""

    folder: Path
    content: dict[str, Any]

    @property
    def label(self) -> str:
        return self.content.get("label") or self.content["method"]

    @property
    def settings(self) -> dict[str, Any]:
        return self.content.get("settings", {})

    @property
    def drafter(self) -> Path | None:
        checkpoint = self.settings.get("checkpoint")
        return Path(checkpoint) if checkpoint else None


def save_results(folder: Path, content: dict[str, Any]) -> Result:
    write_json(folder / "results.json", content)
    return Result(folder, content)


def load_results(path: Path, key: str) -> Result:
    """One results.json, from its folder.

    Raises:
        UserError: when it is missing or no results file of this schema.
    """
    content = read_json(path / "results.json", key)
    lacking = [name for name in ("method", "overall", "subtasks", "categories", "baseline") if name not in content]
    if lacking:
        raise UserError(key, path / "results.json", f"not a results file: it lacks {', '.join(lacking)}")
    if content.get("schema") != SCHEMA:
        raise UserError(key, path / "results.json", f"its schema is {content.get('schema')!r}, {SCHEMA} is read")
    with reading(key, path / "results.json", "evaluate again"):
        _check_blocks(content)
    return Result(path, content)


_FIGURES = ("tau", "tokens", "rounds", "tokens_per_second", "speedup", "exact_match_rate", "near_ties")


def _check_blocks(content: dict[str, Any]) -> None:
    """Tables and pages read these figures: numbers or null everywhere."""
    for part in (
        content["overall"],
        content["baseline"],
        *content["subtasks"].values(),
        *content["categories"].values(),
    ):
        for name in _FIGURES:
            if part[name] is not None and not isinstance(part[name], int | float):
                raise ValueError(f"{name} is {part[name]!r}")
    if not isinstance(content.get("settings", {}), dict):
        raise ValueError("settings is no object")


def load_run(folder: Path | str, key: str = "report") -> list[Result]:
    """All results of an evaluation's run folder, plain decoding first.

    Raises:
        UserError: when the folder is no evaluation.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(key, folder, "there is no such folder: give the run folder of an evaluation")
    places = [folder / "baseline", folder, *sorted(entry for entry in folder.iterdir() if entry.is_dir())]
    places = [place for place in dict.fromkeys(places) if (place / "results.json").is_file()]
    found = [load_results(place, key) for place in places]
    if len(found) > 1 and (folder in places) and found[places.index(folder)].content["method"] == "autoregressive":
        found = [result for result in found if result.folder != folder / "baseline"]  # a bare run is its own baseline
    if not found:
        raise UserError(key, folder, "it holds no results.json: give the run folder of a finished evaluation")
    return found
