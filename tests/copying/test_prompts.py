"""Probe prompts: how many, how different, of nobody's benchmark; how they are divided; files of one's own."""

import collections
import functools
import inspect
import json
import random
import re

import pytest

from specwave.artifacts import UserError
from specwave.benchmark.documents import document, logbook
from specwave.benchmark.questions import BUILTIN, read_questions
from specwave.copying import prompts as room
from specwave.copying.prompts import (
    DOMAINS,
    ProbePrompt,
    diagonals,
    probe_prompts,
    read_prompts,
    split,
    templates,
)
from specwave.data.overlap import overlap

# ---------------------------------------------------------------- templates


def test_at_least_200_templates_of_many_kinds():
    known = templates()
    assert len(known) >= 200
    assert len({template.id for template in known}) == len({template.text for template in known}) == len(known)
    per_domain = collections.Counter(template.domain for template in known)
    assert set(per_domain) == set(DOMAINS)
    assert min(per_domain.values()) >= 60, per_domain
    per_kind = collections.Counter(template.kind for template in known)
    assert len(per_kind) >= 20
    assert min(per_kind.values()) >= 5, per_kind
    assert {"docstring", "edit", "quote", "table", "form", "translate", "summary", "repeat", "passage"} <= set(per_kind)
    assert {"arithmetic", "logic", "plan", "story", "opinion", "derivation"} <= set(per_kind)


def test_every_template_is_whole():
    for template in templates():
        names = [name for column, _ in template.columns for name in column]
        assert len(set(names)) == len(names), template.id
        assert set(names) == set(re.findall(r"<<(\w+)>>", template.text)), template.id
        assert template.id.startswith(f"{template.kind}-"), template.id
        assert template.size >= 5, template.id
        for column, fillers in template.columns:
            assert len(set(fillers)) == len(fillers), (template.id, column)
            for filler in fillers:
                assert len(filler) == len(column), (template.id, filler)
                assert all(text.strip() for text in filler), (template.id, filler)


def test_all_expansions_differ_and_leave_no_slot():
    found = [prompt for template in templates() for prompt in template.expand(0)]
    assert len(found) == sum(template.size for template in templates())
    assert len({prompt.text for prompt in found}) == len(found)
    for prompt in found:
        assert prompt.text == prompt.text.strip()
        assert "<<" not in prompt.text, prompt.text
        assert not re.search(r"(?<!>)>>(?!>)", prompt.text), prompt.text  # >>> is Python's prompt
        assert not re.search(r"[ \t]\n", prompt.text), prompt.text


def test_a_template_by_hand():
    columns = ((("a", "b"), (("1", "2"), ("<<c>>", "4"))), (("c",), (("x",), ("y",), ("z",))))
    template = room.Template("t", "<<a>>-<<b>>-<<c>>-<<a>> <d>", "k", "code", columns)
    found = [prompt.text for prompt in template.expand(0)]
    assert sorted(found) == sorted(
        f"{a}-{b}-{c}-{a} <d>" for a, b in (("1", "2"), ("<<c>>", "4")) for c in "xyz"
    )  # a filler is text: what looks like a slot in it stays
    assert len(set(found[:3])) == len({text.split("-")[2] for text in found[:3]}) == 3


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [()]),
        ([1], [(0,)]),
        ([3], [(0,), (1,), (2,)]),
        ([2, 3], [(0, 0), (1, 1), (0, 2), (1, 0), (0, 1), (1, 2)]),
        ([2, 2], [(0, 0), (1, 1), (0, 1), (1, 0)]),
    ],
)
def test_diagonals_by_hand(sizes, expected):
    assert list(diagonals(sizes)) == expected


def test_diagonals_are_every_choice_and_begin_with_new_numbers():
    draw = random.Random(1)
    for _ in range(200):
        sizes = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
        found = list(diagonals(sizes))
        assert len(found) == len(set(found)) == functools.reduce(lambda x, y: x * y, sizes)
        for column, size in enumerate(sizes):
            assert len({choice[column] for choice in found[:size]}) == size


# ---------------------------------------------------------------- expansion


