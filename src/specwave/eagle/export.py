"""The drafter as files: `config.json` and `model.safetensors` for the engines, `card.json` for specwave, `README.md`
for people.

Knows nothing about training; what it saw there is handed in as plain data.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specwave.artifacts import (
    LAYER_CONVENTION,
    SCHEMA,
    UserError,
    check_layers,
    read_json,
    reading,
    write_json,
    write_tensors,
    write_text,
)
from specwave.eagle.drafter import SWITCHES, DrafterConfig, Eagle3Drafter
from specwave.eagle.engines import engine_config, padding_layer, served_by
from specwave.eagle.formats import FORMATS, flattened, from_speculators, speculators_config, to_speculators
from specwave.eagle.model_card import readme
from specwave.eagle.vocab import check_vocab_map

KEY = "checkpoint"  # the config key that names a drafter folder
_NORM = "fc_norm.{}.weight"  # by the place of its layer among those written


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter remembers of its target."""

    name: str
    fingerprint: str
    num_layers: int
    source: str = ""  # hub id or folder; speculators' format names it


@dataclass
class Export:
    """`export` in conf/train.yaml."""

    format: Literal["engines", "speculators"] = "engines"
    push_to_hub: str | None = None
    private: bool = True


def write_drafter(
    folder: Path | str,
    drafter: Eagle3Drafter,
    target: TargetFacts,
    *,
    dtype: torch.dtype = torch.bfloat16,
    data: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    pictures: Sequence[Path] = (),
    layout: str = "engines",
) -> list[str]:
    """Writes the files (the card last) and copies `pictures` beside them; returns the warnings.

    Floats are stored as `dtype`. A card exists only where the other files are whole. `layout`: one of `FORMATS`.
    """
    folder, config = Path(folder), drafter.config
    check_layers(config.layers, target.num_layers, "layers")
    check_vocab_map(drafter.d2t, drafter.t2d, config.vocab_size, "export")
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in drafter.state_dict().items()}
    spare, layers = padding_layer(config, target.num_layers), config.layers
    if spare is not None:
        fc = tensors["fc.weight"]
        layers = tuple(sorted((spare, *config.layers)))
        tensors["fc.weight"] = torch.cat([torch.zeros_like(fc) if layer == spare else fc for layer in layers], 1)
        if config.fc_norm:
            norm = tensors[_NORM.format(0)]
            for place, layer in enumerate(layers):
                tensors[_NORM.format(place)] = torch.ones_like(norm) if layer == spare else norm
    serves, warnings = served_by(layers, target.num_layers)
    described = engine_config(config, layers, dtype)
    if layout == "speculators":
        steps = (training or {}).get("steps", 3)
        described, tensors = speculators_config(config, layers, dtype, target.source, steps), to_speculators(tensors)
        serves, warnings = ["vllm"], [*warnings, "speculators' format: vLLM serves it alone, SGLang does not read it"]
    (folder / "card.json").unlink(missing_ok=True)  # from here on the files may be of two drafters
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_json(folder / "config.json", described)
    for picture in pictures:
        shutil.copyfile(picture, folder / picture.name)
    card = {
        "schema": SCHEMA,
        "method": "eagle3",
        "layers": list(config.layers),
        "layer_convention": LAYER_CONVENTION,
        "padding_layer": spare,
        "format": layout,
        "switches": config.switches,
        "target": {"name": target.name, "fingerprint": target.fingerprint, "num_layers": target.num_layers},
        "serves": serves,
        "warnings": warnings,
        "pictures": [picture.name for picture in pictures],
        "data": data or {},
        "training": training or {},
    }
    write_text(folder / "README.md", readme(card, target.source))
    write_json(folder / "card.json", card)
    return warnings


def add_pictures(folder: Path | str, pictures: Sequence[Path]) -> None:
    """Copies more pictures beside a drafter and names them in its card."""
    folder = Path(folder)
    card = read_json(folder / "card.json", KEY)
    for picture in pictures:
        shutil.copyfile(picture, folder / picture.name)
    names = dict.fromkeys([*card["pictures"], *(picture.name for picture in pictures)])
    write_json(folder / "card.json", card | {"pictures": list(names)})


def read_drafter(path: Path | str) -> tuple[DrafterConfig, dict[str, Tensor], dict[str, Any]]:
    """(sizes, tensors, card) of a drafter folder, without the padding; refuses what is incomplete or contradictory."""
    folder = Path(path)
    with reading(KEY, folder, "export the drafter again"):
        return _read_drafter(folder)


