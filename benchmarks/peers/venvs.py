"""Environments of the peers that cannot share this one, made on first use from the requirements beside this file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tqdm import tqdm
from wire import PeerError

from specwave.artifacts import write_text

HERE = Path(__file__).resolve().parent
OWN = ("economize", "vllm")  # peers with an environment of their own; the others run in this one
UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}  # installed with it, and its import fails on them


def interpreter(peer: str, venvs: Path) -> Path:
    """The peer's Python; its environment below `venvs` is made where it is missing or of other requirements.

    Raises:
        PeerError: the installation failed.
    """
    if peer not in OWN:
        return Path(sys.executable)
    home, wanted = venvs / peer, HERE / f"requirements-{peer}.txt"
    python, mark = home / "bin" / "python", home / ".ready"
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted.read_text(encoding="utf-8"):
        return python
    tqdm.write(f"installing {peer} into {home}", file=sys.stderr)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    steps = [[sys.executable, "-m", "venv", str(home)], [*pip, "install", "-r", str(wanted)]]
    if peer in UNWANTED:
        steps.append([*pip, "uninstall", "--yes", *UNWANTED[peer]])
    with open(venvs / f"{peer}.log", "ab") as log:
        for step in steps:
            if subprocess.run(step, stdout=log, stderr=log).returncode:
                raise PeerError(f"the installation failed, see {log.name}")
    write_text(mark, wanted.read_text(encoding="utf-8"))
    return python
