"""`train.py`: distils one EAGLE-3 drafter for every layer group, all from one pass of the target.

check → load → answer the training prompts → draft vocabulary → fit → drafters/, metrics.csv, curves, a table.
`task=regenerate`, which makes training data, is in regenerate.py; `task=convert`, for drafters of other tools, in
convert.py; `task=probe` in probe.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specwave.app.contamination import compare
from specwave.app.convert import Convert, convert
from specwave.app.exports import BEST, Exports
from specwave.app.groups import check_warm_start, drafter_configs, make_drafters, read_selection, wanted_groups
from specwave.app.hub import check_push, push
from specwave.app.preflight import architecture, described, forecast, refuse, report
from specwave.app.probe import check_task, train_probe
from specwave.artifacts import UserError
from specwave.data.engines import Regenerate, check_engine
from specwave.eagle.export import Export, TargetFacts
from specwave.eagle.offline import StatesConfig, check_states, offline

if TYPE_CHECKING:
    from specwave.app.run import Run
    from specwave.eagle.module import GroupTraining


@dataclass
class TrainConfig:
    """`conf/train.yaml`, groups already built: a ModelConfig, a data set, an Eagle3, a TrainerConfig, a logger."""

    model: Any
    data: Any
    drafter: Any
    trainer: Any
    logger: Any
    selection: str | None = None
    top: int = 1
    groups: list[Any] | None = None
    task: Literal["train", "regenerate", "convert", "probe"] = "train"
    dry_run: bool = False
    plan_for: Literal["h100", "h200", "a100"] = "h100"
    export: Export = field(default_factory=Export)
    convert: Convert = field(default_factory=Convert)
    regenerate: Regenerate = field(default_factory=Regenerate)
    states: StatesConfig = field(default_factory=StatesConfig)
    probe: Any = None  # a LinearProbe, or nothing
    probe_data: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UserError("top", self.top, "must be ≥ 1: that many groups of the selection are trained")
        if self.top > 1 and self.selection is None:
            raise UserError("top", self.top, "takes groups of a selection: add selection=<selection.json>")
        if self.groups == []:
            raise UserError("groups", "[]", "name at least one group, as in groups=[[2,15,27]] or groups=[eagle3]")
        if self.task == "regenerate":
            check_engine(self.regenerate)
        if self.task == "probe":
            check_task(self)


def travelling(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings for a card, which goes where this machine's folders do not: of a path that is here, its last part."""
    here = {key: Path(value) for key, value in settings.items() if isinstance(value, str) and os.sep in value}
    return settings | {key: path.name for key, path in here.items() if path.expanduser().exists()}


def table(module: GroupTraining, rules: Mapping[str, str | None]) -> str:
    """The figures of the last validation, a row per drafter."""
    shown = range(min(3, module.options.steps))
    every = module.validated["figures"]
    decoded, width = any("tau" in figures for figures in every.values()), max(16, *map(len, every))
    lines = [
        f"{'group':<{width}} {'rule':<14} {'tau_hat':>8} "
        + " ".join(f"{f'a_{s}':>6}" for s in shown)
        + f" {'loss':>8}"
        + (f" {'tau':>6}" if decoded else "")
    ]
    for name, figures in every.items():
        shares = " ".join(f"{figures[f'a_{step}']:>6.3f}" for step in shown)
        line = (
            f"{name:<{width}} {rules[name] or 'listed':<14} {figures['tau_hat']:>8.3f} {shares} {figures['loss']:>8.3f}"
        )
        lines.append(line + (f" {figures['tau']:>6.3f}" if "tau" in figures else ""))
    return "\n".join(lines)


def main(config: TrainConfig, run: Run) -> None:
    """Trains into the run's folder; `run.resume` goes on from its last checkpoint."""
    if config.probe and config.task != "probe":
        raise UserError("task", config.task, "probe=linear is for task=probe: add that, or leave the probe out")
    if config.task == "regenerate":
        from specwave.app.regenerate import regenerate

        regenerate(config, run)
    elif config.task == "convert":
        convert(config, run)
    elif config.task == "probe":
        train_probe(config, run)
    elif config.dry_run:
        found = forecast(config, architecture(config.model))
        report(found, config, run.say)
        run.note(forecast=described(found))
    else:
        train(config, run)


