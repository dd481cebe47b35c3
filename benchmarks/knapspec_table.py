"""KnapSpec and its rivals by context: the table behind experiment=knapspec_table and its twin on SmolLM2.

    python benchmarks/knapspec_table.py runs/knapspec_table_smollm2

Reads the evaluations of a chain's folder, as it was last run, and writes there by_context.csv and by_context.md: for
every set of questions (a length of long_context, a category of Spec-Bench) and every method tokens per second and
speedup with their intervals over questions, τ, α (accepted drafts / drafts), γ (drafts of a round that drafts), kept
attentions and MLPs (means over the plans that were drafted with) and the share of time that planning took. Rates are of
decoding alone: a prompt of thousands of tokens costs every method the same, and would hide what they differ in. The
note names the training that Kangaroo's adapter took. Only reads; any machine.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from specwave.app.run import read_run
from specwave.artifacts import write_text
from specwave.benchmark.answering import sequence_id
from specwave.benchmark.bootstrap import interval, quotient, ratio_interval, resampled
from specwave.benchmark.questions import Question
from specwave.benchmark.results import Result, load_results
from specwave.benchmark.rows import failed, repetitions
from specwave.benchmark.tables import METHODS, setting

KEY = "folder"
COLUMNS = ("questions", "method", "T", "asked", "tokens/s", "low", "high", "speedup", "speedup low", "speedup high",
           "τ", "α", "γ", "attentions", "MLPs", "plans", "plan time")  # fmt: skip
SHOWN = {"τ": ".2f", "α": ".2f", "γ": ".1f", "attentions": ".1f", "MLPs": ".1f", "plan time": ".1%"}
VARIANTS = (  # of KnapSpec: a key, the value that makes it another method, what it is called then
    ("plan_share", None, "plans whenever due"),
    ("fixed_gamma", True, "fixed γ"),
    ("adapt", False, "no adaptation"),
)
Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the chain")
    folder = parser.parse_args().folder
    found = [load_results(job, KEY) for job in jobs(folder, "evaluate") if (job / "answers.jsonl").is_file()]
    if not found:
        parser.error(f"{folder}: no evaluation of a chain has finished there")
    rows = table(found)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / "by_context.csv", text.getvalue())
    page = "\n".join([*markdown(rows), "", *training_notes(folder)])
    write_text(folder / "by_context.md", f"{page}\n")
    print(page)


def jobs(folder: Path, door: str) -> list[Path]:
    """Folders of the finished jobs of a door's steps as the chain was last run."""
    try:
        steps = yaml.safe_load((folder / "chain.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    named = [folder / job for step in steps if step["step"].startswith(door) for job in step["jobs"]]
    return [job for job in named if (read_run(job, KEY) or {}).get("status") == "finished"]


# ---------------------------------------------------------------- figures


class Sums(NamedTuple):
    """Of one answer of one question, all turns: tokens, seconds of decoding, rounds, drafts, those accepted."""

    tokens: int
    seconds: float
    rounds: int
    drafts: int
    accepted: int
    drafting: int  # rounds with a draft


def sums(row: Row) -> Sums:
    parts = list(repetitions(row))
    levels = [(level, length) for choice, noted in parts
              for level, length in zip(noted["draft_levels"], choice["accept_lengths"], strict=True)]  # fmt: skip
    return Sums(
        tokens=sum(sum(choice["new_tokens"]) for choice, _ in parts),
        seconds=sum(sum(choice["wall_time"]) - sum(noted["prefill_seconds"]) for choice, noted in parts),
        rounds=len(levels),
        drafts=sum(level for level, _ in levels),
        accepted=sum(min(length - 1, level) for level, length in levels),
        drafting=sum(level > 0 for level, _ in levels),
    )


def table(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Rows by set of questions, the short ones first, and by method; plain decoding's of all its measurements."""
    plain: dict[tuple[str, Any], dict[Any, list[Sums]]] = {}
    rows: list[dict[str, Any]] = []
    for result in results:
        own, base = answers(result.folder), answers(result.folder / "baseline")
        heat = setting(result, "sampling.temperature")
        for category in dict.fromkeys(row["category"] for row in own.values()):
            asked = [name for name, row in own.items() if row["category"] == category and name in base]
            for name in asked:
                plain.setdefault((category, heat), {}).setdefault(name, []).append(sums(base[name]))
            if result.content["method"] != "autoregressive" and asked:
                pairs = [(sums(own[name]), sums(base[name])) for name in asked]
                rows.append({"questions": category, "method": label(result), "T": heat}
                            | rates(pairs) | kept_sets(result, {name: own[name] for name in asked}, pairs))  # fmt: skip
    for (category, heat), measured in plain.items():
        pairs = [(total(each), total(each)) for each in measured.values()]
        rows.append({"questions": category, "method": "plain decoding", "T": heat} | rates(pairs))
    methods = list(METHODS.values())

    def place(row: Row) -> tuple[Any, ...]:
        method, *without = row["method"].split(", ")
        return row["T"], length_of(row["questions"]), row["questions"], methods.index(method), len(without)

    return sorted(rows, key=place)


def answers(folder: Path) -> dict[Any, Row]:
    """Finished rows of an answers file, by question."""
    lines = (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["question_id"]: row for row in map(json.loads, lines) if not failed(row)}


def total(each: Sequence[Sums]) -> Sums:
    return Sums(*(sum(getattr(one, name) for one in each) for name in Sums._fields))


def length_of(category: str) -> float:
    """Tokens of a category of long_context, as in reasoning_512 or summarization_4k; Spec-Bench's stand behind."""
    tail = category.rpartition("_")[2]
    number = tail.removesuffix("k")
    return int(number) * (1024 if tail.endswith("k") else 1) if number.isdecimal() else float("inf")


def rates(pairs: Sequence[tuple[Sums, Sums]]) -> dict[str, Any]:
    """Of (method's, plain decoding's) sums of every question."""
    own, base = zip(*pairs, strict=True)
    mine, theirs = ([[getattr(one, name) for one in side] for name in ("tokens", "seconds")] for side in (own, base))
    whole, plain = total(own), total(base)
    ends = ratio_interval(*mine) or (None, None)
    ratio = interval(quotient(resampled(*mine), resampled(*theirs))) if len(pairs) > 1 else None
    return {
        "asked": len(pairs),
        "tokens/s": whole.tokens / whole.seconds,
        "low": ends[0],
        "high": ends[1],
        "speedup": whole.tokens / whole.seconds * plain.seconds / plain.tokens,
        "speedup low": ratio[0] if ratio else None,
        "speedup high": ratio[1] if ratio else None,
        "τ": whole.tokens / whole.rounds,
        "α": whole.accepted / whole.drafts if whole.drafts else None,
        "γ": whole.drafts / whole.drafting if whole.drafting else None,
    }


def kept_sets(result: Result, asked: Mapping[Any, Row], pairs: Sequence[tuple[Sums, Sums]]) -> dict[str, Any]:
    """Of the plans that were drafted with on these questions, or of the one that always was."""
    if (result.folder / "plan.json").is_file():
        plans, spent = [json.loads((result.folder / "plan.json").read_text(encoding="utf-8"))], 0.0
        made = 0
    else:
        own = {sequence_id(Question(name, row["category"], ()), turn)
               for name, row in asked.items() for turn in range(len(row["choices"][0]["turns"]))}  # fmt: skip
        lines = (result.folder / "plans.jsonl").read_text(encoding="utf-8").splitlines()
        logged = [plan for plan in map(json.loads, lines) if own & set(plan["sequences"])]
        made, spent = len(logged), sum(plan["seconds"] for plan in logged)
        plans = [plan for plan in logged if plan["gamma"] > 0 and plan.get("taken", True)]  # SWIFT logs all it tries
    counts = [(sum(plan["kept"][::2]), sum(plan["kept"][1::2])) for plan in plans]
    means = [statistics.fmean(column) for column in zip(*counts, strict=True)] if counts else [None, None]
    seconds = sum(mine.seconds for mine, _ in pairs)
    return {"attentions": means[0], "MLPs": means[1], "plans": made, "plan time": spent / seconds}


# ---------------------------------------------------------------- words


def label(result: Result) -> str:
    """The method, and of KnapSpec what was left out of it."""
    name = METHODS[result.content["method"]]
    if result.content["method"] != "knapspec":
        return name
    decoding = result.settings["decoding"]
    return ", ".join([name, *(words for key, value, words in VARIANTS if decoding[key] is value)])


def markdown(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table with intervals in brackets."""
    lines = ["| questions | method | tokens/s | speedup | τ | α | γ | attentions | MLPs | plan time |"]
    lines.append("|" + "---|" * 10)
    hot = len({row["T"] for row in rows}) > 1
    for row in rows:
        shown = [f"{row['questions']}, T = {row['T']:g}" if hot else row["questions"], row["method"]]
        for name, ends, digits in (("tokens/s", ("low", "high"), 1), ("speedup", ("speedup low", "speedup high"), 2)):
            low, high = (row[end] for end in ends)
            words = "" if low is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
            shown.append(f"{row[name]:.{digits}f}{words}")
        for name, form in SHOWN.items():
            value = row.get(name)
            shown.append("–" if value is None else format(value, form))
        lines.append(f"| {' | '.join(shown)} |")
    return lines


def training_notes(folder: Path) -> list[str]:
    """What Kangaroo's adapters took to train."""
    notes = []
    for job in jobs(folder, "train"):
        record = read_run(job, KEY) or {}
        if {"exit", "parameters", "training_seconds"} <= record.keys():
            notes.append(
                f"Kangaroo's adapter: {record['parameters']:,} parameters behind {record['exit']} blocks, taught on "
                f"{record['tokens']:,} tokens in {record['training_seconds']:,.0f} s of training "
                f"({record['wall_seconds']:,.0f} s with the target's answers)."
            )
    return notes


if __name__ == "__main__":
    main()
