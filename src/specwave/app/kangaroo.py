"""`train.py drafter=kangaroo`: one adapter behind the target's first blocks, for `decoding=kangaroo`.

check → forecast → load → answer the training prompts → fit → drafters/kangaroo, metrics.csv, curves.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specwave.app.contamination import compare
from specwave.app.exports import BEST, Exports
from specwave.app.preflight import architecture, forecast, refuse
from specwave.artifacts import UserError
from specwave.eagle.offline import check_states
from specwave.skipping.adapter_folder import METHOD, write_adapter
from specwave.skipping.distil import DRAFTS
from specwave.skipping.exits import exit_block

if TYPE_CHECKING:
    from specwave.app.run import Run
    from specwave.app.train import TrainConfig


def check_adapter(config: TrainConfig) -> None:
    """Refuses what says something about EAGLE-3 drafters alone, and several processes.

    Raises:
        UserError: the first such key that is set.
    """
    from specwave.app.trainer import TrainerConfig

    own = "drafter=kangaroo reads one exit, drafter.exit: leave it out, or use drafter=eagle3"
    for key in ("groups", "selection", "choose"):
        if getattr(config, key) is not None:
            raise UserError(key, getattr(config, key), f"chooses the layers that an EAGLE-3 drafter reads; {own}")
    if type(config.trainer) is not TrainerConfig:
        name = type(config.trainer).__name__
        raise UserError("trainer", name, "an adapter is trained in one process: use trainer=cpu or trainer=gpu")
    if config.export.format != "engines":
        raise UserError("export.format", config.export.format, "no engine serves an adapter: leave it out")
    if config.export.push_to_hub is not None:
        remedy = "sends EAGLE-3 drafters; `hf upload` sends an adapter's folder: use null"
        raise UserError("export.push_to_hub", config.export.push_to_hub, remedy)


def train_adapter(config: TrainConfig, run: Run) -> float | None:
    """Trains into the run's folder; `run.resume` goes on from its last checkpoint. Its τ̂, where it ended."""
    began, trains, options = time.monotonic(), config.trainer, config.drafter
    check_adapter(config)
    device = trains.device_for(config.model)
    for warning in refuse(forecast(config, architecture(config.model)), run.folder):
        run.say(f"warning: {warning}")
    target = replace(config.model, device=device).load()
    block = exit_block(options.exit, target.num_layers, "drafter.exit")
    check_states(target, [[block - 1]], config.states)
    data = config.data.prepared(target)
    contamination, lines = compare(data, target.tokenizer.decode)
    for line in [*data.notes, *lines]:
        run.say(line)

    import torch

    from specwave.app.fitting import learn, taught_by
    from specwave.app.train import travelling
    from specwave.eagle.targets import Online
    from specwave.skipping.adapter import Adapter, AdapterConfig, initialise
    from specwave.skipping.kangaroo import DoubleExit, KangarooDecoding
    from specwave.skipping.module import AdapterTraining

    adapter = Adapter(AdapterConfig.of_target(target.arch, block))
    initialise(adapter, target)
    facts = data.facts() | {"source": travelling(asdict(config.data)), "seed": config.seed}
    facts |= {"contamination": contamination, "states": config.states.described()}
    size = sum(parameter.numel() for parameter in adapter.parameters())
    run.say(
        f"{target.name}: an adapter of {size:,} parameters behind {block} of {target.num_layers} blocks, on "
        f"{len(data.train)} conversations, {facts['tokens']} tokens; {data.dropped} dropped, {data.cut} cut"
    )
    source, watch = taught_by(config, target, data, [[block - 1]], DRAFTS, run.say)
    read = (source or Online(target, [block - 1])).read

    def tau(adapter: Adapter) -> float | None:
        assert watch is not None
        return watch.tau_of(DoubleExit(target, adapter, KangarooDecoding()))

    rows, watched = config.data.batch_size, tau if watch is not None else None
    module = AdapterTraining(target, adapter, options, trains.max_steps, trains.log_every, read, watched, rows)
    module.facts["training data"] = data.digest()
    dtype = getattr(torch, options.export_dtype)

    def write(folder: Path, adapter: Any, training: dict[str, Any]) -> list[str]:
        return write_adapter(folder, adapter, target, dtype=dtype, data=facts, training=training)

    exports = Exports(run.folder, module, {METHOD: {}}, write, run.say)

    def last_words() -> None:
        figures = module.validated["figures"][METHOD]
        run.note(exit=block, **module.validated, contamination=contamination)
        run.note(tokens=module.tokens, training_seconds=round(module.seconds, 1), parameters=size)
        shown = [f"{key} {figures[key]:.3f}" for key in ("tau_hat", "a_0", "a_1", "loss", "tau") if key in figures]
        run.say(f"on held-out prompts: {', '.join(shown)}")
        decoded = f"; tau is of decoding {len(watch.prompts)} of them by decoding=kangaroo" if watch else ""
        run.say(f"tau_hat is of chains of {DRAFTS} drafts and counts the target's own token{decoded}")
        run.say(f"{module.global_step} steps, {module.tokens} tokens, {module.seconds:.0f} s of training")
        run.say(f"written: {run.folder / BEST / METHOD}")
        run.say(f"decode with it: python evaluate.py decoding=kangaroo checkpoint={run.folder / BEST / METHOD}")

    return learn(config, run, module, data, exports, began, last_words)
