"""The steps of a chain: from an experiment's settings to command lines of the doors, their jobs, and their folders.

A job's folder is `<step>/<fingerprint>`. The fingerprint is of its resolved config, which names the folders of earlier
steps, and of the files named there. So a changed setting gives the jobs that depend on it other folders and leaves the
rest theirs, a sweep that grows keeps what it has, and a setting changed back finds what was made before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specwave.app import config as configs
from specwave.app.command import first_choices, job_overrides, quoted
from specwave.app.run import HARMLESS, read_run
from specwave.artifacts import UserError, conf_dir

DOORS = ("select", "train", "evaluate")
DIGITS = 10  # of a fingerprint
CHANGE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<step>\w+)\.(?P<key>[^=]+)(=(?P<value>.*))?", re.DOTALL)
FOLDERS = [(key,) for key in ("source", "path", "checkpoint", "probe_checkpoint", "selection", "baseline", "report")]
FOLDER = re.compile(r"\{(\w+)(:jobs)?\}([\w./-]*)")  # an earlier step's folder, or those of its finished jobs


@dataclass(frozen=True)
class JobPlan:
    """One run of a door."""

    folder: Path  # named by what the job is, so whatever lies there is its own
    overrides: list[str]  # as Hydra will note them in its run.yaml
    content: dict[str, Any]  # its checked config

    @cached_property
    def record(self) -> dict[str, Any] | None:
        """Its run.yaml; None where it has not begun."""
        return read_run(self.folder, "folder")

    @property
    def finished(self) -> bool:
        return self.record is not None and self.record["status"] == "finished"


@dataclass(frozen=True)
class Step:
    """One command: a run of a door, or a sweep of it."""

    name: str
    door: str
    overrides: list[str]
    folder: Path  # the job's; of several one that links to them by their numbers
    jobs: list[JobPlan]
    several: bool

    @property
    def finished(self) -> bool:
        return all(job.finished for job in self.jobs)

    @property
    def arguments(self) -> list[str]:
        place = as_path(self.folder)
        own = [f"hydra.sweep.dir={place}", "-m"] if self.several else [f"hydra.run.dir={place}", "resume=true"]
        return [*self.overrides, *own]

    @property
    def command(self) -> str:
        """As one would type it."""
        return shlex.join(["python", f"{self.door}.py", *self.arguments])

    def again(self) -> Step:
        """The same with what lies in its folders now."""
        jobs = [JobPlan(job.folder, job.overrides, job.content) for job in self.jobs]
        return replace(self, jobs=jobs)

    def link(self) -> None:
        """Lays out a sweep: where Hydra puts job n there is a link to the folder of the job it is."""
        for number, job in enumerate(self.jobs if self.several else ()):
            job.folder.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(exist_ok=True)
            place = self.folder / str(number)
            if not place.is_symlink():
                place.symlink_to(Path("..") / job.folder.name, target_is_directory=True)


def door_of(name: str) -> str:
    """The door of a step, which its name begins with."""
    door = name.partition("_")[0]
    if door not in DOORS:
        raise UserError("steps", name, f"a step's name begins with its door's: {', '.join(DOORS)}")
    return door


def door_script(door: str) -> Path:
    """`train.py` beside conf/. The doors are scripts of the checkout, and Lightning starts them again for each rank."""
    path = conf_dir().parent / f"{door}.py"
    if not path.is_file():
        raise UserError("steps", door, f"there is no {path}: chains need specwave's checkout, whose doors they run")
    return path


def make_step(name: str, settings: Mapping[str, str], root: Path, earlier: Sequence[Step]) -> Step:
    """A step with its jobs, its folder found.

    Args:
        settings: keys of the door → values in the grammar of overrides, folders of earlier steps as `{name}`.

    Raises:
        UserError: whatever the door would refuse, named by the step.
    """
    door = door_of(name)
    try:
        overrides = overrides_of(name, settings, earlier)
        given = [f"hydra.job.name={door}", *overrides]
        composed = configs.compose(door, first_choices(given))
        swept = job_overrides(given, composed)
        if not swept:
            raise UserError("hydra/sweeper", "?", "a chain lists its jobs beforehand: only the basic sweeper does")
        composer = configs.Composer(door)
        contents = [configs.check(door, composer(job)) for job in swept]
        for content in contents:
            configs.build(door, content)
    except UserError as error:
        named = error.key if error.key.startswith(f"{name}.") else f"{name}.{error.key}"
        raise UserError(named, error.value, error.remedy) from None
    typed = [[entry for entry in job if not entry.startswith(("hydra.", "hydra/"))] for job in swept]
    known = [job.folder for step in earlier for job in step.jobs]
    marks = [fingerprint(door, content, root, known) for content in contents]
    places = [root / name / mark for mark in marks]
    jobs = list(map(JobPlan, places, typed, contents))
    several = len(jobs) > 1
    whole = hashlib.sha256(" ".join(marks).encode()).hexdigest()[:DIGITS]
    folder = root / name / f"sweep-{whole}" if several else jobs[0].folder
    return Step(name, door, overrides, folder, jobs, several)


def overrides_of(name: str, settings: Mapping[str, str], earlier: Sequence[Step]) -> list[str]:
    """What a step's command line sets, folders of earlier steps put in."""
    return [f"{key}={with_folders(text, earlier, f'{name}.{key}')}" for key, text in settings.items()]


