"""What an annotation admits and a `_target_` may name: the small print of config.py.

Knows nothing about configs as a whole, nor about Hydra.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specwave.artifacts import UserError

TRUSTED = ("specwave", "torch", "pytorch_lightning", "hydra")  # packages a config may name in _target_
RE_EXPORTED = ("lightning_fabric",)  # where classes of pytorch_lightning are defined


# ---------------------------------------------------------------- types


@lru_cache
def field_schema(hint: Any) -> DictConfig:
    """A structured config of one field; annotations OmegaConf does not know are taken as Any."""
    if hint is type(None):
        hint = Any
    try:
        return OmegaConf.structured(dataclasses.make_dataclass("Field", [("field", hint)]))
    except OmegaConfBaseException:
        return OmegaConf.structured(dataclasses.make_dataclass("Field", [("field", Any)]))


def union_members(hint: Any) -> list[Any]:
    """A union's members without None; the hint itself otherwise."""
    if get_origin(hint) in (Union, types.UnionType):
        return [member for member in get_args(hint) if member is not type(None)]
    return [hint]


def optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def dataclass_of(hint: Any) -> type | None:
    return next(
        (member for member in union_members(hint) if isinstance(member, type) and dataclasses.is_dataclass(member)),
        None,
    )


def literal_choices(hint: Any) -> list[Any] | None:
    """The values of a Literal annotation."""
    members = union_members(hint)
    if not all(get_origin(member) is Literal for member in members):
        return None
    return [choice for member in members for choice in get_args(member)] + [None] * optional(hint)


def expected(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    words = []
    for member in union_members(hint):
        origin = get_origin(member) or member
        if origin in (list, tuple):
            inner = [name for name in get_args(member)[:1] if name is not Any]
            words.append(f"a list [{', '.join(map(expected, inner))}, …]" if inner else "a list […]")
        elif origin is dict:
            words.append("a mapping {key: value}")
        else:
            words.append(names.get(member, getattr(member, "__name__", str(member))))
    return " or ".join(words + ["null"] * optional(hint))


def text(value: Any) -> str:
    """A value as one would type it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def plain(value: Any) -> Any:
    """Nothing but dict, list, str, int, float, bool, None: what YAML and JSON can hold."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry) for entry in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    if hasattr(value, "tolist"):  # numbers and arrays of torch and numpy
        return value.tolist()
    return str(value)


# ---------------------------------------------------------------- targets


def _within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def locate(target: Any, key: str, allow: Sequence[str] = ()) -> Any:
    """The object a `_target_` names.

    Both the name and the module that defines the object must lie in a trusted package: `specwave.artifacts.os.system`
    is no object of specwave. A module that exists and fails to import raises its own error.
    """
    vouched = [name.rstrip(".") for name in allow]  # the user answers for whatever lies there
    trusted = (*TRUSTED, *vouched)
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise UserError(key, text(target), "a dotted name package.module.Class is expected")
    remedy = f"only {', '.join(TRUSTED)} are trusted in _target_; if you trust it, add allow_targets=[{{}}]"
    if not _within(target, trusted):
        raise UserError(key, target, remedy.format(target.split(".")[0]))
    found = find(target, key)
    home = getattr(found, "__module__", None)
    if home is not None and not _within(home, (*trusted, *RE_EXPORTED)) and not _within(target, vouched):
        raise UserError(key, target, remedy.format(home.split(".")[0]))
    if not callable(found):
        raise UserError(key, target, "a class or function is expected")
    return found


def find(target: str, key: str) -> Any:
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not _within(name, [error.name]):
                raise  # the module is there; something it imports is not
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                raise UserError(key, target, f"{name} has no {part}")
            found = getattr(found, part)
        return found
    raise UserError(key, target, f"there is no module {parts[0]}")
