"""Growing trees against lists of paths: which drafts stay, on what they hang, what a frontier sees."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specwave.decoding.grow import Dynamic, Fixed, best, candidates, children, keep
from specwave.decoding.tree import Tree, ancestors, nodes

VOCAB = 5


def table(seed, row=0, vocab=VOCAB, certain=0.2):
    """Logits float64 [V] after a path of ids. Every node has the same ones in an order of its own, so that paths tie
    all over; at `certain` of the nodes one id is so likely that its step counts exactly 0."""

    def at(path):
        generator = random.Random(f"{seed} {row} {path}")
        logits = [-0.5 * i for i in range(vocab)]
        if generator.random() < certain:
            logits[0] = 1e4
        generator.shuffle(logits)
        return torch.tensor(logits, dtype=torch.float64)

    return at


def steps(logits):
    """Log-probabilities of all ids, as a list."""
    return (logits - logits.logsumexp(-1)).clamp(max=0).tolist()


def by_lists(at, levels, top_k, size):
    """The paths of the kept drafts, best first: the algorithm's description, word by word."""
    found, frontier = [], [(0.0, ())]
    for _ in range(levels):
        made = []
        for score, path in frontier:
            step = steps(at(path))
            for token in sorted(range(len(step)), key=lambda token: -step[token])[:top_k]:
                made.append((score + step[token], (*path, token)))
        found += made
        frontier = sorted(made, key=lambda entry: -entry[0])[:top_k]  # Python's sort is stable
    return [path for _, path in sorted(found, key=lambda entry: -entry[0])[:size]]


def score(at, path):
    total = 0.0
    for level, token in enumerate(path):
        total += steps(at(path[:level]))[token]
    return total


def paths_of(ids, parents):
    """Each draft's path of ids."""
    paths = []
    for token, parent in zip(ids.tolist(), parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def drive(shape, tables):
    """Grows one tree per table, and checks on the way what every frontier sees: its ancestors among the nodes read."""
    growth, frontier = shape.start(len(tables)), [[()] for _ in tables]
    read = [[] for _ in tables]
    rounds = 0
    while True:
        logits = [torch.stack([at(path) for path in row]) for at, row in zip(tables, frontier, strict=True)]
        rounds += 1
        following = growth.add(torch.stack(logits))
        if following is None:
            break
        for row, before in enumerate(frontier):
            ids = following.ids[row].tolist()
            source = [0] * len(ids) if following.source is None else following.source[row].tolist()
            frontier[row] = [(*before[above], token) for above, token in zip(source, ids, strict=True)]
            read[row] += frontier[row]
            wanted = [[path[: len(other)] == other for other in read[row]] for path in frontier[row]]
            assert (following.sees is None and all(map(all, wanted))) or following.sees[row].tolist() == wanted
    assert rounds == shape.levels
    assert all(len(row) <= shape.slots for row in read)
    ids, parents = growth.finish()
    return [paths_of(*row) for row in zip(ids, parents, strict=True)], ids, parents


shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))


@given(st.integers(0, 10**6), shapes, st.integers(1, 3))
@settings(deadline=None, max_examples=120)
def test_the_kept_drafts_are_those_of_the_description(seed, shape, rows):
    levels, top_k, size = shape
    tables = [table(seed, row) for row in range(rows)]
    paths, ids, parents = drive(Dynamic(levels, top_k, size), tables)
    for row, at in enumerate(tables):
        assert paths[row] == by_lists(at, levels, top_k, size)  # the same order too: ties go to the earlier
        assert len(paths[row]) == min(size, candidates(levels, top_k))
        assert len(set(paths[row])) == len(paths[row])
        scores = [score(at, path) for path in paths[row]]
        assert scores == sorted(scores, reverse=True)
        assert all(path[:-1] in {(), *paths[row][:place]} for place, path in enumerate(paths[row]))
        Tree(ids[row], parents[row]).check()


