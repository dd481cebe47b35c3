"""Every command on a page can be given, every link leads somewhere, every experiment says how it is run."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from specwave.app import config as configs
from specwave.app.chain import planned, read
from specwave.app.command import first_choices, read_command_line
from specwave.app.usage import keys_of, listing, reference
from specwave.artifacts import conf_dir

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("assets/**/*.md")])
FENCE = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^python (select|train|evaluate|chain)\.py(?![\w.])(.*)")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(door, the rest of the line) of the commands in a page's blocks; a backslash goes on in the next line."""
    for block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if found := COMMAND.match(line.strip()):
                yield found[1], found[2]


def check(door: str, words: str) -> None:
    """Composes a command's config and builds it: keys, types, ranges. `<a placeholder>` and … stand for some name."""
    filled = re.sub(r"<[^<>]*>|…", "placeholder", words)
    request = read_command_line(door, shlex.split(filled, comments=True))
    if request.list is not None:
        assert listing(door, request.list)
    elif door == "chain":
        settings, root, _ = read(request.overrides)
        planned(settings, root)
    else:
        configs.build(door, configs.check(door, configs.compose(door, first_choices(request.overrides))))


EVERY = [(page, *found) for page in PAGES for found in commands(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "door", "words"), EVERY, ids=lambda value: getattr(value, "name", value))
def test_a_command_of_a_page_can_be_given(page, door, words):
    check(door, words)


def test_pages_have_commands():
    assert len({page for page, *_ in EVERY}) >= 6
    assert len(EVERY) >= 40


@pytest.mark.parametrize("path", sorted((conf_dir() / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_names_its_command(path):
    package, command, *_ = path.read_text(encoding="utf-8").splitlines()
    assert package == "# @package _global_"
    found = COMMAND.match(command.removeprefix("# "))
    assert found, command
    assert f"experiment={path.stem}" in found[2].split()
    check(found[1], found[2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        place = (page.parent / target).resolve()
        assert place.exists(), target
        if anchor and place.suffix == ".md":
            headings = HEADING.findall(place.read_text(encoding="utf-8"))
            assert anchor in {slug(heading) for heading in headings}, f"{target}#{anchor}"


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_check_itself_refuses():
    with pytest.raises(Exception, match="no such key"):
        check("select", "selector.k_bem=3  # a comment")


def test_the_page_of_keys_has_every_key_of_every_option():
    page = reference()
    for path in conf_dir().rglob("[!_]*.yaml"):
        name = str(path.relative_to(conf_dir()).with_suffix(""))
        if name == "common" or name.startswith("experiment/"):
            continue
        group, _, option = name.rpartition("/")
        block = page.partition(f"### {group}={option}\n" if group else f"## {name}.py\n")[2].partition("\n#")[0]
        for key in keys_of(name):
            dotted = f"{group.replace('/', '.')}.{key}" if group else key
            assert re.search(rf"^{re.escape(dotted)}:", block, re.MULTILINE), (name, key)


def test_the_site_puts_the_keys_where_the_page_says():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    for name, changes in (("keys.md", True), ("training.md", False)):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
        assert (reference() in hooks.on_page_markdown(text, page)) == changes
