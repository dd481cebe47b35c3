"""`train.py task=probe`: probes that say whether a token is copied, for every layer and both sites, and what they are
worth.

check → prompts → the target answers → its states to disk → fit → judge → probe/, tables, pictures.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specwave.artifacts import UserError, cache_dir, write_text
from specwave.copying.answers import Labelled
from specwave.copying.capture import bytes_per_row, capture
from specwave.copying.settings import LinearProbe, Parts, ProbeData
from specwave.data.states import free_bytes, readable

if TYPE_CHECKING:
    from specwave.app.run import Run
    from specwave.app.train import TrainConfig
    from specwave.copying.assess import Assessment, Row
    from specwave.target import Target

ACCIDENTS = ("domain", "prompts", "tokens", "repeated", "copied", "accidental")
TRIGGERS = ("domain", "prompts", "trigger_rate", "trigger_precision", "probe_rate", "probe_precision", "probe_recall")
TRANSFER = (
    "trained_on",
    "tested_on",
    "train_prompts",
    "train_tokens",
    "test_tokens",
    "auc",
    "precision",
    "recall",
    "f1",
)


def check_task(config: TrainConfig) -> tuple[LinearProbe, ProbeData]:
    """The settings of the task.

    Raises:
        UserError: probe=none.
    """
    if not isinstance(config.probe, LinearProbe) or not isinstance(config.probe_data, ProbeData):
        raise UserError("probe", "none", "task=probe trains a probe: add probe=linear")
    return config.probe, config.probe_data


def train_probe(config: TrainConfig, run: Run) -> None:
    """Trains into the run's folder. Answers and states of an earlier attempt are taken up from the cache."""
    settings, source = check_task(config)
    prompts = source.prompts()
    target = config.model.load()
    settings.check_layer(target)
    rows, each = len(prompts) * (source.max_new_tokens + 1), bytes_per_row(target, settings.states)
    folder = cache_dir() if settings.states.path is None else Path(settings.states.path)
    run.say(
        f"{target.name}: {len(prompts)} prompts; their answers' states take up to {readable(rows * each)} "
        f"({each:,} bytes a token), {readable(free_bytes(folder))} are free"
    )
    if config.dry_run:
        run.note(prompts=len(prompts), bytes_at_most=rows * each)
        return
    parts = source.parts(target, prompts)
    training = Labelled(settings.chosen(parts.train), settings.n_train).check("training answers")
    validation = Labelled(parts.validation, settings.n_train).check("validation answers")
    test = Labelled(parts.test, settings.n_train)
    states = capture(target, parts.all, settings.states, run.say)

    from specwave.copying.assess import assess, train, transfer_rows, trigger_rows
    from specwave.target.clock import clock

    began = time.monotonic()
    probes = train(states, training, validation, settings)
    seconds = time.monotonic() - began
    found = assess(probes, states, validation, test, settings, partial(clock, target))
    triggers = trigger_rows(Labelled(parts.all, settings.n_train), test, found.probabilities >= found.threshold)
    transfer = transfer_rows(states, training, validation, test, found.chosen, settings) if settings.transfer else []

    data = _data_facts(source, parts, training, validation, test)
    write_card(run, target, settings, probes, found, data | {"fit_seconds": round(seconds, 1)})
    write_tables(run, found, triggers, transfer)
    draw(run, target, found, test)
    say_figures(run, found, triggers, transfer, seconds, training)


def _data_facts(
    source: ProbeData, parts: Parts, training: Labelled, validation: Labelled, test: Labelled
) -> dict[str, Any]:
    """Plain data for the card."""
    facts: dict[str, Any] = {"source": type(source).__name__, **asdict(source)}
    facts["answers"] = {name: len(getattr(parts, name)) for name in ("train", "validation", "test")}
    for name, one in (("trained_on", training), ("validation", validation), ("test", test)):
        copied = int(one.all_copied.sum())
        facts[name] = {"prompts": len(one), "tokens": one.tokens, "copied": copied}
    return facts


# ---------------------------------------------------------------- files


