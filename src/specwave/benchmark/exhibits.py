"""What a report shows of how its drafters came about: training curves, and the pictures in their folders."""

from __future__ import annotations

import base64
import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specwave.artifacts import read_json
from specwave.benchmark.figures import Plot, curves
from specwave.benchmark.results import Result

_TYPES = {".svg": "image/svg+xml", ".png": "image/png"}
_CAPTIONS = {  # pictures that a drafter folder may carry, by stem
    "entropy": "Matrix entropy over depth, with the chosen layers marked",
    "cka": "CKA between layers, with the transitions between depth compartments",
    "curves": "Training curves as the training run drew them",
}
_CURVES = {  # panel → the column of metrics.csv behind "<drafter>/"
    "training loss, nats": "loss",
    "τ̂ on held-out prompts": "val_tau_hat",
}


@dataclass(frozen=True)
class Picture:
    source: str  # a data: address
    caption: str


def training_curves(methods: Sequence[Result], labels: Sequence[str]) -> Plot | None:
    """Loss and τ̂ over training, of every drafter whose training run is at hand; None when none is."""
    panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for label, result in zip(labels, methods, strict=True):
        for panel, line in read_curves(result.drafter).items():
            panels.setdefault(panel, {})[label] = line
    return curves("Training curves", list(panels.items())) if panels else None


def metrics_file(drafter: Path | None) -> Path | None:
    """The metrics.csv of the run that trained the drafter in <run>/drafters/<name>, if it is still there."""
    path = drafter.parent.parent / "metrics.csv" if drafter is not None else None
    return path if path is not None and path.is_file() else None


def _number(cell: str | None) -> float | None:
    """A cell's number; None where it is empty, damaged or not finite."""
    try:
        value = float(cell or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def read_curves(drafter: Path | None) -> dict[str, tuple[list[float], list[float]]]:
    """(steps, values) by panel."""
    path = metrics_file(drafter)
    if path is None or drafter is None:
        return {}
    with open(path, newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    found = {}
    for panel, column in _CURVES.items():
        cells = [(row.get("step"), row.get(f"{drafter.name}/{column}")) for row in rows]
        numbers = [(_number(step), _number(value)) for step, value in cells]
        points = [(step, value) for step, value in numbers if step is not None and value is not None]
        if points:
            found[panel] = ([step for step, _ in points], [value for _, value in points])
    return found


def pictures(methods: Sequence[Result], labels: Sequence[str]) -> list[Picture]:
    """The pictures in the drafters' folders; one that several share is shown once."""
    owners: dict[tuple[str, str], list[str]] = {}
    for label, result in zip(labels, methods, strict=True):
        folder = result.drafter
        if folder is None or not (folder / "card.json").is_file():
            continue
        for name in read_json(folder / "card.json", "checkpoint").get("pictures") or []:
            path = folder / name
            drawn_here = path.stem == "curves" and metrics_file(folder) is not None
            if drawn_here or path.suffix not in _TYPES or not path.is_file():
                continue
            address = f"data:{_TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"
            owners.setdefault((path.stem, address), []).append(label)
    found = []
    for (stem, address), having in owners.items():
        whose = "" if len(having) == len(labels) else f" ({', '.join(having)})"
        found.append(Picture(address, f"{_CAPTIONS.get(stem, stem)}{whose}"))
    return found
