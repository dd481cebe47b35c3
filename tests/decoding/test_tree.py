"""Masks, cuts and acceptance against loops over nodes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specwave.decoding.accept import match_tree
from specwave.decoding.tree import Resume, Tree, ancestors, nodes


@st.composite
def trees(draw, most=14):
    count = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    tokens = [draw(st.integers(0, 2)) for _ in range(count)]
    return Tree(torch.tensor(tokens, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64))


def lineage(parents, node):
    """The nodes above a node, itself included, by walking up."""
    path = [node]
    while path[-1] != 0:
        path.append(parents[path[-1]])
    return set(path)


@given(trees())
@settings(deadline=None, max_examples=80)
def test_a_node_sees_its_ancestors_only(tree):
    parents = nodes(tree)[1]
    sees = ancestors(parents[None])[0]
    for node in range(len(tree) + 1):
        assert set(sees[node].nonzero()[:, 0].tolist()) == lineage(parents.tolist(), node)
    deepest = int(sees.sum(-1).max()) - 1
    for depth in range(deepest, deepest + 3):  # told how deep it is, it stops doubling earlier
        assert torch.equal(ancestors(parents[None], depth)[0], sees)


@given(trees(), st.integers(0, 6))
@settings(deadline=None, max_examples=80)
def test_cut_drops_the_deep_drafts_and_no_parent(tree, levels):
    cut = tree.cut(levels)
    cut.check()
    parents = nodes(tree)[1].tolist()
    depth = [len(lineage(parents, node)) - 1 for node in range(len(tree) + 1)]
    kept = [i for i in range(len(tree)) if depth[i + 1] <= levels]
    assert cut.depth is None or cut.depth <= levels
    assert cut.tokens.tolist() == tree.tokens[kept].tolist()
    place = {node: i for i, node in enumerate(kept)}
    assert cut.parents.tolist() == [place.get(int(tree.parents[i]), -1) for i in kept]


def test_a_tree_known_to_be_shallow_is_not_looked_at():
    tree = Tree(torch.tensor([3, 4, 5]), torch.tensor([-1, -1, 0]), depth=2)
    assert tree.cut(2) is tree
    assert tree.cut(1).tokens.tolist() == [3, 4]
    assert len(tree.cut(0)) == 0
    chain = Tree.chain([3, 4, 5])
    assert chain.cut(3) is chain
    assert chain.cut(2).tokens.tolist() == [3, 4]


@given(trees(), st.lists(st.integers(0, 2), min_size=15, max_size=15))
@settings(deadline=None, max_examples=150)
def test_matching_walks_as_far_as_some_path_agrees(tree, chosen):
    """Duplicate siblings are allowed when every node draws the same token after the same prefix, so make it so."""
    tokens, parents = nodes(tree)
    above = parents.tolist()
    sees = ancestors(parents[None])
    prefix = [tuple(int(tokens[j]) for j in sorted(lineage(above, node)) if j) for node in range(len(tokens))]
    by_prefix: dict = {}
    picks = torch.tensor([by_prefix.setdefault(prefix[node], chosen[node]) for node in range(len(tokens))])
    end, on_path = match_tree(tokens[None], parents[None], sees, picks[None])
    depth = 0
    for node in range(len(tokens)):
        walk = sorted(lineage(above, node))
        if all(int(tokens[child]) == int(picks[above[child]]) for child in walk if child):
            depth = max(depth, len(walk) - 1)
    assert int(on_path.sum()) == depth + 1
    assert on_path[0].nonzero()[:, 0].tolist() == sorted(lineage(above, int(end)))


def test_worked_example():
    tokens = torch.tensor([[-1, 10, 11, 12]])
    parents = torch.tensor([[0, 0, 0, 1]])
    sees = ancestors(parents)
    assert sees[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    end, on_path = match_tree(tokens, parents, sees, torch.tensor([[10, 12, 99, 7]]))
    assert end.tolist() == [3]
    assert on_path.tolist() == [[True, True, False, True]]
    end, _ = match_tree(tokens, parents, sees, torch.tensor([[11, 12, 99, 7]]))
    assert end.tolist() == [2]
    end, _ = match_tree(tokens, parents, sees, torch.tensor([[5, 12, 99, 7]]))
    assert end.tolist() == [0]


def test_a_node_before_its_parent_is_refused():
    with pytest.raises(ValueError, match="after its parent"):
        Tree(torch.tensor([1, 2]), torch.tensor([1, -1])).check()
    with pytest.raises(ValueError, match="residuals"):
        Tree(torch.tensor([1, 2]), torch.tensor([-1, -1]), q=torch.ones(2, 5) / 5).check()


def test_states_to_go_on_from_are_cut_with_the_drafts():
    """A chain keeps the states of what is left, a cut to nothing those of the root; out of the middle of a tree drafts
    take the order away that the cache is in."""
    hidden, blocks = torch.arange(8.0).view(4, 2), {0: torch.arange(4.0).view(4, 1)}
    chain = Tree.chain([3, 4, 5], resume=Resume(2, hidden, blocks))
    for levels in (3, 2, 1, 0):
        resume = chain.cut(levels).resume
        assert resume.block == 2
        assert torch.equal(resume.hidden, hidden[: levels + 1])
        assert torch.equal(resume.output(1), hidden[: levels + 1])
        assert torch.equal(resume.output(0), blocks[0][: levels + 1])
    assert Resume(3, hidden, blocks).output(1) is None
    tree = Tree(torch.tensor([3, 4, 5]), torch.tensor([-1, 0, -1]), resume=Resume(2, hidden))
    assert tree.cut(1).resume is None
    assert tree.cut(0).resume is not None
    assert Tree.chain([3]).cut(0).resume is None


@pytest.mark.parametrize("resume", [Resume(2, torch.zeros(3, 4)), Resume(2, torch.zeros(4, 4), {0: torch.zeros(5, 4)})])
def test_states_of_other_nodes_are_refused(resume):
    with pytest.raises(ValueError, match="3 drafts and their root with states of"):
        Tree.chain([3, 4, 5], resume=resume)
