"""The proxy on steps made by hand: closed forms, a written-out reference, planted sets, refusals; candidates."""

import dataclasses
import itertools
import math

import pytest
import torch

from specwave.artifacts import UserError
from specwave.layers import foresight as room
from specwave.layers.analysis import spearman
from specwave.layers.candidates import Union, in_turns
from specwave.layers.foresight import Foresight, parts_of, resampled
from specwave.layers.groups import Group
from specwave.layers.proxy import Proxy
from specwave.layers.selectors import Elsi, ElsiC
from specwave.layers.steps import Steps

N, P, E, D, V, S = 8, 6, 3, 6, 9, 400


def made(noise=0.0, conversations=10, seed=0, telling=(), rows=S):
    """Steps of which the layers in `telling` hold the target's state (split among them), all else is noise."""
    draw = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, D, generator=draw)
    head = torch.randn(V, D, generator=draw)
    logits = states @ head.T
    tokens = logits.argmax(1)
    order = torch.bincount(tokens, minlength=V).argsort(descending=True, stable=True)
    place = torch.empty(V, dtype=torch.int64)
    place[order] = torch.arange(V)
    inputs = torch.randn(rows, E + N * P, generator=draw)
    for part, layer in zip(torch.arange(D).tensor_split(max(1, len(telling))), telling, strict=False):
        own = E + layer * P + part
        inputs[:, own] = states[:, part] + noise * torch.randn(rows, len(part), generator=draw)
    return Steps(
        inputs, states, place[tokens], torch.arange(rows) % conversations, order + 100, head[order], P, E, rows
    )


