"""Which drafters a training run makes: groups of a selection and listed ones, each with the drafter's switches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specwave.artifacts import Selection, UserError, check_layers, group_name
from specwave.eagle.drafter import SWITCHES, DrafterConfig, Eagle3Drafter
from specwave.eagle.export import check_target, read_drafter
from specwave.eagle.start import initialise
from specwave.eagle.vocab import build_vocab_map, count_tokens

if TYPE_CHECKING:
    from specwave.app.train import TrainConfig
    from specwave.data.samples import Prepared
    from specwave.target import Target

SHAPE = "a group is a list of layers, a rule's name, or one of these with switches: {layers: eagle3, fc_norm: true}"


@dataclass(frozen=True)
class Wanted:
    """One drafter to make, and the rule that chose its layers."""

    layers: tuple[int, ...]
    rule: str | None = None
    switches: dict[str, bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its folder and its figures."""
        return group_name(self.layers, self.switches)


def wanted_groups(config: TrainConfig, chosen: Sequence[Selection], num_layers: int) -> list[Wanted]:
    """Those of the selections first, each drafter once.

    Raises:
        UserError: a layer the model lacks, a layer twice, more layers than the model has, an unknown rule or switch.
    """
    usual = {key: getattr(config.drafter, key) for key in SWITCHES}
    found: dict[str, Wanted] = {}

    def add(wanted: Wanted) -> None:
        found.setdefault(wanted.name, wanted)

    skip = config.skip or 0
    for selection in chosen:
        best = selection.groups(skip + config.top)
        if len(best) < skip + config.top:
            key, asked = ("skip", f"{skip} and top={config.top}") if skip else ("top", str(config.top))
            raise UserError(key, asked, f"the selection holds {len(best)} groups: ask for at most that many")
        for layers in best[skip:]:
            add(Wanted(check_layers(layers, num_layers, "selection"), selection.selector, usual))
    groups = config.groups if config.groups is not None else [] if chosen else ["eagle3"]
    for place, entry in enumerate(groups):
        key = f"groups[{place}]"
        switches = dict(usual)
        if isinstance(entry, dict):
            own = {name: value for name, value in entry.items() if name != "layers"}
            for name, value in own.items():
                if name not in SWITCHES or not isinstance(value, bool):
                    raise UserError(f"{key}.{name}", value, f"{SHAPE}; the switches are {', '.join(SWITCHES)}")
            switches |= own
            entry, key = entry.get("layers"), f"{key}.layers"
        add(Wanted(*_layers(entry, num_layers, key), switches))
    return list(found.values())


def _layers(entry: Any, num_layers: int, key: str) -> tuple[tuple[int, ...], str | None]:
    from specwave.layers.selectors import fixed_rule

    if isinstance(entry, str):
        return fixed_rule(entry, num_layers, key), entry
    if not isinstance(entry, list):
        raise UserError(key, entry, f"{SHAPE}, as in groups=[[2,15,27],eagle2]")
    if len(entry) > num_layers:
        raise UserError(key, entry, f"{len(entry)} layers are asked for, the model has {num_layers}")
    return check_layers(entry, num_layers, key), None


def selection_paths(named: Any) -> list[Path]:
    """What the key `selection` names: nothing, a selection.json or its folder, or a list of these."""
    entries = [] if named is None else [named] if isinstance(named, str) else named
    if not isinstance(entries, list) or not all(isinstance(entry, str) and entry for entry in entries):
        raise UserError("selection", named, "a selection.json or the run folder that holds one, or a list of these")
    if named is not None and not entries:
        raise UserError("selection", "[]", "name at least one selection.json, or give null")
    return [Path(entry).expanduser() for entry in entries]


def read_selections(named: Any, target: Target) -> tuple[list[Selection], list[Path]]:
    """Selections made for this target, and the pictures of the first."""
    found = [_read_selection(path, target) for path in selection_paths(named)]
    return [chosen for chosen, _ in found], found[0][1] if found else []


def _read_selection(path: Path, target: Target) -> tuple[Selection, list[Path]]:
    chosen = Selection.load(path)
    if chosen.num_layers != target.num_layers or chosen.fingerprint != target.fingerprint:
        raise UserError(
            "selection",
            path,
            f"it was made for {chosen.model} ({chosen.num_layers} layers), this is {target.name} "
            f"({target.num_layers}): select again for this model, or name the layers with groups=[[…]]",
        )
    folder = path if path.is_dir() else path.parent
    return chosen, [folder / name for name in ("entropy.png", "cka.png") if (folder / name).is_file()]


def drafter_configs(config: TrainConfig, target: Target, groups: Sequence[Wanted]) -> list[DrafterConfig]:
    """What is to be built for each group; refuses what could not be exported."""
    size = min(config.drafter.draft_vocab_size, target.vocab_size)
    return [DrafterConfig.of_target(target.arch, wanted.layers, size, **wanted.switches) for wanted in groups]


def check_warm_start(config: TrainConfig, target: Target, groups: Sequence[Wanted]) -> Any:
    """(sizes, tensors) of the drafter to go on from, None without one.

    Raises:
        UserError: it is of another target, or none of the groups has its layers, switches and draft vocabulary.
    """
    path = config.drafter.warm_start
    if path is None:
        return None
    try:
        sizes, tensors, card = read_drafter(Path(path).expanduser())
        check_target(sizes, card, target)
    except UserError as error:
        raise UserError("drafter.warm_start", error.value, error.remedy) from None
    if sizes not in drafter_configs(config, target, groups):
        name = group_name(sizes.layers, sizes.switches)
        remedy = f"it is the drafter {name} of {sizes.draft_vocab_size} draft tokens, which this run does not train: "
        raise UserError("drafter.warm_start", path, f"{remedy}name its layers in groups and set draft_vocab_size")
    return sizes, tensors


def make_drafters(
    config: TrainConfig, target: Target, groups: Sequence[Wanted], data: Prepared, warm: Any = None
) -> tuple[dict[str, Eagle3Drafter], float]:
    """(name → drafter with its first weights, share of the answers' tokens that the draft vocabulary covers).

    All share one draft vocabulary: the answers' most frequent tokens, or the one of `warm`, the drafter to go on from.
    """
    counts = count_tokens(((sample.ids, sample.answer) for sample in data.train), target.vocab_size)
    if warm is None:
        d2t, t2d = build_vocab_map(counts, min(config.drafter.draft_vocab_size, target.vocab_size))
    else:
        d2t, t2d = warm[1]["d2t"], warm[1]["t2d"]
    drafters = {}
    for wanted, described in zip(groups, drafter_configs(config, target, groups), strict=True):
        drafter = Eagle3Drafter(described, d2t, t2d)
        if warm is not None and described == warm[0]:
            drafter.load_state_dict({name: warm[1][name].to(held) for name, held in drafter.state_dict().items()})
        else:
            initialise(drafter, target, config.drafter.init, config.seed)
        drafters[wanted.name] = drafter
    return drafters, float(counts[t2d].sum() / counts.sum())
