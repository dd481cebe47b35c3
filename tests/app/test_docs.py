"""Every command on a page can be given, every link leads somewhere, every experiment says how it is run.

Every command of a page but chains also runs and ends well: with small settings, on a target of random weights with as
many blocks as the default one; on the default one where a page decodes with the drafter that comes along. What takes
GPUs, a cluster or a hub says so on its page. (Chains are planned job by job here and in test_chain.py, which runs one.)
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from specwave.app import config as configs
from specwave.app.chain import planned, read
from specwave.app.command import first_choices, read_command_line
from specwave.app.door import run_door
from specwave.app.usage import keys_of, listing, reference
from specwave.artifacts import conf_dir
from specwave.benchmark import Benchmark
from specwave.target.tiny import make_tiny

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


# ---------------------------------------------------------------- commands run

# A part of a command, what it takes that is not here, and how its line or the one before it says so.
ELSEWHERE = (
    (r"hydra/launcher=slurm\b", r"SLURM|cluster|GPU"),
    (r"push_to_hub=", r"\bhub\b"),
    (r"model\.source=Qwen/", r"\bhub\b"),
    (r"trainer=deepspeed\b(?!.*dry_run)", r"GPU"),
)
DRAFTER = r"<drafter folder>|<drafter of ours>|runs/…/drafters/L2-15-27"
TRAINED = r"runs/train/<date>/<time>|runs/train/…|…"
# What a page leaves open, by the words before it: which of the folders made below stands there.
PLACES = (
    (rf"(?<=probe_checkpoint=)({TRAINED}|<run folder>)", "{probe}"),
    (rf"(?<=decoding=kangaroo checkpoint=)({TRAINED})", "{kangaroo}"),
    (rf"(?<=checkpoint=)({TRAINED})", "{train}"),
    (r"(?<= checkpoint=)builtin", "{train}/drafters/L2-15-27"),
    (DRAFTER, "{train}/drafters/L2-15-27"),
    (r"(?<=convert.path=)<folder>", "{train}/drafters/L2-15-27"),
    (r"(?<=rerank.training=)<run folder of train.py>", "{beam}"),
    (r"(?<=selection=)runs/select/<date>/<time>(?= top=14)", "{spread}"),
    (r"runs/select/<date>/<time>|<run folder of (select.py|the last step)>|sweeps/rho/[01]\b", "{select}"),
    (r"runs/own/answers.jsonl", "chats.jsonl"),
)
# Settings that end a command of this door and these words, so that it takes seconds.
SMALL = (
    (
        "select",
        "",
        "calibration.limit=8 calibration.max_new_tokens=24 calibration.block_size=8 calibration.max_rows=64",
    ),
    ("select", "analysis=full", "analysis.resamples=20"),
    ("select", "selector=(proxy|spread)", "selector.width=8 selector.token_width=8"),
    ("select", "selector=spread", "selector.sizes=[1,2]"),
    ("select", "selector=union", "selector.of.proxy.width=8 selector.of.proxy.token_width=8"),
    ("train", "^(?!.*task=)", "trainer.max_steps=2 trainer.decode=1 data.max_length=96 data.validation=2"),
    ("train", "^(?!.*(task=|drafter=kangaroo))", "drafter.steps=2"),
    ("train", "^(?!.*(task=(convert|probe)|data=))", "data.limit=16"),
    ("train", "data=sharegpt", "data.limit=16"),
    ("train", "regenerate|smollm2_groups", "regenerate.max_new_tokens=12"),
    ("train", "smollm2_groups", "data.max_length=400"),
    ("train", "task=probe", "probe_data.max_new_tokens=24 probe.epochs=1 probe.resamples=20"),
    ("train", "task=probe(?!.*jsonl)", "probe_data.count=60"),
    ("train", "experiment=optuna_tau", "hydra.sweeper.n_trials=2 choose.calibration.limit=8"),
    ("evaluate", "", "limit=1 max_new_tokens=6"),
    ("evaluate", "devices=8", "devices=2"),
    ("evaluate", "benchmark=spec_bench", "benchmark.path=question.jsonl benchmark.sha256=null"),
    ("evaluate", "draft_verify", "decoding.trials=8"),
    (
        "evaluate",
        "experiment=skipping_matrix",
        "decoding=clasp,del 'decoding.stop=0,{_target_:specwave.skipping.Midway}'",
    ),
)


def bare(words):
    return " ".join(shlex.split(words, comments=True))


def plain_commands():
    """(page, door, words) of every command that is no chain, once."""
    found = {}
    for page, door, words in EVERY:
        if door != "chain":
            found.setdefault((door, bare(words)), (page, door, words))
    return list(found.values())


COMMANDS = plain_commands()


def elsewhere(words):
    return next((said for part, said in ELSEWHERE if re.search(part, words)), None)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A checkpoint of random weights with 30 blocks."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 30,
        "head_dim": 8,
        "max_position_embeddings": 16384,
    }
    return make_tiny(tmp_path_factory.mktemp("deep") / "deep", **sizes)


@pytest.fixture(scope="module")
def desk(deep, tmp_path_factory):
    """(a folder with the files that pages name, {name: folder of a run that pages refer to})."""
    folder = tmp_path_factory.mktemp("desk")
    before = Path.cwd()
    os.chdir(folder)
    try:
        write_files(folder)
        places = {"deep": str(deep)}
        for name, (door, words) in MADE.items():
            places[name] = str(folder / "made" / name)
            run(door, f"{words} hydra.run.dir={places[name]}", places)
        shutil.copytree(folder / "made" / "evaluation", folder / "runs" / "a")
        shutil.copytree(folder / "made" / "evaluation", folder / "runs" / "b")
        shutil.copytree(Path(places["train"]) / "drafters" / "L2-15-27", folder / "runs" / "a=b")
        shutil.copy(folder / "runs" / "a" / "answers.jsonl", folder / "vicuna-pld.jsonl")
        yield folder, places
    finally:
        os.chdir(before)


def write_files(folder):
    """Conversations, prompts, questions: a few of each, in the layouts that pages name."""

    def write(name, rows):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    questions = Benchmark().questions()
    asked = [[{"role": "user", "content": question.turns[0]}] for question in questions]
    talks = [[*one, {"role": "assistant", "content": f"Answer {number}. " * 9}] for number, one in enumerate(asked)]
    write("prompts.jsonl", [{"messages": one, "prompt": one[0]["content"], "kind": f"k{n % 8}", "domain": "prose"}
                            for n, one in enumerate(asked)])  # fmt: skip
    write("chats.jsonl", [{"messages": one} for one in talks])
    write("ultrachat_200k/train.jsonl", [{"prompt_id": str(n), "messages": one} for n, one in enumerate(talks)])
    write("question.jsonl", [{"question_id": n, "category": question.category, "turns": list(question.turns)}
                             for n, question in enumerate(questions)])  # fmt: skip
    said = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So. " * 30}]
    (folder / "sharegpt.json").write_text(json.dumps([{"id": str(n), "conversations": said} for n in range(20)]))


# What commands of pages build on, in order: a door and its words.
MADE = {
    "select": ("select", ""),
    "spread": ("select", "selector=spread"),
    "train": ("train", "'groups=[[2,15,27],eagle2]'"),
    "beam": ("train", "selection={select} top=8"),
    "kangaroo": ("train", "drafter=kangaroo"),
    "probe": ("train", "task=probe probe=linear"),
    "evaluation": ("evaluate", "checkpoint={train}/drafters/L2-15-27 decoding=eagle3"),
}


def run(door, words, places):
    """The command with small settings and, unless it only asks or decodes with our own drafter, the small target."""
    text = bare(words)
    asks = re.search(r"--|list=|dry_run=true", text)
    more = [] if asks else [one for where, part, given in SMALL if where == door and re.search(part, text)
                            for one in shlex.split(given)]  # fmt: skip
    own = "decoding=eagle3" in text and "checkpoint=" not in text
    if not (asks or own or "model=tiny" in text or "report=" in text):
        more = ["model=hub", "model.source={deep}", "model.name=deep", *more]
    for pattern, place in PLACES:
        words = re.sub(pattern, place, words)
    given = [*shlex.split(words, comments=True), *more]
    for name, place in places.items():
        given = [word.replace("{" + name + "}", place) for word in given]
    given = [word for word in given if not re.fullmatch(r"model=(smollm2_135m|llama31_8b)", word) or asks]
    if re.search(r"devices=8|trainer=(ddp|deepspeed_cpu)", text):  # its processes are started as it was
        command = [sys.executable, str(ROOT / f"{door}.py"), *given]
        assert subprocess.run(command, check=False, timeout=300).returncode == 0, given
    else:
        assert run_door(door, given) == 0, given


def test_what_is_not_run_says_so():
    left = [(page, words) for page, _, words in COMMANDS if elsewhere(bare(words))]
    assert len(left) <= 10, "most commands run here"
    for page, words in left:
        text = page.read_text(encoding="utf-8")
        block = next(block for block in FENCE.findall(text) if words.strip() in block.replace("\\\n", " "))
        around = text[max(0, text.index(block) - 400) : text.index(block) + len(block)]
        assert re.search(elsewhere(bare(words)), around), f"{page.name}: {words}"


@pytest.mark.parametrize(
    ("door", "words"),
    [(door, words) for _, door, words in COMMANDS if not elsewhere(bare(words))],
    ids=lambda value: bare(value)[:90] or "-",
)
def test_it_runs(door, words, desk, monkeypatch):
    folder, places = desk
    monkeypatch.chdir(folder)
    run(door, words, places)
