"""The prompts a probe learns from: templates with slots, expanded by a seed, or a file of one's own.

    templates/<domain>/<kind>.yaml   a list of {id, text, slots}; `<<name>>` in a text is a slot
    slots:                           name → its fillers; a name of several, "city, river", is filled by lists of as many

Answers to some kinds copy from the question (edits, quotes, tables, forms); to others a repeat is an accident
(arithmetic, stories, opinions). Every text is written for this project. Knows nothing about tokens and models.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from specwave.artifacts import UserError, check_seed, is_whole, read_jsonl

DOMAINS = ("code", "prose", "reasoning")
_SLOT = re.compile(r"<<(\w+)>>")
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # every scalar stays text: no 12:30 that becomes 750


@dataclass(frozen=True)
class ProbePrompt:
    """A user's message.

    Attributes:
        template: id of what it was made from; prompts of a file have one each.
        kind: what is asked for, such as "docstring" or "arithmetic".
        domain: one of DOMAINS; "" in a file that does not say.
    """

    text: str
    template: str
    kind: str
    domain: str


@dataclass(frozen=True)
class Template:
    """A text with slots. `columns` are (names, fillers), each filler as long as the names it fills."""

    id: str
    text: str
    kind: str
    domain: str
    columns: tuple[tuple[tuple[str, ...], tuple[tuple[str, ...], ...]], ...]

    @property
    def size(self) -> int:
        """How many prompts there are in it."""
        return math.prod(len(fillers) for _, fillers in self.columns)

    def expand(self, seed: int) -> Iterator[ProbePrompt]:
        """All its prompts, in an order by seed that takes new fillers as long as there are some."""
        draw = random.Random(f"{seed}/{self.id}")
        columns = [(names, draw.sample(fillers, len(fillers))) for names, fillers in self.columns]
        for choice in diagonals([len(fillers) for _, fillers in columns]):
            chosen = zip(columns, choice, strict=True)
            values = dict(
                pair for (names, fillers), place in chosen for pair in zip(names, fillers[place], strict=True)
            )
            text = _SLOT.sub(lambda slot, values=values: values[slot[1]], self.text)  # type: ignore[misc]
            yield ProbePrompt(text, self.id, self.kind, self.domain)


def diagonals(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every choice of one number below each size, once; all numbers move on together as long as that is new.

    (2, 3) → 00 11 02 10 01 12;  (2, 2) → 00 11 01 10
    """
    seen = set()
    for start in itertools.product(*map(range, sizes)):
        for step in range(math.lcm(*sizes)):
            choice = tuple((place + step) % size for place, size in zip(start, sizes, strict=True))
            if choice not in seen:
                seen.add(choice)
                yield choice


@functools.cache
def templates() -> tuple[Template, ...]:
    """The built-in templates by domain, kind and place in their file."""
    root = files("specwave.copying").joinpath("templates")
    found = []
    for domain in DOMAINS:
        for file in sorted(root.joinpath(domain).iterdir(), key=lambda one: one.name):
            found += [_template(entry, domain, file) for entry in yaml.load(file.read_text(encoding="utf-8"), _LOADER)]
    return tuple(found)


def _template(entry: dict[str, Any], domain: str, file: Traversable) -> Template:
    columns = []
    for key, fillers in entry["slots"].items():
        names = tuple(name.strip() for name in key.split(","))
        columns.append((names, tuple((one,) if isinstance(one, str) else tuple(one) for one in fillers)))
    return Template(entry["id"], entry["text"].strip(), file.name.removesuffix(".yaml"), domain, tuple(columns))


def probe_prompts(count: int = 1000, seed: int = 0) -> list[ProbePrompt]:
    """`count` different prompts of the built-in templates, as many of each as sizes allow, in the templates' order.

    Raises:
        UserError: fewer than 1, more than there are, or no seed.
    """
    check_seed("probe_data.seed", seed)
    known = templates()
    largest = sum(template.size for template in known)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= largest:
        raise UserError("probe_data.count", count, f"must be a whole number in 1 … {largest}, what the templates hold")
    taken = _spread([template.size for template in known], count)
    return [
        prompt
        for template, number in zip(known, taken, strict=True)
        for prompt in itertools.islice(template.expand(seed), number)
    ]


def _spread(sizes: Sequence[int], count: int) -> list[int]:
    """How many to take of each, equal as far as the sizes allow; a rest goes to places evenly spaced."""
    taken = [0] * len(sizes)
    while count:
        able = [place for place, size in enumerate(sizes) if taken[place] < size]
        if count < len(able):
            able = [able[number * len(able) // count] for number in range(count)]
        for place in able:
            taken[place] += 1
        count -= len(able)
    return taken


def read_prompts(path: Path | str, key: str = "probe_data.path") -> list[ProbePrompt]:
    """The prompts of a JSONL file: `{"prompt": text, "kind": text, "domain": one of DOMAINS}`, the last two optional.

    Other keys are passed over.

    Raises:
        UserError: naming file and line, for a line of another form, a blank prompt, one that was there before.
    """
    found: list[ProbePrompt] = []
    line_of: dict[str, int] = {}
    for number, row in read_jsonl(path, key):
        where = f"{path}:{number}"
        text, kind, domain = row.get("prompt"), row.get("kind", "other"), row.get("domain", "")
        if not isinstance(text, str) or not text.strip():
            raise UserError(key, where, f"prompt must be a text that is not blank, got {text!r}")
        if not isinstance(kind, str) or not kind.strip():
            raise UserError(key, where, f"kind must be a text that is not blank, got {kind!r}")
        if "domain" in row and domain not in DOMAINS:
            raise UserError(key, where, f"domain must be one of {', '.join(DOMAINS)}, got {domain!r}")
        if kind == "all":
            raise UserError(key, where, "kind must not be all, as the tables call everything together: rename it")
        for name, said in (("prompt", text), ("kind", kind)):
            if not is_whole(said):
                raise UserError(key, where, f"the {name} holds half of a surrogate pair: mend it")
        earlier = line_of.setdefault(text.strip(), number)
        if earlier != number:
            raise UserError(key, where, f"the prompt of line {earlier} again: name each once")
        found.append(ProbePrompt(text, f"line-{number}", kind, domain))
    return found


def split(
    prompts: Sequence[ProbePrompt], share: float, seed: int = 0, key: str = "probe_data.held_out"
) -> tuple[list[ProbePrompt], list[ProbePrompt]]:
    """(for training, held out): `share` of the templates are held out with all their prompts, as evenly over the kinds
    as can be. Both keep the order of `prompts`, and at least one template.

    Raises:
        UserError: a share outside (0, 1); fewer than two templates.
    """
    check_seed("probe_data.seed", seed)
    if not 0 < share < 1:
        raise UserError(key, share, "must be a share between 0 and 1, both excluded")
    kind_of = {prompt.template: (prompt.domain, prompt.kind) for prompt in prompts}
    if len(kind_of) < 2:
        raise UserError(key, share, f"{len(kind_of)} prompts or templates cannot be divided in two: give more")
    order = random.Random(f"{seed}/split").sample(sorted(kind_of), len(kind_of))
    order.sort(key=kind_of.__getitem__)  # stable: by chance within a kind
    number = min(max(round(share * len(order)), 1), len(order) - 1)
    held_out = {order[(2 * place + 1) * len(order) // (2 * number)] for place in range(number)}  # evenly spaced
    return (
        [prompt for prompt in prompts if prompt.template not in held_out],
        [prompt for prompt in prompts if prompt.template in held_out],
    )
