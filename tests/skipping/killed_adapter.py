"""Run as a script by test_adapter_training.py: trains an adapter in child processes, two of which kill themselves.

    python killed_adapter.py <model folder> <run folder>

Prints how each child ended. Children are forked before any tensor is computed here.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from test_adapter_training import main, run_of, training

import specwave.skipping.adapter_folder
from specwave.skipping.module import AdapterTraining


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def within_a_step() -> None:
    before = AdapterTraining.training_step

    def training_step(self, batch, batch_idx):
        if self.global_step == 7:
            die()
        return before(self, batch, batch_idx)

    AdapterTraining.training_step = training_step


def while_it_is_written() -> None:
    write = specwave.skipping.adapter_folder.write_json

    def unfinished(path, content):
        if Path(path).name == "card.json" and content["training"]["step"] >= 8:
            die()
        write(path, content)

    specwave.skipping.adapter_folder.write_json = unfinished


def attempts(model: Path, folder: Path) -> None:
    for place in (within_a_step, while_it_is_written, lambda: None):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                place()
                main(training(model), run_of(folder, resume=(folder / "checkpoints" / "last.ckpt").exists()))
                code = 0
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    attempts(Path(sys.argv[1]), Path(sys.argv[2]))
