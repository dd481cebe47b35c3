"""The selectors: worked tables of the fixed rules, agreement with the searches, refusals."""

import pytest
import torch

from specwave.artifacts import UserError
from specwave.layers.entropy import matrix_entropy
from specwave.layers.search import elsi, elsi_c, exhaustive
from specwave.layers.selectors import Elsi, ElsiC, Exhaustive, Fixed, fixed_rule, fixed_rules


@pytest.fixture
def grams():
    z = torch.randn(8, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return z @ z.mT


@pytest.mark.parametrize(
    ("rule", "layers", "expected"),
    [
        ("eagle2", 30, (29,)),
        ("eagle3", 30, (2, 15, 27)),  # SmolLM2-135M
        ("eagle3", 36, (2, 18, 33)),  # Qwen3-4B
        ("eagle3", 7, (2, 3, 4)),  # the smallest model
        ("eagle3_release", 32, (1, 15, 28)),
        ("eagle3_release", 7, (1, 2, 3)),
        ("low_entropy", 36, (0, 1, 35)),
        ("low_entropy", 3, (0, 1, 2)),
        ("eagle2", 1, (0,)),
    ],
)
def test_rules(rule, layers, expected):
    assert fixed_rule(rule, layers) == expected


@pytest.mark.parametrize("rule", ["eagle3", "eagle3_release"])
@pytest.mark.parametrize("layers", range(1, 7))
def test_a_rule_that_repeats_a_layer_is_refused_by_name(rule, layers):
    with pytest.raises(UserError, match=f"model of {layers} layers the rule {rule} gives .* repeats a layer"):
        fixed_rule(rule, layers)


def test_an_unknown_rule_blames_the_key_of_the_caller():
    with pytest.raises(UserError, match=r"^groups=eagle4: there is no such rule: use eagle2, eagle3, "):
        fixed_rule("eagle4", 30, key="groups")
    with pytest.raises(UserError, match=r"^selector\.rule=eagle4"):
        Fixed(rule="eagle4")


def test_elsi_is_the_search_with_its_settings(grams):
    assert Elsi(m=2, k_beam=4, k_expand=3, alpha=2.0).select(grams).groups == elsi(grams, 2, 4, 3, 2.0)
    found = Elsi().select(grams)
    assert [len(beam) for beam in found.steps] == [8, 10, 10]
    assert found.steps[-1] == found.groups
    assert [len(group.layers) for beam in found.steps for group in beam[:1]] == [1, 2, 3]


def test_elsi_c_is_the_search_with_its_settings(grams):
    own = ElsiC(m=3, k_beam=2, k_pool=1, right_neighbour=True, unbiased=True)
    assert own.select(grams).groups == elsi_c(grams, 3, 2, 1, right_neighbour=True, unbiased=True)
    with pytest.raises(UserError, match="at least 4 rows"):
        own.select(grams[:, :3, :3])


def test_exhaustive_is_the_ranking_with_its_settings(grams):
    found = Exhaustive(m=4, top=7).select(grams)
    assert found.groups == exhaustive(grams, 4, top=7)
    assert len(found.ranking) == 70
    with pytest.raises(UserError, match=r"selector\.m=4: 70 sets of 4 of 8 layers are more than selector\.max_sets=69"):
        Exhaustive(m=4, max_sets=69).check(8)


def test_seeded_random_layers():
    drawn = {Fixed(rule="random", m=3, seed=seed).check(30) for seed in range(40)}
    assert len(drawn) > 35
    assert all(len(set(layers)) == 3 and list(layers) == sorted(layers) for layers in drawn)
    assert Fixed(rule="random", m=3, seed=7).check(30) == Fixed(rule="random", m=3, seed=7).check(30)
    assert {layer for layers in drawn for layer in layers} > set(range(0, 30, 29))
    with pytest.raises(UserError, match=r"selector\.m must be ≤ 2"):
        Fixed(rule="random", m=3).check(2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"layers": [5, 23, 35]}, (5, 23, 35)),
        ({"layers": [5, 23, 35], "paper_ids_are": "input"}, (4, 22, 34)),  # the paper's ELSI set for Qwen3-4B
        ({"rule": "eagle3"}, (2, 18, 33)),
        ({"rule": "eagle3", "paper_ids_are": "input"}, (1, 17, 32)),
        ({"rule": "eagle3_release", "paper_ids_are": "input"}, (1, 17, 32)),  # in our convention already
        ({"rule": "eagle2", "paper_ids_are": "input"}, (35,)),
    ],
)
def test_the_papers_ids(settings, expected):
    assert Fixed(**settings).check(36) == expected


def test_input_0_is_no_block_output():
    with pytest.raises(UserError, match="input 0 is the embedding"):
        Fixed(layers=[0, 5], paper_ids_are="input").check(36)
    assert Fixed(layers=[36], paper_ids_are="input").check(36) == (35,)


def test_rules_of_a_small_model():
    assert set(fixed_rules(4)) == {"eagle2", "low_entropy"}


def test_fixed_measures_what_it_names(grams):
    (group,) = Fixed().select(grams).groups
    assert group.layers == (2, 4, 5)
    assert group.entropy == pytest.approx(matrix_entropy(grams[[2, 4, 5]].sum(0)).item())
    assert Fixed(layers=[7, 0]).select(grams).groups[0].layers == (0, 7)


def test_m_above_the_model():
    with pytest.raises(UserError) as caught:
        Elsi(m=31).check(30)
    assert "selector.m must be ≤ 30 (the model has 30 layers), got 31" in str(caught.value)
    Elsi(m=30).check(30)


@pytest.mark.parametrize(
    ("layers", "message"),
    [([3, 30], "layer 30 is unknown"), ([3, -1], "layer -1 is unknown"), ([3, 3], "twice"), ([], "at least one")],
)
def test_layers_that_cannot_be(layers, message):
    with pytest.raises(UserError, match=message) as caught:
        Fixed(layers=layers).check(30)
    assert caught.value.key == "selector.layers"


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Elsi(m=0), "selector.m"),
        (lambda: Elsi(k_beam=0), "selector.k_beam"),
        (lambda: Elsi(k_expand=-1), "selector.k_expand"),
        (lambda: Elsi(alpha=0.0), "selector.alpha"),
        (lambda: Elsi(alpha=float("inf")), "selector.alpha"),
        (lambda: Fixed(seed=2**32), "selector.seed"),
        (lambda: Fixed(alpha=-1.0), "selector.alpha"),
        (lambda: Fixed(m=0), "selector.m"),
        (lambda: ElsiC(k_pool=0), "selector.k_pool"),
        (lambda: ElsiC(m=-2), "selector.m"),
        (lambda: Exhaustive(top=0), "selector.top"),
    ],
)
def test_settings_out_of_range(make, key):
    with pytest.raises(UserError) as caught:
        make()
    assert caught.value.key == key
