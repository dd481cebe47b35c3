"""select.py in the repository's root never stands in for the standard library's module `select`."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL = "import select; assert hasattr(select, 'select') and not hasattr(select, 'door'), select; "

WORKERS = """
import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    loader = DataLoader(list(range(6)), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3, 4, 5]
    print("done")
"""
REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
"""


def python(*argv, **more):
    """A Python process whose search path begins with the repository's root."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_standard_library_works_from_the_root():
    uses = "import asyncio, multiprocessing, selectors, socket, subprocess; asyncio.run(asyncio.sleep(0)); "
    spawn = "print(subprocess.run(['echo', 'out'], capture_output=True, text=True).stdout, end='')"
    assert python("-c", REAL + uses + spawn) == "out\n"
    assert "selectors" in python("-c", f"{REAL}{uses} print(selectors.DefaultSelector.__module__)")


def test_python_dash_m_pytest():
    assert "pytest" in python("-m", "pytest", "--version")


def test_spawned_data_loader_workers(tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    assert python(script, PYTHONPATH=str(ROOT)) == "done\n"


def test_torchrun(tmp_path):
    script = tmp_path / "reduce.py"
    script.write_text(REDUCE)
    out = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", script, PYTHONPATH=str(ROOT))
    assert "sum 1.0" in out


def load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, ROOT / "select.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.mark.parametrize("builtin", [False, True], ids=["extension file", "built in"])
def test_the_real_module_takes_its_place(monkeypatch, builtin):
    """Both kinds of Python: `select` in a file of its own (pyenv, conda) and compiled in (Debian)."""
    from importlib.machinery import BuiltinImporter, PathFinder

    real = sys.modules["select"]
    if builtin:
        monkeypatch.setattr(BuiltinImporter, "find_spec", lambda name: real.__spec__)
        monkeypatch.setattr(PathFinder, "find_spec", lambda name, path: pytest.fail("not asked when it is built in"))
    monkeypatch.syspath_prepend(ROOT)
    found = load("select", monkeypatch)
    assert callable(found.select)
    assert Path(getattr(found, "__file__", "/builtin")).parent != ROOT


def test_a_worker_that_loads_the_main_script_again_runs_nothing(monkeypatch):
    module = load("__mp_main__", monkeypatch)
    assert not hasattr(module, "door")
    assert callable(sys.modules["select"].select)
