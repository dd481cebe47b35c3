"""From a command line to a run: read it, check the config, choose the run folder, hand over to Hydra.

Hydra composes and sweeps; what it raises is put into words by `complaints`. A run and every job of a sweep go through
the same `Job`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from omegaconf import DictConfig

from specwave.app import collate as collation
from specwave.app import config as configs
from specwave.app.complaints import explain, is_group, parse
from specwave.app.job import Job, complain, exit_code, is_main, join, launched_by, take_codes
from specwave.app.run import changed_settings, claim, make
from specwave.app.usage import listing, usage
from specwave.artifacts import UserError, conf_dir

LONGEST_TABLE = 40  # rows of a sweep on the console


def run_command(app: str, argv: Sequence[str]) -> int:
    """Answers a command line; the exit code. Crashes pass through."""
    try:
        joined = launched_by()
        return join(app, joined) if joined else _run(app, read_command_line(app, argv))
    except UserError as error:
        complain(error)
        return 2
    except SystemExit as stop:
        return exit_code(stop)


# ---------------------------------------------------------------- command line


@dataclass
class Request:
    """A command line, read."""

    overrides: Sequence[str]
    multirun: bool = False
    help: bool = False
    list: str | None = None  # the group whose options are asked for, by list=<its name>
    flags: Sequence[str] = ()  # those that Hydra answers: --cfg, --info, …


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError("command line", " ".join(sys.argv[1:]), f"{message}; see --help")


def read_command_line(app: str, argv: Sequence[str]) -> Request:
    parser = _Parser(prog=f"{app}.py", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-p", "--package")
    parser.add_argument("-i", "--info", nargs="?", const="all", choices=["all", "config", "defaults", "plugins"])
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("-sc", "--shell-completion", action="store_true")
    parser.add_argument("-cd", "--config-dir", help="a folder of further options, laid out like conf/")
    given = parser.parse_intermixed_args(list(argv))
    asked = [word for word in given.overrides if word.startswith("list=")]
    overrides = [f"hydra.job.name={app}", *(word for word in given.overrides if word not in asked)]
    if given.config_dir is not None:
        if not Path(given.config_dir).is_dir():
            raise UserError("--config-dir", given.config_dir, "there is no such folder")
        overrides.append(f"hydra.searchpath=[{quoted('file://' + os.path.abspath(given.config_dir))}]")
    flags = [name for name in ("resolve", "hydra_help", "shell_completion") if getattr(given, name)]
    flags += [f"{name}={getattr(given, name)}" for name in ("cfg", "package", "info") if getattr(given, name)]
    spelled = [f"--{flag.replace('_', '-', 1)}" for flag in flags]
    wanted = asked[-1].removeprefix("list=") if asked else None
    return Request(overrides, given.multirun, given.help, wanted, spelled)


def quoted(value: str) -> str:
    """A text in the grammar of overrides."""
    return "'" + value.replace("'", "\\'") + "'"


def first_choices(overrides: Sequence[str]) -> list[str]:
    """A sweep's overrides with the first value of each; ranges that only a sweeper can draw from are left out."""
    chosen = []
    for override in parse(overrides):
        if not override.is_sweep_override():
            chosen.append(override.input_line or "")
        elif override.is_discrete_sweep():
            chosen.append(f"{override.get_key_element()}={next(override.sweep_string_iterator())}")
    return chosen


def check_choices(app: str, overrides: Sequence[str]) -> None:
    """Every option that a sweep goes through must exist before its first job starts."""
    for override in parse(overrides):
        if is_group(override.key_or_group) and override.is_discrete_sweep():
            for option in override.sweep_string_iterator():
                configs.compose(app, [f"{override.get_key_element()}={option}"])


# ---------------------------------------------------------------- runs


