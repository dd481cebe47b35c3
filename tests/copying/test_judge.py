"""AUC, precision and recall, calibration, against counting."""

import pytest
import torch

from specwave.copying.judge import auc, calibration, precision_recall


def draws(count, levels, seed):
    """Scores with many ties when `levels` is small, and labels that go with them to some degree."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (count,), generator=draw) / levels
    labels = torch.rand(count, generator=draw) < 0.1 + 0.6 * scores
    return scores, labels


def counted_auc(scores, labels):
    """Every pair of a copied token and another."""
    won = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high in scores[labels].tolist()
        for low in scores[~labels].tolist()
    ]
    return sum(won) / len(won)


@pytest.mark.parametrize("levels", [2, 5, 10**6])
def test_auc_is_the_share_of_pairs_in_order(levels):
    for seed in range(20):
        scores, labels = draws(60, levels, seed)
        if labels.all() or not labels.any():
            continue
        assert float(auc(scores, labels)) == pytest.approx(counted_auc(scores, labels), abs=1e-12)


def test_auc_of_many_probes_at_once_and_its_closed_forms():
    scores, labels = draws(80, 7, 1)
    stacked = torch.stack([scores, -scores, scores**3, torch.zeros(80), labels.float()]).view(5, 1, 80)
    found = auc(stacked, labels)
    assert found.shape == (5, 1)
    own = float(auc(scores, labels))
    assert found[:, 0].tolist() == pytest.approx([own, 1 - own, own, 0.5, 1.0], abs=1e-12)
    assert torch.isnan(auc(scores, torch.ones(80, dtype=torch.bool)))


@pytest.mark.parametrize("levels", [2, 5, 10**6])
def test_precision_and_recall_at_every_threshold(levels):
    for seed in range(10):
        scores, labels = draws(50, levels, seed)
        curve = precision_recall(scores, labels)
        assert curve.thresholds.tolist() == sorted(set(scores.tolist()))
        for place, threshold in enumerate(curve.thresholds):
            said = scores >= threshold
            hits = int((said & labels).sum())
            assert float(curve.precision[place]) == pytest.approx(hits / int(said.sum()))
            assert float(curve.recall[place]) == pytest.approx(hits / int(labels.sum()))


def test_the_best_threshold_by_hand():
    scores = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    labels = torch.tensor([False, True, False, True, True])
    # from 0.5 down: P 1, 1, 2/3, 3/4, 3/5; R 1/3, 2/3, 2/3, 1, 1; F1 0.5, 0.8, 0.67, 0.857, 0.75
    curve = precision_recall(scores, labels)
    assert curve.best_f1() == pytest.approx((0.2, 6 / 7))
    assert curve.average_precision == pytest.approx(1 * 1 / 3 + 1 * 1 / 3 + 3 / 4 * 1 / 3)
    perfect = precision_recall(labels.float(), labels)
    assert perfect.best_f1() == (1.0, 1.0)
    assert perfect.average_precision == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least one copied token"):
        precision_recall(scores, torch.zeros(5, dtype=torch.bool))


def test_equal_thresholds_the_higher_one():
    """0.3 and 0.9 both have F1 2/3: fewer false triggers are worth more than as many true ones."""
    curve = precision_recall(torch.tensor([0.3, 0.3, 0.9, 0.1]), torch.tensor([True, False, True, True]))
    f1 = 2 * curve.precision * curve.recall / (curve.precision + curve.recall)
    threshold, best = curve.best_f1()
    assert best == pytest.approx(float(f1.max()))
    assert threshold == float(curve.thresholds[(f1 >= f1.max() - 1e-12).nonzero().max()])


def test_calibration_by_hand():
    said = torch.tensor([0.05, 0.05, 0.95, 1.0, 0.55, 0.5])
    labels = torch.tensor([False, True, True, True, True, False])
    found = calibration(said, labels, bins=10)
    assert found.counts.tolist() == [2, 0, 0, 0, 0, 2, 0, 0, 0, 2]
    assert found.said[[0, 5, 9]].tolist() == pytest.approx([0.05, 0.525, 0.975])
    assert found.came[[0, 5, 9]].tolist() == pytest.approx([0.5, 0.5, 1.0])
    assert torch.isnan(found.said[1])
    assert found.error == pytest.approx((2 * 0.45 + 2 * 0.025 + 2 * 0.025) / 6)


def test_what_comes_as_often_as_it_was_said_is_calibrated():
    draw = torch.Generator().manual_seed(0)
    said = torch.rand(200_000, generator=draw)
    labels = torch.rand(200_000, generator=draw) < said
    assert calibration(said, labels).error < 0.005  # a bin of 20,000 draws strays by 0.0035 at most (one σ)
    assert calibration(said**2, labels).error > 0.1
