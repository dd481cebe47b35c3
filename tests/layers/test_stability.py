"""The bootstrap: weights stand for copies exactly, units are drawn whole, the sentence says what the numbers say."""

import pytest
import torch

from specwave.artifacts import UserError
from specwave.layers import stability as room
from specwave.layers.calibrate import Calibrated
from specwave.layers.cka import cka_matrix
from specwave.layers.entropy import matrix_entropy
from specwave.layers.search import elsi
from specwave.layers.stability import Stability, bootstrap


def calibrated(labels, categories, layers=5, columns=7, seed=0):
    draw = torch.Generator().manual_seed(seed)
    z = torch.randn(layers, len(labels), columns, dtype=torch.float64, generator=draw) + 0.5
    z = z * torch.arange(1, layers + 1)[:, None, None]
    empty = torch.empty(2, 3, 0, layers)
    return Calibrated(z @ z.mT, torch.tensor(labels), empty, categories, 0, 0, 0, len(labels)), z


@pytest.mark.parametrize("scale", ["none", "frobenius"])
@pytest.mark.parametrize("centre", [False, True])
def test_weighted_rows_have_the_spectrum_of_copies(scale, centre):
    found, _ = calibrated([0, 0, 1, 2, 3, 3], ["a"] * 4)
    units = room._units(found, "prompts")
    drawn = torch.tensor([3, 0, 3, 3])
    weighted = room._resampled(found.grams, units, drawn, scale, centre, copies=False)
    copied = room._resampled(found.grams, units, drawn, scale, centre, copies=True)
    assert weighted.shape[-1] == 4  # rows 0, 1, 4, 5
    assert copied.shape[-1] == 2 + 3 * 2
    for layers in ([0], [1, 4], [0, 2, 3]):
        torch.testing.assert_close(matrix_entropy(weighted[layers].sum(0)), matrix_entropy(copied[layers].sum(0)))


def test_copies_are_the_rows_themselves():
    found, z = calibrated([0, 1, 1, 2], ["a"] * 3)
    copied = room._resampled(found.grams, room._units(found, "prompts"), torch.tensor([1, 1, 0]), "none", False, True)
    rows = z[:, [0, 1, 1, 2, 2]]
    torch.testing.assert_close(copied, rows @ rows.mT)
    torch.testing.assert_close(cka_matrix(copied), cka_matrix(rows @ rows.mT))


def test_units_are_conversations_or_domains():
    found, _ = calibrated([0, 0, 2, 3], ["a", "b", "b", "a"])
    assert room._units(found, "prompts").tolist() == [0, 0, 1, 2]  # conversation 1 left no row
    assert room._units(found, "domains").tolist() == [0, 0, 1, 0]
    one, _ = calibrated([0, 1, 2], ["a"] * 3)
    assert room._units(one, "domains") is None
    averaged, _ = calibrated([-1, -1], ["a"])
    assert room._units(averaged, "prompts") is None


def run(found, resamples=60, over="prompts", seed=0):
    chosen = elsi(found.grams, 2)[0].layers
    return bootstrap(found, lambda grams: elsi(grams, 2)[0].layers, chosen, ("rule", (0, 1)), over=over,
                     resamples=resamples, seed=seed)  # fmt: skip


def test_shares_add_up_and_repeat_with_the_seed():
    found, _ = calibrated(list(range(12)), list("abcdefabcdef"))
    first, again, other = run(found), run(found), run(found, seed=1)
    assert first.content() == again.content()
    assert first.content() != other.content()
    assert sum(entry["share"] for entry in first.sets) == pytest.approx(1)
    assert sum(first.layer_share) == pytest.approx(2)  # two layers to a set
    assert first.gap == sorted(first.gap)
    assert run(found, over="domains").units == 6


def test_equal_prompts_leave_no_doubt():
    """Every prompt has the same rows: any resample is the same data over again, so nothing varies."""
    found, z = calibrated([0, 0, 0], ["a"])
    rows = z.repeat(1, 4, 1)
    same = Calibrated(rows @ rows.mT, torch.arange(4).repeat_interleave(3), found.spread, list("abcd"), 0, 0, 0, 12)
    stable = run(same)
    assert stable.share == 1.0
    assert stable.supported
    assert stable.gap[0] == pytest.approx(stable.gap[2], abs=1e-9)


def made(share, gap, chosen=(0, 2)):
    sets = [{"layers": [0, 2], "share": share}, {"layers": [1, 2], "share": 1 - share}]
    return Stability("prompts", 200, 100, 0, list(chosen), [1, 3], "eagle3", [0.0] * 4, sets, True, gap)


def test_the_sentence_says_what_the_numbers_say():
    good = made(0.9, [0.1, 0.2, 0.3])
    assert good.supported
    assert good.sentence() == (
        "Resampling 200 prompts 100 times chose {0,2} in 90%; its entropy less eagle3's is +0.200 nats "
        "[+0.100, +0.300]: the choice is supported."
    )
    rare = made(0.3, [0.1, 0.2, 0.3])
    assert not rare.supported
    assert "most resamples choose another set, {1,2} came in 70%" in rare.sentence()
    near = made(0.9, [-0.1, 0.2, 0.3])
    assert not near.supported
    assert "it is not clearly above eagle3" in near.sentence()


def test_layers_named_beforehand_get_no_verdict():
    named = made(1.0, [0.1, 0.2, 0.3])
    named.searched = False
    assert not named.supported
    assert named.sentence() == (
        "Resampling 200 prompts 100 times put the entropy of {0,2} +0.200 nats [+0.100, +0.300] from eagle3's."
    )


def test_a_resample_that_the_selector_cannot_use_is_left_out():
    found, _ = calibrated(list(range(6)), list("aabbcc"))

    def select(grams):
        if grams.shape[-1] < 5:
            raise UserError("selector.unbiased", "true", "too few rows")
        return (0, 1)

    stable = bootstrap(found, select, (0, 1), ("rule", (1, 2)), over="prompts", resamples=40)
    assert 0 < stable.resamples < 40
    assert stable.share == 1.0
