"""`select.py`: which layers of a target a drafter should see.

calibrate (or re-use a pass) → select → analyse → pictures, tables, selection.json. `rerank=tau_hat`, which puts
candidates in the order of a training, is in rerank.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from specwave.app.select_report import Findings, draw, proxy_text, show, standing_table, write_data
from specwave.app.services import tracking
from specwave.artifacts import Selection, UserError, write_tensors
from specwave.layers.analysis import rule_standings, standings
from specwave.layers.calibrate import Calibrated
from specwave.layers.passes import calibrated
from specwave.layers.ranking import Ranking, worth_it
from specwave.layers.rows import Rows
from specwave.layers.selectors import Outcome, fixed_rule
from specwave.layers.sensitivity import Effect, sensitivity
from specwave.layers.settings import Calibration, record
from specwave.layers.spread import Spread
from specwave.layers.stability import Stability, bootstrap
from specwave.layers.step_passes import stepped

if TYPE_CHECKING:
    from torch import Tensor

    from specwave.app.run import Run


@dataclass
class SelectConfig:
    """`conf/select.yaml`, groups already built: a ModelConfig, a Calibration, a selector, an Analysis; a Rerank and
    a logger, or nothing."""

    model: Any
    calibration: Any
    selector: Any
    analysis: Any
    rerank: Any = None
    logger: Any = None


def prepare(configs: Sequence[SelectConfig], say: Callable[[str], None]) -> None:
    """Before a sweep: one pass for all the row settings of its jobs, which then find theirs in the cache."""
    configs = [config for config in configs if not config.rerank]
    models = {repr(config.model): config.model for config in configs}
    for name, model in models.items():
        settings = [config.calibration for config in configs if repr(config.model) == name]
        try:
            calibrated(model, settings, say)
        except UserError:  # of this model: its jobs will say so, those of others go on
            continue
    steps = {}
    for config in configs:
        if sampling := config.selector.sampling():
            steps[repr((config.model, config.calibration, sampling))] = (config.model, config.calibration, sampling)
    for model, settings, sampling in steps.values():
        with contextlib.suppress(UserError):
            stepped(model, settings, sampling, say)


def main(config: SelectConfig, run: Run) -> float:
    """Selects and writes into the run's folder; what the selector ranks by, for sweepers that optimise it. A tracker is
    shown what is written."""
    with tracking(config.logger, run) as tracker:
        if config.rerank:
            from specwave.app.rerank import rerank  # reads drafters, which selecting knows nothing of

            ranked_by = rerank(config, run)
        else:
            ranked_by = choose(config, run)
        if tracker is not None:
            show(tracker, run.folder)
    return ranked_by


def choose(config: SelectConfig, run: Run) -> float:
    """Selects by the states of a pass."""
    settings, selector, analysis = config.calibration, config.selector, config.analysis
    if analysis.sensitivity and selector.sampling():
        rule = f"varies the options of entropies, and selector={selector.name} ranks by drafting steps"
        raise UserError("analysis.sensitivity", "true", f"{rule}: use analysis=brief")
    if isinstance(selector, Spread) and (settings.scale != "none" or settings.centre):
        rule = "selector=spread takes entropies under every normalisation itself: leave calibration.centre=false"
        raise UserError("calibration.scale", settings.scale, f"{rule} and calibration.scale=none")
    identity = config.model.identify()
    selector.check(identity.num_layers)  # before the answers, which take minutes
    analysis.check(identity.num_layers, selector.m_of(identity.num_layers))
    against = fixed_rule(analysis.against, identity.num_layers, "analysis.against") if analysis.resamples else ()
    (result,) = calibrated(config.model, [settings], run.say)
    if isinstance(result, UserError):
        raise result
    grams = result.prepared(settings.scale, settings.centre)
    outcome = _outcome(config, grams, run)
    best, ranking = outcome.groups[0], outcome.ranking
    if ranking is None and worth_it(analysis.ranking, grams, len(best.layers)):
        ranking = Ranking(grams, len(best.layers), selector.alpha, say=run.say)
    found = Findings(
        name=identity.name,
        selector=selector.name,
        alpha=selector.alpha,
        calibrated=result,
        centre=settings.centre,
        grams=grams,
        outcome=outcome,
        ranking=ranking,
        rules=rule_standings(grams, ranking, selector.alpha),
        chosen=standings(grams, {selector.name: best.layers}, ranking, selector.alpha)[0],
        stability=_stability(result, config, best.layers, against, run) if analysis.resamples else [],
        effects=_effects(config, run, identity.num_layers) if analysis.sensitivity else [],
    )
    write_tensors(run.folder / "grams.safetensors", {"grams": grams}, {"fingerprint": identity.fingerprint})
    written = write_data(run.folder, found)
    if analysis.figures:
        written += draw(run.folder, found)
    Selection(  # last: a folder with a selection is complete
        model=identity.name,
        fingerprint=identity.fingerprint,
        num_layers=identity.num_layers,
        selector=selector.name,
        m=len(best.layers),
        layers=list(best.layers),
        entropy=best.entropy,
        beam=[group.described() for group in outcome.groups],
        layer_entropy=found.layer_entropy.tolist(),
        transitions=found.transitions.tolist(),
        calibration=record(settings, result.counts(), identity.fingerprint),
        settings={"selector": asdict(selector), "calibration": asdict(settings)},
        optimum=found.optimum(),
        score=best.score,
        proxy=found.proxy,
    ).save(run.folder / "selection.json")

    optimum = found.optimum() or {}
    run.note(
        layers=list(best.layers), num_layers=identity.num_layers, entropy=best.entropy, score=best.score,
        gap=optimum.get("gap"), rank=optimum.get("rank"), calibration="re-used" if result.cached else "one pass",
        **result.counts(),
    )  # fmt: skip
    run.say(
        f"{result.rows} rows from {result.prompts} prompts ({result.prompts_dropped} without a block): "
        f"{result.tokens_kept} of {result.tokens_seen} positions kept"
    )
    run.say(standing_table(found))
    for stability in found.stability:
        run.say(stability.sentence())
    run.say("entropies in nats; a larger one says more directions, not by itself a better drafter")
    if found.proxy is not None:
        run.say(proxy_text(found.proxy))
    run.say(f"written: {', '.join(written)}, grams.safetensors, {run.folder / 'selection.json'}")
    return best.entropy if best.score is None else best.score


def _outcome(config: SelectConfig, grams: Tensor, run: Run) -> Outcome:
    """What the selector finds; where it fits anything, the conversations are first compared with the benchmarks."""
    settings, selector = config.calibration, config.selector
    sampling = selector.sampling()
    if sampling is None:
        return selector.select(grams)
    from specwave.app.contamination import compare_texts

    texts = ((each.id, "\n".join(text for _, text in each.messages)) for each in settings.conversations())
    key = "calibration.check_benchmark"
    contamination, lines = compare_texts(texts, settings.check_benchmark, key, "the calibration")
    for line in lines:
        run.say(line)
    run.note(contamination=contamination)
    return selector.select(grams, stepped(config.model, settings, sampling, run.say))


def _stability(
    result: Calibrated, config: SelectConfig, chosen: tuple[int, ...], against: tuple[int, ...], run: Run
) -> list[Stability]:
    settings, selector, analysis = config.calibration, config.selector, config.analysis
    found = []
    for over in ("prompts", "domains"):
        stability = bootstrap(
            result,
            (lambda grams: selector.select(grams).groups[0].layers) if selector.searched else (lambda grams: chosen),
            chosen,
            (analysis.against, against),
            over=over,
            resamples=analysis.resamples,
            seed=analysis.seed,
            scale=settings.scale,
            centre=settings.centre,
            alpha=selector.alpha,
            copies=selector.reads_cka,
            searched=selector.searched,
        )
        if stability is None:
            run.say(f"no bootstrap over {over}: the rows must belong to two of them at least, each to one")
        else:
            found.append(stability)
    return found


def _effects(config: SelectConfig, run: Run, num_layers: int) -> list[Effect]:
    def passes(settings: list[Calibration]) -> dict[Rows, Calibrated | UserError]:
        results = calibrated(config.model, settings, run.say)
        return {own.rows(): result for own, result in zip(settings, results, strict=True)}

    ranked = config.analysis.ranks(num_layers, config.selector.m_of(num_layers))
    return sensitivity(config.calibration, config.selector, passes, ranked)
