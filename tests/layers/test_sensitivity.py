"""The sensitivity table: every option once, each row what that setting alone would choose."""

import dataclasses

import pytest
import torch

from specwave.artifacts import UserError
from specwave.layers.calibrate import Calibrated
from specwave.layers.ranking import Ranking
from specwave.layers.selectors import Elsi, ElsiC, Fixed
from specwave.layers.sensitivity import GRAM_OPTIONS, ROW_OPTIONS, SELECTOR_OPTIONS, sensitivity, table, variants
from specwave.layers.settings import Calibration


def made(settings):
    """Random Grams that depend on the row settings; 64 rows at most leave none, as an example of a failure."""
    found = {}
    for own in {one.rows() for one in settings}:
        if own.max_rows == 64:
            found[own] = UserError("calibration.block_size", 32, "0 rows are left: use less")
            continue
        draw = torch.Generator().manual_seed(hash(own) % 10_000)
        z = torch.randn(8, 6, 5, dtype=torch.float64, generator=draw) * torch.arange(1, 9)[:, None, None]
        found[own] = Calibrated(z @ z.mT, torch.arange(6), torch.empty(2, 3, 0, 8), ["a"] * 6, 0, 0, 0, 6)
    return found


def test_one_option_at_a_time():
    base, selector = Calibration(), Elsi()
    listed = list(variants(base, selector))
    assert listed[0].option == "base"
    for variant in listed[1:]:
        before = dataclasses.asdict(base) | dataclasses.asdict(selector)
        after = dataclasses.asdict(variant.calibration) | dataclasses.asdict(variant.selector)
        changed = {key for key in before if before[key] != after[key]}
        assert changed == set(variant.option.split(", "))
    options = {variant.option for variant in listed}
    assert options >= set(ROW_OPTIONS) | set(GRAM_OPTIONS) | {"alpha", "k_beam", "k_expand"}
    assert "k_pool" not in options
    assert {"k_pool", "right_neighbour", "unbiased"} <= {one.option for one in variants(base, ElsiC())}
    assert set(SELECTOR_OPTIONS) >= {"alpha", "k_beam", "k_expand", "k_pool", "right_neighbour", "unbiased"}


@pytest.mark.parametrize("selector", [Elsi(k_beam=2), ElsiC(), Fixed()])
def test_each_row_is_what_its_setting_would_choose(selector):
    base = Calibration()
    effects = sensitivity(base, selector, made)
    listed = list(variants(base, selector))
    assert len(effects) == len(listed)
    for variant, effect in zip(listed, effects, strict=True):
        own = made([variant.calibration])[variant.calibration.rows()]
        if isinstance(own, UserError):
            assert effect.group is None
            assert effect.note == "0 rows are left"
            continue
        grams = own.prepared(variant.calibration.scale, variant.calibration.centre)
        expected = variant.selector.select(grams).groups[0]
        assert effect.group == expected
        ranking = Ranking(grams, len(expected.layers), variant.selector.alpha)
        assert effect.sets == len(ranking)
        for rule in effect.rules:
            assert rule.rank == (ranking.rank(rule.group.layers) if len(rule.group.layers) == 3 else None)


def test_the_table_holds_ranks_of_rules_of_that_size():
    rows = table(sensitivity(Calibration(), Elsi(), made))
    assert list(rows[0])[:5] == ["option", "value", "rows", "layers", "entropy"]
    assert {key for key in rows[0] if key.startswith("rank_")} == {
        "rank_eagle3", "rank_eagle3_release", "rank_low_entropy"
    }  # fmt: skip
    failed = [row for row in rows if row["note"]]
    assert [row["option"] for row in failed] == ["max_rows"]
    assert failed[0]["layers"] is None


def test_without_ranks_the_rules_are_listed_and_nothing_is_ranked(monkeypatch):
    monkeypatch.setattr("specwave.layers.sensitivity.Ranking", lambda *_: pytest.fail("ranked"))
    effects = sensitivity(Calibration(), Elsi(), made, ranked=False)
    assert all(rule.rank is None for effect in effects for rule in effect.rules)
    assert "rank_eagle3" not in table(effects)[0]


def test_an_option_that_the_rows_do_not_allow_is_a_row_that_says_so():
    def three_rows(settings):
        return {own: found if isinstance(found, UserError) else dataclasses.replace(found, grams=found.grams[:, :3, :3])
                for own, found in made(settings).items()}  # fmt: skip

    effects = sensitivity(Calibration(), ElsiC(), three_rows)
    (unbiased,) = [effect for effect in effects if effect.option == "unbiased"]
    assert unbiased.group is None
    assert unbiased.note == "needs at least 4 rows, there are 3"
