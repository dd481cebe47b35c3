"""What benchmarks/rounds.py counts as a method's parts, on a tiny target: every call once; nothing stays watched."""

import sys
from collections import Counter

import pytest
import torch

from specwave.decoding import generate
from specwave.skipping import ClaspDecoding, DelDecoding, LayerSkipDecoding
from specwave.target import Session

PROMPT = [5, 9, 200, 31, 7, 7, 80]


@pytest.fixture(scope="module")
def benchmark(script):
    return script("rounds")


def counted(benchmark, target, settings, new_tokens=14):
    """(how often each part was called, the calls, what was generated)."""
    proposer, forward = settings.build(target), Session.forward
    settled = []
    with benchmark.watched(lambda: settled.append(None)) as (calls, seconds):
        made = generate(target, proposer, PROMPT, max_new_tokens=new_tokens, eos_ids=())
    assert Session.forward is forward
    found = Counter({key: len(again) for key, again in calls.items()})
    assert len(settled) == 2 * found.total()  # before and behind each
    assert seconds.keys() == {key[0] for key in found}
    assert 0 < seconds.total() < made.seconds
    return found, calls, made


def test_an_early_exit_runs_its_blocks_once_more_than_it_drafts(benchmark, mild):
    found, _, made = counted(benchmark, mild["llama"], LayerSkipDecoding(exit=3, gamma=2))
    drafting = [levels for levels in made.draft_levels if levels]
    assert found["draft", 1, 8, 8, 0, 3, "all"] == sum(drafting)
    assert found["draft", 1, 8, 8, 0, 3, False] == len(drafting)
    verified = {key: count for key, count in found.items() if key[0] == "verify"}
    assert verified[("verify", 3, 8, 8, 3, 8, True)] == drafting.count(2)
    assert sum(verified.values()) == made.rounds
    assert not any(key[0] == "search" for key in found)


def test_clasp_searches_once_a_round_and_its_sub_layers_are_within_the_search(benchmark, mild):
    found, calls, made = counted(benchmark, mild["llama"], ClaspDecoding(blocks=3, gamma=2, stop=0.0))
    assert found["search", 9] == made.rounds - 1  # none before the first
    assert [key for key in found if key[0] == "search"] == [("search", 9)]
    assert sum(count for key, count in found.items() if key[:4] == ("draft", 1, 5, 5)) == sum(made.draft_levels)
    for again in calls["search", 9]:
        again()
    assert Counter({key: len(again) for key, again in calls.items()}) == found  # nothing is noted any more


def test_del_reads_its_shadows(benchmark, mild):
    found, *_, made = counted(benchmark, mild["llama"], DelDecoding(exits=[1, 3], gamma=2))
    heads = {key: count for key, count in found.items() if key[0] == "head"}
    assert sum(heads.values()) == made.rounds
    assert all(key[1] == 2 for key in heads)  # exits at once


def test_a_call_is_repeated_where_it_was_made(benchmark, mild):
    target = mild["llama"]
    session = target.session(1, 64)
    tokens = torch.tensor([PROMPT])
    with benchmark.watched(lambda: None) as (calls, _):
        session.forward(tokens)
        session.advance([len(PROMPT)])
        session.forward(tokens[:, :1], plan=[True] * 16)
    (again,) = calls["draft", 1, 8, 8, 0, 8, True]
    session.advance([1])
    again()
    assert session.lengths == [len(PROMPT)]


def test_a_ratio_is_of_neighbours(benchmark):
    assert benchmark.ratio_of([2.0, 4.0, 9.0], [1.0, 2.0, 3.0]) == 2.0  # a machine that slows down slows both


def test_every_method_has_its_line(benchmark, mild, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path))
    methods = ["swift", "clasp", "asd", "layerskip", "kangaroo", "del", "knapspec"]
    monkeypatch.setattr(sys, "argv", ["rounds.py", "--questions", "1", "--new-tokens", "40", "--methods", *methods])
    monkeypatch.setattr(benchmark, "load_target", lambda *_, **__: mild["llama"])
    benchmark.main()
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: list(map(float, line.split()[1:])) for line in lines[3:-1]}
    assert list(rows) == methods
    for rounds, clock, parts, ratio, alone, alone_ratio, draft, verify, search, head, choice in rows.values():
        assert 1 <= rounds <= 40
        assert min(clock, ratio, alone, alone_ratio) > 0
        assert draft + verify + search + head + choice == pytest.approx(parts, abs=0.05)
        assert min(verify, choice) > 0
    assert rows["clasp"][8] > 0 == rows["layerskip"][8]
    assert rows["kangaroo"][9] > 0
    assert lines[-1].startswith("not within 10% of their parts: ")
