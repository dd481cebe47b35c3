"""`--help`: the choices and keys of a door, as its files in conf/ have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from specwave.app.complaints import is_group, options, parse
from specwave.artifacts import UserError, conf_dir


def usage(app: str, overrides: Sequence[str]) -> str:
    """Options of every group (* is chosen), then every key with its default and comment."""
    defaults = yaml.safe_load((conf_dir() / f"{app}.yaml").read_text(encoding="utf-8")).get("defaults", [])
    chosen = {group: option for entry in defaults if isinstance(entry, dict) for group, option in entry.items()}
    chosen = {group: option for group, option in chosen.items() if is_group(group)}
    chosen |= {item.key_or_group: str(item.value()) for item in parse(overrides) if item.key_or_group in chosen}
    wide = max(map(len, chosen), default=0)
    lines = [
        f"python {app}.py [<group>=<option>] [<key>=<value>] [-m]",
        "",
        "choices (* unless chosen otherwise):",
        *(f"  {group:<{wide}}  {_marked(group, option)}" for group, option in chosen.items()),
        "",
        "keys:",
        *_keys(app, ""),
    ]
    for group, option in chosen.items():
        if option is None or option == "None":
            continue
        if option not in options(group):
            raise UserError(group, option, f"there is no such option; choose one of {', '.join(options(group))}")
        lines += ["", f"{group}={option}", *_keys(f"{group}/{option}", f"{group}.")]
    return "\n".join([*lines, "", *_EXAMPLES]).replace("APP", app)


def reference() -> str:
    """The keys of all doors, and of every option of every group, as Markdown."""
    parts = []
    for app in ("select", "train", "evaluate"):
        parts += [f"## {app}.py", "", *_block(app, "")]
    for group in sorted(
        folder.name for folder in conf_dir().iterdir() if folder.is_dir() and folder.name != "experiment"
    ):
        parts += [f"## {group}=", ""]
        for option in options(group):
            parts += [f"### {group}={option}", "", *_block(f"{group}/{option}", f"{group}.")]
    return "\n".join(parts)


def _block(name: str, prefix: str) -> list[str]:
    """A file's keys as a block, below what the file says of itself."""
    first, *_ = (conf_dir() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    says = [first.removeprefix("#").strip(), ""] if first.startswith("#") else []
    return [*says, "```yaml", *(line.removeprefix("  ") for line in _keys(name, prefix)), "```", ""]


_EXAMPLES = (
    "python APP.py model=tiny                    the smallest run there is",
    "python APP.py -m seed=0,1,2                 a sweep: one job for each value, each in a folder of its own",
    "python APP.py hydra.run.dir=mine            in this folder; going on there: add resume=true",
    "python APP.py --cfg job                     prints the whole config and stops",
)


def _marked(group: str, chosen: str | None) -> str:
    return " ".join(f"{name}*" if name == chosen else name for name in options(group))


def keys_of(name: str) -> dict[str, list[str]]:
    """Top-level key → its lines with their comments, of a file of conf/ and of those its defaults list includes.

    Where two files set a key, the lines of the one that Hydra lets win: the later in the defaults list, the file
    itself being last where the list does not say `_self_`.
    """
    own = _sections(conf_dir() / f"{name}.yaml")
    listed = yaml.safe_load("\n".join(own.get("defaults", ["defaults: []"])))["defaults"]
    files = [entry for entry in listed if isinstance(entry, str)]
    files += [] if "_self_" in files else ["_self_"]
    found: dict[str, list[str]] = {key: [] for key in own}  # its own keys first, whoever sets them
    for file in files:
        path = file if file.startswith("/") else f"{name.rpartition('/')[0]}/{file}"
        found |= own if file == "_self_" else keys_of(path.strip("/"))
    return {key: lines for key, lines in found.items() if key not in ("defaults", "hydra", "_target_")}


def _sections(path: Path) -> dict[str, list[str]]:
    """The lines of a YAML file by the top-level key they belong to, without comments that stand alone."""
    sections: dict[str, list[str]] = {}
    key = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            key = key if line.startswith((" ", "-")) else line.partition(":")[0]
            sections.setdefault(key, []).append(line)
    sections.pop("{}", None)  # a file without keys
    return sections


def _keys(name: str, prefix: str) -> Iterator[str]:
    for lines in keys_of(name).values():
        yield f"  {prefix}{lines[0]}"
        yield from (f"  {line}" for line in lines[1:])
