"""`train.py task=convert`: a drafter that another tool wrote becomes one of ours, to be evaluated or gone on from; one
of ours is written in another format. Nothing is trained, and the target's weights are not loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specwave.app.hub import check_push, push
from specwave.app.preflight import architecture
from specwave.artifacts import UserError, check_layers, group_name
from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.export import TargetFacts, check_target, read_drafter, write_drafter
from specwave.eagle.formats import read_foreign

if TYPE_CHECKING:
    from specwave.app.run import Run
    from specwave.app.train import TrainConfig

KEY = "convert.path"


@dataclass
class Convert:
    """`convert` in conf/train.yaml."""

    path: str | None = None
    layers: list[int] | None = None


@dataclass(frozen=True)
class _Target:
    """What `check_target` compares."""

    name: str
    fingerprint: str
    num_layers: int
    hidden_size: int
    vocab_size: int


def convert(config: TrainConfig, run: Run) -> None:
    """Writes `drafters/<group>` into the run's folder."""
    if config.convert.path is None:
        raise UserError(KEY, "null", "name the drafter's folder")
    folder = Path(config.convert.path).expanduser()
    if not folder.is_dir():
        raise UserError(KEY, folder, "there is no such folder")
    identity, arch = config.model.identify(), architecture(config.model)
    target = _Target(identity.name, identity.fingerprint, arch.num_layers, arch.hidden_size, arch.vocab_size)
    facts = TargetFacts(target.name, target.fingerprint, target.num_layers, config.model.source)
    layers = config.convert.layers
    if layers is not None:
        check_layers(layers, arch.num_layers, "convert.layers")
    data: dict[str, Any] = {"converted_from": folder.name}  # a card goes where the other folders do not
    training: dict[str, Any] = {}
    if (folder / "card.json").is_file():
        sizes, tensors, card = read_drafter(folder)
        check_target(sizes, card, target)
        data, training = card["data"], card["training"]
    else:
        sizes, tensors = read_foreign(folder, KEY, arch.num_layers, layers)
        check_target(sizes, {"target": {"name": str(folder), **_facts(target)}}, target)
    drafter = Eagle3Drafter(sizes)
    drafter.load_state_dict(tensors)
    name = group_name(sizes.layers, sizes.switches)
    check_push(config.export, [name])
    dtype = getattr(torch, config.drafter.export_dtype)
    written = run.folder / "drafters" / name
    warnings = write_drafter(
        written, drafter, facts, dtype=dtype, data=data, training=training, layout=config.export.format
    )
    for warning in warnings:
        run.say(f"{name}: {warning}")
    run.note(groups={name: list(sizes.layers)}, converted_from=str(folder))
    run.say(f"layers {', '.join(map(str, sizes.layers))} (outputs of blocks), {sizes.draft_vocab_size} draft tokens")
    run.say(f"written: {written}")
    if sent := push(config.export, {name: written}, run.say):
        run.note(pushed=sent)


def _facts(target: _Target) -> dict[str, Any]:
    """Another tool's drafter does not say for which target it was made: sizes alone are compared."""
    return {"fingerprint": target.fingerprint, "num_layers": target.num_layers}
