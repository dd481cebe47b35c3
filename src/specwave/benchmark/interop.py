"""Spec-Bench's own answer files as results, so that its runs and ours stand in one table.

What they do not say stays out: no settings, no prefill or draft times, no tokens to compare. An answers file in which
every round commits one token is plain decoding; the first such file named is the baseline of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specwave.artifacts import UserError
from specwave.benchmark.answers import read_answers
from specwave.benchmark.results import Baseline, Result, build_results, load_run
from specwave.benchmark.rows import is_plain


def load_all(entries: Sequence[str], key: str = "report") -> list[Result]:
    """The results of run folders and of answer files, in the order given.

    Raises:
        UserError: for an entry that is neither, is damaged, or is named twice.
    """
    paths = [Path(entry).expanduser().resolve() for entry in entries]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UserError(key, twice, "it is named twice")
    files = {path: read_answers(path, key, own=False) for path in paths if path.is_file()}
    plain = next(((path, rows) for path, rows in files.items() if is_plain(rows)), None)
    found: list[Result] = []
    for path, entry in zip(paths, entries, strict=True):
        if path in files:
            found.append(_as_result(path, files[path], plain))
        else:
            found += load_run(entry, key)
    return [result for place, result in enumerate(found) if not _shown(result, found[:place])]


def _shown(result: Result, earlier: Sequence[Result]) -> bool:
    """Whether it is plain decoding as an earlier run measured it, from which `baseline=` took it up."""
    content = result.content
    same = (other for other in earlier if other.content["method"] == content["method"] == "autoregressive")
    return any(other.content["overall"] == content["overall"] and other.settings == result.settings for other in same)


def _as_result(path: Path, rows: list[dict[str, Any]], plain: tuple[Path, list[dict[str, Any]]] | None) -> Result:
    model = next((row["model_id"] for row in rows if isinstance(row.get("model_id"), str)), path.stem)
    content = build_results(
        label=model,
        method="autoregressive" if is_plain(rows) else model,
        rows=rows,
        baseline=Baseline(plain[1], str(plain[0])) if plain else Baseline([], "none: no file of plain decoding"),
        verdicts=None,
        divergences=[],
        settings={},
    )
    return Result(path.parent, content)