@given(st.integers(0, 10**6), shapes)
@settings(deadline=None, max_examples=60)
def test_the_first_drafts_are_the_best_smaller_tree(seed, shape):
    levels, top_k, size = shape
    whole = drive(Dynamic(levels, top_k, 64), [table(seed)])[0][0]
    assert drive(Dynamic(levels, top_k, size), [table(seed)])[0][0] == whole[:size]


@given(st.integers(0, 10**6), shapes)
@settings(deadline=None, max_examples=60)
def test_the_mask_is_the_ancestors_and_a_leaf_is_seen_by_itself_alone(seed, shape):
    levels, top_k, size = shape
    paths, ids, parents = drive(Dynamic(levels, top_k, size), [table(seed)])
    sees = ancestors(nodes(Tree(ids[0], parents[0]))[1][None], levels)[0]
    every = [(), *paths[0]]
    assert sees.tolist() == [[path[: len(other)] == other for other in every] for path in every]
    for place, path in enumerate(every):
        if path not in {other[:-1] for other in paths[0]}:  # a leaf
            assert sees[:, place].sum() == 1
            assert sees[place].sum() == len(path) + 1


def test_worked_example():
    """The one at the head of grow.py: ids a b c d e f = 0 … 5, probabilities of what follows a path."""
    given_ = {(): {0: 0.6, 1: 0.32}, (0,): {2: 0.5, 3: 0.4}, (1,): {4: 0.9, 5: 0.1}}

    def at(path):
        after = [given_[path].get(token, 0.0) for token in range(6)]
        rest = (1 - sum(after)) / 40  # over many ids, so that none of them comes before a named one
        return torch.tensor([*after, *[rest] * 40], dtype=torch.float64).log()

    paths, _, parents = drive(Dynamic(2, 2, 4), [at])
    assert paths == [[(0,), (1,), (0, 2), (1, 4)]]
    assert parents.tolist() == [[-1, -1, 0, 1]]


