"""Rows of public data sets as turns: hand-worked tables of what is kept, joined, left out and refused."""

import pytest

from specwave.artifacts import UserError
from specwave.data.turns import read_turns, whole

U, A, S = "user", "assistant", "system"


def sharegpt(*turns):
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


FORMATS = [
    (sharegpt(("human", "a"), ("gpt", "b"), ("user", "c"), ("bing", "d")), [(U, "a"), (A, "b"), (U, "c"), (A, "d")]),
    (sharegpt(("system", "s"), ("Human", "a"), ("chatgpt", "b")), [(S, "s"), (U, "a"), (A, "b")]),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, [(U, "a"), (A, "b")]),
    (  # UltraChat has the first question in `prompt` too
        {"prompt": "a", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        [(U, "a"), (A, "b")],
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        [(U, "ab")],
    ),
    ({"conversations": None, "conversation": [{"role": "user", "content": "a"}]}, [(U, "a")]),
    (  # a table of two formats has the columns of both in every row
        {"messages": [{"role": "user", "from": None, "content": "a", "value": None}]},
        [(U, "a")],
    ),
    ({"prompt": "a"}, [(U, "a")]),
    ({"prompt": "a", "response": "b"}, [(U, "a"), (A, "b")]),
    ({"prompt": "a", "answer": "b"}, [(U, "a"), (A, "b")]),
    ({"prompt": "a", "completion": "b"}, [(U, "a"), (A, "b")]),
    ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
     [(U, "a"), (A, "b")]),
    ({"question_id": 1, "category": "qa", "turns": ["a", "b"]}, [(U, "a")]),  # what `b` replies to is not known
    ({"turns": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [(U, "a"), (A, "b")]),
]  # fmt: skip


@pytest.mark.parametrize(("row", "turns"), FORMATS)
def test_formats(row, turns):
    assert read_turns(row, "key", "f:1") == tuple(turns)


ORDER = [
    ("leading answers", [("gpt", "x"), ("gpt", "y"), ("human", "a"), ("gpt", "b")], [(U, "a"), (A, "b")]),
    ("leading answer behind a system turn", [("system", "s"), ("gpt", "x"), ("human", "a")], [(S, "s"), (U, "a")]),
    ("two questions", [("human", "a"), ("human", "b"), ("gpt", "c")], [(U, "a\n\nb"), (A, "c")]),
    ("three answers", [("human", "a"), ("gpt", "b"), ("gpt", "c"), ("gpt", "d")], [(U, "a"), (A, "b\n\nc\n\nd")]),
    ("two system turns", [("system", "s"), ("system", "t"), ("human", "a")], [(S, "s\n\nt"), (U, "a")]),
    ("empty answer", [("human", "a"), ("gpt", " \n"), ("human", "b"), ("gpt", "c")], [(U, "a\n\nb"), (A, "c")]),
    ("empty system turn", [("system", ""), ("human", "a")], [(U, "a")]),
    ("null", [("human", "a"), ("gpt", None)], [(U, "a")]),
    ("late system turn", [("human", "a"), ("gpt", "b"), ("system", "s"), ("human", "c")], [(U, "a"), (A, "b")]),
    ("spaces stay", [("human", " a\n"), ("gpt", "\tb ")], [(U, " a\n"), (A, "\tb ")]),
    ("only answers", [("gpt", "x"), ("gpt", "y")], []),
    ("only a system turn", [("system", "s")], []),
    ("nothing", [], []),
]


@pytest.mark.parametrize(("turns", "expected"), [row[1:] for row in ORDER], ids=[row[0] for row in ORDER])
def test_order(turns, expected):
    assert read_turns(sharegpt(*turns), "key", "f:1") == tuple(expected)


WRONG = [
    (["a"], "must be a JSON object"),
    (None, "must be a JSON object"),
    ({}, "no conversation: .* this one has none"),
    ({"text": "a", "label": 1}, "no conversation: .* this one has text, label"),
    ({"turns": []}, "no conversation"),
    ({"messages": "a"}, "messages must be a list"),
    ({"messages": ["a"]}, "a turn must be an object"),
    (sharegpt(("tool", "a")), "the role 'tool' is unknown, these are read: system, human"),
    ({"messages": [{"content": "a"}]}, "the role None is unknown"),
    (sharegpt(("human", 7)), "must be a text, got '7'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "no text .'image_url'"),
    ({"prompt": 7}, "must be a text"),
]


@pytest.mark.parametrize(("row", "rule"), WRONG)
def test_refused_with_the_place(row, rule):
    with pytest.raises(UserError, match=rf"^key=f:1: .*{rule}"):
        read_turns(row, "key", "f:1")


def test_whole_joins_pairs_and_replaces_halves():
    assert whole("\ud83d\ude00") == "😀"
    assert whole("a\ud83d, \ude00b") == "a�, �b"
    assert whole("end\ud83d") == "end�"
    assert whole("﻿naïve 😀") == "﻿naïve 😀"
