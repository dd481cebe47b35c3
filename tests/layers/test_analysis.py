"""Pairs, spread and standings against brute force and worked numbers."""

import pytest
import torch

from specwave.artifacts import UserError
from specwave.layers.analysis import Analysis, best_partners, pair_gains, rule_standings, thirds, variance_cuts
from specwave.layers.entropy import matrix_entropy
from specwave.layers.ranking import Ranking


def grams(layers=8, seed=0):
    z = torch.randn(layers, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    z = z * (1 + torch.arange(layers))[:, None, None]
    return z @ z.mT


def test_pair_gains_are_differences_of_entropies():
    own = grams(5)
    gains = pair_gains(own)
    for seed in range(5):
        for partner in range(5):
            pair = matrix_entropy(own[seed] + own[partner]) if seed != partner else matrix_entropy(own[seed])
            assert gains[seed, partner] == pytest.approx((pair - matrix_entropy(own[seed])).item(), abs=1e-12)
    partners = best_partners(gains)
    for seed, partner in enumerate(partners):
        assert partner != seed
        assert gains[seed, partner] == max(gains[seed, other] for other in range(5) if other != seed)
    assert pair_gains(own[:1]).tolist() == [[0.0]]


def test_the_papers_parts_of_36_layers():
    assert thirds(36) == {"early": range(7), "middle": range(7, 29), "late": range(29, 36)}
    assert [part for names in thirds(30).values() for part in names] == list(range(30))
    assert thirds(2) == {"middle": range(2)}


def test_variance_cut_of_known_variances():
    """Filtered states vary half as much as unfiltered ones (a quarter of the variance), random ones as much."""
    base = torch.randn(10, 36, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = variance_cuts(torch.stack([base / 2 + 3, base, base + 1]))
    assert [row["part"] for row in rows] == ["early", "middle", "late"]
    for row in rows:
        assert row["cut"] == pytest.approx(0.75)
        assert row["cut_random"] == pytest.approx(0)
    assert rows[0]["layers"] == [0, 6]
    assert rows[0]["variance"]["unfiltered"] == pytest.approx(base[:, :7].var(0).mean().item())


def test_rules_are_ranked_where_the_size_fits():
    own = grams()
    ranking = Ranking(own, 3)
    found = {standing.name: standing for standing in rule_standings(own, ranking, 1.0)}
    assert set(found) == {"eagle2", "eagle3", "eagle3_release", "low_entropy"}
    assert found["eagle2"].rank is None
    assert found["eagle3"].rank == ranking.rank((2, 4, 5))
    assert found["eagle3"].group.entropy == pytest.approx(matrix_entropy(own[[2, 4, 5]].sum(0)).item())
    assert {standing.name for standing in rule_standings(own[:4], None, 1.0)} == {"eagle2", "low_entropy"}


@pytest.mark.parametrize(
    ("settings", "key"), [({"resamples": -1}, "analysis.resamples"), ({"against": "eagle9"}, "analysis.against")]
)
def test_settings_out_of_range(settings, key):
    with pytest.raises(UserError) as caught:
        Analysis(**settings)
    assert caught.value.key == key


def test_more_sets_than_can_be_ranked():
    full = Analysis(ranking="always", max_sets=1000)
    full.check(36, 2)
    with pytest.raises(UserError, match=r"analysis\.ranking=always: 7,140 sets of 3 of 36 layers are more than"):
        full.check(36, 3)
    Analysis(ranking="auto", max_sets=1000).check(36, 18)
    assert full.ranks(36, 2)
    assert not full.ranks(36, 18)
    assert not Analysis(ranking="never").ranks(8, 3)