def with_folders(text: str, earlier: Sequence[Step], key: str) -> str:
    """`{train}` → the folder of that step; `{select:jobs}` → those of its jobs, with commas between.

    Once a step has been run those of its jobs that failed are left out.
    """
    known = {step.name: step for step in earlier}

    def place(found: re.Match[str]) -> str:
        name, jobs, below = found.groups()
        if name not in known:
            remedy = f"it names no earlier step; there are {', '.join(known)}" if known else "no step comes before it"
            raise UserError(key, found[0], remedy)
        step = known[name]
        if step.several and not jobs:
            raise UserError(key, found[0], f"{name} is a sweep: its jobs' folders are [{{{name}:jobs}}]")
        taken = [job.folder for job in step.jobs if job.finished] or [job.folder for job in step.jobs]
        return ",".join(as_path(f"{folder}{below}") for folder in taken)

    return FOLDER.sub(place, text)


def as_path(path: Path | str) -> str:
    """A path in the grammar of overrides, quoted only where it must be."""
    return str(path) if re.fullmatch(r"[\w/.-]+", str(path), re.ASCII) else quoted(str(path))


# ---------------------------------------------------------------- settings


def as_text(value: Any) -> str:
    """A value of YAML in the grammar of overrides; a text is taken to be in it already, so that `1,2` is a sweep."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_text, value)) + "]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings_of(
    steps: Mapping[str, Any], every: Mapping[str, Any], changes: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Step → its settings: those of all steps, its own, and what the command line changes.

    Args:
        changes: overrides as `all.seed=1`, `train.trainer.max_steps=20`, `~train.drafter.lr`. The name of a door
            that no step has stands for all steps of that door.
    """
    listed = {"all": {key: as_text(value) for key, value in every.items()}}
    own = {name: settings for name, settings in steps.items() if settings is not None}
    listed |= {name: {key: as_text(value) for key, value in settings.items()} for name, settings in own.items()}
    late: dict[str, str] = {}  # of the command line for all steps: stronger than what a step has of its own
    named: set[tuple[str, str]] = set()
    for change in changes:
        found = CHANGE.fullmatch(change)
        if found is None:
            raise UserError("override", change, "a step's setting is written <step>.<key>=<value>")
        sign, name, key, value = found["sign"], found["step"], found["key"], found["value"]
        meant = [name] if name in listed else [step for step in listed if step.partition("_")[0] == name]
        if not meant:
            remedy = f"there is no such step; choose one of {', '.join(listed)}, as in all.{name}.{key}=…"
            raise UserError(f"{name}.{key}", value or "", remedy)
        if sign != "~" and value is None:
            raise UserError("override", change, "a step's setting is written <step>.<key>=<value>")
        removed = False
        for step in meant:
            settings = late if step == "all" else listed[step]
            before = [settings.pop(variant, None) for variant in (key, f"+{key}", f"++{key}")]
            removed |= any(before)
            if sign != "~":
                settings[sign + key] = value
                named.add((step, key))
        if sign == "~" and not removed and listed["all"].pop(key, None) is None:
            raise UserError(change, "", f"the step {name} does not set {key}")
    common = listed.pop("all")
    return {
        name: common | settings | {key: text for key, text in late.items() if (name, key.lstrip("+")) not in named}
        for name, settings in listed.items()
    }


# ---------------------------------------------------------------- fingerprints


def fingerprint(door: str, content: Mapping[str, Any], root: Path, earlier: Sequence[Path] = ()) -> str:
    """Digits of all that a job's result depends on: its config, earlier jobs by their folders, files by what they hold.

    Where the chain's folder lies plays no part.
    """
    kept = _said(content)
    described = json.dumps([door, kept], sort_keys=True, default=str).replace(json.dumps(str(root))[1:-1], "")
    digests = [digest(path) for path in outside(kept, earlier)]
    return hashlib.sha256("\n".join([described, *digests]).encode()).hexdigest()[:DIGITS]


def _said(node: Any, path: str = "") -> Any:
    """A config without what changes no result and without its nulls: a key that a later version adds, and leaves at
    null, makes no other job."""
    if isinstance(node, Mapping):
        named = {key: (f"{path}.{key}" if path else key, value) for key, value in node.items()}
        return {key: _said(value, name) for key, (name, value) in named.items()
                if value is not None and name not in HARMLESS}  # fmt: skip
    return [_said(value, path) for value in node] if isinstance(node, list) else node


def outside(node: Any, earlier: Sequence[Path], path: tuple[str, ...] = ()) -> list[Path]:
    """The files and folders that a config names, apart from those of earlier jobs, whose fingerprints say enough, and
    from a folder of states, which the job itself fills."""
    if isinstance(node, Mapping):
        return [found for key, entry in node.items() for found in outside(entry, earlier, (*path, str(key)))]
    if isinstance(node, list):
        return [found for entry in node for found in outside(entry, earlier, path)]
    if not isinstance(node, str) or len(node) > 1024 or path[-2:] == ("states", "path"):
        return []
    named = Path(node).expanduser()
    whole = named.absolute()
    if any(job == whole or job in whole.parents for job in earlier):
        return []
    folder = os.sep in node or path[-1:] in FOLDERS  # other words may be a folder's name by chance
    try:
        return [named] if named.is_file() or (folder and named.is_dir()) else []
    except (OSError, ValueError):
        return []


def digest(path: Path) -> str:
    """Of a file its bytes; of a folder the names, sizes and times of its files, which may be weights."""
    if path.is_file():
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    found = sorted((entry, entry.stat()) for entry in path.rglob("*") if entry.is_file())
    return json.dumps([[str(entry.relative_to(path)), stat.st_size, stat.st_mtime_ns] for entry, stat in found])
