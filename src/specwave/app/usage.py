"""`--help`: the choices and keys of a door, as its files in conf/ have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from specwave.app.complaints import groups, is_group, one_of, options, parse
from specwave.artifacts import UserError, conf_dir


def usage(app: str, overrides: Sequence[str]) -> str:
    """Options of every group (* is chosen), then every key with its default and comment."""
    chosen = _defaults(app)
    chosen |= {item.key_or_group: str(item.value()) for item in parse(overrides) if item.key_or_group in chosen}
    wide = max(map(len, chosen), default=0)
    lines = [
        f"python {app}.py [<group>=<option>] [<key>=<value>] {'[<step>.<key>=<value>]' if app == 'chain' else '[-m]'}",
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
    return "\n".join([*lines, "", "examples:", *_examples(app)])


def reference() -> str:
    """The keys of all doors, and of every option of every group, as Markdown."""
    parts = []
    for app in ("select", "train", "evaluate", "chain"):
        parts += [f"## {app}.py", "", *_block(app, "")]
    for group in [name for name in groups() if name != "experiment"] + ["hydra/launcher", "hydra/sweeper"]:
        parts += [f"## {group}=", ""]
        for option in options(group):
            parts += [f"### {group}={option}", "", *_block(f"{group}/{option}", f"{group.replace('/', '.')}.")]
    return "\n".join(parts)


def _block(name: str, prefix: str) -> list[str]:
    """A file's keys as a block, below what the file says of itself."""
    first, *_ = (conf_dir() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    says = [first.removeprefix("#").strip(), ""] if first.startswith("#") else []
    return [*says, "```yaml", *(line.removeprefix("  ") for line in _keys(name, prefix)), "```", ""]


_EXAMPLES = {  # by door; * are those of all but chain.py
    "*": (
        ("model=tiny", "the smallest run there is"),
        ("-m seed=0,1,2", "a sweep: one job for each value, each in a folder of its own"),
        ("hydra.run.dir=mine", "in this folder; going on there: add resume=true"),
        ("--cfg job", "prints the whole config and stops"),
    ),
    "select": (
        ("selector.m=2 calibration.rho=0.5", "two layers, from half of the positions"),
        ("calibration=jsonl calibration.path=chats.jsonl", "from conversations of your own"),
        ("selector=exhaustive analysis=full", "the exact best, with stability and sensitivity"),
        ("list=selectors", "the selectors there are; so models, calibrations, …"),
    ),
    "train": (
        ("selection=runs/select/mine", "a drafter for the selected layers"),
        ("'groups=[[2,15,27],eagle2]'", "drafters for groups of your own, from one pass"),
        ("data=jsonl data.path=prompts.jsonl data.answers=regenerate", "from prompts of your own"),
        ("trainer=deepspeed model=llama31_8b dry_run=true", "what 8 GPUs would need"),
        ("list=trainers", "the trainers there are; so models, data, …"),
    ),
    "evaluate": (
        ("decoding=eagle3 checkpoint=runs/train/mine", "all drafters of a training run, against plain decoding"),
        ("decoding=pld limit=26", "a method without a drafter, on two questions of each category"),
        ("'report=[runs/a,runs/b]'", "one table and page over several evaluations"),
        ("list=methods", "the decoding methods there are; so models, benchmarks, …"),
    ),
    "chain": (
        ("experiment=qwen3_table2 dry_run=true", "every job, its cost, and what is there already"),
        ("experiment=qwen3_table2_smollm2", "select, train, evaluate, tables; again: goes on"),
        ("experiment=qwen3_table2_smollm2 all.model=tiny train.trainer.max_steps=20", "settings of all steps, of one"),
        ("list=experiments", "the experiments there are"),
    ),
}
_ALSO = {"methods": "decoding", "analyses": "analysis"}  # further names for list=


def _examples(app: str) -> list[str]:
    shown = [*_EXAMPLES.get(app, ()), *(_EXAMPLES["*"] if app != "chain" else ())]
    wide = max(len(words) for words, _ in shown if len(words) < 48)
    return [f"python {app}.py {words:<{wide}}  {says}" for words, says in shown]


def listing(app: str, wanted: str) -> str:
    """`list=methods`: the options of a group with what their files say of themselves; * is the door's own choice.

    Raises:
        UserError: there is no such group; the closest one is named.
    """
    known = {
        group if group.endswith("data") else f"{group}s": group for group in groups() if group not in _ALSO.values()
    }
    known |= _ALSO
    group = known.get(wanted) or (wanted if wanted in known.values() else None)
    if group is None:
        raise one_of("list", wanted, sorted(known))
    chosen = _defaults(app).get(group)
    wide = max(map(len, options(group))) + 1
    return "\n".join(
        f"{group}={f'{name}*' if name == chosen else name:<{wide}}  {_says(group, name)}".rstrip()
        for name in options(group)
    )


def _says(group: str, option: str) -> str:
    """The first comment of an option's file; an experiment's comes behind its two lines for Hydra and the shell."""
    lines = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    line = lines[2 if group == "experiment" else 0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""


def _defaults(app: str) -> dict[str, str]:
    """The door's groups and the options it chooses."""
    listed = yaml.safe_load((conf_dir() / f"{app}.yaml").read_text(encoding="utf-8")).get("defaults", [])
    chosen = {group: option for entry in listed if isinstance(entry, dict) for group, option in entry.items()}
    return {group: option for group, option in chosen.items() if is_group(group)}


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
        path = (file if file.startswith("/") else f"{name.rpartition('/')[0]}/{file}").strip("/")
        if file == "_self_":
            found |= own
        elif (conf_dir() / f"{path}.yaml").is_file():  # else a plugin's
            found |= keys_of(path)
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