def _read_drafter(folder: Path) -> tuple[DrafterConfig, dict[str, Tensor], dict[str, Any]]:
    if not (folder / "card.json").is_file():
        raise UserError(KEY, folder, "no drafter of specwave is here (card.json is missing): name a drafters/L… folder")
    # A drafter written before there were switches has none on: so do engines read their absence.
    off = dict.fromkeys(SWITCHES, False)
    card = {"switches": off, "format": FORMATS[0]} | read_json(folder / "card.json", KEY)
    content = off | read_json(folder / "config.json", KEY)
    if card.get("method", "eagle3") != "eagle3":
        method = card["method"]
        raise UserError(KEY, folder, f"its card is of method {method!r}, no EAGLE-3 drafter: use decoding={method}")
    if card["format"] not in FORMATS:
        raise UserError(KEY, folder, f"its format is {card['format']!r}; {' and '.join(FORMATS)} are read")
    if card["format"] == "speculators":
        content = off | flattened(content)
    nested = content.get("eagle_config") or {}
    ids, shifted = nested.get("eagle_aux_hidden_state_layer_ids"), content.get("eagle_aux_hidden_state_layer_ids")
    if not card.get("layers") or not ids or not shifted:
        raise UserError(
            KEY, folder, "the drafter has no layer ids, other layers would be read silently: export it again"
        )
    if card.get("layer_convention") != LAYER_CONVENTION:
        raise UserError(
            KEY, folder, f"its layer_convention is {card.get('layer_convention')!r}, {LAYER_CONVENTION!r} is read"
        )
    if card.get("schema") != SCHEMA:
        raise UserError(KEY, folder, f"the schema of card.json is {card.get('schema')!r}, {SCHEMA} is read")
    if not isinstance(card["target"]["fingerprint"], str) or not isinstance(card["training"], dict):
        raise UserError(KEY, folder, "card.json does not say for which target the drafter was made: export it again")
    layers = check_layers(card["layers"], card["target"]["num_layers"], f"{KEY}:{folder}")
    spare: int | None = card.get("padding_layer")
    written = sorted(layers if spare is None else {*layers, spare})
    if ids != written or shifted != [layer + 1 for layer in written]:
        raise UserError(KEY, folder, f"config.json names layers {ids} (and {shifted} from 1), card.json {written}")
    switches = {name: content[name] for name in SWITCHES}
    if switches != card["switches"]:
        raise UserError(KEY, folder, f"config.json has {switches}, card.json {card['switches']}: export it again")
    try:
        tensors = from_speculators(load_file(folder / "model.safetensors"))
        config = DrafterConfig(
            layers=layers,
            target_hidden_size=content["target_hidden_size"],
            hidden_size=content["hidden_size"],
            num_heads=content["num_attention_heads"],
            num_kv_heads=content["num_key_value_heads"],
            head_dim=content["head_dim"],
            intermediate_size=content["intermediate_size"],
            vocab_size=content["vocab_size"],
            draft_vocab_size=content["draft_vocab_size"],
            rms_eps=float(content["rms_norm_eps"]),
            max_length=int(content["max_position_embeddings"]),
            rope=content["rope_parameters"],
            **switches,
        )
    except (OSError, SafetensorError) as error:
        raise UserError(KEY, folder, f"model.safetensors cannot be read ({error})") from None
    except KeyError as error:
        raise UserError(KEY, folder, f"config.json lacks {error}") from None
    except UserError as error:
        raise UserError(KEY, folder, f"config.json has {error}") from None
    if config.max_length < 1:
        raise UserError(KEY, folder, f"config.json has max_position_embeddings={config.max_length}: export it again")
    padded = replace(config, layers=tuple(written))
    for key, meant in engine_config(padded, written, torch.bfloat16).items():
        if key != "torch_dtype" and content.get(key) != meant:
            raise UserError(
                KEY, folder, f"config.json has {key}={content.get(key)!r}, the drafter it describes has {meant!r}"
            )
    _check_tensors(folder, padded, tensors)
    if spare is not None:
        width, place = config.target_hidden_size, written.index(layers[0])
        tensors["fc.weight"] = tensors["fc.weight"][:, place * width : (place + 1) * width].contiguous()
        if config.fc_norm:
            kept, _ = tensors.pop(_NORM.format(place)), tensors.pop(_NORM.format(1 - place))
            tensors[_NORM.format(0)] = kept
    return config, tensors, card


def _check_tensors(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor]) -> None:
    with torch.device("meta"):
        expected = Eagle3Drafter(config).state_dict()
    for name, tensor in expected.items():
        if name not in tensors:
            raise UserError(KEY, folder, f"model.safetensors lacks {name}")
        if tensors[name].is_floating_point() != tensor.is_floating_point():
            raise UserError(KEY, folder, f"{name} is {tensors[name].dtype}, expected is {tensor.dtype}")
        if tensor.is_floating_point() and not bool(tensors[name].isfinite().all()):
            raise UserError(KEY, folder, f"{name} holds NaN or infinity: train the drafter again")
        if name not in ("d2t", "t2d") and tensors[name].shape != tensor.shape:
            shapes = f"{list(tensors[name].shape)}, config.json asks for {list(tensor.shape)}"
            raise UserError(KEY, folder, f"{name} is {shapes}")
    unknown = sorted(tensors.keys() - expected.keys() - {"embed_tokens.weight"})
    if unknown:
        raise UserError(KEY, folder, f"model.safetensors holds {unknown[0]}, which this drafter does not have")
    check_vocab_map(tensors["d2t"], tensors["t2d"], config.vocab_size, f"{KEY}:{folder}")
    if tensors["d2t"].numel() != config.draft_vocab_size:
        raise UserError(KEY, folder, f"d2t has {tensors['d2t'].numel()} entries, config.json {config.draft_vocab_size}")


def check_target(config: DrafterConfig, card: dict[str, Any], target: Any, allow_other_target: bool = False) -> None:
    """Refuses a drafter made for another target; one of other sizes always.

    Args:
        target: has `name`, `fingerprint`, `num_layers`, `hidden_size`, `vocab_size`.
    """
    made_for = card["target"]
    for size, mine, its in (
        ("width", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("number of layers", made_for["num_layers"], target.num_layers),
    ):
        if mine != its:
            raise UserError(KEY, made_for["name"], f"this drafter's target has the {size} {mine}, {target.name} {its}")
    if made_for["fingerprint"] != target.fingerprint and not allow_other_target:
        raise UserError(
            KEY,
            made_for["name"],
            f"this drafter was trained for another target than {target.name} (fingerprint "
            f"{made_for['fingerprint'][:12]}, here {target.fingerprint[:12]}): train one for it, or set "
            "allow_other_target=true",
        )