def test_a_thousand_prompts():
    found = probe_prompts()
    assert len(found) == len({prompt.text for prompt in found}) == 1000
    per_template = collections.Counter(prompt.template for prompt in found)
    assert set(per_template) == {template.id for template in templates()}
    assert max(per_template.values()) - min(per_template.values()) <= 1
    by_id = {template.id: template for template in templates()}
    for prompt in found:
        assert (prompt.kind, prompt.domain) == (by_id[prompt.template].kind, by_id[prompt.template].domain)
    shares = collections.Counter(prompt.domain for prompt in found)
    assert min(shares.values()) >= 250, shares


def test_prompts_fit_small_models():
    lengths = sorted(len(prompt.text.split()) for prompt in probe_prompts())
    assert lengths[0] >= 15
    assert lengths[-1] <= 350
    assert lengths[len(lengths) // 2] >= 50


def test_the_seed_decides():
    first, again, other = probe_prompts(400, 3), probe_prompts(400, 3), probe_prompts(400, 4)
    assert first == again
    assert [prompt.template for prompt in first] == [prompt.template for prompt in other]
    same = sum(one == two for one, two in zip(first, other, strict=True))
    assert same < 200
    assert inspect.signature(probe_prompts).parameters["count"].default == 1000


@pytest.mark.parametrize("count", [1, 7, 50])
def test_few_prompts_are_of_templates_far_apart(count):
    found = probe_prompts(count)
    assert len(found) == len({prompt.template for prompt in found}) == count
    if count == 50:
        assert len({prompt.kind for prompt in found}) == len({template.kind for template in templates()})


def test_all_there_are_and_not_one_more():
    largest = sum(template.size for template in templates())
    assert len({prompt.text for prompt in probe_prompts(largest)}) == largest
    with pytest.raises(UserError, match=rf"probe_data.count={largest + 1}: must be .* 1 … {largest}"):
        probe_prompts(largest + 1)


@pytest.mark.parametrize("count", [0, -3, 2.5, True])
def test_counts_that_are_none(count):
    with pytest.raises(UserError, match=r"probe_data\.count"):
        probe_prompts(count)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_that_are_none(seed):
    with pytest.raises(UserError, match=r"probe_data\.seed"):
        probe_prompts(10, seed)
    with pytest.raises(UserError, match=r"probe_data\.seed"):
        split(probe_prompts(10), 0.2, seed)


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([3, 3, 3], 6, [2, 2, 2]),
        ([1, 9, 2], 9, [1, 6, 2]),
        ([5, 5, 5, 5], 2, [1, 0, 1, 0]),
        ([2, 2], 4, [2, 2]),
        ([4], 3, [3]),
    ],
)
def test_spread_by_hand(sizes, count, expected):
    assert room._spread(sizes, count) == expected


# ---------------------------------------------------------------- of nobody's benchmark


def shared_with(questions):
    """The probe's words in a row that benchmarks have too, all expansions counted."""
    texts = ((prompt.template, prompt.text) for template in templates() for prompt in template.expand(0))
    return overlap(texts, {"benchmark": questions})["benchmark"].longest()


def turns_of(path):
    return [(str(question.id), turn) for question in read_questions(path) for turn in question.turns]


def test_a_shared_text_would_be_seen():
    template = next(template for template in templates() if template.id == "plan-long-brief")
    asked = " ".join(next(template.expand(0)).text.split()[10:40])
    assert [match.sample for match in shared_with([("7", f"Please note: {asked}?")])] == ["plan-long-brief"]


def test_nothing_is_shared_with_the_builtin_benchmark():
    assert shared_with(turns_of(BUILTIN)) == []


def test_nothing_is_shared_with_long_contexts():
    entries = logbook(0, 400)
    assert shared_with([("logbook", document(entries, 4))]) == []


def test_nothing_is_shared_with_spec_bench(shared_data):
    assert shared_with(turns_of(shared_data / "spec_bench" / "question.jsonl")) == []


# ---------------------------------------------------------------- division


