"""From overrides to objects: compose with Hydra, check keys, types and targets, build plain dataclasses.

A node with `_target_` names a dataclass of a room. Its fields are the node's keys, its annotations their types, its
`__post_init__` the ranges. Any other target (a logger of Lightning, say) becomes a `Deferred`.
No DictConfig or ListConfig leaves this file.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specwave.app.complaints import explain, no_such_key, one_of, parse, refuse_experiment, refuse_includes
from specwave.app.kinds import (
    dataclass_of,
    expected,
    field_schema,
    find,
    literal_choices,
    locate,
    plain,
    text,
    union_members,
)
from specwave.artifacts import UserError, conf_dir

MISSING = "???"
VERSION_BASE = "1.3"  # of Hydra's behaviour, whatever version is installed


@dataclasses.dataclass
class Common:
    """`conf/common.yaml`: the keys of every door; a door's own dataclass repeats those it reads."""

    seed: int = 0
    resume: bool = False
    allow_targets: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise UserError("seed", self.seed, "must be in 0 … 2³²−1")


class Deferred:
    """An object outside specwave, built when a door calls it: `config.logger(save_dir=run.folder)`."""

    def __init__(self, node: dict[str, Any]):
        self.node = node

    def __call__(self, **more: Any) -> Any:
        from hydra.utils import instantiate

        return instantiate(self.node, _convert_="all", **more)

    def __repr__(self) -> str:
        return f"Deferred({self.node['_target_']})"


def app_module(app: str) -> Any:
    """The room's module that holds `main` and the config dataclass of a door."""
    return importlib.import_module(f"specwave.app.{app}")


def config_class(app: str) -> type:
    """`SelectConfig` of `select`."""
    return getattr(app_module(app), f"{app.capitalize()}Config")


# ---------------------------------------------------------------- compose


def compose(app: str, overrides: Sequence[str]) -> DictConfig:
    """The composed config with its `hydra` node. Raises UserError on whatever the overrides get wrong."""
    try:
        refuse_includes(overrides)
        with _outside_jobs(), initialize_config_dir(str(conf_dir()), job_name=app, version_base=VERSION_BASE):
            return hydra_compose(app, list(overrides), return_hydra_config=True)
    except Exception as error:
        complaint = explain(error, app, overrides, known_keys)
        if complaint is None:
            raise
        raise complaint from None


@contextlib.contextmanager
def _outside_jobs() -> Iterator[None]:
    """Hydra composes for one command at a time: within a job it forgets the job's for a while."""
    job = GlobalHydra.instance().hydra
    GlobalHydra.instance().hydra = None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = job


class Composer:
    """`compose` for the jobs of one sweep: conf/ is read once for each set of choices, and values are put in by the
    function with which Hydra puts them in last."""

    def __init__(self, app: str):
        self.app = app
        self.bases: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        values = [override for override in overrides if _sets_a_value(override)]
        choices = tuple(override for override in overrides if override not in values)
        if any(choice.startswith(("+", "~")) for choice in choices):
            return compose(self.app, overrides)  # keys that come and go: their order counts
        if choices not in self.bases:
            self.bases[choices] = compose(self.app, choices)
        composed = copy.deepcopy(self.bases[choices])
        try:
            ConfigLoaderImpl._apply_overrides_to_config(parse(values), composed)
        except HydraException:
            return compose(self.app, overrides)  # says what is wrong
        return composed


def _sets_a_value(override: str) -> bool:
    """Whether an override sets a key of the config; groups of options have no dots in their names."""
    key = override.partition("=")[0]
    dotted = re.fullmatch(r"\w+(\.\w+)+", key) is not None and not key.startswith("hydra.")
    return dotted or key in {entry.name for entry in dataclasses.fields(Common)}


def known_keys(app: str, overrides: Sequence[str], hydra: bool = False) -> list[str]:
    """All keys of a config, dotted; [] when the overrides do not compose."""
    try:
        with initialize_config_dir(str(conf_dir()), job_name=app, version_base=VERSION_BASE):
            composed = hydra_compose(app, list(overrides), return_hydra_config=hydra)
        return [key for key, _ in _dotted(OmegaConf.to_container(composed, resolve=False))]
    except Exception:
        return []


