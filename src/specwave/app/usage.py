"""`--help`: the choices and keys of a door, as its files in conf/ have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        *_keys("common", ""),
    ]
    for group, option in chosen.items():
        if option is None or option == "None":
            continue
        if option not in options(group):
            raise UserError(group, option, f"there is no such option; choose one of {', '.join(options(group))}")
        lines += ["", f"{group}={option}", *_keys(f"{group}/{option}", f"{group}.")]
    return "\n".join([*lines, "", *_EXAMPLES]).replace("APP", app)


_EXAMPLES = (
    "python APP.py model=tiny                    the smallest run there is",
    "python APP.py -m seed=0,1,2                 a sweep: one job for each value, each in a folder of its own",
    "python APP.py hydra.run.dir=mine            in this folder; going on there: add resume=true",
    "python APP.py --cfg job                     prints the whole config and stops",
)


def _marked(group: str, chosen: str | None) -> str:
    return " ".join(f"{name}*" if name == chosen else name for name in options(group))


def _keys(name: str, prefix: str) -> Iterator[str]:
    """The lines of a config file that set a key, comments included."""
    inside = False  # of a block that is Hydra's
    for line in (conf_dir() / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith(("defaults:", "hydra:", "_target_:")):
            inside = True
        elif line and not line.startswith((" ", "-", "#")):
            inside = False
        if line.strip() and not inside and not line.startswith("#"):
            yield f"  {prefix}{line}" if not line.startswith((" ", "-")) else f"  {line}"
