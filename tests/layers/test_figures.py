"""The pictures: both forms, whole, the same for the same numbers, and what is marked is what was said."""

import pytest
import torch

from specwave.layers import analysis
from specwave.layers.cka import cka_matrix
from specwave.layers.figures import cka_figure, entropy_figure
from specwave.layers.ranking import Ranking
from specwave.layers.search_figures import frontier_figure, partners_figure, ranking_figure, stability_figure
from specwave.layers.selectors import Elsi
from specwave.layers.stability import Stability


def made(layers=8):
    z = torch.randn(layers, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = z * (1 + torch.arange(layers))[:, None, None]
    return z @ z.mT


def spread(prompts):
    return torch.rand(3, prompts, 8, generator=torch.Generator().manual_seed(1))


def draw(folder, prompts=5):
    grams = made()
    outcome, ranking = Elsi().select(grams), Ranking(grams, 3)
    rules = analysis.rule_standings(grams, ranking, 1.0)
    chosen = analysis.standings(grams, {"elsi": outcome.groups[0].layers}, ranking, 1.0)
    gains = analysis.pair_gains(grams)
    cuts = analysis.variance_cuts(spread(prompts)) if prompts else []
    stable = [
        Stability(
            over,
            5,
            10,
            0,
            [1, 2],
            [3, 4],
            "eagle3",
            [0.1] * 8,
            [{"layers": [1, 2], "share": 0.6}],
            True,
            [-0.1, 0, 0.3],
        )
        for over in ("prompts", "domains")
    ]
    written = entropy_figure(folder / "entropy", torch.rand(8), spread(prompts), (2, 5), "tiny", 32, cuts)
    written += cka_figure(folder / "cka", {"biased": cka_matrix(grams), "unbiased": cka_matrix(grams, True)}, "tiny")
    written += frontier_figure(folder / "frontier", outcome.steps, rules, ranking.top(1)[0], "tiny")
    written += partners_figure(folder / "partners", gains, analysis.best_partners(gains), "tiny")
    written += ranking_figure(folder / "ranking", ranking, [*chosen, *rules], "tiny")
    written += stability_figure(folder / "stability", stable, "tiny")
    return written


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    torch.manual_seed(0)
    return draw(folder), folder


def test_whole_files_the_same_each_time(drawn, tmp_path):
    first, folder = drawn
    torch.manual_seed(0)
    second = draw(tmp_path)
    assert len(first) == 12
    assert sorted(folder.iterdir()) == sorted(first)  # nothing half-written is left
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("entropy", ["5 prompts", "early", "late", "filtered", "random"]),
        ("cka", ["biased", "unbiased", "transition"]),
        ("frontier", ["chosen", "eagle3 {2,4,5}", "best of all sets"]),
        ("partners", ["best partner", "seed layer"]),
        ("ranking", ["of 56", "elsi {", "low_entropy {0,1,7}"]),
        ("stability", ["5 prompts", "5 domains", "{1,2} in 60%", "eagle3 {3,4}"]),
    ],
)
def test_what_is_marked_is_said(drawn, name, words):
    text = (drawn[1] / f"{name}.svg").read_text()
    for word in words:
        assert word in text


def test_without_a_spread_there_is_one_panel(tmp_path):
    entropy_figure(tmp_path / "entropy", torch.rand(8), spread(0), (2, 5), "tiny", 32)
    assert "prompts" not in (tmp_path / "entropy.svg").read_text()
