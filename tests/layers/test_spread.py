"""Sets for a study of acceptance: who is among them, and what is said of each."""

import itertools

import pytest
import torch

from specwave.artifacts import UserError
from specwave.layers.cka import linear_cka
from specwave.layers.entropy import matrix_entropy
from specwave.layers.foresight import Foresight
from specwave.layers.spread import NORMALISATIONS, Spread, apart, dealt, predictors
from specwave.layers.steps import Steps

N, P, E, D, V, S = 8, 4, 3, 6, 9, 400


@pytest.fixture(scope="module")
def steps():
    draw = torch.Generator().manual_seed(0)
    states, head = torch.randn(S, D, generator=draw), torch.randn(V, D, generator=draw)
    tokens = (states @ head.T).argmax(1)
    inputs = torch.randn(S, E + N * P, generator=draw)
    inputs[:, E + 5 * P : E + 5 * P + P] = states[:, :P]
    return Steps(inputs, states, tokens, torch.arange(S) % 10, torch.arange(V), head, P, E, S)


@pytest.fixture(scope="module")
def rows():
    """[N, R, D] of growing norm, away from zero."""
    draw = torch.Generator().manual_seed(1)
    return (torch.randn(N, 12, 5, dtype=torch.float64, generator=draw) + 1) * torch.arange(1, N + 1)[:, None, None]


@pytest.fixture(scope="module")
def grams(rows):
    return rows @ rows.mT


def small(**changes):
    return Spread(**{"count": 20, "width": P, "token_width": E, **changes})


def test_every_kind_is_there(grams, steps):
    groups = small().select(grams, steps).groups
    assert len({group.layers for group in groups}) == len(groups) == 20
    origins = {name for group in groups for name in group.origin}
    assert origins == {"eagle2", "eagle3", "eagle3_release", "low_entropy", "top", "bottom", "random"}
    assert {len(group.layers) for group in groups} == {1, 2, 3}
    for size in (1, 2, 3):
        every = sorted(
            itertools.combinations(range(N), size), key=lambda layers: -matrix_entropy(grams[list(layers)].sum(0))
        )
        own = {group.layers: group.origin for group in groups if len(group.layers) == size}
        assert "top" in own[every[0]]
        assert "bottom" in own[every[-1]]


def test_the_same_seed_is_the_same_sets(grams, steps):
    first, again, other = (small(seed=seed).select(grams, steps).groups for seed in (0, 0, 1))
    assert first == again
    assert {group.layers for group in first} != {group.layers for group in other}
    fixed = [group for group in first if group.origin != ("random",)]
    assert {group.layers for group in fixed} <= {group.layers for group in other}


def test_what_is_called_random_was_drawn():
    """Draws have their turn whatever they are; one that was offered but had none is not random."""
    offers = [("rule", [(1,)]), ("top", [(2,), (3,)]), ("random", [(2,), (4,), (1,)])]
    assert dealt(offers, 4) == {(1,): ["rule"], (2,): ["top", "random"], (3,): ["top"], (4,): ["random"]}
    assert dealt(offers, 9)[(1,)] == ["rule", "random"]


def test_extremes_are_different_sets():
    ordered = [(0, 1, 9), (0, 2, 9), (0, 3, 9), (0, 4, 5), (6, 7, 8)]
    assert apart(ordered, 2) == [(0, 1, 9), (0, 4, 5)]
    assert apart(ordered, 9) == [(0, 1, 9), (0, 4, 5), (6, 7, 8)]
    assert apart([(3,), (1,)], 2) == [(3,), (1,)]
    assert apart(ordered, 0) == []


def test_predictors_are_what_they_say(rows, grams, steps):
    """Each against the rows themselves, scaled, centred and joined by hand."""
    sets = [(3,), (0, 7), (1, 4, 6)]
    foresight = Foresight(steps, 4, 0.01)
    for layers, told in zip(sets, predictors(grams, sets, foresight), strict=True):
        for name, (scale, centre) in NORMALISATIONS.items():
            own = [rows[layer] - rows[layer].mean(0) if centre else rows[layer] for layer in layers]
            own = [one / one.norm() if scale == "frobenius" else one for one in own]
            joined = torch.cat(own, 1)
            assert told[name] == pytest.approx(matrix_entropy(joined @ joined.T).item()), name
        pairs = [linear_cka(grams[one], grams[other]).item() for one, other in itertools.combinations(layers, 2)]
        assert told["cka"] == (pytest.approx(sum(pairs) / len(pairs)) if pairs else None)
        assert told["ridge"] == foresight.hits(layers).double().mean().item()
    assert predictors(grams, [(5,)], foresight)[0]["ridge"] > predictors(grams, [(2,)], foresight)[0]["ridge"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sizes": []}, "selector.sizes"), ({"sizes": [2, 2]}, "selector.sizes"), ({"sizes": [0]}, "selector.sizes"),
        ({"count": 0}, "selector.count"), ({"extremes": -1}, "selector.extremes"), ({"parts": 1}, "selector.parts"),
        ({"ridge": 0.0}, "selector.ridge"),
    ],
)  # fmt: skip
def test_settings_refused(changes, key):
    with pytest.raises(UserError) as caught:
        small(**changes)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sizes": [9]}, "selector.sizes"), ({"rules": ["eagle9"]}, "selector.rules"),
        ({"max_sets": 9}, "selector.sizes"), ({"count": 200}, "selector.count"),
    ],
)  # fmt: skip
def test_models_refused(changes, key, grams, steps):
    with pytest.raises(UserError) as caught:
        small(**changes).select(grams, steps)
    assert caught.value.key == key


def test_too_few_rows_for_the_regression(grams, steps):
    few = Steps(
        steps.inputs[:30], steps.states[:30], steps.tokens[:30], steps.conversations[:30], steps.vocabulary, steps.head,
        P, E, 30,
    )  # fmt: skip
    with pytest.raises(UserError, match="unknowns"):
        small().select(grams, few)