def train(config: TrainConfig, run: Run) -> None:
    """Distils the drafters."""
    began = time.monotonic()
    device = config.trainer.device()  # before anything is loaded or spawned
    if config.model.device.partition(":")[0] not in ("auto", device.partition(":")[0]):
        raise UserError("model.device", config.model.device, f"the trainer runs on {device}: set model.device={device}")
    planned = forecast(config, architecture(config.model))
    for warning in refuse(planned, run.folder):
        run.say(f"warning: {warning}")
    check_push(config.export, planned.names, run.main)
    target = replace(config.model, device=device).load()
    chosen, pictures = read_selection(config.selection, target) if config.selection else (None, [])
    groups = wanted_groups(config, chosen, target.num_layers)
    drafter_configs(config, target, groups)  # what they refuse, before the target answers anything
    warm = check_warm_start(config, target, groups)
    check_states(target, [wanted.layers for wanted in groups], config.states)
    data = config.data.prepared(target)
    contamination, lines = compare(data, target.tokenizer.decode)
    for line in [*data.notes, *lines]:
        run.say(line)
    drafters, coverage = make_drafters(config, target, groups, data, warm)

    import torch

    from specwave.app.trainer import Keeper, Progress, ended, fit, open_logger, sweep_up
    from specwave.eagle.datamodule import DrafterData
    from specwave.eagle.module import GroupTraining
    from specwave.eagle.watch import Watch

    size = next(iter(drafters.values())).config.draft_vocab_size
    facts = data.facts() | {
        "source": travelling(asdict(config.data)),
        "draft_vocabulary_coverage": coverage,
        "seed": config.seed,
    }
    facts |= {"contamination": contamination, "states": config.states.described()}
    run.say(
        f"{target.name}: {len(drafters)} drafters ({', '.join(drafters)}) on {len(data.train)} conversations, "
        f"{facts['tokens']} tokens; {data.dropped} dropped, {data.cut} cut; draft vocabulary {size}, "
        f"{coverage:.1%} of the answers' tokens"
    )
    trains, options = config.trainer, config.drafter
    source = watch = None
    if config.states.mode == "offline":
        source = offline(target, data, [wanted.layers for wanted in groups], config.states, run.say)
        target.blocks.clear()  # nothing runs them any more: their memory is for training
        if trains.decode:
            run.say("offline, so no held-out prompt is decoded: val_tau is left out")
    elif trains.decode:
        watch = Watch(target, data.validation, trains.decode, options.steps)
    rows = config.data.batch_size * trains.processes
    module = GroupTraining(target, drafters, options, trains.max_steps, trains.log_every, source, watch, rows)
    module.facts["training data"] = data.digest(module.draft_ids)
    last = run.folder / "checkpoints" / "last.ckpt"

    exports = Exports(
        run.folder,
        module,
        groups,
        TargetFacts(target.name, target.fingerprint, target.num_layers, config.model.source),
        getattr(torch, options.export_dtype),
        facts,
        pictures,
        run.say,
        run.main,
        config.export.format,
    )

    def describe() -> str:
        figures = module.validated.get("figures", {})
        return ", ".join(f"τ̂ {name} {found['tau_hat']:.2f}" for name, found in figures.items())

    going_on = run.resume and last.exists()
    step = trains.last_step(last) if going_on else 0
    if run.main:
        sweep_up(run.folder)
    logger = open_logger(config.logger, run.folder, step) if run.main else False
    end = None if trains.minutes is None else began + 60 * trains.minutes
    keeper = Keeper(last, trains.save_every, module.finish_step, exports.saved, exports.validated, end)
    callbacks = [keeper, Progress(describe)] if run.main else [keeper]
    trainer = trains.build(target.dtype, logger, callbacks, options.clip, len(drafters))
    module.engine = trains.engine(trainer)
    loaders = DrafterData(data, config.data.batch_size, config.seed)
    with ended(logger):
        try:
            fit(trainer, module, datamodule=loaders, ckpt_path=str(last) if going_on else None, weights_only=True)
        except UserError:
            if run.main:
                raise
            return  # all processes stop for the same reason, and the first one says it
        if not keeper.in_time:
            stop_here(run, module, trainer, trains)
            return
        if module.validated.get("step") != trainer.global_step:
            trainer.validate(module, datamodule=loaders, verbose=False)
        if run.main:
            conclude(run, module, exports, logger)
            say_figures(run, module, exports, len(watch.prompts) if watch else 0)
            run.note(contamination=contamination)
            folders = {name: run.folder / BEST / name for name in exports.groups}
            if sent := push(config.export, folders, run.say):
                run.note(pushed=sent)


def stop_here(run: Run, module: GroupTraining, trainer: Any, trains: Any) -> None:
    """The time is up, the work is not done."""
    run.status = "stopped"
    run.note(tokens=module.tokens, steps=trainer.global_step)
    run.say(
        f"stopped after {trains.minutes:g} minutes at step {trainer.global_step} of {trains.max_steps}: go on with "
        f"resume=true hydra.run.dir={run.folder}"
    )


def conclude(run: Run, module: GroupTraining, exports: Exports, logger: Any) -> None:
    """The picture of the run, and what a tracker shows of its drafters."""
    from specwave.app.trainer import read_metrics
    from specwave.eagle.figures import training_figure

    logger.finalize("success")
    title = f"{module.target.name}: {module.tokens:,} tokens in {module.seconds:.0f} s"
    drawn = training_figure(run.folder / "curves", read_metrics(run.folder), list(exports.groups), title)
    exports.finish(drawn[:1])
    if hasattr(logger, "report"):
        folders = {name: run.folder / BEST / name for name in exports.groups}
        logger.report(module.validated["figures"], folders)


def say_figures(run: Run, module: GroupTraining, exports: Exports, decoded: int) -> None:
    """The last words on the console and in run.yaml."""
    drafters: dict[str, Any] = dict(module.drafters.items())
    run.note(groups={name: drafter.config.layers for name, drafter in drafters.items()}, **module.validated)
    run.note(tokens=module.tokens, training_seconds=round(module.seconds, 1))
    run.say(table(module, {name: wanted.rule for name, wanted in exports.groups.items()}))
    for name, reason in module.stopped.items():
        run.note(stopped=module.stopped)
        run.say(f"{name} stopped early: {reason}")
    run.say(
        "on held-out prompts; tau_hat counts the target's own token and compares to tau on greedy on-policy text only"
        + (f"; tau is of decoding {decoded} of them" if decoded else "")
    )
    run.say(f"{module.global_step} steps, {module.tokens} tokens, {module.seconds:.0f} s of training")
    run.say(f"written: {run.folder / BEST}")
