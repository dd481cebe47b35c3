"""Hydra's errors in this project's words: key, value and remedy, with the closest name there is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from specwave.artifacts import UserError, conf_dir

EXTRAS = {  # plugins of Hydra and the extras of specwave that bring them
    ("hydra/launcher", "joblib"): "sweep",
    ("hydra/launcher", "submitit_local"): "slurm",
    ("hydra/launcher", "submitit_slurm"): "slurm",
}
Keys = Callable[..., list[str]]  # (app, overrides, hydra=False) → all keys of the config they compose


def explain(error: Exception, app: str, overrides: Sequence[str], keys: Keys) -> UserError | None:
    """The user's mistake behind an error of composition; None when it is not one."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OverrideParseException):
        return unreadable(error)
    if isinstance(error, yaml.YAMLError):
        mark = getattr(error, "problem_mark", None)
        place = f"{mark.name}:{mark.line + 1}" if mark else "?"
        return UserError("config file", place, f"not YAML ({getattr(error, 'problem', error)})")
    parsed = parse(overrides)
    for override in parsed:
        refused = _bad_choice(override)
        if refused is not None:
            return refused
    if isinstance(error, MissingConfigException):
        return _no_such_option(error)
    if isinstance(error, HydraException) and not isinstance(error, InstantiationException):
        return _uncomposable(error, app, parsed, keys)
    if isinstance(error, OmegaConfBaseException):
        return UserError(error.full_key or "config", "?", _line((error.msg or str(error)).splitlines()[0]))
    return None


def parse(overrides: Sequence[str]) -> list[Override]:
    """Overrides in Hydra's grammar."""
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise unreadable(error) from None


def is_group(key: str) -> bool:
    """Whether a key names a folder of options."""
    return bool(key) and (conf_dir() / key).is_dir()


def groups() -> list[str]:
    return sorted(folder.name for folder in conf_dir().iterdir() if folder.is_dir() and folder.name != "hydra")


def options(group: str) -> list[str]:
    """A group's choices; a file whose name begins with _ is none, but what options include."""
    return sorted(path.stem for path in (conf_dir() / group).glob("[!_]*.yaml"))


def refuse_includes(overrides: Sequence[str]) -> None:
    """Hydra would take `calibration=_rows`: a file that only options include."""
    for override in overrides:
        key, _, value = override.partition("=")
        if value.startswith("_") and is_group(key.lstrip("+")):
            raise one_of(key, value, options(key.lstrip("+")))


def refuse_experiment(hydra: Any, app: str) -> None:
    """An experiment that another command takes: its second line says which."""
    chosen = hydra.runtime.choices.get("experiment") if hydra is not None else None
    path = conf_dir() / "experiment" / f"{chosen}.yaml"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if len(lines) > 1 and lines[1].startswith("# python ") and f" {app}.py " not in lines[1]:
        raise UserError("experiment", chosen, f"it is for another command: {lines[1].removeprefix('# ')}")


# ---------------------------------------------------------------- names


def closest(name: str, known: Sequence[str]) -> str | None:
    """The known key nearest to a mistyped one: a sibling, else one of the same last part (`k_bem` → `selector.k_beam`),
    else one of a similar whole name (`selectr.m` → `selector.m`)."""
    parent, _, leaf = name.rpartition(".")
    leaves: dict[str, list[str]] = {}
    for key in known:
        leaves.setdefault(key.rpartition(".")[2], []).append(key)
    siblings = [end for end, keys in leaves.items() if any(key.rpartition(".")[0] == parent for key in keys)]
    near = get_close_matches(leaf, siblings, n=1)
    if near:
        return f"{parent}.{near[0]}" if parent else near[0]
    same = get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    if same:
        return max(leaves[same[0]], key=lambda key: SequenceMatcher(None, name, key).ratio())
    others = [key for key in known if key.rpartition(".")[0] != parent]
    return next(iter(get_close_matches(name, others, n=1, cutoff=0.7)), None)