def _run(app: str, request: Request) -> int:
    if request.help or request.list is not None:
        print(usage(app, first_choices(request.overrides)) if request.list is None else listing(app, request.list))
        return 0
    job = Job(app, [sys.argv[0], *sys.argv[1:]])
    if request.flags:
        _hydra(job, [*request.overrides, *request.flags])
        return 0
    several = request.multirun or any(entry.startswith("hydra.mode=MULTIRUN") for entry in request.overrides)
    composed = configs.compose(app, first_choices(request.overrides) if several else request.overrides)
    if several:
        check_choices(app, request.overrides)
    configs.refuse_missing(configs.missing(composed))
    if not several:
        configs.build(app, configs.check(app, composed))  # every mistake shows before a folder is made
    key = "hydra.sweep.dir" if several else "hydra.run.dir"
    folder = choose_folder(composed, key, request.overrides)
    arguments = [*request.overrides, f"{key}={quoted(str(folder))}"]
    if not several:
        _hydra(job, arguments)
        return job.codes[-1]
    print(f"run folder: {folder}", flush=True)
    if is_main():
        prepare(app, request.overrides, composed, folder)
    take_codes(folder)  # those of a sweep that was interrupted
    try:
        _hydra(job, [*arguments, "--multirun"])
    except Exception:  # a launcher's worker died: what the other jobs found counts
        if is_main():
            collate(app, folder)
        raise
    left, refused = take_codes(folder)
    codes = job.codes + left
    if refused or job.refused:
        print(f"{folder} holds jobs with other settings: its table is left as it was", flush=True)
    elif is_main():
        collate(app, folder)
    failed = [code for code in codes if code]
    jobs = "1 job" if len(codes) == 1 else f"{len(codes)} jobs"
    waiting = 0 if refused or job.refused else stopped(folder)
    ends = [f"{count} {end}" for count, end in ((len(failed), "failed"), (waiting, "with more to do")) if count]
    print(", ".join([jobs, *(ends or ["all finished"])]), flush=True)
    return min(failed, default=0)  # 1 when any job crashed, 2 when the user's mistakes are all there is


def prepare(app: str, overrides: Sequence[str], composed: DictConfig, folder: Path) -> None:
    """Calls the app's `prepare(configs, say)`, where it has one, for the jobs of a sweep that are still to do.

    What several jobs need is made there once, before any of them starts. A job whose config is wrong is left out: it
    will say so itself.
    """
    hook = getattr(configs.app_module(app), "prepare", None)
    if hook is None:
        return
    finished = [record for record in collation.records(folder).values() if record["status"] == "finished"]
    composer = configs.Composer(app)
    wanted: dict[str, Any] = {}
    for job in job_overrides(overrides, composed):
        try:
            content = configs.check(app, composer(job))
            if not any(record["app"] == app and not changed_settings(record, content) for record in finished):
                wanted.setdefault(repr(content), configs.build(app, content))
        except UserError:
            continue
    if wanted:
        hook(list(wanted.values()), lambda text: print(text, flush=True))


def job_overrides(overrides: Sequence[str], composed: DictConfig) -> list[list[str]]:
    """The overrides of every job of a sweep, Hydra's own included; [] where another sweeper than Hydra's basic one
    chooses them as it goes."""
    sweeper = composed.hydra.sweeper
    if not sweeper._target_.endswith(".BasicSweeper"):
        return []
    given = parse(overrides)
    own = [entry.input_line or "" for entry in given if entry.is_hydra_override()]
    listed = parse([f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()])
    swept = [*listed, *(entry for entry in given if not entry.is_hydra_override())]
    if any(entry.is_sweep_override() and not entry.is_discrete_sweep() for entry in swept):
        return []  # an interval: Hydra refuses it in a moment
    return [[*own, *job] for job in BasicSweeper.split_arguments(swept, None)[0]]


def stopped(folder: Path) -> int:
    """How many jobs of a sweep ended in good order before they were done."""
    return sum(record["status"] == "stopped" for record in collation.records(folder).values())


def collate(app: str, folder: Path) -> None:
    """Writes and prints what all jobs of a sweep have in common: one table, one picture."""
    table = collation.rows(folder)
    if table:
        written = collation.write(folder, app, table)
        print(collation.markdown(table, LONGEST_TABLE), flush=True)
        print(f"written: {', '.join(path.name for path in written)} in {folder}", flush=True)


def choose_folder(composed: DictConfig, key: str, overrides: Sequence[str]) -> Path:
    """The run folder as an absolute path: the one the user named, or a new one nobody else has."""
    wanted = Path(composed.hydra.sweep.dir if key == "hydra.sweep.dir" else composed.hydra.run.dir).absolute()
    named = any(override.key_or_group == key for override in parse(overrides))
    if not named:
        if composed.get("resume"):
            raise UserError("resume", "true", f"name the folder to go on in: {key}=<folder>")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 or not is_main():
            raise UserError(key, wanted, f"a launcher started several processes: name the folder they share, {key}=…")
        return claim(wanted)
    make(wanted, key)
    return wanted


def _hydra(job: Job, arguments: Sequence[str]) -> None:
    """Hands over to `hydra.main`, which reads sys.argv."""
    entry = hydra.main(config_path=str(conf_dir()), config_name=job.app, version_base=configs.VERSION_BASE)(job)
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        entry()
    except Exception as error:
        overrides = [argument for argument in arguments if not argument.startswith("-")]
        complaint = explain(error, job.app, first_choices(overrides), configs.known_keys)
        if complaint is None:
            raise
        raise complaint from None
    finally:
        sys.argv = before
