"""One run, whoever starts it: this process, a sweep, a launcher's process, or the first rank of the same run.

Opens the folder, calls the app's `main`, and turns whatever happens into an exit code and the last words of run.yaml.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from specwave.app import config as configs
from specwave.app.door import prepare_environment
from specwave.app.run import RUN_FILE, Record, Run, alone, changed_settings, read_run, refuse_changes, sweep_up
from specwave.artifacts import UserError
from specwave.termination import end_on_terminate

LAUNCH = "SPECWAVE_LAUNCH"  # tells the processes a run starts which run they belong to
EXIT_CODES = ".exit_codes"  # in a sweep's folder while its jobs run in other processes: a line for each that ended
REFUSED = "r"  # behind the code of a job that was not begun
TERMINATED = 128 + signal.SIGTERM  # exit code
FULL = (errno.ENOSPC, errno.EDQUOT)
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")


class Job:
    """The function Hydra calls with a composed config, once for a run and once for each job of a sweep."""

    def __init__(self, app: str, command: list[str]):
        self.app, self.command = app, command
        self.codes: list[int] = []  # exit codes of the jobs that ran in this process
        self.refused = False  # whether one of them was not begun for what lies in its folder
        self.pid = os.getpid()  # of the process that began the sweep

    def __call__(self, composed: DictConfig) -> Any:
        """What `main` returned, for sweepers that optimise it; nan when the job failed."""
        settings = HydraConfig.get()
        number = settings.job.num if settings.mode == RunMode.MULTIRUN else None
        folder, overrides = Path(settings.runtime.output_dir), list(settings.overrides.task)
        elsewhere = os.getpid() != self.pid
        if elsewhere:
            prepare_environment()  # a launcher's process has not come through the door
        with own_environment():
            code, value = self.attempt(composed, folder, overrides, number)
        if not elsewhere:
            self.codes.append(code)
        elif is_main():
            leave_code(Path(settings.sweep.dir), code, self.refused)
        return value if code == 0 else float("nan")

    def attempt(self, composed: DictConfig, folder: Path, overrides: list[str], number: int | None) -> tuple[int, Any]:
        """(exit code, what `main` returned). Only Ctrl-C and SIGTERM leave by an exception: a sweep goes on.

        Args:
            number: of the job in its sweep; None for a run by itself.
        """
        key = "hydra.run.dir" if number is None else "hydra.sweep.dir"
        run, record, value = Run(folder, main=is_main()), None, None
        code, reason = 0, ""
        try:
            content = configs.check(self.app, composed)
            config = configs.build(self.app, content)
            run.resume = content["resume"]
            with alone(folder, key) if run.main else contextlib.nullcontext():
                if run.main:
                    record = self.begin(run, content, overrides, number, key)
                    if record is None:
                        run.say(f"job {number}: {folder} finished earlier, skipped")
                        return 0, (read_run(folder, key) or {}).get("objective")
                elif number is not None and follow(run, content, key):
                    return 0, None
                configs.seed_everything(content["seed"])
                end_on_terminate()
                value = configs.app_module(self.app).main(config, run)
        except UserError as error:
            complain(error)
            code, reason = 2, str(error)
        except KeyboardInterrupt:
            if record is not None:
                record.close("failed", run.facts, "interrupted", 130)
            raise
        except SystemExit as stop:  # `main` ends early; a message is for the user, as Python has it
            if stop.code == TERMINATED:
                if record is not None:
                    record.close("failed", run.facts, "terminated", TERMINATED)
                raise
            code, reason = exit_code(stop), str(stop.code)
        except Exception as error:
            code, reason = report(error, key, folder)
        if code and record is None and number is not None and run.main:
            if holds_run(folder, key):
                self.refused = True
            else:
                record = Record(folder, self.app, self.command, overrides, None)  # a job that never began is a row too
        if record is not None:
            told = {"objective": value} if isinstance(value, float) else {}
            with contextlib.suppress(OSError) if code == 2 else contextlib.nullcontext():  # where the disk is full
                record.close("failed" if code else run.status, run.facts | told, " ".join(reason.split()), code)
        return code, value

    def begin(
        self, run: Run, content: dict[str, Any], overrides: list[str], number: int | None, key: str
    ) -> Record | None:
        """Takes the folder and announces it; None when a sweep finds this very job finished there."""
        earlier = read_run(run.folder, key)
        if earlier is not None:
            if number is None and not run.resume:
                raise UserError(key, run.folder, "this folder holds a run: name another, or add resume=true")
            refuse_changes(earlier, self.app, content, run.folder, key)
            if number is not None and earlier["status"] == "finished":
                return None
            run.resume = True
        if run.resume:
            sweep_up(run.folder)
        record = Record(run.folder, self.app, self.command, overrides, content)
        if earlier is not None:
            record.go_on(earlier)
        record.write()
        run.say(
            f"run folder: {run.folder}" if number is None else f"job {number}: {' '.join(overrides)} in {run.folder}"
        )
        os.environ[LAUNCH] = json.dumps({"pid": os.getpid(), "folder": str(run.folder), "resume": run.resume})
        return record


def holds_run(folder: Path, key: str) -> bool:
    """Whether a folder has a run in it, readable or not."""
    try:
        return read_run(folder, key) is not None
    except UserError:
        return True


def follow(run: Run, content: dict[str, Any], key: str) -> bool:
    """For the further processes that a launcher gives a job: whether the first one skips it, and whether it goes on
    with an earlier attempt. (Its own run.yaml may be there already; an attempt without files is as good as none.)"""
    earlier = read_run(run.folder, key)
    run.resume = run.resume or earlier is not None
    return earlier is not None and earlier["status"] == "finished" and not changed_settings(earlier, content)


def leave_code(folder: Path, code: int, refused: bool) -> None:
    """Tells the process that began a sweep how a job ended: a job refused for what lies in its folder writes nothing
    there, and one that was skipped wrote long ago."""
    with open(folder / EXIT_CODES, "a", encoding="utf-8") as stream:
        stream.write(f"{code}{REFUSED * refused}\n")  # one write of a few bytes: lines of several processes stay whole


def take_codes(folder: Path) -> tuple[list[int], bool]:
    """The exit codes that jobs in other processes have left, once; whether one of them was refused its folder."""
    path = folder / EXIT_CODES
    if not path.exists():
        return [], False
    lines = path.read_text(encoding="utf-8").split()
    path.unlink()
    return [int(line.removesuffix(REFUSED)) for line in lines], any(line.endswith(REFUSED) for line in lines)


def complain(error: UserError, prefix: str = "error") -> None:
    """A user's mistake: one line, whatever the value holds."""
    print(f"{prefix}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def report(error: Exception, key: str, folder: Path) -> tuple[int, str]:
    """(exit code, reason) of what `main` let through: a full disk is the user's to mend, all else is a crash."""
    if isinstance(error, OSError) and error.errno in FULL:
        place = f" ({error.filename})" if error.filename else ""
        mistake = UserError(key, folder, f"{error.strerror}{place}: make room, and go on with resume=true")
        complain(mistake)
        return 2, str(mistake)
    traceback.print_exception(error)
    return 1, f"{type(error).__name__}: {error}"


def exit_code(stop: SystemExit) -> int:
    """The code of a SystemExit; its message, where it carries one, goes to stderr."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr, flush=True)
    return 1


# ---------------------------------------------------------------- the processes of one run


def is_main() -> bool:
    """False in the further processes of a distributed run, whoever launched it."""
    return all(os.environ.get(name, "0") in ("0", "") for name in RANKS)


def launched_by() -> dict[str, Any] | None:
    """The run that started this process as a further rank: Lightning runs the script again for each."""
    launch = json.loads(os.environ.get(LAUNCH, "{}"))
    return launch if launch.get("pid") == os.getppid() and not is_main() else None


def join(app: str, launch: dict[str, Any]) -> int:
    """A further rank: the config that the first one wrote, the same folder, no record of its own."""
    folder = Path(launch["folder"])
    content = yaml.safe_load((folder / RUN_FILE).read_text(encoding="utf-8"))["config"]
    try:
        config = configs.build(app, content)
        configs.seed_everything(content["seed"])
        configs.app_module(app).main(config, Run(folder, launch["resume"], main=False))
    except UserError as error:
        complain(error, f"error (rank {os.environ.get('LOCAL_RANK', '?')})")
        return 2
    return 0


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Undoes what a job leaves in the process: ranks and ports of a finished DDP run would hang the next one."""
    before, terminate = dict(os.environ), signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if terminate is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