def no_such_key(key: str, value: Any, known: Sequence[str]) -> UserError:
    near, parent = closest(key, known), key.rpartition(".")[0]
    siblings = [name for name in known if name.rpartition(".")[0] == parent]
    if near:
        hint = f"did you mean {near}?"
    elif 0 < len(siblings) <= 16:
        hint = f"choose one of {', '.join(siblings)}"
    else:
        hint = "--help lists all keys"
    return UserError(key, "null" if value is None else value, f"there is no such key; {hint}")


def one_of(key: str, value: Any, choices: Sequence[str]) -> UserError:
    near = get_close_matches(str(value), choices, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return UserError(key, value, f"there is no such option; {hint}choose one of {', '.join(choices)}")


# ---------------------------------------------------------------- kinds of error


def unreadable(error: OverrideParseException) -> UserError:
    key, equals, value = error.override.partition("=")
    if not equals:
        return UserError("override", key, "an override is written key=value")
    reason = _line(re.sub(r"Error parsing override '.*'|See https://\S+ for details", "", error.message))
    return UserError(key, value, f"this value cannot be read ({reason}); quote special characters: \"{key}='a=b'\"")


def _bad_choice(override: Override) -> UserError | None:
    """Overrides that Hydra answers with a bare ValueError."""
    key, value = override.key_or_group, value_of(override)
    if not key:
        return UserError("override", f"={value}", "an override is written key=value, this key is empty")
    named = override.is_delete() or override.is_sweep_override() or isinstance(override.value(), str | list)
    if is_group(key) and not named:
        return one_of(key, value, options(key))
    return None


def value_of(override: Override) -> str:
    """The text after the = of an override."""
    return (override.input_line or "").partition("=")[2]


def _no_such_option(error: MissingConfigException) -> UserError:
    wanted = error.missing_cfg_file or "?"
    group, _, option = wanted.rpartition("/")
    found = list(error.options or []) or _listed(str(error))
    if (group, option) in EXTRAS:
        kind = group.partition("/")[2]
        remedy = f"this {kind} is a package of its own: pip install 'specwave[{EXTRAS[group, option]}]'"
        return UserError(group, option, remedy)
    if not group or not found:
        return UserError("config", wanted, "there is no such config file")
    return one_of(group, option, [name for name in found if not name.startswith("_")])


def _listed(message: str) -> list[str]:
    """The options in Hydra's text: indented lines after "Available options"."""
    _, _, tail = message.partition("Available options")
    lines = tail.splitlines()[1:]
    return [line.strip() for line in lines[: next((i for i, x in enumerate(lines) if x[:1] != "\t"), len(lines))]]


def _uncomposable(error: HydraException, app: str, parsed: Sequence[Override], keys: Keys) -> UserError:
    message = str(error)
    twice = re.search(r"Multiple values for (\S+)\.|(\S+) appears more than once", message)
    named = next(iter(re.findall(r"'([^'=]+)", message)), "")
    key = (twice[1] or twice[2]) if twice else named
    blamed = next((override for override in parsed if override.key_or_group == key.partition("@")[0]), None)
    value = value_of(blamed) if blamed is not None else ""
    if twice:
        remedy = "this choice is made already: leave out the +"
    elif message.startswith("Ambiguous value"):
        remedy = f"several values: add -m to run one job for each, or write {key}=[{value}] for a list"
    elif message.startswith("Could not append"):
        remedy = "this key exists already: leave out the +"
    elif "No match in the defaults list" in message and is_group(key):
        own = [name for name in groups() if name in keys(app, [])]
        remedy = f"{app} makes no such choice; it chooses {', '.join(own)}"
    elif message.startswith(("Could not override", "Could not delete")):
        chosen = [entry.input_line or "" for entry in parsed if is_group(entry.key_or_group)]
        within = key.startswith("hydra.")
        known = keys(app, chosen, hydra=within) or keys(app, [], hydra=within)
        return no_such_key(key, value, known)
    else:
        return UserError("command line", " ".join(entry.input_line or "" for entry in parsed), _line(message))
    return UserError(key, value, remedy)


def _line(message: str) -> str:
    return " ".join(message.split())
