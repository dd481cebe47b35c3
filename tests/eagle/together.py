"""Run as a script, once for every process, by test_together.py: trains on a tiny target, scenario after scenario.

    RANK=<r> python together.py <model folder> <folder> <JSON: a list of scenarios>

A scenario is a dict: `name` of its run folder, `port`, `trainer` (keys of a config of distributed.py, of DeepSpeed's
where `zero_stage` is among them), `rows` of a process, `packing`, `drafter` (more of its keys, and `groups`), and what
is to happen:
`resume`, `die` (a step before which all processes kill themselves), `poison` ([rank, step, drafter, "loss" or
"gradient"]: what is not finite there). Each runs in a forked child, and no tensor is computed before.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from specwave.app.distributed import DdpConfig, DeepSpeedConfig
from specwave.app.run import Run
from specwave.app.train import TrainConfig, main
from specwave.app.trainer import TrainerConfig
from specwave.artifacts import UserError
from specwave.data.samples import BuiltinData
from specwave.eagle.module import GroupTraining
from specwave.eagle.options import Eagle3
from specwave.target import ModelConfig

PROCESSES = 2
GROUPS = [[2, 4, 5], [7]]
STEPS = {"max_steps": 6, "save_every": 2, "validate_every": 4, "log_every": 1, "decode": 2, "precision": "32-true"}


def csv_logger(save_dir: str) -> pl.loggers.CSVLogger:
    return pl.loggers.CSVLogger(save_dir, name="", version="", flush_logs_every_n_steps=1)


def a_config(model: Path, trainer: TrainerConfig, rows: int, packing: bool = False, **drafter: Any) -> TrainConfig:
    """Alike in one process and in several but for the trainer and the rows of a process. Nothing is clipped: engines
    that clip all drafters together do it otherwise."""
    groups = drafter.pop("groups", GROUPS)
    return TrainConfig(
        model=ModelConfig("tiny", str(model), dtype="float32", device="cpu"),
        data=BuiltinData(limit=22, validation=5, max_new_tokens=16, batch_size=rows, packing=packing),
        drafter=Eagle3(**{"steps": 3, "draft_vocab_size": 128, "export_dtype": "float32", "clip": 100.0} | drafter),
        trainer=trainer,
        logger=csv_logger,
        groups=groups,
    )


def several(keys: dict[str, Any]) -> TrainerConfig:
    found = DeepSpeedConfig if "zero_stage" in keys else DdpConfig
    return found(accelerator="cpu", devices=PROCESSES, **{**STEPS, **keys})


def poison(rank: int, step: int, drafter: str, what: str) -> None:
    outcome = GroupTraining._outcome

    def poisoned(self: GroupTraining, name: str, *given: Any) -> Any:
        found = outcome(self, name, *given)
        if name == drafter and self.training and self.global_step == step and int(os.environ["LOCAL_RANK"]) == rank:
            if what == "loss":
                found.loss = found.loss * float("nan")
            else:
                found.loss.register_hook(lambda gradient: gradient * float("inf"))
        return found

    GroupTraining._outcome = poisoned  # type: ignore[method-assign]


def die_before(step: int) -> None:
    before = GroupTraining.training_step

    def training_step(self: GroupTraining, batch: dict[str, Any], batch_idx: int) -> Any:
        if self.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(self, batch, batch_idx)

    GroupTraining.training_step = training_step  # type: ignore[method-assign]


def run(model: Path, folder: Path, scenario: dict[str, Any], rank: int) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(scenario["port"])}
    if "poison" in scenario:
        poison(*scenario["poison"])
    if "die" in scenario:
        die_before(scenario["die"])
    own = folder / scenario["name"]
    own.mkdir(parents=True, exist_ok=True)
    made = Run(own, resume=scenario.get("resume", False), main=rank == 0)
    rows, packing = scenario.get("rows", 3), scenario.get("packing", False)
    config = a_config(model, several(scenario["trainer"]), rows, packing, **scenario.get("drafter", {}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            main(config, made)
        except UserError as error:
            print(f"{scenario['name']} {rank}: {error}", flush=True)
        for warning in caught:
            print(f"{scenario['name']} {rank} warns: {warning.message}", flush=True)
    (own / f"facts{rank}.json").write_text(json.dumps({"stopped": made.facts.get("stopped")}))


def scenarios(model: Path, folder: Path, rank: int, given: list[dict[str, Any]]) -> None:
    for scenario in given:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(model, folder, scenario, rank)
                code = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(f"{scenario['name']} {rank}: ended {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenarios(Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ.pop("RANK")), json.loads(sys.argv[3]))
