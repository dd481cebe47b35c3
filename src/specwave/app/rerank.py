"""`select.py rerank=tau_hat`: candidates of an earlier selection, in the order of the acceptance that training found.

Selection and training meet through files: select.py (candidates) → train.py (all together, one budget, the same
held-out prompts) → the cards of its drafters → here, a selection.json like any other.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specwave.app.collate import csv_text
from specwave.app.exports import BEST
from specwave.app.run import read_run
from specwave.artifacts import Selection, UserError, read_json, reading, write_text

if TYPE_CHECKING:
    from specwave.app.run import Run
    from specwave.app.select import SelectConfig

KEY, GRAMS = "rerank.training", "grams.safetensors"


@dataclass
class Rerank:
    """`conf/rerank/tau_hat.yaml`."""

    training: str
    selection: str | None = None


@dataclass(frozen=True)
class Trained:
    """What the card of a drafter says."""

    name: str  # of its folder
    layers: tuple[int, ...]
    fingerprint: str  # of its target
    tau_hat: float


def rerank(config: SelectConfig, run: Run) -> float:
    """Writes selection.json with the sets by τ̂, best first; the best τ̂.

    Raises:
        UserError: the folder holds no finished training of a selection's sets; drafters or candidates of another
            target; a drafter without a validation.
    """
    settings, identity = config.rerank, config.model.identify()
    folder = Path(settings.training).expanduser()
    record, drafters = finished_training(folder), trained(folder)
    named = settings.selection or record["config"].get("selection")
    if named is None:
        remedy = "it trained sets of no selection: name the candidates with rerank.selection=<selection.json>"
        raise UserError(KEY, folder, remedy)
    path = Path(named).expanduser()
    candidates = Selection.load(path, "rerank.selection")
    owners = {("rerank.selection", path): candidates.fingerprint}
    owners |= {(KEY, folder / BEST / one.name): one.fingerprint for one in drafters}
    for (key, place), fingerprint in owners.items():
        if fingerprint != identity.fingerprint:
            remedy = f"it is of another target than {identity.name}: choose the model that it was made for"
            raise UserError(key, place, remedy)
    grams = (path if path.is_dir() else path.parent) / GRAMS
    beam = in_order(candidates, drafters, grams)
    best, layers = beam[0], [entry["layers"] for entry in beam]
    untrained = [entry["layers"] for entry in candidates.beam if entry["layers"] not in layers]
    budget = {"steps": record["step"], "tokens": record["tokens"], "seed": record["seed"]}
    facts = {"by": "tau_hat", "training": folder.resolve().name, "candidates": candidates.selector}
    facts |= budget | {"untrained": untrained}

    from specwave.app.sweep_figures import candidates_figure

    title = f"{identity.name}: candidates after {budget['tokens']:,} tokens of one training"
    pictures = candidates_figure(run.folder / "candidates", beam, title)
    write_text(run.folder / "candidates.csv", csv_text(beam))
    if grams.is_file():
        shutil.copyfile(grams, run.folder / GRAMS)
    settings_before = {key: value for key, value in (candidates.settings or {}).items() if key != "rerank"}
    Selection(
        **{
            **vars(candidates),
            "selector": "tau_hat",
            "m": len(best["layers"]),
            "layers": best["layers"],
            "entropy": best["entropy"],
            "score": best["tau_hat"],
            "beam": beam,
            "optimum": None,
            "rerank": facts,
            "settings": settings_before,
        }
    ).save(run.folder / "selection.json")  # last: a folder with a selection is complete
    run.note(
        layers=best["layers"], num_layers=candidates.num_layers, entropy=best["entropy"], tau_hat=best["tau_hat"],
        **budget,
    )  # fmt: skip
    run.say(table(beam))
    run.say(
        f"tau_hat on held-out prompts after {budget['steps']} steps, {budget['tokens']:,} tokens of one training; "
        f"{len(untrained)} candidates were not trained. One seed: small gaps may be chance"
    )
    names = ["candidates.csv", *(picture.name for picture in pictures)]
    run.say(f"written: {', '.join(names)}, {run.folder / 'selection.json'}")
    return best["tau_hat"]


def finished_training(folder: Path) -> dict[str, Any]:
    """The run.yaml of a training that came to its end."""
    record = read_run(folder, KEY)
    if record is None or record["app"] != "train" or record["config"].get("task") != "train":
        raise UserError(KEY, folder, "no training is here: name the run folder of a train.py selection=… top=…")
    if record["status"] != "finished":
        remedy = f"the training there is {record['status']}: go on with resume=true hydra.run.dir={folder}"
        raise UserError(KEY, folder, remedy)
    return record


def trained(folder: Path) -> list[Trained]:
    """The drafters of a training, as they validated best."""
    found = []
    for path in sorted(folder.glob(f"{BEST}/*/card.json")):
        card = read_json(path, KEY)
        with reading(KEY, path, "train again"):
            own, validation = tuple(card["layers"]), card["training"]["validation"]
            fingerprint = str(card["target"]["fingerprint"])
            tau_hat = float(validation["tau_hat"]) if validation else None
        if tau_hat is None:
            raise UserError(KEY, path.parent, "this drafter was never validated, so nothing says how good it is")
        found.append(Trained(path.parent.name, own, fingerprint, tau_hat))
    if not found:
        raise UserError(KEY, folder, f"the training left no drafter in {BEST}/")
    return found


def in_order(candidates: Selection, drafters: Sequence[Trained], grams: Path) -> list[dict[str, Any]]:
    """Entries of a beam by τ̂, ties to the lexicographically smallest set; of several drafters for a set the best.

    What the candidates say of a set stays, their score under `candidate_score`. A set that is none of them (one of the
    training's `groups`) has its entropy from the Grams beside them.
    """
    told = {tuple(entry["layers"]): entry for entry in candidates.beam}
    best: dict[tuple[int, ...], Trained] = {}
    for one in sorted(drafters, key=lambda one: (-one.tau_hat, one.name)):
        best.setdefault(one.layers, one)
    beam = []
    for layers, one in sorted(best.items(), key=lambda entry: (-entry[1].tau_hat, entry[0])):
        own = told.get(layers) or {"entropy": _entropy(candidates, layers, grams), "origin": ["training"]}
        origin = own.get("origin") or [candidates.selector]
        beam.append(
            {
                "layers": list(layers),
                "entropy": own["entropy"],
                "tau_hat": one.tau_hat,
                "origin": origin,
                "drafter": one.name,
            }
            | ({"candidate_score": own["score"]} if "score" in own else {})
        )
    if any("candidate_score" in entry for entry in beam):
        beam = [{"candidate_score": None} | entry for entry in beam]
    return beam


def _entropy(candidates: Selection, layers: tuple[int, ...], grams: Path) -> float:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from specwave.layers.groups import score

    with reading("rerank.selection", grams, "select again", also=(SafetensorError,)):
        tensor = load_file(grams)["grams"]
    selector = (candidates.settings or {}).get("selector", {})
    return score(tensor, [layers], selector.get("alpha", 1.0))[0].entropy


def table(beam: Sequence[dict[str, Any]]) -> str:
    """What is printed: a row for each set."""
    lines = [f"{'layers':<16} {'tau_hat':>8} {'entropy':>8}  proposed by"]
    for entry in beam:
        layers = ",".join(map(str, entry["layers"]))
        names = ", ".join(entry["origin"])
        lines.append(f"{layers:<16} {entry['tau_hat']:>8.3f} {entry['entropy']:>8.4f}  {names}")
    return "\n".join(lines)
