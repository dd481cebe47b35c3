"""`results.json`: what one method is worth against plain decoding, with its settings and the definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwave.artifacts import SCHEMA, UserError, read_json, reading, write_json
from specwave.benchmark.definitions import DEFINITIONS
from specwave.benchmark.measures import TALLIED, per_question
from specwave.benchmark.metrics import Verdict, block, blocks
from specwave.benchmark.rows import failed, machines


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
    rules: Sequence[str] = (),
    drafter: dict[str, int] | None = None,
) -> dict[str, Any]:
    """The content of results.json.

    Args:
        label: names the method in tables, e.g. "L2-15-27".
        rows: the answers of the questions of this run.
        verdicts: by question id; None when sampling.
        divergences: where outputs left the target's own, with gaps.
        settings: the run's and the method's settings.
        layers, rules: what the drafter reads and the rules that choose it.
        drafter: its parameters and bytes (`drafters.size_of`).
    """
    ties = 0 if settings.get("dtype") == "float32" else None
    itself = None if verdicts is None else {row["question_id"]: Verdict(True, ties) for row in baseline.rows}
    plain = block(baseline.rows, baseline.rows, itself)
    finished = [row for row in rows if not failed(row)]
    by_id = {row["question_id"]: row for row in baseline.rows if not failed(row)}
    return {
        "schema": SCHEMA,
        "method": method,
        "label": label,
        "layers": layers,
        "rule": ", ".join(rules) or None,
        "rules": list(rules),
        "drafter": drafter,
        **blocks(rows, baseline.rows, verdicts),
        "baseline": {"method": "autoregressive", "source": baseline.source, **plain}
        | {"machines": machines(baseline.rows)},
        "machines": machines(finished),
        "per_question": per_question(finished, by_id),
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
    def rules(self) -> list[str]:
        """The rules that choose its drafter's layers; files of earlier versions know of one."""
        rule = self.content.get("rule")
        return self.content.get("rules") or ([rule] if rule else [])

    @property
    def machines(self) -> list[str]:
        return self.content.get("machines") or []

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


LARGEST = 1e300
ACCOUNT = (*TALLIED, "share", "in_vain", "drafted_a_round", "accepted_a_round")  # of every source
_FIGURES = ("tau", "tokens", "rounds", "tokens_per_second", "speedup", "exact_match_rate", "near_ties")


def _check_blocks(content: dict[str, Any]) -> None:
    """Tables and pages read these figures: numbers or null everywhere; what older files lack may be absent."""
    if not isinstance(content["method"], str) or not isinstance(content.get("label") or "", str):
        raise ValueError("method and label are texts")
    layers = content.get("layers") or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ValueError("layers is no list of whole numbers")
    for name in ("rules", "machines"):
        texts = content.get(name) or []
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name} is no list of texts")
    for part in (
        content["overall"],
        content["baseline"],
        *content["subtasks"].values(),
        *content["categories"].values(),
    ):
        for name in _FIGURES:
            _number(part[name], name)
        for name in ("tokens", "rounds"):  # figures are divided by them
            if part[name] is not None and type(part[name]) is not int:
                raise ValueError(f"{name} is no whole number")
        for name in ("questions", "failed", "tau_per_question", "speedup_per_question"):
            _number(part.get(name), name)
        _check_nested(part)
    for name in ("settings", "definitions"):
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(f"{name} is no object")
    settings = content.get("settings", {})
    if not isinstance(settings.get("checkpoint") or "", str):
        raise ValueError("checkpoint is no text")
    _number(settings.get("sampling", {}).get("temperature"), "temperature")
    for record in content.get("per_question", []):
        if not isinstance(record["question_id"], str | int):
            raise ValueError("a question_id is a text or a whole number")
        for name in ("tokens", "rounds", "accepted", "seconds"):
            if record[name] is None:
                raise ValueError(f"{name} of a question is null")
        for name in ("tau", "tokens", "rounds", "accepted", "seconds", "plain_tokens", "plain_seconds"):
            _number(record[name], name)
        _number(record.get("draft_seconds"), "draft_seconds")
    size = content.get("drafter") or {"parameters": 0, "bytes": 0}
    for name in ("parameters", "bytes"):
        if size[name] is None:
            raise ValueError(f"{name} of the drafter is null")
        _number(size[name], name)
    for entry in content.get("divergences", []):
        if not {"question_id", "near_tie"} <= entry.keys():
            raise ValueError("a divergence names question_id and near_tie")
        for name in ("turn", "position", "top2_gap", "gap", "noise"):
            _number(entry[name], name)
    for failure in content.get("failures", []):
        if not {"question_id", "error"} <= failure.keys():
            raise ValueError("a failure names question_id and error")


def _check_nested(part: dict[str, Any]) -> None:
    for name, interval in (part.get("intervals") or {}).items():
        _pair(interval, name)
    again = part.get("repetitions") or {}
    _pair(again.get("speedup_interval"), "speedup_interval")
    for value in again.get("speedup") or []:
        _number(value, "speedup")
    for name, seconds in (part.get("time") or {}).items():
        if seconds is None:
            raise ValueError(f"{name} is null")
        _number(seconds, name)
    for source, own in (part.get("sources") or {}).items():
        for name in ACCOUNT:
            if own[name] is None:
                raise ValueError(f"{name} of {source} is null")
            _number(own[name], name)
    for value in (part.get("acceptance") or {"conditional": []})["conditional"]:
        _number(value, "conditional")


def _pair(interval: Any, name: str) -> None:
    if interval is not None and (not isinstance(interval, list) or len(interval) != 2 or None in interval):
        raise ValueError(f"{name} is no interval")
    for end in interval or []:
        _number(end, name)


def _number(value: Any, name: str) -> None:
    """Neither NaN nor infinite: Python's reader takes both, a table would print them."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise ValueError(f"{name} is {value!r}")


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
