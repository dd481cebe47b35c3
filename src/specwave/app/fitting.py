"""The part of a training run that does not depend on what is trained: teacher, fit, resume, pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specwave.app.exports import BEST, Exports
from specwave.app.run import sweep_up
from specwave.app.trainer import Keeper, Progress, ended, fit, open_logger, read_metrics
from specwave.artifacts import UserError
from specwave.data.datamodule import DrafterData
from specwave.eagle.figures import training_figure
from specwave.eagle.offline import offline
from specwave.eagle.watch import Watch

if TYPE_CHECKING:
    from specwave.app.run import Run
    from specwave.app.train import TrainConfig
    from specwave.data.samples import Prepared
    from specwave.target import Target


def taught_by(
    config: TrainConfig,
    target: Target,
    data: Prepared,
    groups: Sequence[Sequence[int]],
    drafts: int,
    say: Callable[[str], None],
) -> tuple[Any, Watch | None]:
    """(where the outputs of the groups' blocks come from: disk, or None, the target as it runs; who watches drafters at
    work with chains of `drafts`, if anybody)."""
    decode = config.trainer.decode
    if config.states.mode == "offline":
        if config.states.engine == "vllm":
            target.blocks.clear()  # vLLM has its own
        source = offline(target, data, groups, config.states, say)
        target.blocks.clear()  # nothing runs them any more: their memory is for training
        if decode:
            say("offline, so no held-out prompt is decoded: val_tau is left out")
        return source, None
    return None, Watch(target, data.validation, decode, drafts) if decode else None


def learn(
    config: TrainConfig,
    run: Run,
    module: Any,
    data: Prepared,
    exports: Exports,
    began: float,
    last_words: Callable[[], None],
) -> float | None:
    """Fits from the start, or from the run's last checkpoint; where it comes to the end, draws it, says the rest and
    returns the best τ̂ on held-out prompts.

    Args:
        module: a LightningModule with what `Exports` asks for, a `target`, and `finish_step`.
        began: of `time.monotonic()`, when the run did.
    """
    trains, target, last = config.trainer, module.target, run.folder / "checkpoints" / "last.ckpt"

    def describe() -> str:
        figures = module.validated.get("figures", {})
        return ", ".join(f"τ̂ {name} {found['tau_hat']:.2f}" for name, found in figures.items())

    going_on = run.resume and last.exists()
    step = trains.last_step(last) if going_on else 0
    if run.main:
        sweep_up(run.folder)  # as a run through a door has been already: `main` may be called by hand
    validated = step % trains.validate_every == 0  # the last step's own validation comes behind its checkpoint
    logger = open_logger(config.logger, run.folder, step, validated) if run.main else False
    end = None if trains.minutes is None else began + 60 * trains.minutes
    keeper = Keeper(last, trains.save_every, module.finish_step, exports.saved, exports.validated, end)
    callbacks = [keeper, Progress(describe)] if run.main else [keeper]
    trainer = trains.build(target.dtype, target.device, logger, callbacks, module.options.clip, len(module.drafters))
    module.engine = trains.engine(trainer)
    loaders = DrafterData(data, config.data.batch_size, config.seed)
    with ended(logger):
        try:
            fit(trainer, module, datamodule=loaders, ckpt_path=str(last) if going_on else None, weights_only=True)
        except UserError:
            if run.main:
                raise
            return None  # all processes stop for the same reason, and the first one says it
        if not keeper.in_time:
            stop_here(run, module, trainer, trains)
            return None
        if module.validated.get("step") != trainer.global_step:
            trainer.validate(module, datamodule=loaders, verbose=False)
        if run.main:
            conclude(run, module, exports, logger)
            last_words()
    best = max((figures["tau_hat"] for figures in module.validated["figures"].values()), default=None)
    run.note(tau_hat=best)  # a column of a sweep's table
    return best


def stop_here(run: Run, module: Any, trainer: Any, trains: Any) -> None:
    """The time is up, the work is not done."""
    run.status = "stopped"
    run.note(tokens=module.tokens, steps=trainer.global_step)
    run.say(
        f"stopped after {trains.minutes:g} minutes at step {trainer.global_step} of {trains.max_steps}: go on with "
        f"resume=true hydra.run.dir={run.folder}"
    )


def conclude(run: Run, module: Any, exports: Exports, logger: Any) -> None:
    """The picture of the run, and what a tracker shows of its drafters."""
    logger.finalize("success")
    title = f"{module.target.name}: {module.tokens:,} tokens in {module.seconds:.0f} s"
    drawn = training_figure(run.folder / "curves", read_metrics(run.folder), list(exports.groups), title)
    exports.finish(drawn[:1])
    if hasattr(logger, "report"):
        folders = {name: run.folder / BEST / name for name in exports.groups}
        logger.report(module.validated["figures"], folders)