def test_of_equal_candidates_the_earlier_stays():
    scores = torch.tensor([[-1.0, -2.0, -1.0, -2.0, -2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert best(scores, 4).tolist() == [[0, 2, 1, 3], [0, 1, 2, 3]]
    kept, parents = keep(scores, torch.tensor([[-1, -1, 0, 1, 2], [-1, 0, 1, 2, 3]]), 4)
    assert kept.tolist() == [[0, 2, 1, 3], [0, 1, 2, 3]]
    assert parents.tolist() == [[-1, 0, -1, 2], [-1, 0, 1, 2]]


@given(st.integers(0, 10**6), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
@settings(deadline=None, max_examples=60)
def test_no_draft_without_its_parent_in_low_precision(seed, dtype):
    """sglang#36201. Rounding makes ties and steps above 0; a shifted tree would name a parent that comes later."""
    generator = torch.Generator().manual_seed(seed)
    growth, nodes_read = Dynamic(5, 4, 30).start(3), 1
    scale = 10 ** (3 * torch.rand(3, 1, 1, generator=generator) - 1)
    while True:
        logits = torch.randn(3, nodes_read, 40, generator=generator) * scale
        frontier = growth.add(logits.to(dtype))
        if frontier is None:
            break
        nodes_read = frontier.ids.shape[1]
    above, places = torch.cat(growth.scores, 1), torch.cat(growth.parents, 1)
    kept = [set(row) for row in keep(above, places, 30)[0].tolist()]
    for row, places_kept in enumerate(kept):
        assert all(int(places[row, place]) in {-1, *places_kept} for place in places_kept)
    for tokens, parents in zip(*growth.finish(), strict=True):
        Tree(tokens, parents).check()


def test_steps_are_log_probabilities_of_at_most_zero():
    logits = torch.randn(2, 3, 9, dtype=torch.float64)
    above = torch.tensor([[0.0, -1.0, -2.0], [-0.5, -0.25, -4.0]], dtype=torch.float64)
    scores, ids = children(logits, above, 4)
    wanted = (logits.log_softmax(-1) + above[..., None]).sort(descending=True)
    torch.testing.assert_close(scores, wanted.values[..., :4])
    assert torch.equal(ids, wanted.indices[..., :4])
    sure = torch.full((1, 1, 3000), -1e4)
    sure[..., 7] = 1e3
    assert children(sure, torch.zeros(1, 1), 1)[0].tolist() == [[[0.0]]]
    assert children(logits.bfloat16(), above.float(), 2)[0].dtype == torch.float32


def test_a_vocabulary_smaller_than_top_k_is_used_up():
    tables = [table(3, vocab=3, certain=0.0), table(4, vocab=3, certain=0.0)]
    paths = drive(Dynamic(3, 8, 64), tables)[0]
    assert [len(row) for row in paths] == [3 + 9 + 8 * 3] * 2
    assert paths == [by_lists(at, 3, 8, 64) for at in tables]


# ---------------------------------------------------------------- fixed trees


@st.composite
def rank_paths(draw):
    """Trees of rank paths, in any order."""
    paths = [(draw(st.integers(0, 3)),)]
    for _ in range(draw(st.integers(0, 12))):
        path = (*draw(st.sampled_from([(), *paths])), draw(st.integers(0, 3)))
        if path not in paths and len(path) <= 5:
            paths.append(path)
    return draw(st.permutations(paths))


@given(st.integers(0, 10**6), rank_paths(), st.integers(1, 3))
@settings(deadline=None, max_examples=100)
def test_a_fixed_tree_takes_the_named_ranks(seed, named, rows):
    tables = [table(seed, row, certain=0.0) for row in range(rows)]
    shape = Fixed([list(path) for path in named])
    assert (shape.levels, shape.size) == (max(map(len, named)), len(named))
    paths, ids, parents = drive(shape, tables)
    for row, at in enumerate(tables):
        wanted = []
        for ranks in sorted(named, key=lambda path: (len(path), path)):
            path = ()
            for rank in ranks:
                step = steps(at(path))
                path = (*path, sorted(range(VOCAB), key=lambda token: -step[token])[rank])
            wanted.append(path)
        assert paths[row] == wanted
        Tree(ids[row], parents[row]).check()


def test_a_chain_is_the_likeliest_path():
    paths, _, parents = drive(Fixed.chain(4), [table(8)])
    assert paths[0] == by_lists(table(8), 4, 1, 4)
    assert parents.tolist() == [[-1, 0, 1, 2]]
    assert Fixed.chain(4).slots == 3


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], "one at least"),
        ([[0], [0]], "once"),
        ([[0], []], "one rank or more"),
        ([[0], [0, -1]], "count from 0"),
        ([[0], [1, 0]], r"\[1, 0\] hangs on \[1\], which is missing"),
        ([[0, 0]], r"hangs on \[0\]"),
    ],
)
def test_what_is_no_tree_is_refused(paths, words):
    with pytest.raises(ValueError, match=words):
        Fixed(paths)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_logits_that_are_no_numbers_break_no_tree(level):
    """They count as impossible: the row's tree stays one, and the other rows draft as before."""
    draw, logits = torch.Generator().manual_seed(3), []
    shape = Dynamic(3, 3, 12)
    for poison in (False, True):
        draw.manual_seed(3)
        growth, frontier, read = shape.start(2), True, 0
        while frontier is not None:
            nodes_read = 1 if read == 0 else frontier.ids.shape[1]
            found = torch.randn(2, nodes_read, VOCAB, generator=draw)
            if poison and read == level:
                found[0, -1, 2] = torch.nan
            frontier, read = growth.add(found), read + 1
        logits.append(growth.finish())
    (ids, parents), (poisoned_ids, poisoned_parents) = logits
    assert torch.equal(ids[1], poisoned_ids[1])
    assert torch.equal(parents[1], poisoned_parents[1])
    assert Tree(poisoned_ids[0], poisoned_parents[0]).check() <= 3
    assert Tree(ids[0], parents[0]).check() == 3
