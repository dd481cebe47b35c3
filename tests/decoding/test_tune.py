"""The size of a draft: what smaller trees would have earned, by cutting real trees; the choice by a worked clock."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specwave.decoding.grow import Dynamic
from specwave.decoding.protocol import Verdict
from specwave.decoding.tree import Tree
from specwave.decoding.tune import Round, choose


def walk(tree, truth):
    """The accepted nodes when the target's own tokens are `truth` (root 0 first)."""
    path, at = [0], -1
    for token in truth:
        found = [
            place for place in range(len(tree)) if int(tree.parents[place]) == at and int(tree.tokens[place]) == token
        ]
        if not found:
            break
        at = found[0]
        path.append(at + 1)
    return path


def grown(levels, top_k, size, tables):
    """A dynamic tree from a made-up drafter: the logits of a node depend on its last token alone."""
    growth = Dynamic(levels, top_k, size).start(1)
    frontier = growth.add(tables[0][None, None])
    while frontier is not None:
        frontier = growth.add(tables[frontier.ids])
    ids, parents = growth.finish()
    return Tree(ids[0], parents[0])


@given(st.integers(0, 10_000))
@settings(deadline=None)
def test_a_smaller_tree_is_the_head_of_a_larger_one(seed):
    draw = torch.Generator().manual_seed(seed)
    tables = 3 * torch.randn(6, 6, generator=draw)
    truth = torch.randint(6, (5,), generator=draw).tolist()
    whole = grown(4, 3, 30, tables)
    watched = Round.of(Verdict(None, whole, walk(whole, truth), []))
    for levels in (1, 2, 3, 4):
        for drafts in (1, 2, 4, 8, 12):
            small = grown(levels, 3, drafts, tables)
            assert watched.tree(drafts, levels) == len(walk(small, truth)) - 1


def test_a_chain_follows_each_first_child():
    """Drafts a, b below the root; c, d below a; the target takes a, then d: a tree earns two, a chain one."""
    tree = Tree(torch.tensor([7, 8, 9, 5]), torch.tensor([-1, -1, 0, 0]))
    watched = Round.of(Verdict(None, tree, [0, 1, 4], [7, 5, 3]))
    assert watched == Round((1, 1, 2, 2), (0, 3), (True, False, True, False))
    assert [watched.chain(levels) for levels in (1, 2, 3)] == [1, 1, 1]
    assert [watched.tree(drafts, 2) for drafts in (1, 2, 3, 4)] == [1, 1, 1, 2]
    assert watched.tree(4, 1) == 1


def test_the_choice_by_a_worked_clock():
    """Half of the rounds accept two drafts of a chain, half none: E = 1.5 at one level, 2 at two, 2 at three.

    Free drafting, T(k) = 1 + 0.1 k: rates 1/1.1, 1.5/1.2, 2/1.3, 2/1.4. A level that costs 0.6 leaves plain decoding.
    """
    chain = (1, 2, 3)
    rounds = [Round(chain, (0, 1), (True,) * 3), Round(chain, (), (True,) * 3)]

    def verify(tokens):
        return 1 + 0.1 * tokens

    best = choose(rounds, verify, lambda levels, chain: 0.0, [], 3)
    assert [(choice.drafts, round(choice.rate, 6)) for choice in best] == [
        (2, round(2 / 1.3, 6)),
        (3, round(2 / 1.4, 6)),
        (1, round(1.5 / 1.2, 6)),
        (0, round(1 / 1.1, 6)),
    ]
    dear = choose(rounds, verify, lambda levels, chain: 0.6 * levels, [], 3)
    assert dear[0].drafts == 0
    # An overhead per round is borne by fewer rounds the more a round commits.
    slow = choose(rounds, verify, lambda levels, chain: 0.6 * levels, [], 3, overhead=5.0)
    assert slow[0].drafts == 2


def test_a_tree_pays_where_width_is_cheap():
    depths, first = (1, 1, 1), (True, False, False)
    rounds = [Round(depths, (1,), first)] * 3 + [Round(depths, (0,), first)]
    flat = choose(rounds, lambda tokens: 1.0, lambda levels, chain: 0.1, [2, 3], 1)
    assert (flat[0].drafts, flat[0].chain, flat[0].tokens) == (2, False, 2.0)
    steep = choose(rounds, lambda tokens: float(tokens), lambda levels, chain: 0.1, [2, 3], 1)
    assert steep[0].drafts == 0
    assert steep[0].rate == pytest.approx(1.0)
