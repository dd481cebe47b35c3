"""`chain.py`: the steps of an experiment, one command of a door after the other, finished ones skipped.

Adds nothing to the doors: every step is a command line that one could type, run as a process of its own, and resumed or
skipped by what the door left in its folder. Which folder that is says steps.py.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specwave.app import collate as collation
from specwave.app import config as configs
from specwave.app.command import read_command_line
from specwave.app.complaints import is_group, parse, value_of
from specwave.app.job import complain
from specwave.app.run import RUN_FILE, alone, make
from specwave.app.steps import Step, door_of, door_script, make_step, overrides_of, settings_of
from specwave.app.usage import listing, usage
from specwave.artifacts import UserError, write_text


@dataclass
class ChainConfig:
    """`conf/chain.yaml`."""

    all: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    folder: str | None = None
    dry_run: bool = False


def run_chain(argv: Sequence[str]) -> int:
    """Answers a command line; the exit code. Crashes pass through."""
    try:
        return _run(argv)
    except UserError as error:
        complain(error)
        return 2


def _run(argv: Sequence[str]) -> int:
    request = read_command_line("chain", argv)
    if request.help or request.list is not None:
        print(usage("chain", []) if request.list is None else listing("chain", request.list))
        return 0
    if request.multirun or request.flags:
        raise UserError(
            "command line", " ".join(argv), "a chain is no sweep and has no --cfg: its steps are; see --help"
        )
    settings, root, dry_run = read(request.overrides)
    if dry_run:
        forecast(settings, root)
        return 0
    for name in settings:
        door_script(door_of(name))
    plan = planned(settings, root)  # every mistake shows before the first step
    make(root, "folder")
    with alone(root, "folder"):
        return carry_out(settings, plan, root)


def read(overrides: Sequence[str]) -> tuple[dict[str, dict[str, str]], Path, bool]:
    """(the settings of every step, the chain's folder, whether it is only to be said what would run)."""
    own, changes = split(overrides)
    composed = configs.compose("chain", own)
    config: ChainConfig = configs.build("chain", configs.check("chain", composed))
    chosen = composed.hydra.runtime.choices.get("experiment")
    if not config.steps:
        raise UserError("experiment", chosen or "null", "it lists no steps: choose one that does, see list=experiments")
    settings = settings_of(config.steps, config.all, changes)
    for entry in parse(own):
        if entry.key_or_group == "hydra.searchpath":  # of --config-dir: the steps' options may lie there too
            settings = {name: {"hydra.searchpath": value_of(entry), **step} for name, step in settings.items()}
    return settings, Path(config.folder or f"runs/{chosen or 'chain'}").expanduser().absolute(), config.dry_run


def split(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the chain's own overrides, those of its steps: their keys have a dot and begin with a step's name).

    Raises:
        UserError: a choice that only steps make.
    """
    own: list[str] = []
    changes: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        found = re.match(r"[+~]{0,2}(\w+)[./]", key)
        if is_group(key) and key != "experiment":
            raise UserError(
                key, value, f"the steps make this choice: all.{key}={value} is for each, <step>.{key}=… for one"
            )
        (changes if found and found[1] not in ("hydra", "steps") else own).append(override)
    return own, changes


def planned(settings: dict[str, dict[str, str]], root: Path) -> list[Step]:
    """All steps as they stand now."""
    steps: list[Step] = []
    for name, own in settings.items():
        steps.append(make_step(name, own, root, steps))
    return steps


def carry_out(settings: dict[str, dict[str, str]], plan: Sequence[Step], root: Path) -> int:
    """Runs what is not finished; the exit code. A sweep with failed jobs goes on with those that finished, on which the
    steps behind it are then planned anew; nothing else goes on."""
    print(f"chain folder: {root}", flush=True)
    steps: list[Step] = []
    try:
        return _carry_out(settings, plan, root, steps)
    finally:  # of what there is by now: tables of an earlier call must not stand beside other jobs
        for door in ("select", "train", "evaluate"):
            collate(root, door, [step for step in steps if step.door == door])


def _carry_out(settings: dict[str, dict[str, str]], plan: Sequence[Step], root: Path, steps: list[Step]) -> int:
    """The same but the tables.

    Args:
        steps: takes up those that were run, with what lies in their folders then.
    """
    worst = 0
    for step in plan:
        name, own = step.name, settings[step.name]
        if overrides_of(name, own, steps) != step.overrides:
            step = make_step(name, own, root, steps)
        if step.finished:
            print(f"step {name}: finished earlier, re-used", flush=True)
        else:
            print(f"step {name}: {step.command}", flush=True)
            step.link()
            code = run_step(step)
            step = step.again()
            done = sum(job.finished for job in step.jobs)
            stopped = any(job.record is not None and job.record["status"] == "stopped" for job in step.jobs)
            if code and not (step.several and code in (1, 2) and (done or stopped)):
                steps.append(step)
                print(f"step {name} failed: the same command goes on there", file=sys.stderr, flush=True)
                return code if code > 0 else 1
            if code:
                worst = min(worst or code, code)
                print(
                    f"step {name}: {failed(step)} of {len(step.jobs)} jobs failed, the others count",
                    flush=True,
                )
            if stopped or not (code or step.finished):
                steps.append(step)
                print(f"step {name} has more to do: the same command goes on there", flush=True)
                return worst
        steps.append(step)
        note(root, steps)
    print(f"{len(steps)} steps, the last one in {steps[-1].folder}", flush=True)
    return worst


def failed(step: Step) -> int:
    """How many jobs ended with an error, or have none of a run in their folders."""
    return sum(job.record is None or job.record["status"] not in ("finished", "stopped") for job in step.jobs)


def run_step(step: Step) -> int:
    """The exit code of a door's process. SIGTERM is handed on to it, and the chain ends when it does."""
    with subprocess.Popen([sys.executable, str(door_script(step.door)), *step.arguments]) as process:
        before = signal.signal(signal.SIGTERM, lambda signum, _: process.send_signal(signum))
        try:
            return process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def note(root: Path, steps: Sequence[Step]) -> None:
    """chain.yaml: which folders hold the steps as they were last run."""
    content = [
        {
            "step": step.name,
            "command": step.command,
            "jobs": [job.folder.relative_to(root).as_posix() for job in step.jobs],
        }
        for step in steps
    ]
    write_text(root / "chain.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))


def collate(root: Path, door: str, steps: Sequence[Step]) -> None:
    """The jobs of a door's steps, where there are several, as one table and picture beside the steps."""
    jobs = [job for step in steps for job in step.jobs if job.content.get("report") is None]  # reports have no figures
    begun = [job.folder for job in jobs if (job.folder / RUN_FILE).exists()]
    found = {folder.relative_to(root).as_posix(): collation.read_record(folder / RUN_FILE) for folder in begun}
    table = collation.table_of(found)
    if len(table) < 2:
        for ending in (".csv", ".md", ".tex", ".png", ".svg", "_seeds.csv", "_keys.png", "_keys.svg"):
            (root / f"{door}{ending}").unlink(missing_ok=True)  # of an earlier call that had more
    else:
        print(f"{door}:\n{collation.markdown(table)}", flush=True)
        written = collation.write(root, door, table, door)
        print(f"written: {', '.join(path.name for path in written)} in {root}", flush=True)


# ---------------------------------------------------------------- dry runs


def forecast(settings: dict[str, dict[str, str]], root: Path) -> None:
    """Says every job, what it costs, and what is there already. Runs and writes nothing."""
    from specwave.app.costs import cost  # with torch: not for a --help

    print(f"chain folder: {root}")
    steps = planned(settings, root)
    for place, step in enumerate(steps):
        print(f"\nstep {step.name}: {step.command}")
        for job in step.jobs:
            what = " ".join(differing(step, job.overrides)) or "one job"
            print(f"  {what} ({state(job)}), in {job.folder.relative_to(root)}")
            for line in [] if job.finished else cost(job, step.door, steps[:place]):
                print(f"      {line}")
    jobs = [job for step in steps for job in step.jobs]
    waiting = sum(not job.finished for job in jobs)
    print(f"\n{len(steps)} steps, {len(jobs)} jobs: {len(jobs) - waiting} re-used, {waiting} to run; nothing was run")


def state(job: Any) -> str:
    if job.finished:
        return f"re-used, took {job.record.get('wall_seconds', 0):,.0f} s"
    return "to run" if job.record is None else f"{job.record['status']} earlier, goes on"


def differing(step: Step, overrides: Sequence[str]) -> list[str]:
    """What tells a job from the others of its step."""
    shared = set.intersection(*(set(job.overrides) for job in step.jobs))
    return [override for override in overrides if override not in shared]
