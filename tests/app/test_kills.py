"""kill -9 at twenty random moments over training, regeneration and the caches: what is left goes on to the same end."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from kills import CACHE, KILLS, RUN, STATES  # noqa: E402


@pytest.fixture(scope="module")
def everything(family_folders, tmp_path_factory):
    """(the folder of all of them, what was printed)."""
    folder = tmp_path_factory.mktemp("kills")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, str(HERE / "kills.py"), str(family_folders["llama"]), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return folder, done.stdout.splitlines()


def files_of(folder: Path, *patterns: str) -> dict[str, bytes]:
    """Path → bytes of whole files; what a resumed run leaves beside them would be a file more."""
    found = (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if path.name != ".lock"}


def rows_of(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without what a clock says."""
    with open(folder / RUN / "metrics.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]


def test_twenty_moments(everything):
    _, lines = everything
    for job, count in KILLS.items():
        assert sum(line.startswith(f"{job}-") and "killed after" in line for line in lines) == count
    assert sum(KILLS.values()) == 20
    ended = [line for line in lines if "exit" in line]
    assert len(ended) >= 6
    assert all(line.endswith("exit 0") for line in ended)


@pytest.mark.parametrize("job", KILLS)
def test_what_was_killed_ends_as_what_was_left_alone(everything, job):
    """Weights, moments and figures; answers; tokens, states and their checksums: all to the bit."""
    folder, _ = everything
    whole = folder / f"{job}-whole"
    others = [path for path in folder.glob(f"{job}-*") if path != whole]
    compared = {
        "train": [f"{CACHE}/answers/*", f"{RUN}/drafters/*/model.safetensors", f"{RUN}/last/*/model.safetensors"],
        "regenerate": [f"{RUN}/answers*"],
        "cache": [f"{STATES}/*", f"{CACHE}/tokens/*/*", f"{RUN}/last/*/model.safetensors"],
    }[job]
    expected = files_of(whole, *compared)
    assert expected
    for other in others:
        assert files_of(other, *compared) == expected, other
        assert not [path for place in (RUN, STATES) for path in (other / place).rglob("*.part")]
        assert yaml.safe_load((other / RUN / "run.yaml").read_text())["status"] == "finished"
        if job == "regenerate":
            continue
        assert rows_of(other) == rows_of(whole)
        ends = [torch.load(one / RUN / "checkpoints" / "last.ckpt", weights_only=True) for one in (whole, other)]
        moments = [end["optimizer_states"][0]["state"] for end in ends]
        for place, state in moments[0].items():
            assert all(torch.equal(moments[1][place][key], tensor) for key, tensor in state.items()), place
