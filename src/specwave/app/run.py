"""Run folders: one for each run, never shared; its run.yaml says what ran, from which code, and how it ended."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from specwave import __version__
from specwave.app import config as configs
from specwave.app.config import plain
from specwave.artifacts import UserError, conf_dir, filled, write_text

try:
    import fcntl
except ImportError:  # no file locks on this system
    fcntl = None  # type: ignore[assignment]

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's where PyYAML has it: a sweep reads many
RUN_FILE = "run.yaml"
HARMLESS = ("resume", "allow_targets", "minutes", "trainer.minutes")  # keys that may change when a run goes on
OWN_KEYS = {  # of run.yaml; whatever else stands there is a fact that `main` noted
    *("app", "status", "started", "command", "overrides", "seed", "git", "versions", "attempts", "config"),
    *("exit_code", "error", "wall_seconds", "peak_memory_bytes", "peak_gpu_memory_bytes"),
    "objective",  # what `main` returned, for sweepers that optimise it
}
PACKAGES = ("torch", "transformers", "pytorch-lightning", "hydra-core", "omegaconf", "numpy", "safetensors")


@dataclass
class Run:
    """What a door's `main` knows about its run. `Run(folder)` alone is enough to call a `main` by hand."""

    folder: Path
    resume: bool = False  # going on in a folder that may hold parts of an earlier attempt
    main: bool = True  # False in the further processes of a distributed run: they write nothing here
    facts: dict[str, Any] = field(default_factory=dict)
    status: str = "finished"  # what run.yaml says when `main` returns; "stopped": there is more to do, resume goes on

    def note(self, **facts: Any) -> None:
        """Facts for run.yaml, written when the run ends."""
        self.facts.update(facts)

    def say(self, text: str) -> None:
        """A line on the console, once per run."""
        if self.main:
            print(text, flush=True)


# ---------------------------------------------------------------- folders


def claim(folder: Path) -> Path:
    """Makes a folder nobody else has: `folder`, else `folder-2`, `folder-3`, … Making one is atomic, a clock is not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 100_000):
        chosen = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            chosen.mkdir()
        except FileExistsError:
            continue
        return chosen
    raise RuntimeError(f"no free name beside {folder}")


def make(folder: Path, key: str) -> None:
    """A folder the user named."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(key, folder, f"no folder can be made there ({error.strerror})") from None


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; None when it cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def read_run(folder: Path, key: str) -> dict[str, Any] | None:
    """The run.yaml of a folder; None when it holds no run.

    A run that a mistake stopped before it wrote anything leaves its run.yaml alone in the folder: that is no run.
    """
    path = folder / RUN_FILE
    if not path.exists():
        return None
    record = read_yaml(path)
    if not isinstance(record, dict) or not {"app", "status", "config"} <= record.keys():
        raise UserError(key, folder, f"its {RUN_FILE} cannot be read: choose another folder")
    empty = [entry.name for entry in folder.iterdir()] == [RUN_FILE]
    if record.get("status") == "failed" and (record.get("config") is None or empty):
        return None
    return record


def sweep_up(folder: Path) -> None:
    """Removes what a killed attempt was writing: parts beside the files they were to replace."""
    for part in folder.rglob(".*.part"):
        part.unlink(missing_ok=True)


def changed_keys(old: Any, new: Any, path: str = "") -> list[str]:
    """Dotted keys on which two configs differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        nested = ((f"{path}.{key}" if path else key, old.get(key, "absent"), new.get(key, "absent")) for key in keys)
        return [name for key, before, after in nested for name in changed_keys(before, after, key)]
    return [] if old == new else [path]


def changed_settings(record: dict[str, Any], content: dict[str, Any]) -> list[str]:
    """The keys that make a recorded run another one than a config's. A run that began before a key existed has had its
    default: the value that the same overrides give today."""
    old, new = (
        {key: value for key, value in one.items() if key not in HARMLESS}
        for one in (record["config"] or {}, plain(content))
    )
    if filled(old, new) != old:  # it lacks keys
        old = filled(old, _begun_today(record["app"], tuple(record.get("overrides") or ())))
    return [name for name in changed_keys(old, new) if name not in HARMLESS]


@functools.cache
def _begun_today(app: str, overrides: tuple[str, ...]) -> Any:
    """What overrides mean as conf/ is now; {} where they have no meaning any more."""
    try:
        return plain(configs.check(app, configs.compose(app, overrides)))
    except UserError:
        return {}


def refuse_changes(record: dict[str, Any], app: str, content: dict[str, Any], folder: Path, key: str) -> None:
    """Going on needs the app and the settings the run began with."""
    if record["app"] != app:
        raise UserError(key, folder, f"this folder holds a run of {record['app']}: choose another folder")
    changed = changed_settings(record, content)
    if changed:
        raise UserError(
            key,
            folder,
            f"the run there has other settings ({', '.join(changed)}): restore them or choose another folder",
        )


@contextlib.contextmanager
def alone(folder: Path, key: str) -> Iterator[None]:
    """Holds the folder for one process at a time; a process that dies lets go by itself."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(key, folder, "another process is at work in this folder") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)


# ---------------------------------------------------------------- run.yaml


class Record:
    """run.yaml: written when a run starts and again when it ends."""

    def __init__(
        self, folder: Path, app: str, command: list[str], overrides: list[str], content: dict[str, Any] | None
    ):
        self.folder = folder
        self.started = time.monotonic()
        self.earlier: dict[str, Any] = {}
        reset_peak_memory()
        self.content: dict[str, Any] = {
            "app": app,
            "status": "running",
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": command,
            "overrides": overrides,
            "seed": (content or {}).get("seed"),
            "git": git_state(),
            "versions": versions(),
            "config": content,
        }

    def go_on(self, earlier: dict[str, Any]) -> None:
        """Keeps what an earlier attempt recorded; the attempts' times add up."""
        self.earlier = earlier
        self.content["attempts"] = earlier.get("attempts", 1) + 1

    def write(self) -> None:
        content = yaml.safe_dump(plain(self.content), sort_keys=False, allow_unicode=True, width=120)
        write_text(self.folder / RUN_FILE, content)

    def close(self, status: str, facts: dict[str, Any], error: str | None = None, code: int = 0) -> None:
        """Status finished, stopped or failed; the last word on this run."""
        seconds = time.monotonic() - self.started + self.earlier.get("wall_seconds", 0.0)
        ended = {"status": status, "exit_code": code} | ({"error": error} if error else {})
        measured = {"wall_seconds": round(seconds, 3), **peak_memory()}
        config = self.content.pop("config")
        self.content |= ended | measured | facts | {"config": config}  # the long part last
        self.write()


def versions() -> dict[str, str]:
    found = {"specwave": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_state() -> dict[str, Any] | None:
    """Revision of the code and whether files differ from it; None when specwave is no checkout."""
    root = conf_dir().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        top, revision = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
        if Path(top).resolve() != root.resolve():
            return None  # installed somewhere inside another project
        return {"revision": revision, "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def reset_peak_memory() -> None:
    """Starts the peaks anew, so that a job of a sweep does not inherit those of the jobs before it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)


def peak_memory() -> dict[str, int]:
    """Peak bytes of this process: resident, and allocated on the fullest GPU where one is in use."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        peaks["peak_memory_bytes"] = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peaks["peak_gpu_memory_bytes"] = max(
            torch.cuda.max_memory_allocated(device) for device in range(torch.cuda.device_count())
        )
    return peaks
