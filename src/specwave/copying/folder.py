"""A trained probe on disk: `card.json` and `probe.safetensors`, whole or absent.

    probe.safetensors   attention, block: float32 [N, D], a row for every layer's probe
    card.json           whose states they read, which site, layer and threshold are chosen, the figures of all of them

So another layer can be chosen later without training again; each has a threshold of its own in the card.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specwave.artifacts import LAYER_CONVENTION, UserError, read_json, reading, write_json, write_tensors
from specwave.copying.capture import SITES

if TYPE_CHECKING:
    from specwave.target import Target

KIND, SCHEMA = "linear_probe", 1
KEY = "probe_checkpoint"
FOLDER = "probe"  # in a run's folder
_CARD, _WEIGHTS = "card.json", "probe.safetensors"
_AGAIN = "train the probe again, or name another folder"


@dataclass(frozen=True)
class TrainedProbes:
    """What a probe folder holds: the weights [N, D] of each site, and the card."""

    weights: dict[str, Tensor]
    card: dict[str, Any]
    sha256: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.weights[SITES[0]])

    def threshold(self, site: str, layer: int) -> float:
        """The threshold that was best for this site and layer."""
        chosen = self.card["choice"]
        if (site, layer) == (chosen["site"], chosen["layer"]):
            return float(chosen["threshold"])
        rows = self.card["sites"]
        return float(next(row["threshold"] for row in rows if (row["site"], row["layer"]) == (site, layer)))


def write_probe(folder: Path, target: Target, weights_PD: Tensor, card: dict[str, Any]) -> None:
    """Writes a probe folder, the card last: with it the folder is whole.

    Args:
        weights_PD: after attention of all layers, then block outputs of all layers.
        card: at least `offset`, `n_train`, `choice` (site, layer, threshold) and `sites`, a row of figures for each.
    """
    halves = dict(zip(SITES, weights_PD.float().chunk(2), strict=True))
    write_tensors(folder / _WEIGHTS, halves)
    whose = {
        "name": target.name,
        "fingerprint": target.fingerprint,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
    }
    facts = {"schema": SCHEMA, "kind": KIND, "target": whose, "layer_convention": LAYER_CONVENTION}
    write_json(folder / _CARD, facts | card)


def find_probe(path: Path | str, key: str = KEY) -> Path:
    """The probe folder that a path names: itself, or `probe` in a run's folder.

    Raises:
        UserError: there is none.
    """
    given = Path(path).expanduser()
    if not given.is_dir():
        raise UserError(key, path, "there is no such folder")
    found = next((folder for folder in (given, given / FOLDER) if (folder / _CARD).is_file()), None)
    if found is None:
        raise UserError(key, path, f"no probe: {_CARD} and {_WEIGHTS} of a run of train.py task=probe are looked for")
    return found


def read_card(folder: Path, key: str = KEY) -> dict[str, Any]:
    """The card of a probe folder, checked.

    Raises:
        UserError: it is damaged, of another kind or convention.
    """
    path = folder / _CARD
    card = read_json(path, key)
    if card.get("kind") != KIND:
        raise UserError(key, folder, f"its card is of kind {card.get('kind')!r}, a {KIND} is expected: {_AGAIN}")
    if card.get("schema") != SCHEMA:
        raise UserError(key, folder, f"the schema of its card is {card.get('schema')!r}, {SCHEMA} is read: {_AGAIN}")
    if card.get("layer_convention") != LAYER_CONVENTION:
        raise UserError(
            key, folder, f"its layer_convention is {card.get('layer_convention')!r}, {LAYER_CONVENTION!r} is read"
        )
    with reading(key, path, _AGAIN):
        layers, choice = int(card["target"]["num_layers"]), card["choice"]
        rows = {(str(row["site"]), int(row["layer"])): float(row["threshold"]) for row in card["sites"]}
        if rows.keys() != {(site, layer) for site in SITES for layer in range(layers)}:
            raise ValueError("sites and layers of its figures")
        if any(type(row["layer"]) is not int for row in (*card["sites"], choice)):
            raise ValueError("a layer that is no whole number")
        if not all(0 < threshold < 1 for threshold in rows.values()):
            raise ValueError("a threshold outside of 0 … 1")
        if (choice["site"], choice["layer"]) not in rows or not 0 < float(choice["threshold"]) < 1:
            raise ValueError("its choice")
        str(card["target"]["name"]), str(card["target"]["fingerprint"]), int(card["offset"]), int(card["n_train"])
    return card


def read_probe(path: Path | str, key: str = KEY) -> TrainedProbes:
    """A probe folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    folder = find_probe(path, key)
    card = read_card(folder, key)
    weights_path = folder / _WEIGHTS
    with reading(key, weights_path, _AGAIN, also=(SafetensorError,)):
        weights = load_file(weights_path)
        size = [card["target"]["num_layers"], card["target"]["hidden_size"]]
        for site in SITES:
            if list(weights[site].shape) != size or weights[site].dtype != torch.float32:
                raise ValueError(f"{site} is {list(weights[site].shape)}, the card says {size}")
            if not bool(weights[site].isfinite().all()):
                raise ValueError(f"{site} holds NaN or infinity")
        sha256 = hashlib.sha256(weights_path.read_bytes()).hexdigest()
    return TrainedProbes(weights, card, sha256)


def check_probe(probes: TrainedProbes, target: Target, allow_other_target: bool = False, key: str = KEY) -> None:
    """Refuses a probe of another target; one of other sizes always.

    Raises:
        UserError: so.
    """
    made_for = probes.card["target"]
    for size, mine, its in (
        ("width", made_for["hidden_size"], target.hidden_size),
        ("number of layers", made_for["num_layers"], target.num_layers),
    ):
        if mine != its:
            raise UserError(key, made_for["name"], f"this probe's target has the {size} {mine}, {target.name} {its}")
    if made_for["fingerprint"] != target.fingerprint and not allow_other_target:
        raise UserError(
            key,
            made_for["name"],
            f"this probe was trained on another target than {target.name} (fingerprint {made_for['fingerprint'][:12]}, "
            f"here {target.fingerprint[:12]}): train one on it, or set allow_other_target=true",
        )
