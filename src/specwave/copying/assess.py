"""What trained probes are worth: figures of every site on prompts they have not met, the choice among them, tables.

Penalty, layer and threshold are chosen on validation prompts; the figures are of test prompts. The rule that is judged
is the one that decodes: a token triggers a copy when it stood before *and* its probability reaches the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specwave.copying.answers import Labelled
from specwave.copying.batches import batches, logits
from specwave.copying.capture import States, column_of
from specwave.copying.judge import auc, calibration, precision_recall
from specwave.copying.probe import Classes, Probes, fit
from specwave.copying.resample import auc_intervals
from specwave.copying.settings import LinearProbe, site_of
from specwave.copying.simulate import GRID, best_threshold, copy_lengths

_EDGE = 1e-6  # thresholds lie between 0 and 1, which probabilities may reach when they are rounded
Row = dict[str, Any]


def train(states: States, training: Labelled, validation: Labelled, settings: LinearProbe) -> Probes:
    """The probes of all sites of `states`.

    Raises:
        UserError: no copied token, no other one, or none as long as a run, in either part.
    """
    training.check("training answers")
    validation.check("validation answers")
    return fit(
        batches(states, training, settings.offset, settings.batch_tokens, settings.seed),
        batches(states, validation, settings.offset, settings.batch_tokens),
        Classes.of(training.copied),
        l2=settings.l2,
        epochs=settings.epochs,
        rate=settings.rate,
    )


# ---------------------------------------------------------------- every site


@dataclass(frozen=True)
class Assessment:
    """Figures of all sites, which one is chosen with which threshold, what it says of the test tokens [N], and what
    copies of some lengths bring where it says copy (on validation answers)."""

    rows: list[Row]
    place: int
    threshold: float
    probabilities: Tensor
    simulated: list[Row]
    lengths: list[Row]

    @property
    def chosen(self) -> Row:
        return self.rows[self.place]


def assess(
    probes: Probes,
    states: States,
    validation: Labelled,
    test: Labelled,
    settings: LinearProbe,
    forward: Callable[[], Callable[[int], float]],
) -> Assessment:
    """Judges all probes and chooses one.

    Args:
        forward: gives T(k), seconds of a forward over k tokens; asked only for thresholds by throughput.
    """
    said_PN, held_PN = (logits(probes, states, data, settings.offset) for data in (validation, test))
    areas_P = auc(said_PN, validation.all_copied)
    rows = []
    for place, figures in enumerate(_test_rows(held_PN, test, settings)):
        site, layer = site_of(place, states.num_layers)
        threshold, f1 = f1_threshold(said_PN[place], validation)
        own: Row = {"site": site, "layer": layer, "l2": _rounded(probes.l2[place])}
        own |= {"validation_loss": float(probes.loss[place]), "validation_auc": float(areas_P[place])}
        own |= {"threshold": threshold, "validation_f1": f1}
        rows.append(own | figures | rule_figures(held_PN[place], test, threshold))
    able = [
        place
        for place, row in enumerate(rows)
        if settings.site in (None, row["site"]) and settings.layer in (None, row["layer"])
    ]
    place = max(able, key=lambda one: rows[one]["validation_auc"])
    simulated: list[Row] = []
    said_N = said_PN[place].double().sigmoid()
    if settings.threshold == "throughput":
        best, rates_K = best_threshold(said_N, validation.answers, settings.rounds, forward())
        valid = rule_figures(said_PN[place], validation, best)["f1"]
        rows[place] |= {"threshold": best, "validation_f1": valid} | rule_figures(held_PN[place], test, best)
        simulated = [
            {"threshold": one, "tokens_per_second": float(rate)} for one, rate in zip(GRID, rates_K, strict=True)
        ]
    threshold = rows[place]["threshold"]
    lengths = copy_lengths(said_N, validation.answers, threshold)
    return Assessment(rows, place, threshold, held_PN[place].double().sigmoid(), simulated, lengths)


def _test_rows(logits_PN: Tensor, test: Labelled, settings: LinearProbe) -> list[Row]:
    """AUC with its interval, over all tokens and over repeated ones; average precision; calibration error."""
    labels, again = test.all_copied, test.all_repeated
    areas, among = auc(logits_PN, labels), auc(logits_PN[:, again], labels[again])
    low = high = areas.new_full(areas.shape, math.nan)
    if settings.resamples and test.both:
        low, high = auc_intervals(logits_PN, labels, test.template_of, settings.resamples, settings.seed)
    rows = []
    for place, logits_N in enumerate(logits_PN):
        row: Row = {name: known(ends[place]) for name, ends in (("auc", areas), ("auc_low", low), ("auc_high", high))}
        row["auc_repeated"] = known(among[place])
        row["average_precision"] = row["calibration_error"] = None
        if bool(labels.any()):
            row["average_precision"] = precision_recall(logits_N, labels).average_precision
            row["calibration_error"] = calibration(logits_N.double().sigmoid(), labels).error
        rows.append(row)
    return rows


def f1_threshold(logits_N: Tensor, data: Labelled) -> tuple[float, float]:
    """(threshold, F1) of the rule, best on these tokens: those that stood nowhere before trigger nothing."""
    again = data.all_repeated
    threshold, f1 = precision_recall(logits_N[again].double().sigmoid(), data.all_copied[again]).best_f1()
    return min(max(threshold, _EDGE), 1 - _EDGE), f1


def rule_figures(logits_N: Tensor, data: Labelled, threshold: float) -> Row:
    """Precision, recall and F1 of the rule; None where nothing triggers or nothing is copied."""
    said = data.all_repeated & (logits_N.double().sigmoid() >= threshold)
    return _counted(said, data.all_copied)


def _counted(said_N: Tensor, copied_N: Tensor) -> Row:
    hits, triggers, copied = (int(one.sum()) for one in (said_N & copied_N, said_N, copied_N))
    f1 = 2 * hits / (triggers + copied) if triggers + copied else None
    return {"precision": share(hits, triggers), "recall": share(hits, copied), "f1": f1}


# ---------------------------------------------------------------- triggers


def trigger_rows(everything: Labelled, test: Labelled, said_N: Tensor) -> list[Row]:
    """The plain-repeat trigger (the token stood before) by domain and kind, and on test prompts the probe's beside it.

    Args:
        said_N: bool, of which test tokens the probe says that they are copied; those of them that stood before trigger.
    """
    return _grouped("all", everything, None) + _grouped("test", test, said_N & test.all_repeated)


def _grouped(part: str, data: Labelled, said_N: Tensor | None) -> list[Row]:
    groups: dict[tuple[str, str], list[int]] = {("all", "all"): list(range(len(data)))}
    for number, one in enumerate(data.answers):
        groups.setdefault((one.domain or "unknown", "all"), []).append(number)
    for number, one in enumerate(data.answers):
        groups.setdefault((one.domain or "unknown", one.kind), []).append(number)
    rows = []
    for (domain, kind), numbers in sorted(groups.items(), key=lambda entry: (entry[0][1] != "all", entry[0])):
        mine_N = torch.isin(data.prompt_of, torch.tensor(numbers, dtype=torch.int64))
        copied, again = data.all_copied & mine_N, data.all_repeated & mine_N
        tokens, triggers, hits = int(mine_N.sum()), int(again.sum()), int(copied.sum())
        row: Row = {"part": part, "domain": domain, "kind": kind, "prompts": len(numbers), "tokens": tokens}
        row |= {"repeated": triggers, "copied": hits, "trigger_rate": share(triggers, tokens)}
        row |= {"trigger_precision": share(hits, triggers), "accidental": share(triggers - hits, triggers)}
        for name in ("probe_rate", "probe_precision", "probe_recall", "probe_f1"):
            row[name] = None
        if said_N is not None:
            said = said_N & mine_N
            row["probe_rate"] = share(int(said.sum()), tokens)
            row |= {f"probe_{name}": value for name, value in _counted(said, copied).items()}
        rows.append(row)
    return rows


# ---------------------------------------------------------------- transfer


def transfer_rows(
    states: States, training: Labelled, validation: Labelled, test: Labelled, chosen: Row, settings: LinearProbe
) -> list[Row]:
    """Probes of the chosen site trained on one domain each, and on all, tested on each. A domain in which nothing, or
    everything, is copied trains none; its rows say so."""
    own = states.at(column_of(chosen["site"], chosen["layer"]))
    domains = list(dict.fromkeys(one.domain for one in training.answers if one.domain))
    rows = []
    for source in ["all", *domains]:
        learnt, judged = (data if source == "all" else data.of(source) for data in (training, validation))
        row: Row = {"trained_on": source, "train_prompts": len(learnt), "train_tokens": learnt.tokens}
        row["train_copied"] = int(learnt.all_copied.sum())
        probes: Probes | None = None
        threshold = 0.0
        if learnt.both and judged.both:
            probes = train(own, learnt, judged, settings)
            threshold, _ = f1_threshold(logits(probes, own, judged, settings.offset)[0], judged)
        for goal in ["all", *domains]:
            held = test if goal == "all" else test.of(goal)
            figures: Row = dict.fromkeys(("auc", "precision", "recall", "f1"))
            if probes is not None and len(held):
                said_PN = logits(probes, own, held, settings.offset)
                figures = {"auc": known(auc(said_PN, held.all_copied)[0])}
                figures |= rule_figures(said_PN[0], held, threshold)
            counts = {"tested_on": goal, "test_tokens": held.tokens, "test_copied": int(held.all_copied.sum())}
            rows.append(row | counts | figures)
    return rows


# ---------------------------------------------------------------- numbers


def share(some: int, of: int) -> float | None:
    return some / of if of else None


def known(value: Tensor | float) -> float | None:
    """None where there is no number."""
    number = float(value)
    return None if math.isnan(number) else number


def _rounded(value: Tensor) -> float:
    """A float32 as it was given."""
    return float(f"{float(value):.6g}")


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows in Markdown."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(_cell(row[name]) for name in columns)} |" for row in rows)]) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
