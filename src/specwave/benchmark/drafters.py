"""From the `checkpoint` key to drafter folders, with a label and the rules that choose their layers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    rules: tuple[str, ...]
    method: str = "eagle3"


def find_drafters(
    checkpoint: str | Sequence[str] | None, rules: Mapping[str, str | Sequence[str]] | None = None
) -> list[DrafterFolder]:
    """The drafters that `checkpoint` names: drafter folders, or training runs (every drafter in their `drafters/`).

    Args:
        rules: by label, what to call the rules that choose a drafter's layers, in place of what its card says.

    Raises:
        UserError: for an entry that is neither; rules of a drafter that is not among them.
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
            own = (rule,) if rule else ()
        switches = card.get("switches")
        label = group_name(layers, switches if isinstance(switches, dict) else None) if layers else path.name
        same = sum(other.label == label or other.label.startswith(f"{label}_") for other in found)
        method = str(card.get("method", "eagle3"))
        found.append(DrafterFolder(path, f"{label}_{same + 1}" if same else label, layers, own, method))
    return _renamed(found, rules or {})


def _renamed(drafters: Sequence[DrafterFolder], rules: Mapping[str, Any]) -> list[DrafterFolder]:
    labels = [drafter.label for drafter in drafters]
    given: dict[str, tuple[str, ...]] = {}
    for label, named in rules.items():
        if label not in labels:
            there = f"there are {', '.join(labels)}" if labels else "checkpoint names none"
            raise UserError("rules", label, f"no drafter has this label; {there}")
        texts = [named] if isinstance(named, str) else named
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise UserError(f"rules.{label}", named, "give the name of a rule, or a list of names")
        given[label] = tuple(texts)
    return [replace(drafter, rules=given.get(drafter.label, drafter.rules)) for drafter in drafters]


def size_of(folder: Path) -> dict[str, int] | None:
    """`parameters` and `bytes` of a drafter, from the header of its file: nothing is loaded. None without a file.

    Engines read one-layer drafters as of two layers, one of them with zeros in `fc`: that one is not counted.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        return None
    with reading("checkpoint", path, "export the drafter again"), open(path, "rb") as stream:
        tensors = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        tensors.pop("__metadata__", None)
        padded = read_json(folder / "card.json", "checkpoint").get("padding_layer") is not None
        parameters = stored = 0
        for name, tensor in tensors.items():
            if padded and name.startswith("fc_norm.1."):
                continue
            half = 2 if padded and name == "fc.weight" else 1
            begin, end = tensor["data_offsets"]
            stored += (end - begin) // half
            parameters += math.prod(tensor["shape"]) // half if "F" in tensor["dtype"] else 0
    return {"parameters": parameters, "bytes": stored}


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