def test_split_divides_templates():
    found = probe_prompts()
    kept, held_out = split(found, 0.2, seed=5)
    assert sorted(map(found.index, kept + held_out)) == list(range(1000))
    assert [found.index(prompt) for prompt in kept] == sorted(found.index(prompt) for prompt in kept)
    assert [found.index(prompt) for prompt in held_out] == sorted(found.index(prompt) for prompt in held_out)
    sides = [{prompt.template for prompt in side} for side in (kept, held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == round(0.2 * len(templates()))
    assert {prompt.kind for prompt in held_out} == {prompt.kind for prompt in kept}  # every kind has 8 or more
    assert (kept, held_out) == split(found, 0.2, seed=5)
    assert split(found, 0.2, seed=6)[1] != held_out


def made_up(count, kind="other"):
    return [ProbePrompt(f"prompt {place}", f"line-{place}", kind, "") for place in range(count)]


@pytest.mark.parametrize(
    ("count", "share", "held"), [(2, 0.01, 1), (2, 0.99, 1), (5, 0.2, 1), (10, 0.34, 3), (3, 0.9, 2)]
)
def test_split_leaves_something_on_both_sides(count, share, held):
    kept, held_out = split(made_up(count), share)
    assert (len(kept), len(held_out)) == (count - held, held)


def test_split_is_by_template_where_they_are_few():
    found = [ProbePrompt(f"prompt {place}", "ab"[place % 2], "k", "code") for place in range(6)]
    kept, held_out = split(found, 0.5)
    assert len(kept) == len(held_out) == 3
    assert len({prompt.template for prompt in held_out}) == 1


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5, float("nan")])
def test_shares_that_are_none(share):
    with pytest.raises(UserError, match=r"probe_data.held_out=.*between 0 and 1"):
        split(made_up(5), share)


@pytest.mark.parametrize("count", [0, 1])
def test_too_little_to_divide(count):
    with pytest.raises(UserError, match=f"my.key=.*: {count} "):
        split(made_up(count), 0.5, key="my.key")


# ---------------------------------------------------------------- files


def written(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_file_of_prompts(tmp_path):
    rows = [
        {"prompt": "Sort these names.", "kind": "table", "domain": "prose", "id": 9},
        "",
        {"prompt": " Why? \n", "kind": "chat"},
        {"prompt": "Fix it."},
    ]
    assert read_prompts(written(tmp_path, *rows)) == [
        ProbePrompt("Sort these names.", "line-1", "table", "prose"),
        ProbePrompt(" Why? \n", "line-3", "chat", ""),
        ProbePrompt("Fix it.", "line-4", "other", ""),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", r":2: this line is not JSON"),
        ('["a list"]', r":2: each line must be a JSON object"),
        ({"kind": "chat"}, r":2: prompt must be a text that is not blank, got None"),
        ({"prompt": " \n"}, r":2: prompt must be a text that is not blank"),
        ({"prompt": ["a"]}, r":2: prompt must be a text that is not blank"),
        ({"prompt": "b", "kind": ""}, r":2: kind must be a text that is not blank"),
        ({"prompt": "b", "kind": 3}, r":2: kind must be a text that is not blank, got 3"),
        ({"prompt": "b", "kind": "all"}, r":2: kind must not be all"),
        ({"prompt": "b", "domain": "maths"}, r":2: domain must be one of code, prose, reasoning, got 'maths'"),
        ({"prompt": "b", "domain": None}, r":2: domain must be one of code, prose, reasoning, got None"),
        ({"prompt": "first "}, r":2: the prompt of line 1 again"),
        ('{"prompt": "half \\ud83d"}', r":2: the prompt holds half of a surrogate pair"),
        ('{"prompt": "b", "kind": "half \\ud83d"}', r":2: the kind holds half of a surrogate pair"),
    ],
)
def test_lines_that_are_wrong(tmp_path, line, said):
    with pytest.raises(UserError, match=said) as caught:
        read_prompts(written(tmp_path, {"prompt": "first"}, line, {"prompt": "last"}))
    assert caught.value.key == "probe_data.path"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file(tmp_path, content):
    with pytest.raises(UserError, match="the file is empty"):
        read_prompts(written(tmp_path, content))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"mine\.path=.*there is no such file"):
        read_prompts(tmp_path / "nothing.jsonl", key="mine.path")
