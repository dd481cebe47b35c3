"""`select.py`: which layers of a target a drafter should see.

calibrate (or re-use a pass) → select → analyse → pictures, tables, selection.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from specwave.app.select_report import Findings, draw, standing_table, write_data
from specwave.artifacts import Selection, UserError, write_tensors
from specwave.layers.analysis import rule_standings, standings
from specwave.layers.calibrate import Calibrated
from specwave.layers.passes import calibrated
from specwave.layers.ranking import Ranking, worth_it
from specwave.layers.rows import Rows
from specwave.layers.selectors import fixed_rule
from specwave.layers.sensitivity import Effect, sensitivity
from specwave.layers.settings import Calibration, record
from specwave.layers.stability import Stability, bootstrap

if TYPE_CHECKING:
    from specwave.app.run import Run


@dataclass
class SelectConfig:
    """`conf/select.yaml`, groups already built: a ModelConfig, a Calibration, a selector, an Analysis."""

    model: Any
    calibration: Any
    selector: Any
    analysis: Any


def prepare(configs: Sequence[SelectConfig], say: Callable[[str], None]) -> None:
    """Before a sweep: one pass for all the row settings of its jobs, which then find theirs in the cache."""
    models = {repr(config.model): config.model for config in configs}
    for name, model in models.items():
        settings = [config.calibration for config in configs if repr(config.model) == name]
        try:
            calibrated(model, settings, say)
        except UserError:  # of this model: its jobs will say so, those of others go on
            continue


def main(config: SelectConfig, run: Run) -> float:
    """Selects and writes into the run's folder; the entropy of the chosen set, for sweepers that optimise it."""
    settings, selector, analysis = config.calibration, config.selector, config.analysis
    identity = config.model.identify()
    selector.check(identity.num_layers)  # before the answers, which take minutes
    analysis.check(identity.num_layers, selector.m_of(identity.num_layers))
    against = fixed_rule(analysis.against, identity.num_layers, "analysis.against") if analysis.resamples else ()
    (result,) = calibrated(config.model, [settings], run.say)
    if isinstance(result, UserError):
        raise result
    grams = result.prepared(settings.scale, settings.centre)
    outcome = selector.select(grams)
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
        beam=[{"layers": list(group.layers), "entropy": group.entropy} for group in outcome.groups],
        layer_entropy=found.layer_entropy.tolist(),
        transitions=found.transitions.tolist(),
        calibration=record(settings, result.counts(), identity.fingerprint),
        settings={"selector": asdict(selector), "calibration": asdict(settings)},
        optimum=found.optimum(),
    ).save(run.folder / "selection.json")

    optimum = found.optimum() or {}
    run.note(
        layers=list(best.layers), num_layers=identity.num_layers, entropy=best.entropy, gap=optimum.get("gap"),
        rank=optimum.get("rank"), calibration="re-used" if result.cached else "one pass", **result.counts(),
    )  # fmt: skip
    run.say(
        f"{result.rows} rows from {result.prompts} prompts ({result.prompts_dropped} without a block): "
        f"{result.tokens_kept} of {result.tokens_seen} positions kept"
    )
    run.say(standing_table(found))
    for stability in found.stability:
        run.say(stability.sentence())
    run.say("entropies in nats; a larger one says more directions, not by itself a better drafter")
    run.say(f"written: {', '.join(written)}, grams.safetensors, {run.folder / 'selection.json'}")
    return best.entropy


def _stability(
    result: Calibrated, config: SelectConfig, chosen: tuple[int, ...], against: tuple[int, ...], run: Run
) -> list[Stability]:
    settings, selector, analysis = config.calibration, config.selector, config.analysis
    found = []
    for over in ("prompts", "domains"):
        stability = bootstrap(
            result,
            lambda grams: selector.select(grams).groups[0].layers,
            chosen,
            (analysis.against, against),
            over=over,
            resamples=analysis.resamples,
            seed=analysis.seed,
            scale=settings.scale,
            centre=settings.centre,
            alpha=selector.alpha,
            copies=selector.reads_cka,
            searched=selector.name != "fixed",
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