def _dotted(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of nested dicts with its value, parents first."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield _join(path, key), value
            yield from _dotted(value, _join(path, key))


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def refuse_missing(keys: Sequence[str]) -> None:
    """One message for all keys that have no value yet."""
    if keys:
        remedy = "has no value yet: set it" if len(keys) == 1 else "these keys have no value yet: set them"
        raise UserError(", ".join(keys), MISSING, f"{remedy} on the command line, as in {keys[0]}=…")


def missing(composed: DictConfig) -> list[str]:
    """The keys that are still `???`, Hydra's own apart."""
    content = OmegaConf.to_container(_own(composed), resolve=False)
    return sorted(key for key, value in _dotted(content) if value == MISSING)


def _own(composed: DictConfig) -> DictConfig:
    """The config without Hydra's node."""
    return OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])


# ---------------------------------------------------------------- check


def check(app: str, composed: DictConfig) -> dict[str, Any]:
    """The config as plain data: every key known, every value of its type, every default filled in.

    Raises:
        UserError: a key nobody reads, a value of another type, a `_target_` outside the trusted packages, a key
            without a value (all of them at once).
    """
    refuse_missing(missing(composed))
    content = _resolved(composed)
    own = config_class(app)
    names = {entry.name for entry in dataclasses.fields(own)}
    shared = {entry.name for entry in dataclasses.fields(Common)}
    unknown = content.keys() - names - shared
    if unknown:
        refuse_experiment(composed.get("hydra"), app)
    for key in unknown:
        raise no_such_key(key, content[key], sorted(names | shared))
    common = _typed(Common, {key: value for key, value in content.items() if key in shared}, "", Checker())
    checker = Checker(tuple(common["allow_targets"]))
    node = {key: value for key, value in content.items() if key in names}
    checked = _typed(own, node, "", checker, _idle(app, content))
    refuse_missing(checker.missing)
    return common | checked