def grams(seed=0):
    z = torch.randn(N, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return z @ z.mT


def a_proxy(**changes):
    return Proxy(**{"width": P, "token_width": E, "m": 2, "exact": 10, "top": 5, **changes})


# ---------------------------------------------------------------- closed forms


def test_a_layer_that_is_the_target_state_is_foretold_whole():
    found = Foresight(made(telling=[5]), 4, 1e-9)
    assert found.hits((5,)).all()
    assert found.hits((2, 5)).all()
    agreement, explained = found.search(torch.tensor([[5], [2]]), V)
    assert agreement[0] == 1
    assert explained[0] > 1 - 1e-6


def test_noise_is_worth_chance_and_so_is_nothing():
    """Nothing to learn: what is told is the mean, hence one token; noise can only lose to it, and not by much."""
    steps = made()
    found = Foresight(steps, 4, 1.0)
    likely = (steps.tokens == steps.tokens.bincount().argmax()).double().mean().item()
    several = 3 * math.sqrt(likely * (1 - likely) / S)
    for layers in [(), (3,), (1, 6)]:
        assert found.hits(layers).double().mean().item() < likely + several
    _, explained = found.search(torch.tensor([[3], [1]]), V)
    assert explained.abs().max() < 0.2
    assert explained.max() < 0.05


def test_more_noise_is_less_agreement():
    values = [
        Foresight(made(noise, telling=[5]), 4, 0.01).hits((5,)).double().mean() for noise in (0.0, 0.3, 1.0, 10.0)
    ]
    assert values == sorted(values, reverse=True)
    assert values[0] > 0.95 > 0.5 > values[-1]


def test_a_layer_more_helps_where_it_tells_something():
    found = Foresight(made(0.1, telling=[1, 4, 6]), 4, 0.01)
    alone, two, three = (found.hits(layers).double().mean() for layers in [(1,), (1, 4), (1, 4, 6)])
    assert alone < two < three


# ---------------------------------------------------------------- against what it stands for


def reference(steps, parts, layers, damping):
    """Every part foretold by a regression on the others' concatenated rows."""
    x, y = steps.inputs[:, steps.columns(layers)].double(), steps.states.double()
    own = steps.conversations % parts  # conversations are 0, 1, 2, …
    hits = torch.zeros(len(y), dtype=torch.bool)
    for part in range(parts):
        fit, held = own != part, own == part
        mean_x, mean_y = x[fit].mean(0), y[fit].mean(0)
        inner = (x[fit] - mean_x).T @ (x[fit] - mean_x)
        inner += damping * inner.diagonal().mean() * torch.eye(len(inner), dtype=inner.dtype)
        weights = torch.linalg.solve(inner, (x[fit] - mean_x).T @ (y[fit] - mean_y))
        told = mean_y + (x[held] - mean_x) @ weights
        hits[held] = (told @ steps.head.double().T).argmax(1) == steps.tokens[held]
    return hits


@pytest.mark.parametrize("layers", [(), (0,), (1, 4), (2, 4, 6), (7,)])
def test_hits_are_those_of_a_regression_on_the_rows_themselves(layers, monkeypatch):
    monkeypatch.setattr(room, "_AT_ONCE", 7)
    steps = made(0.5, telling=[1, 4], rows=240)
    if layers == (7,):
        steps.tokens[::3] = -1  # said by the target, outside the vocabulary: never a hit
    found = Foresight(steps, 5, 0.05).hits(layers)
    if not layers:
        layers = ()
    assert torch.equal(found, reference(steps, 5, layers, 0.05))
    assert not found[steps.tokens < 0].any()


def test_the_rough_comparison_with_all_tokens_and_rows_is_the_exact_one():
    steps = made(0.5, telling=[1, 4])
    found = Foresight(steps, 4, 0.05)
    sets = torch.tensor(list(itertools.combinations(range(N), 2)))
    rough, _ = found.search(sets, V)
    for layers, value in zip(sets.tolist(), rough.tolist(), strict=True):
        assert value == pytest.approx(found.hits(tuple(layers))[found.rows[0]].double().mean().item())


def test_the_rough_comparison_takes_few_rows_and_tokens(monkeypatch):
    monkeypatch.setattr(room, "SEARCH_ROWS", 30)
    steps = made(0.5, telling=[1, 4])
    rough, explained = Foresight(steps, 4, 0.05).search(torch.tensor([[1, 4], [0, 2]]), 3)
    assert ((rough * 30).round() / 30 - rough).abs().max() < 1e-12
    assert rough[0] > rough[1]
    assert explained[0] > explained[1]
    assert rough[0] <= 1 - (steps.tokens >= 3).double().mean() + 0.3


def test_conversations_stay_whole():
    conversations = torch.tensor([4, 4, 9, 9, 9, 2, 7])
    assert parts_of(conversations, 2).tolist() == [1, 1, 1, 1, 1, 0, 0]
    with pytest.raises(UserError, match="4 conversations have a step, which is fewer than parts") as caught:
        parts_of(conversations, 5)
    assert caught.value.key == "selector.parts"


def test_intervals_are_of_conversations():
    values, conversations = torch.tensor([1.0, 1, 0, 0]).repeat(50), torch.arange(4).repeat(50)
    low, middle, high = resampled(values, conversations, 400, 0)
    assert (low, high) == (0, 1)  # four conversations, each all hits or all misses: 200 rows make it no surer
    assert middle == pytest.approx(0.5, abs=0.26)
    assert resampled(values, conversations, 400, 0) == [low, middle, high]
    assert resampled(torch.zeros(200), conversations, 10, 0) == [0, 0, 0]


def test_spearman_shares_ranks():
    x = torch.tensor([1.0, 2, 2, 4])
    assert spearman(x, x.exp()) == pytest.approx(1)
    assert spearman(x, -x) == pytest.approx(-1)
    assert spearman(x, torch.tensor([1.0, 2, 3, 4])) == pytest.approx(3 / math.sqrt(10))  # ranks 1, 2.5, 2.5, 4
    assert math.isnan(spearman(x, torch.ones(4)))


# ---------------------------------------------------------------- the selector


def test_the_planted_set_is_chosen():
    steps = made(0.1, telling=[2, 5])
    outcome = a_proxy().select(grams(), steps)
    assert outcome.groups[0].layers == (2, 5)
    scores = [group.score for group in outcome.groups]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 5
    found = outcome.foretold
    assert scores[0] == found.agreement((2, 5))
    assert len(found.sets) == math.comb(N, 2)
    facts = found.facts((2, 5))
    assert facts["agreement"] == scores[0]
    assert facts["interval"][0] <= scores[0] <= facts["interval"][1]
    assert facts["token_alone"] < scores[0]
    assert set(facts["rules"]) == {"eagle2", "eagle3", "eagle3_release", "low_entropy"}
    assert facts["rules"]["eagle2"]["chosen_less_rule"][0] > 0
    assert (facts["unknowns"], facts["steps"], facts["conversations"]) == (E + 2 * P, S, 10)
    assert facts["search"]["sets"] == 28
    assert facts["search"]["spearman"] > 0.5


def test_the_same_again_and_no_entropy_in_it():
    steps = made(0.3, telling=[2, 5, 6])
    first, again, other = (a_proxy(m=3).select(grams(seed), steps).groups for seed in (0, 0, 1))
    assert first == again
    assert [(group.layers, group.score) for group in first] == [(group.layers, group.score) for group in other]
    assert first[0].entropy != other[0].entropy


def test_ties_go_to_the_lexicographically_smallest():
    steps = made(telling=[5])
    outcome = a_proxy(ridge=1e-9, exact=28, top=28).select(grams(), steps)
    assert [group.layers for group in outcome.groups[:7]] == [
        tuple(sorted((5, other))) for other in range(N) if other != 5
    ]


def test_too_few_rows_are_named():
    steps = made(rows=64, conversations=8)  # 48 rows behind a fit
    assert Foresight(steps, 4, 0.1).fitted == 48
    a_proxy(m=3).select(grams(), steps)  # 21 unknowns
    with pytest.raises(UserError, match=r"the regression for \{0,1,2,3\} has 27 unknowns and 48 rows") as caught:
        a_proxy(m=4).select(grams(), steps)
    assert caught.value.key == "selector.width"
    rules = a_proxy(m=1).select(grams(), made(rows=40, conversations=8)).foretold.rules
    assert set(rules) == {"eagle2"}  # 30 rows are enough for one layer, the rules of three are left out


def test_steps_of_another_model():
    with pytest.raises(ValueError, match="steps are of 8 layers, the Grams of 5"):
        a_proxy().select(grams()[:5], made())


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"m": 0}, "selector.m"),
        ({"width": 0}, "selector.width"),
        ({"token_width": 0}, "selector.token_width"),
        ({"ridge": 0.0}, "selector.ridge"),
        ({"ridge": math.inf}, "selector.ridge"),
        ({"ridge": math.nan}, "selector.ridge"),
        ({"parts": 1}, "selector.parts"),
        ({"positions": 1}, "selector.positions"),
        ({"shortlist": 0}, "selector.shortlist"),
        ({"top": 11}, "selector.top"),
        ({"seed": -1}, "selector.seed"),
    ],
)
def test_settings_out_of_range(settings, key):
    with pytest.raises(UserError) as caught:
        a_proxy(**settings)
    assert caught.value.key == key