def write_card(
    run: Run, target: Target, settings: LinearProbe, probes: Any, found: Assessment, data: dict[str, Any]
) -> None:
    """The probe's folder."""
    from specwave.copying.assess import known
    from specwave.copying.folder import FOLDER, write_probe

    chosen = found.chosen
    card = {
        "offset": settings.offset,
        "n_train": settings.n_train,
        "choice": {"site": chosen["site"], "layer": chosen["layer"], "threshold": found.threshold,
                   "by": settings.threshold},
        "sites": [{key: known(value) if isinstance(value, float) else value for key, value in row.items()}
                  for row in found.rows],
        "simulated": found.simulated,
        "copies": found.lengths,
        "data": data,
        "training": asdict(replace(settings, states=replace(settings.states, path=None))),
    }  # fmt: skip
    write_probe(run.folder / FOLDER, target, probes.weights, card)


def write_tables(run: Run, found: Assessment, triggers: Sequence[Row], transfer: Sequence[Row]) -> None:
    """layers.csv, triggers.csv, transfer.csv and transfer.md, simulated.csv: those that have rows."""
    from specwave.copying.assess import table

    tables = {"layers": found.rows, "triggers": triggers, "transfer": transfer, "simulated": found.simulated}
    for name, rows in tables.items():
        if rows:
            write_text(run.folder / f"{name}.csv", _csv(rows))
    if transfer:
        write_text(run.folder / "transfer.md", table(transfer, TRANSFER))


def _csv(rows: Sequence[Row]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def draw(run: Run, target: Target, found: Assessment, test: Labelled) -> None:
    """AUC over depth; calibration of the chosen probe."""
    from specwave.copying.figures import calibration_figure, depth_figure
    from specwave.copying.judge import calibration

    chosen, again = found.chosen, test.all_repeated
    title = f"{target.name}: {test.tokens:,} tokens of {len(test)} test prompts"
    depth_figure(run.folder / "auc_over_depth", found.rows, chosen, title)
    curves = {
        "all tokens": calibration(found.probabilities, test.all_copied),
        "tokens that stood before": calibration(found.probabilities[again], test.all_copied[again]),
    }
    title = f"{target.name}: {_named(chosen)}"
    calibration_figure(run.folder / "calibration", curves, found.threshold, title)


def _named(row: Row) -> str:
    return f"layer {row['layer']}, {'after attention' if row['site'] == 'attention' else 'block output'}"


# ---------------------------------------------------------------- words


def say_figures(
    run: Run, found: Assessment, triggers: Sequence[Row], transfer: Sequence[Row], seconds: float, training: Labelled
) -> None:
    """The last words on the console and in run.yaml."""
    from specwave.copying.assess import known, table
    from specwave.copying.folder import FOLDER

    chosen = found.chosen
    facts = {key: chosen[key] for key in ("site", "layer", "threshold", "validation_auc", "auc", "auc_low", "auc_high")}
    facts |= {key: chosen[key] for key in ("auc_repeated", "precision", "recall", "f1", "calibration_error")}
    facts = {key: known(value) if isinstance(value, float) else value for key, value in facts.items()}
    run.note(**facts, tokens=training.tokens, training_seconds=round(seconds, 1))
    everything = [row for row in triggers if row["part"] == "all" and row["kind"] == "all"]
    run.note(accidental={row["domain"]: row["accidental"] for row in everything})
    run.say("tokens that stood before, and the share of them that is no copy:\n" + table(everything, ACCIDENTS))
    tested = [row for row in triggers if row["part"] == "test" and row["kind"] == "all"]
    run.say("test prompts, the plain trigger and the probe:\n" + table(tested, TRIGGERS))
    if transfer:
        run.say("transfer:\n" + table(transfer, TRANSFER))
    run.say(
        f"chosen: {_named(chosen)}, AUC {_number(chosen['auc'])} [{_number(chosen['auc_low'])}, "
        f"{_number(chosen['auc_high'])}], threshold {found.threshold:.3f}; {len(found.rows)} probes on "
        f"{training.tokens:,} tokens in {seconds:.0f} s"
    )
    run.say(f"written: {run.folder / FOLDER}")
    run.say(f"decode with it: python evaluate.py decoding=switchsd probe_checkpoint={run.folder / FOLDER}")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
