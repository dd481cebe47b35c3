"""`train.py`: distils one EAGLE-3 drafter for every layer group, all from one pass of the target.

check → load → answer the training prompts → draft vocabulary → fit → drafters/, metrics.csv, curves, a table.
`task=regenerate`, which makes training data, is in regenerate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from specwave.app.contamination import compare
from specwave.app.exports import Exports
from specwave.app.groups import check_warm_start, drafter_configs, make_drafters, read_selection, wanted_groups
from specwave.artifacts import UserError
from specwave.data.engines import Regenerate, check_engine
from specwave.eagle.export import TargetFacts
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
    task: Literal["train", "regenerate"] = "train"
    regenerate: Regenerate = field(default_factory=Regenerate)
    states: StatesConfig = field(default_factory=StatesConfig)
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


def table(module: GroupTraining, rules: Sequence[str | None]) -> str:
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
    for (name, figures), rule in zip(every.items(), rules, strict=True):
        shares = " ".join(f"{figures[f'a_{step}']:>6.3f}" for step in shown)
        line = f"{name:<{width}} {rule or 'listed':<14} {figures['tau_hat']:>8.3f} {shares} {figures['loss']:>8.3f}"
        lines.append(line + (f" {figures['tau']:>6.3f}" if "tau" in figures else ""))
    return "\n".join(lines)


def main(config: TrainConfig, run: Run) -> None:
    """Trains into the run's folder; `run.resume` goes on from its last checkpoint."""
    if config.task == "regenerate":
        from specwave.app.regenerate import regenerate

        regenerate(config, run)
        return
    device = config.trainer.device()  # before anything is loaded or spawned
    if config.model.device.partition(":")[0] not in ("auto", device):
        raise UserError("model.device", config.model.device, f"the trainer runs on {device}: set model.device={device}")
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

    from specwave.app.trainer import Keeper, Progress, fit, last_step, open_logger, read_metrics, sweep_up
    from specwave.eagle.datamodule import DrafterData
    from specwave.eagle.figures import training_figure
    from specwave.eagle.module import GroupTraining
    from specwave.eagle.watch import Watch

    size = next(iter(drafters.values())).config.draft_vocab_size
    facts = data.facts() | {"source": asdict(config.data), "draft_vocabulary_coverage": coverage, "seed": config.seed}
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
    module = GroupTraining(target, drafters, options, trains.max_steps, trains.log_every, source, watch)
    last = run.folder / "checkpoints" / "last.ckpt"

    exports = Exports(
        run.folder,
        module,
        groups,
        TargetFacts(target.name, target.fingerprint, target.num_layers),
        getattr(torch, options.export_dtype),
        facts,
        pictures,
        run.say,
    )

    def describe() -> str:
        figures = module.validated.get("figures", {})
        return ", ".join(f"τ̂ {name} {found['tau_hat']:.2f}" for name, found in figures.items())

    sweep_up(run.folder)
    going_on = run.resume and last.is_file()
    step = last_step(last) if going_on else 0
    logger = open_logger(config.logger, run.folder, step)
    keeper = Keeper(last, trains.save_every, module.finish_step, exports.saved, exports.validated, trains.minutes)
    callbacks = [keeper, Progress(describe)]
    trainer = trains.build(target.dtype, logger, callbacks)
    loaders = DrafterData(data, config.data.batch_size, config.seed)
    fit(trainer, module, datamodule=loaders, ckpt_path=str(last) if going_on else None, weights_only=True)
    if not keeper.in_time:
        run.status = "stopped"
        run.note(tokens=module.tokens, steps=trainer.global_step)
        run.say(
            f"stopped after {trains.minutes:g} minutes at step {trainer.global_step} of {trains.max_steps}: go on with "
            f"resume=true hydra.run.dir={run.folder}"
        )
        return
    if module.validated.get("step") != trainer.global_step:
        trainer.validate(module, datamodule=loaders, verbose=False)
    logger.finalize("success")
    title = f"{target.name}: {module.tokens:,} tokens in {module.seconds:.0f} s"
    drawn = training_figure(run.folder / "curves", read_metrics(run.folder), list(drafters), title)
    exports.finish(drawn[:1])

    run.note(groups={name: drafter.config.layers for name, drafter in drafters.items()}, **module.validated)
    run.note(contamination=contamination, tokens=module.tokens, training_seconds=round(module.seconds, 1))
    run.say(table(module, [wanted.rule for wanted in groups]))
    for name, reason in module.stopped.items():
        run.note(stopped=module.stopped)
        run.say(f"{name} stopped early: {reason}")
    run.say(
        "on held-out prompts; tau_hat counts the target's own token and compares to tau on greedy on-policy text only"
        + (f"; tau is of decoding {len(watch.prompts)} of them" if watch is not None and watch.prompts else "")
    )
    run.say(f"{trainer.global_step} steps, {module.tokens} tokens, {module.seconds:.0f} s of training")
    run.say(f"written: {run.folder / 'drafters'}")
