"""`train.py`: distils one EAGLE-3 drafter for every layer group, all from one pass of the target.

check → load → answer the training prompts → draft vocabulary → fit → drafters/, metrics.csv, curves, a table.
`drafter=kangaroo`, one adapter instead, is in kangaroo.py; what both do alike in fitting.py.
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

from specwave.app.choice import Choice, choose, stand_in
from specwave.app.contamination import compare
from specwave.app.convert import Convert, convert
from specwave.app.exports import BEST, Exports
from specwave.app.groups import (
    check_warm_start,
    drafter_configs,
    make_drafters,
    read_selections,
    selection_paths,
    wanted_groups,
)
from specwave.app.hub import check_push, push
from specwave.app.kangaroo import check_adapter, train_adapter
from specwave.app.preflight import architecture, described, forecast, refuse, report
from specwave.app.probe import check_task, train_probe
from specwave.artifacts import UserError
from specwave.data.engines import Regenerate, check_engine
from specwave.eagle.export import Export, TargetFacts, write_drafter
from specwave.eagle.offline import StatesConfig, check_states
from specwave.skipping.options import Kangaroo

if TYPE_CHECKING:
    from specwave.app.run import Run
    from specwave.eagle.module import GroupTraining


@dataclass
class TrainConfig:
    """`conf/train.yaml`, groups already built: a ModelConfig, a data set, an Eagle3 or a Kangaroo, a TrainerConfig, a
    logger."""

    model: Any
    data: Any
    drafter: Any
    trainer: Any
    logger: Any
    selection: Any = None  # null, a selection.json or its folder, or a list of these
    top: int = 1
    skip: int | None = None
    groups: list[Any] | None = None
    task: Literal["train", "regenerate", "convert", "probe"] = "train"
    dry_run: bool = False
    plan_for: Literal["h100", "h200", "a100"] = "h100"
    export: Export = field(default_factory=Export)
    convert: Convert = field(default_factory=Convert)
    regenerate: Regenerate = field(default_factory=Regenerate)
    states: StatesConfig = field(default_factory=StatesConfig)
    choose: Choice | None = None
    probe: Any = None  # a LinearProbe, or nothing
    probe_data: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        selection_paths(self.selection)  # refuses what is no path
        if self.top < 1:
            raise UserError("top", self.top, "must be ≥ 1: that many groups of the selection are trained")
        if self.top > 1 and self.selection is None and self.choose is None:
            raise UserError("top", self.top, "takes groups of a selection: add selection=<selection.json>")
        if self.skip is not None and self.skip < 0:
            raise UserError("skip", self.skip, "must be ≥ 0: that many groups of the selection are passed over")
        if self.skip and self.selection is None:
            raise UserError("skip", self.skip, "passes over groups of a selection: add selection=<selection.json>")
        if self.choose is not None and self.selection is not None:
            raise UserError("choose", "{…}", "takes the place of a selection: leave one of the two out")
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


def main(config: TrainConfig, run: Run) -> float | None:
    """Trains into the run's folder; `run.resume` goes on from its last checkpoint. The best drafter's τ̂ on held-out
    prompts, for sweepers that optimise it; None where nothing was trained to its end."""
    if config.probe and config.task != "probe":
        raise UserError("task", config.task, "probe=linear is for task=probe: add that, or leave the probe out")
    if config.task != "train" and "tracking" in repr(config.logger):
        run.say(f"logger=wandb: task={config.task} sends nothing there; its files and figures lie in the run's folder")
    if config.task == "regenerate":
        from specwave.app.regenerate import regenerate

        regenerate(config, run)
    elif config.task == "convert":
        convert(config, run)
    elif config.task == "probe":
        train_probe(config, run)
    elif config.dry_run:
        if isinstance(config.drafter, Kangaroo):
            check_adapter(config)
        arch = architecture(config.model)
        found = forecast(stand_in(config, arch.num_layers), arch)
        report(found, config, run.say)
        run.note(forecast=described(found))
    elif isinstance(config.drafter, Kangaroo):
        return train_adapter(config, run)
    else:
        return train(config, run)
    return None


def train(config: TrainConfig, run: Run) -> float | None:
    """Distils the drafters; see `main` for what is returned."""
    began = time.monotonic()
    if config.choose is not None:
        config = replace(config, choose=None, selection=choose(config.choose, config.model, run))
    device = config.trainer.device_for(config.model)  # before anything is loaded or spawned
    planned = forecast(config, architecture(config.model))
    for warning in refuse(planned, run.folder):
        run.say(f"warning: {warning}")
    check_push(config.export, list(planned.sizes), run.main)
    target = replace(config.model, device=device).load()
    chosen, pictures = read_selections(config.selection, target)
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

    from specwave.app.fitting import learn, taught_by
    from specwave.eagle.module import GroupTraining

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
    source, watch = taught_by(config, target, data, [wanted.layers for wanted in groups], options.steps, run.say)
    rows = config.data.batch_size * trains.processes
    module = GroupTraining(target, drafters, options, trains.max_steps, trains.log_every, source, watch, rows)
    module.facts["training data"] = data.digest(module.draft_ids.tolist())
    whose = TargetFacts(target.name, target.fingerprint, target.num_layers, config.model.source)
    layout, dtype = config.export.format, getattr(torch, options.export_dtype)

    def write(folder: Path, drafter: Any, training: dict[str, Any]) -> list[str]:
        own: dict[str, Any] = {"data": facts, "training": training, "pictures": pictures}
        return write_drafter(folder, drafter, whose, dtype=dtype, layout=layout, **own)

    wanted_by = {wanted.name: {"rule": wanted.rule, **wanted.switches} for wanted in groups}
    exports = Exports(run.folder, module, wanted_by, write, run.say, run.main)

    def last_words() -> None:
        say_figures(run, module, exports, len(watch.prompts) if watch else 0)
        run.note(contamination=contamination)
        folders = {name: run.folder / BEST / name for name in exports.groups}
        if sent := push(config.export, folders, run.say):
            run.note(pushed=sent)

    return learn(config, run, module, data, exports, began, last_words)


def say_figures(run: Run, module: GroupTraining, exports: Exports, decoded: int) -> None:
    """The last words on the console and in run.yaml."""
    drafters: dict[str, Any] = dict(module.drafters.items())
    run.note(groups={name: drafter.config.layers for name, drafter in drafters.items()}, **module.validated)
    run.note(tokens=module.tokens, training_seconds=round(module.seconds, 1))
    run.say(table(module, {name: own["rule"] for name, own in exports.groups.items()}))
    for name, reason in module.stopped.items():
        run.note(stopped=module.stopped)
        run.say(f"{name} stopped early: {reason}")
    run.say(
        "on held-out prompts; tau_hat counts the target's own token and compares to tau on greedy on-policy text only"
        + (f"; tau is of decoding {decoded} of them" if decoded else "")
    )
    run.say(f"{module.global_step} steps, {module.tokens} tokens, {module.seconds:.0f} s of training")
    run.say(f"written: {run.folder / BEST}")