def test_too_many_sets():
    with pytest.raises(UserError, match=r"selector\.m=3: 56 sets of 3 of 8 layers are more than selector\.max_sets=55"):
        a_proxy(m=3, max_sets=55).check(8)
    with pytest.raises(UserError, match=r"selector\.m must be ≤ 8"):
        a_proxy(m=9).check(8)


# ---------------------------------------------------------------- candidates


def test_candidates_in_turns():
    a, b, c, d = (Group((layer,), float(layer)) for layer in range(4))
    found = in_turns({"one": [a, b, c], "two": [b, a], "rule": [d]}, 4)
    assert [(group.layers, group.origin) for group in found] == [
        ((0,), ("one", "two")),
        ((1,), ("one", "two")),
        ((3,), ("rule",)),
        ((2,), ("one",)),
    ]
    assert [group.layers for group in in_turns({"one": [a, b, c], "two": [b, a], "rule": [d]}, 3)] == [(0,), (1,), (3,)]
    assert len(in_turns({"one": [a]}, 5)) == 1


def test_a_union_asks_them_all():
    steps, own = made(0.1, telling=[2, 5]), a_proxy()
    members = {"elsi": Elsi(m=2), "cka": ElsiC(m=2), "ahead": own, "out": None}
    union = Union(members, m=2, top=8, rules=["eagle3", "eagle2"])
    assert union.sampling() == own.sampling()
    outcome = union.select(grams(), steps)
    groups = {group.layers: group for group in outcome.groups}
    assert len(groups) == 8
    assert outcome.groups[0].layers == Elsi(m=2).select(grams()).groups[0].layers
    assert "ahead" in groups[2, 5].origin
    assert groups[7,].origin == ("eagle2",)
    assert groups[2, 4, 5].origin == ("eagle3",)
    assert groups[2, 5].score == outcome.foretold.agreement((2, 5)) == max(group.score for group in outcome.groups)
    assert groups[7,].entropy == pytest.approx(Elsi(m=1, k_beam=8).select(grams()[7:]).groups[0].entropy)


def test_a_union_without_a_proxy_needs_no_steps():
    union = Union({"elsi": Elsi(m=2)}, m=2, top=3, rules=["eagle2"])
    assert union.sampling() is None
    assert all(group.score is None for group in union.select(grams()).groups)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"top": 0}, "selector.top"),
        ({"top": 2}, "selector.top"),
        ({"of": {"a": None}, "rules": []}, "selector.of"),
        ({"of": {"a": a_proxy(), "b": a_proxy()}}, "selector.of"),
    ],
)
def test_unions_that_cannot_be(changes, key):
    with pytest.raises(UserError) as caught:
        dataclasses.replace(Union({"a": Elsi()}), **changes)
    assert caught.value.key == key


def test_a_union_checks_its_members_and_rules():
    with pytest.raises(UserError, match=r"^selector\.rules=eagle4"):
        Union({"a": Elsi()}, rules=["eagle4"]).check(8)
    with pytest.raises(UserError, match=r"^selector\.of\.a\.m=3: selector\.m must be ≤ 2"):
        Union({"a": Elsi()}).check(2)
    with pytest.raises(UserError, match=r"^selector\.of\.ahead\.width=6: the regression for \{0,1\} has 15 unknowns"):
        Union({"ahead": a_proxy()}, m=2).select(grams(), made(rows=24, conversations=8))
