"""A toy app with its own conf/ folder: what the doors do, without a model."""

import importlib
import importlib.util
import logging
import sys
from pathlib import Path

import pytest

MODULE = """
from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specwave.artifacts import UserError

CALLS = []


@dataclass
class Inner:
    depth: int = 1
    window: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Part:
    m: int = 3
    k_beam: int = 10
    rate: float = 0.5
    kind: Literal["plain", "fancy"] = "plain"
    flag: bool = False
    note: str | None = None
    layers: list[int] = field(default_factory=list)
    groups: list[list[int]] | None = None
    path: Path | None = None
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self):
        if self.m < 1:
            raise UserError("part.m", self.m, "must be at least 1")


@dataclass
class ToyConfig:
    part: Any
    other: Any = None
    act: str = "none"
    needed: int = 0


def main(config, run):
    CALLS.append((config, run))
    run.say(f"at work with {config.part.m}")
    run.note(seen=config.part.m)
    if config.act == "mistake" or (config.act == "odd" and config.part.m % 2):
        raise UserError("part.m", config.part.m, "the data\\ndo not like it")
    if config.act == "crash":
        raise ZeroDivisionError("in the middle")
    if config.act == "stop":
        raise SystemExit("2 of 3 failed")
    if config.act == "interrupt":
        raise KeyboardInterrupt
    if config.act == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if config.act == "full":
        raise OSError(errno.ENOSPC, "No space left on device", "weights")
    if config.act == "ranks":  # as Lightning launches them: the same script again, with a rank
        rank = os.environ.get("LOCAL_RANK", "0")
        (run.folder / f"rank{rank}").write_text(f"{config.part.m} {run.main} {run.resume}")
        if rank == "0":
            os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"] = "0", "2"
            environment = {**os.environ, "LOCAL_RANK": "1"}
            subprocess.run([sys.executable, sys.argv[0], *sys.argv[1:]], env=environment, check=True)
    (run.folder / "result").write_text(str(config.part.m))
    return float(config.part.m)
"""

CONF = {
    "toy.yaml": """
defaults:
  - common
  - part: plain
  - other: none
  - _self_
  - experiment: null
act: none  # what main does
needed: 0
""",
    "part/plain.yaml": """
# a part
_target_: specwave.app.toy.Part
m: 3  # how many
k_beam: 10
rate: 0.5
kind: plain
flag: false
note: null
layers: []
groups: null
path: null
inner:
  depth: 1
  window: null
""",
    "part/open.yaml": "_target_: specwave.app.toy.Part\nm: ???\nrate: ???\n",
    "other/none.yaml": "{}\n",
    "other/linear.yaml": "_target_: torch.nn.Linear\nin_features: 2\nout_features: 3\n",
    "other/nested.yaml": "list:\n- _target_: specwave.app.toy.Inner\n  depth: 4\nplain: [1, 2]\n",
    "other/stray.yaml": "{}\n",
    "strange/one.yaml": "{}\n",
}
APP_MODULES = ("command", "complaints", "config", "run", "usage")


def load_toy(path):
    """The toy module under the name a config may trust."""
    spec = importlib.util.spec_from_file_location("specwave.app.toy", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["specwave.app.toy"] = module
    spec.loader.exec_module(module)
    return module


def write_toy(folder):
    """conf/ and the module in a folder, and `toy.py`, a door of its own that needs nothing else."""
    from specwave.artifacts import conf_dir

    conf = folder / "conf"
    for name, text in CONF.items():
        path = conf / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (conf / "common.yaml").write_text((conf_dir() / "common.yaml").read_text())
    (folder / "toy_module.py").write_text(MODULE)
    (folder / "conftest_copy.py").write_text(Path(__file__).read_text())
    (folder / "toy.py").write_text(
        "import importlib, pathlib, sys\n"
        "here = pathlib.Path(__file__).parent\n"
        "import conftest_copy\n"
        "conftest_copy.load_toy(here / 'toy_module.py')\n"
        "for name in conftest_copy.APP_MODULES:\n"
        "    importlib.import_module(f'specwave.app.{name}').conf_dir = lambda: here / 'conf'\n"
        "from specwave.app.door import door\n"
        "if __name__ == '__main__':\n"
        "    door('toy')\n"
    )
    return conf


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    write_toy(folder)
    return folder


@pytest.fixture
def toy(toy_folder, tmp_path, monkeypatch):
    """The toy's module; the current folder is an empty one."""
    monkeypatch.setitem(sys.modules, "specwave.app.toy", None)
    module = load_toy(toy_folder / "toy_module.py")
    for name in APP_MODULES:
        monkeypatch.setattr(
            importlib.import_module(f"specwave.app.{name}"), "conf_dir", lambda: toy_folder / "conf", raising=True
        )
    monkeypatch.chdir(tmp_path)
    return module


@pytest.fixture
def run_toy(toy, capsys):
    """(exit code, stdout, stderr) of the toy door."""
    from specwave.app.door import run_door

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def run(*argv):
        code = run_door("toy", list(argv))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield run
    for handler in set(root.handlers) - set(handlers):  # `--info` turns Hydra's debugging on
        root.removeHandler(handler)
    root.setLevel(level)
