"""From the `checkpoint` key to drafter folders, with a label and the rule that chose their layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwave.artifacts import UserError, assets_dir, group_name, read_json, reading

BUILTIN = "builtin"  # as a checkpoint: the drafter that specwave brings for the target


@dataclass(frozen=True)
class DrafterFolder:
    """One drafter to evaluate. `label` is unique among those evaluated together; `method` is its card's."""

    path: Path
    label: str
    layers: list[int]
    rule: str | None
    method: str = "eagle3"


def find_drafters(checkpoint: str | Sequence[str] | None) -> list[DrafterFolder]:
    """The drafters that `checkpoint` names: drafter folders, or training runs (every drafter in their `drafters/`).

    Raises:
        UserError: for an entry that is neither.
    """
    entries = [] if checkpoint is None else [checkpoint] if isinstance(checkpoint, str) else list(checkpoint)
    if checkpoint is not None and not entries:
        raise UserError("checkpoint", checkpoint, "give null, a drafter folder, or a list of them")
    paths = [path for entry in entries for path in _folders(entry)]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UserError("checkpoint", twice, "the drafter is named twice")
    found: list[DrafterFolder] = []
    for path in paths:
        card = read_json(path / "card.json", "checkpoint") if (path / "card.json").is_file() else {}
        with reading("checkpoint", path / "card.json", "export the drafter again"):
            layers, rule = [layer for layer in card.get("layers") or [] if isinstance(layer, int)], rule_of(card)
        switches = card.get("switches")
        label = group_name(layers, switches if isinstance(switches, dict) else None) if layers else path.name
        same = sum(other.label == label or other.label.startswith(f"{label}_") for other in found)
        method = str(card.get("method", "eagle3"))
        found.append(DrafterFolder(path, f"{label}_{same + 1}" if same else label, layers, rule, method))
    return found


def builtin_drafter(fingerprint: str, method: str = "eagle3") -> str | None:
    """The folder of the drafter that specwave brings for the target of this fingerprint; None if it brings none."""
    for path in sorted(assets_dir().glob("*/card.json")):
        card = read_json(path, "checkpoint")
        if card["target"]["fingerprint"] == fingerprint and card["method"] == method:
            return str(path.parent)
    return None


def _folders(entry: Any) -> list[Path]:
    if not isinstance(entry, str) or not entry:
        raise UserError("checkpoint", entry, "every entry must be the path of a folder")
    path = Path(entry).expanduser().resolve()
    if not path.is_dir():
        raise UserError("checkpoint", entry, "there is no such folder")
    if any((path / name).is_file() for name in ("card.json", "config.json", "model.safetensors")):
        return [path]  # maybe incomplete: whoever loads it says what is missing
    inside = [folder for folder in (path / "drafters").glob("*") if (folder / "card.json").is_file()]
    if not inside:
        remedy = "neither a drafter folder (card.json, model.safetensors) nor a training run with finished drafters/"
        raise UserError("checkpoint", entry, remedy)
    return sorted(inside, key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name)])


def rule_of(card: dict[str, Any]) -> str | None:
    """The rule that chose a drafter's layers: what its card says, else the fixed rule that gives them."""
    for place in (card, card.get("training") or {}, card.get("data") or {}):
        if place.get("rule"):
            return str(place["rule"])
    from specwave.layers.selectors import RULES  # with torch: not for a report's sake

    layers, num_layers = card.get("layers"), (card.get("target") or {}).get("num_layers")
    if not layers or not num_layers:
        return None
    return next((name for name, rule in RULES.items() if sorted(rule(num_layers)) == sorted(layers)), None)
