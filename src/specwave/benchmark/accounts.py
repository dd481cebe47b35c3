"""Who drafted, as tables: of methods that have several sources of drafts, what became of each (`measures.sources`)."""

from __future__ import annotations

from collections.abc import Sequence

from specwave.benchmark.results import Result
from specwave.benchmark.tables import Cell, Table, ranged

CODE = "coding"  # the one of MT-bench's categories whose answers copy: shown by itself


def tables(results: Sequence[Result], labels: Sequence[str]) -> list[Table]:
    """Who drafted over all questions, and the figures of every subtask beside it; [] where no method has an account."""
    if not any(result.content["overall"].get("sources") for result in results):
        return []
    return [by_source(results, labels), by_subtask(results, labels)]


def by_source(results: Sequence[Result], labels: Sequence[str]) -> Table:
    header = ["method", "source", "rounds", "in vain", "drafted", "accepted", "time of its rounds", "time to draft"]
    rows: list[list[Cell]] = []
    for label, result in zip(labels, results, strict=True):
        found = result.content["overall"].get("sources") or {}
        whole = sum(own["seconds"] for own in found.values())
        for source, own in found.items():
            lost = percent(own["in_vain"]) if own["drafted"] else None
            each: list[Cell] = [own["drafted_a_round"], own["accepted_a_round"]]
            spent = [percent(own[name] / whole, 1) if whole else None for name in ("seconds", "draft_seconds")]
            rows.append([label, source, percent(own["share"]), lost, *each, *spent])
    title = "Who drafted (rounds in vain: nothing accepted; tokens a round; shares of the time of all rounds)"
    return Table(title, header, rows, [2] * len(header), names=2)


def by_subtask(results: Sequence[Result], labels: Sequence[str]) -> Table:
    header = ["method", "tokens/s", "τ", "speedup", "rounds by source", "accepted a round by source"]
    rows: list[list[Cell]] = []
    blocks: dict[int, str] = {}
    parts = {"all questions": [result.content["overall"] for result in results]}
    for name in results[0].content["subtasks"]:
        parts[name.replace("_", " ")] = [result.content["subtasks"].get(name, {}) for result in results]
    parts["mt bench: coding"] = [result.content["categories"].get(CODE, {}) for result in results]
    for heading, group in parts.items():
        if not any(part.get("tokens") for part in group):
            continue
        blocks[len(rows)] = heading
        for label, part in zip(labels, group, strict=True):
            known, found = part.get("intervals") or {}, part.get("sources") or {}
            figures: list[Cell] = [
                ranged(part.get(name), known.get(name), digits)
                for name, digits in (("tokens_per_second", 1), ("tau", 2), ("speedup", 2))
            ]
            shares = ", ".join(f"{source} {percent(own['share'])}" for source, own in found.items())
            each = ", ".join(
                f"{source} {own['accepted_a_round']:.2f}" for source, own in found.items() if own["drafted"]
            )
            rows.append([label, *figures, shares or None, each or None])
    title = "Subtasks: speed and who drafted (95 % intervals over questions)"
    return Table(title, header, rows, [0] * len(header), blocks=blocks)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"