def _resolved(composed: DictConfig) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(_own(composed), resolve=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        reason = (error.msg or str(error)).splitlines()[0]
        raise UserError(error.full_key or "config", "${…}", f"this reference leads nowhere ({reason})") from None
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


@dataclasses.dataclass
class Checker:
    """What a check carries along: packages the user trusts, and the keys found without a value."""

    allow: tuple[str, ...] = ()
    missing: list[str] = dataclasses.field(default_factory=list)


def _idle(app: str, content: dict[str, Any]) -> Sequence[str]:
    """The keys that a run with this config does not read (the app's `idle`, where it has one): left as they are."""
    of = getattr(app_module(app), "idle", None)
    return of(content) if of is not None else ()


def _typed(cls: type, node: dict[str, Any], path: str, checker: Checker, idle: Sequence[str] = ()) -> dict[str, Any]:
    """One node against its dataclass: the same keys with converted values, and the defaults of those left out."""
    hints = get_type_hints(cls)
    entries = {entry.name: entry for entry in dataclasses.fields(cls) if entry.init}
    checked: dict[str, Any] = {}
    for key, value in node.items():
        full = _join(path, key)
        if key == "_target_" or key in idle:
            checked[key] = value
        elif key not in entries:
            raise no_such_key(full, value, [_join(path, name) for name in entries])
        else:
            checked[key] = _value(hints[key], value, full, checker)
    for name, entry in entries.items():
        if name in checked:
            continue
        default: Any = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        if default is dataclasses.MISSING or default == MISSING:
            checker.missing.append(_join(path, name))
        elif dataclasses.is_dataclass(default) and not isinstance(default, type):
            checked[name] = dataclasses.asdict(default)
        else:
            checked[name] = plain(default)
    return checked


def _value(hint: Any, value: Any, path: str, checker: Checker) -> Any:
    if _holds_target(value):
        return _nested(value, path, checker)
    nested = dataclass_of(hint)
    if nested is not None and isinstance(value, dict):
        return _typed(nested, value, path, checker)
    choices = literal_choices(hint)
    if choices is not None:
        if value not in choices:
            raise one_of(path, value, [text(choice) for choice in choices])
        return value
    try:
        field = OmegaConf.merge(field_schema(hint), {"field": value})
    except OmegaConfBaseException:
        raise UserError(path, text(value), f"{expected(hint)} is expected") from None
    return OmegaConf.to_container(field)["field"]  # type: ignore[call-overload,index]


def _nested(node: Any, path: str, checker: Checker) -> Any:
    """Containers that hold targets somewhere inside."""
    if isinstance(node, list):
        return [_nested(value, f"{path}[{place}]", checker) for place, value in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: _nested(value, _join(path, key), checker) for key, value in node.items()}
    found = locate(node["_target_"], f"{path}._target_", checker.allow)
    if dataclasses.is_dataclass(found):
        return _typed(found, node, path, checker)  # type: ignore[arg-type]
    _check_arguments(found, node, path)
    return {key: _nested(value, _join(path, key), checker) for key, value in node.items()}


def _check_arguments(found: Any, node: dict[str, Any], path: str) -> None:
    """Keys that a foreign class does not take; what it does with them is its own affair."""
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key, value in node.items():
        hydra_own = key.startswith("_") and key.endswith("_")
        if key not in parameters and not hydra_own:
            raise no_such_key(_join(path, key), value, [_join(path, name) for name in parameters])


def _holds_target(node: Any) -> bool:
    if isinstance(node, dict):
        return "_target_" in node or any(map(_holds_target, node.values()))
    return isinstance(node, list) and any(map(_holds_target, node))


# ---------------------------------------------------------------- build


def build(app: str, content: dict[str, Any]) -> Any:
    """The door's config object, all groups built; `content` is `check`'s result or the `config` of a run.yaml."""
    own = config_class(app)
    Common(**{entry.name: content[entry.name] for entry in dataclasses.fields(Common)})
    names = {entry.name for entry in dataclasses.fields(own)}
    node = {key: value for key, value in content.items() if key in names}
    return _construct(own, node, idle=_idle(app, content))


def _construct(cls: type, node: dict[str, Any], path: str = "", idle: Sequence[str] = ()) -> Any:
    hints = get_type_hints(cls)
    values = {
        key: value if key in idle else _fit(hints[key], value, _join(path, key))
        for key, value in node.items()
        if key != "_target_"
    }
    try:
        return cls(**values)
    except UserError as error:
        raise _within(path, error) from None


def _within(path: str, error: UserError) -> UserError:
    """A decoding method names its keys as those of `decoding`, wherever in it the method stands; so do selectors."""
    group = next((group for group in ("decoding.", "selector.") if path.startswith(group)), None)
    if group is None or not error.key.startswith(group) or error.key.startswith(f"{path}."):
        return error
    return UserError(_join(path, error.key.removeprefix(group)), error.value, error.remedy)


def _fit(hint: Any, value: Any, path: str) -> Any:
    if isinstance(value, dict):
        nested = dataclass_of(hint)
        if "_target_" in value:
            found = find(value["_target_"], "_target_")
            known = dataclasses.is_dataclass(found)
            return _construct(found, value, path) if known else Deferred(value)
        if nested is not None:
            return _construct(nested, value, path)
        return {key: _fit(Any, entry, _join(path, key)) for key, entry in value.items()}
    if isinstance(value, list):
        entries = [_fit(Any, entry, path) for entry in value]
        wanted = {get_origin(member) or member for member in union_members(hint)}
        return tuple(entries) if tuple in wanted and list not in wanted else entries
    as_path = isinstance(value, str) and Path in union_members(hint) and str not in union_members(hint)
    return Path(value) if as_path else value


def seed_everything(seed: int) -> None:
    """Seeds Python, numpy and torch, each only where it is loaded: rooms that draw use generators of their own."""
    import random

    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
