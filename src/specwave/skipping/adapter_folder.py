"""A trained adapter on disk: `model.safetensors`, `config.json` (its sizes) and `card.json` (whose it is, from what it
learned, its figures), whole or absent: the card is written last."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from specwave.artifacts import LAYER_CONVENTION, SCHEMA, UserError, read_json, reading, write_json, write_tensors
from specwave.skipping.adapter import Adapter, AdapterConfig

if TYPE_CHECKING:
    from specwave.target import Target

KEY, METHOD = "checkpoint", "kangaroo"  # the config key that names a folder; the card's method and the folder's name
AGAIN = "train the adapter again, or name another folder"


def write_adapter(
    folder: Path,
    adapter: Adapter,
    target: Target,
    *,
    dtype: torch.dtype = torch.bfloat16,
    data: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    pictures: Sequence[Path] = (),
) -> list[str]:
    """Writes the files, floats as `dtype`, and copies `pictures` beside them; returns warnings, of which it has none.

    A card exists only where the other files are whole.
    """
    (folder / "card.json").unlink(missing_ok=True)  # from here on the files may be of two adapters
    write_tensors(folder / "model.safetensors", {name: t.to(dtype) for name, t in adapter.state_dict().items()})
    write_json(folder / "config.json", asdict(adapter.config))
    for picture in pictures:
        shutil.copyfile(picture, folder / picture.name)
    card = {
        "schema": SCHEMA,
        "method": METHOD,
        "exit": adapter.config.exit,
        "layer_convention": LAYER_CONVENTION,
        "target": {"name": target.name, "fingerprint": target.fingerprint, "num_layers": target.num_layers},
        "pictures": [picture.name for picture in pictures],
        "data": data or {},
        "training": training or {},
    }
    write_json(folder / "card.json", card)
    return []


def read_adapter(path: Path | str) -> tuple[Adapter, dict[str, Any]]:
    """(adapter, card) of a folder.

    Raises:
        UserError: there is none; it is damaged, of another method, or contradicts itself.
    """
    folder = Path(path).expanduser()
    if not (folder / "card.json").is_file():
        remedy = "no adapter is here (card.json is missing): name the drafters/kangaroo that train.py drafter=kangaroo "
        raise UserError(KEY, path, f"{remedy}wrote")
    card = read_json(folder / "card.json", KEY)
    if card.get("method") != METHOD:
        remedy = f"its card is of method {card.get('method')!r}, an adapter of {METHOD} is expected: use decoding="
        raise UserError(KEY, path, f"{remedy}{card.get('method')}, or name another folder")
    if card.get("schema") != SCHEMA:
        raise UserError(KEY, path, f"the schema of its card is {card.get('schema')!r}, {SCHEMA} is read: {AGAIN}")
    if card.get("layer_convention") != LAYER_CONVENTION:
        was = card.get("layer_convention")
        raise UserError(KEY, path, f"its layer_convention is {was!r}, {LAYER_CONVENTION!r} is read: {AGAIN}")
    content = read_json(folder / "config.json", KEY)
    with reading(KEY, folder, AGAIN, also=(SafetensorError, RuntimeError)):
        config = AdapterConfig(**{entry.name: content[entry.name] for entry in fields(AdapterConfig)})
        if card["exit"] != config.exit or card["target"]["num_layers"] != config.num_layers:
            raise ValueError("config.json and card.json name another exit or another depth")
        if not 1 <= config.exit < config.num_layers:
            raise ValueError(f"an exit at {config.exit} of {config.num_layers} blocks")
        str(card["target"]["name"]), str(card["target"]["fingerprint"])
        adapter, stored = Adapter(config), load_file(folder / "model.safetensors")
        adapter.load_state_dict(stored)
        lost = next((name for name, tensor in stored.items() if not bool(tensor.isfinite().all())), None)
        if lost is not None:
            raise ValueError(f"{lost} holds NaN or infinity")
    return adapter, card


def check_target(adapter: Adapter, card: dict[str, Any], target: Target, allow_other_target: bool = False) -> None:
    """Refuses an adapter of another target; one of other sizes always.

    Raises:
        UserError: so.
    """
    made_for, config = card["target"], adapter.config
    its = asdict(AdapterConfig.of_target(target.arch, config.exit))
    for name, mine in asdict(config).items():
        if mine != its[name]:
            remedy = f"this adapter's target has {name}={mine}, {target.name} {its[name]}: train one for it"
            raise UserError(KEY, made_for["name"], remedy)
    if made_for["fingerprint"] != target.fingerprint and not allow_other_target:
        remedy = f"this adapter was trained for another target than {target.name} (fingerprint "
        remedy += f"{made_for['fingerprint'][:12]}, here {target.fingerprint[:12]}): train one for it, or set "
        raise UserError(KEY, made_for["name"], f"{remedy}allow_other_target=true")
