"""`train.py`: distils one EAGLE-3 drafter for every layer group, all from one pass of the target.

check → load → answer the training prompts → draft vocabulary → fit → drafters/, metrics.csv, curves, a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specwave.artifacts import Selection, UserError, check_layers, group_name
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.export import TargetFacts, write_drafter
from specwave.eagle.samples import Prepared
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map, count_tokens

if TYPE_CHECKING:
    from specwave.app.run import Run
    from specwave.eagle.module import GroupTraining
    from specwave.target import Target


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
    seed: int = 0

    def __post_init__(self) -> None:
        if self.top < 1:
            raise UserError("top", self.top, "must be ≥ 1: that many groups of the selection are trained")
        if self.top > 1 and self.selection is None:
            raise UserError("top", self.top, "takes groups of a selection: add selection=<selection.json>")
        if self.groups == []:
            raise UserError("groups", "[]", "name at least one group, as in groups=[[2,15,27]] or groups=[eagle3]")


def wanted_groups(config: TrainConfig, chosen: Selection | None, num_layers: int) -> dict[tuple[int, ...], str | None]:
    """Layers → the rule that chose them; those of the selection first, each group once.

    Raises:
        UserError: a layer the model lacks, a layer twice, more layers than the model has, an unknown rule.
    """
    from specwave.layers.selectors import fixed_rule

    found: dict[tuple[int, ...], str | None] = {}
    if chosen is not None:
        best = chosen.groups(config.top)
        if len(best) < config.top:
            raise UserError("top", config.top, f"the selection holds {len(best)} groups: ask for at most that many")
        for layers in best:
            found[check_layers(layers, num_layers, "selection")] = chosen.selector
    groups = config.groups if config.groups is not None else [] if chosen is not None else ["eagle3"]
    for place, entry in enumerate(groups):
        key = f"groups[{place}]"
        if isinstance(entry, str):
            found.setdefault(fixed_rule(entry, num_layers, key), entry)
            continue
        if not isinstance(entry, list):
            raise UserError(key, entry, "a group is a list of layers or a rule's name: groups=[[2,15,27],eagle2]")
        if len(entry) > num_layers:
            raise UserError(key, entry, f"{len(entry)} layers are asked for, the model has {num_layers}")
        found.setdefault(check_layers(entry, num_layers, key), None)
    return found


def read_selection(path: str, target: Target) -> tuple[Selection, list[Path]]:
    """A selection made for this target, and its pictures."""
    chosen = Selection.load(path)
    if chosen.num_layers != target.num_layers or chosen.fingerprint != target.fingerprint:
        raise UserError(
            "selection",
            path,
            f"it was made for {chosen.model} ({chosen.num_layers} layers), this is {target.name} "
            f"({target.num_layers}): select again for this model, or name the layers with groups=[[…]]",
        )
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    return chosen, [folder / name for name in ("entropy.png", "cka.png") if (folder / name).is_file()]


def make_drafters(config: TrainConfig, target: Target, groups: Sequence[tuple[int, ...]], data: Prepared) -> Any:
    """(name → drafter with its first weights, share of the answers' tokens that the draft vocabulary covers)."""
    counts = count_tokens(((sample.ids, sample.answer) for sample in data.train), target.vocab_size)
    d2t, t2d = build_vocab_map(counts, min(config.drafter.draft_vocab_size, target.vocab_size))
    drafters = {}
    for layers in groups:
        drafter = Eagle3Drafter(DrafterConfig.of_target(target.arch, layers, d2t.numel()), d2t, t2d)
        initialise(drafter, target, config.drafter.init, config.seed)
        drafters[group_name(layers)] = drafter
    return drafters, float(counts[t2d].sum() / counts.sum())


def table(module: GroupTraining, rules: Sequence[str | None]) -> str:
    """The figures of the last validation, a row per drafter."""
    shown = range(min(3, module.options.steps))
    lines = [
        f"{'group':<16} {'rule':<14} {'tau_hat':>8} " + " ".join(f"{f'a_{s}':>6}" for s in shown) + f" {'loss':>8}"
    ]
    for (name, figures), rule in zip(module.validated["figures"].items(), rules, strict=True):
        shares = " ".join(f"{figures[f'a_{step}']:>6.3f}" for step in shown)
        lines.append(f"{name:<16} {rule or 'listed':<14} {figures['tau_hat']:>8.3f} {shares} {figures['loss']:>8.3f}")
    return "\n".join(lines)


def main(config: TrainConfig, run: Run) -> None:
    """Trains into the run's folder; `run.resume` goes on from its last checkpoint."""
    device = config.trainer.device()  # before anything is loaded or spawned
    if config.model.device.partition(":")[0] not in ("auto", device):
        raise UserError("model.device", config.model.device, f"the trainer runs on {device}: set model.device={device}")
    target = replace(config.model, device=device).load()
    chosen, pictures = read_selection(config.selection, target) if config.selection else (None, [])
    groups = wanted_groups(config, chosen, target.num_layers)
    rules = list(groups.values())
    data = config.data.prepared(target)
    drafters, coverage = make_drafters(config, target, list(groups), data)

    import torch

    from specwave.app.trainer import Keeper, Progress, fit, last_step, open_logger, read_metrics, sweep_up
    from specwave.eagle.datamodule import DrafterData
    from specwave.eagle.figures import training_figure
    from specwave.eagle.module import GroupTraining

    size = next(iter(drafters.values())).config.draft_vocab_size
    facts = data.facts() | {"source": asdict(config.data), "draft_vocabulary_coverage": coverage, "seed": config.seed}
    run.say(
        f"{target.name}: {len(drafters)} drafters ({', '.join(drafters)}) on {len(data.train)} conversations, "
        f"{facts['tokens']} tokens; {data.dropped} dropped, {data.cut} cut; draft vocabulary {size}, "
        f"{coverage:.1%} of the answers' tokens"
    )
    module = GroupTraining(target, drafters, config.drafter, config.trainer.max_steps, config.trainer.log_every)
    last = run.folder / "checkpoints" / "last.ckpt"

    def export(more: Sequence[Path] = ()) -> None:
        for (name, drafter), rule in zip(drafters.items(), rules, strict=True):
            training = {"rule": rule, "step": trainer.global_step, "tokens": module.tokens, **asdict(config.drafter)}
            figures = module.validated.get("figures", {}).get(name, {})
            training |= {"validated_at": module.validated.get("step"), "validation": figures}
            warnings = write_drafter(
                run.folder / "drafters" / name,
                drafter,
                TargetFacts(target.name, target.fingerprint, target.num_layers),
                dtype=getattr(torch, config.drafter.export_dtype),
                data=facts,
                training=training,
                pictures=[*pictures, *more],
            )
            if more:
                for warning in warnings:
                    run.say(f"{name}: {warning}")

    def describe() -> str:
        figures = module.validated.get("figures", {})
        return ", ".join(f"τ̂ {name} {found['tau_hat']:.2f}" for name, found in figures.items())

    sweep_up(run.folder)
    going_on = run.resume and last.is_file()
    step = last_step(last) if going_on else 0
    logger = open_logger(config.logger, run.folder, step)
    callbacks = [Keeper(last, config.trainer.save_every, module.finish_step, export), Progress(describe)]
    trainer = config.trainer.build(target.dtype, logger, callbacks)
    loaders = DrafterData(data, config.data.batch_size, config.seed)
    fit(trainer, module, datamodule=loaders, ckpt_path=str(last) if going_on else None, weights_only=True)
    if module.validated.get("step") != trainer.global_step:
        trainer.validate(module, datamodule=loaders, verbose=False)
    logger.finalize("success")
    title = f"{target.name}: {module.tokens:,} tokens in {module.seconds:.0f} s"
    drawn = training_figure(run.folder / "curves", read_metrics(run.folder), list(drafters), title)
    export(drawn[:1])

    run.note(groups={name: drafter.config.layers for name, drafter in drafters.items()}, **module.validated)
    run.note(tokens=module.tokens, training_seconds=round(module.seconds, 1))
    run.say(table(module, rules))
    run.say(
        "on held-out prompts; tau_hat counts the target's own token and compares to tau on greedy on-policy text only"
    )
    run.say(f"{trainer.global_step} steps, {module.tokens} tokens, {module.seconds:.0f} s of training")
    run.say(f"written: {run.folder / 'drafters'}")
