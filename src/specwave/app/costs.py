"""What a job of a chain costs, said before anything runs: passes, tokens, memory, hours. Loads no weights.

Counts are upper limits from the config; hours are preflight.py's guess. What an earlier step has still to choose is
stood in for: a selection by groups of its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specwave.app import config as configs
from specwave.app.groups import selection_paths
from specwave.app.preflight import GIB, architecture, forecast, gib, speed
from specwave.app.steps import JobPlan, Step
from specwave.artifacts import UserError
from specwave.skipping.adapter_folder import METHOD

SPEC_BENCH = 480  # questions of the official file, where it has not been fetched yet


def cost(job: JobPlan, door: str, earlier: Sequence[Step]) -> list[str]:
    """Lines about a job; `earlier`: the steps before its own, which may have made what it takes."""
    config = configs.build(door, job.content)
    try:
        return {"select": _selecting, "train": _training, "evaluate": _evaluating}[door](config, earlier)
    except UserError as error:  # of a model or file that is not here: the run itself will say so
        return [f"not known: {error}"]


def _selecting(config: Any, earlier: Sequence[Step]) -> list[str]:
    calibration = config.calibration
    count = "all" if calibration.limit is None else f"{calibration.limit:,}"
    line = f"{count} conversations of up to {calibration.max_length:,} tokens through {config.model.name}"
    if calibration.answers == "regenerate":
        line += f", each answered with up to {calibration.max_new_tokens:,} tokens"
    return [f"{line}; one pass for all jobs"]


def _training(config: Any, earlier: Sequence[Step]) -> list[str]:
    if config.task == "probe":
        data = config.probe_data
        count = f"{data.count:,} prompts" if hasattr(data, "count") else "the file's prompts"
        return [f"{count} answered by {config.model.name} with up to {data.max_new_tokens:,} tokens, then captured"]
    if config.task != "train":
        return [f"task={config.task} with {config.model.name}"]
    arch = architecture(config.model)
    chosen, groups = _stand_ins(config, arch.num_layers, earlier)
    taken = (config.top, config.skip) if chosen else (1, None)
    shown = replace(config, selection=chosen or None, top=taken[0], skip=taken[1], groups=groups)
    found = forecast(shown, arch)
    plan, tokens = found.plan, found.tokens * found.steps
    rate = speed(found, config.plan_for)
    answered = getattr(config.data, "answers", "regenerate") == "regenerate"
    where = f"× {config.plan_for.upper()}" if plan.device == "cuda" else "CPU process" + "es" * (plan.processes > 1)
    return [
        f"{_trained(found.sizes)} from one pass of {config.model.name}: {found.steps:,} steps of "
        f"{found.tokens:,} tokens, {tokens / 1e6:,.1f} million" + (", the target's answers before them" * answered),
        f"{plan.processes} {where}, {gib(found.memory)} in each, {sum(found.disk.values()) / GIB:,.1f} GiB on disk, "
        f"about {tokens / rate / 3600:,.1f} hours: a guess",
    ]


def _trained(sizes: Mapping[str, int]) -> str:
    return "an adapter" if list(sizes) == [METHOD] else f"{len(sizes)} drafters"


def _stand_ins(config: Any, num_layers: int, earlier: Sequence[Step]) -> tuple[list[str], list[Any] | None]:
    """(selections that are there, groups with those of selections to come stood in for)."""
    there, coming = [], []
    for path in selection_paths(config.selection):
        job = next((job for step in earlier for job in step.jobs if job.folder == path), None)
        if job is None or job.finished or (path / "selection.json").is_file():
            there.append(str(path))
        else:
            size = configs.build("select", job.content).selector.m_of(num_layers)
            coming += [[*range(place, place + size)] for place in range(config.top) if place + size <= num_layers]
    return there, [*coming, *(config.groups or [])] if coming else config.groups


def _evaluating(config: Any, earlier: Sequence[Step]) -> list[str]:
    if config.report is not None:
        return [f"a report over {len(config.report)} evaluations, seconds"]
    benchmark, limit = config.benchmark, config.limit
    if benchmark.needs_target:
        asked = len(benchmark.lengths) * len(benchmark.tasks) * benchmark.each
        count, turns = (asked if limit is None else min(asked, limit)), 1.0
    elif getattr(benchmark, "path", None) is None and hasattr(benchmark, "url"):
        count, turns = (SPEC_BENCH if limit is None else min(SPEC_BENCH, limit)), 560 / SPEC_BENCH
    else:
        questions = benchmark.questions(limit, config.categories)
        count, turns = len(questions), sum(len(question.turns) for question in questions) / len(questions)
    methods = 1 + (_drafters(config.checkpoint, earlier) or config.decoding.label != "autoregressive")
    tokens = int(count * turns * methods * config.repeat * config.max_new_tokens)
    return [
        f"{count:,} questions × {methods} methods, plain decoding among them"
        + (f" × {config.repeat} repetitions" if config.repeat > 1 else "")
        + f": up to {tokens:,} tokens on {config.devices} device{'s' * (config.devices > 1)}"
    ]


def _drafters(checkpoint: Any, earlier: Sequence[Step]) -> int:
    """How many drafters a checkpoint will be: those of an earlier step, or one for each entry."""
    entries = checkpoint if isinstance(checkpoint, list) else [checkpoint] if checkpoint else []
    count = 0
    for entry in entries:
        job = next((job for step in earlier for job in step.jobs if job.folder == Path(entry)), None)
        if job is None:
            count += 1
            continue
        config = configs.build("train", job.content)
        count += config.top * len(selection_paths(config.selection)) + len(config.groups or [])
    return count
