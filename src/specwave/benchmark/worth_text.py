"""What a study of acceptance says: sentences, then tables, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specwave.benchmark.association import Found
from specwave.benchmark.worth import ONE_SIZE, OUTCOMES, PREDICTORS, Estimate, Study

SAYS = {1: "above 0", -1: "below 0", 0: "the sign is open"}


def markdown(study: Study, found: Sequence[Estimate], title: str) -> str:
    """worth.md: what a reader takes home first, all figures behind it."""
    parts = [f"# {title}", setting(study), *sections(study, found)]
    return "\n\n".join(parts) + "\n"


def sections(study: Study, found: Sequence[Estimate]) -> list[str]:
    said = [sentence(one) for one in found if one.outcome == "tau" and one.scope == ONE_SIZE]
    parts = ["\n".join(f"- {one}" for one in [*said, *noise(study)]), REMARK]
    for outcome, symbol in OUTCOMES.items():
        own = [one for one in found if one.outcome == outcome]
        if own:
            parts += [f"## {symbol} on each predictor", table(own, symbol)]
    parts += ["## The sets", set_table(study)]
    return parts


REMARK = (
    "Slopes and Spearman's ρ with 95 % intervals: over groups and questions drawn anew for τ, over groups alone for τ̂, "
    "whose prompts are not drawn. They hold for one seed's drafters at this budget. With so many intervals one in "
    "twenty misses by chance."
)


def setting(study: Study) -> str:
    """How many of what."""
    counts = ", ".join(f"{study.sizes.count(size)} of m = {size}" for size in sorted(set(study.sizes)))
    steps = sorted({drafter.step for one in study.sets for drafter in one.drafters.values()})
    trained = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]} (as each validated best)"
    again = f"; {len(study.repeated)} of them with {len(study.seeds)} seeds" if len(study.seeds) > 1 else ""
    return (
        f"{len(study.sets)} sets ({counts}), each a drafter of {trained} training steps{again}; "
        f"τ on {len(study.questions)} questions."
    )


def sentence(one: Estimate) -> str:
    """0.1 nat of raw entropy is worth −0.010 τ (−0.030 to +0.010)."""
    step, slope, rank = one.predictor.step, one.found.slope, one.found.spearman
    worth = f"{one.predictor.per} is worth {signed(slope.value * step)} {OUTCOMES[one.outcome]}"
    return (
        f"Among {one.scope}, {worth}{_range(slope, step)}: {SAYS[slope.sign]}; "
        f"ρ {signed(rank.value, 2)}{_range(rank, 1, 2)}, {one.found.groups} sets."
    )


def noise(study: Study) -> list[str]:
    """What another seed would have given, and what is told apart in spite of it."""
    said = []
    for outcome, symbol in OUTCOMES.items():
        own, figures = study.noise(outcome), study.outcomes[outcome].values.tolist()
        if own is None:
            continue
        apart, pairs = own.told_apart(figures)
        ceiling = math.sqrt(own.reliability(study.spread(outcome)))
        said.append(
            f"{own.groups} sets with {own.seeds} seeds: a seed moves {symbol} by {own.deviation:.3f} (standard "
            f"deviation, {(own.groups - 1) * (own.seeds - 1)} degrees of freedom). Drafters of one seed are told apart "
            f"from {own.apart:.3f} on: {apart} of {pairs} pairs are, where chance alone would part "
            f"{0.05 * pairs:.0f}. Among sets of one size no predictor could correlate with {symbol} by more than about "
            f"{ceiling:.2f}."
        )
    return said or ["No set was trained with a second seed: how much of a difference is chance is not known."]


def table(found: Sequence[Estimate], symbol: str) -> str:
    """A row for each predictor and scope."""
    heads = ["predictor", "among", "sets", f"{symbol} per step", "step", "Spearman's ρ", "Pearson's r"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in found:
        own = one.found
        cells = [
            one.predictor.label,
            one.scope,
            str(own.groups),
            f"{signed(own.slope.value * one.predictor.step)}{_range(own.slope, one.predictor.step)}",
            f"{one.predictor.step:g}",
            f"{signed(own.spearman.value, 2)}{_range(own.spearman, 1, 2)}",
            f"{signed(own.pearson.value, 2)}{_range(own.pearson, 1, 2)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def set_table(study: Study) -> str:
    """Every set by τ, the best one first; τ under every further seed beside it."""
    others = study.seeds[1:]
    heads = ["layers", "origin", *(each.label for each in PREDICTORS), "τ̂", "τ"]
    heads += [f"τ, seed {seed}" for seed in others]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    tau, tau_hat = (study.outcomes[name].values.tolist() for name in ("tau", "tau_hat"))
    again = {
        (place, seed): row[number]
        for place, row in zip(study.repeated, study.by_seed("tau"), strict=True)
        for number, seed in enumerate(study.seeds)
    }
    for place in sorted(range(len(study.sets)), key=lambda place: -tau[place]):
        one = study.sets[place]
        told = [one.predictors.get(each.name) for each in PREDICTORS]
        cells = [", ".join(map(str, one.layers)), ", ".join(one.origin)]
        cells += ["–" if value is None else f"{value:.3f}" for value in told]
        cells += [f"{tau_hat[place]:.3f}", f"{tau[place]:.3f}"]
        cells += [f"{again[place, seed]:.3f}" if (place, seed) in again else "" for seed in others]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def signed(value: float, digits: int = 3) -> str:
    """+0.010, −0.010, 0.000."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text if any(letter in text for letter in "123456789") else text.lstrip("+−")


def _range(found: Found, step: float, digits: int = 3) -> str:
    if found.interval is None:
        return " (no interval)"
    low, high = (signed(end * step, digits) for end in found.interval)
    return f" ({low} to {high})"
