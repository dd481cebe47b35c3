"""Tokens per time against its closed form and sums by hand; stage 2 against trying everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwave.skipping.tpt import fastest, tokens_per_layer, tokens_per_time


@pytest.mark.parametrize(
    ("alpha", "rates"),
    [
        (0.5, [1 / 4, 1.5 / 5, 1.75 / 6, 1.9375 / 8]),
        (1.0, [1 / 4, 2 / 5, 3 / 6, 5 / 8]),
        (0.0, [1 / 4, 1 / 5, 1 / 6, 1 / 8]),
    ],
)
def test_the_table_at_its_head(alpha, rates):
    for gamma, rate in zip((0, 1, 2, 4), rates, strict=True):
        assert tokens_per_time(alpha, gamma, 1.0, 4.0) == pytest.approx(rate, rel=1e-14)


@given(st.floats(0, 0.99), st.integers(0, 20), st.floats(0, 10), st.floats(0.01, 10))
def test_it_is_the_closed_form(alpha, gamma, t_draft, t_target):
    closed = (1 - alpha ** (gamma + 1)) / (1 - alpha) / (gamma * t_draft + t_target)
    assert tokens_per_time(alpha, gamma, t_draft, t_target) == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize("near", [1 - 1e-12, 1 - 1e-16, 1.0])
def test_certain_acceptance_puts_gamma_plus_one_on_top(near):
    assert tokens_per_time(near, 7, 0.5, 2.0) == pytest.approx(8 / 5.5, rel=1e-10)


@pytest.mark.parametrize(
    "wrong", [(-0.1, 1, 1, 1), (1.1, 1, 1, 1), (0.5, -1, 1, 1), (0.5, 1.5, 1, 1), (0.5, 1, -1, 1), (0.5, 0, 1, 0),
              (float("nan"), 1, 1, 1), (0.5, 1, float("nan"), 1), (0.5, 1, float("inf"), 1)]
)  # fmt: skip
def test_what_is_no_draft_is_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        tokens_per_time(*wrong)


options = st.lists(st.tuples(st.floats(0, 1), st.floats(0.001, 2)), max_size=6)


@given(options, st.sets(st.integers(1, 8), min_size=1), st.floats(0, 0.5))
def test_stage_two_is_the_best_of_all_pairs(options, gammas, per_token):
    def t_target(tokens):
        return 1 + per_token * (tokens - 1)

    alphas, drafts = [one[0] for one in options], [one[1] for one in options]
    found = fastest(alphas, drafts, t_target, sorted(gammas))
    rates = {(None, 0): 1.0}
    for option, (alpha, t_draft) in enumerate(options):
        for gamma in gammas:
            tokens = sum(alpha**i for i in range(gamma + 1))
            rates[option, gamma] = tokens / (gamma * t_draft + 1 + per_token * gamma)
    assert found.rate == pytest.approx(max(rates.values()), rel=1e-9)
    assert rates[found.option, found.gamma] == pytest.approx(found.rate, rel=1e-9)


@given(st.integers(1, 8), st.floats(0, 0.5))
def test_the_full_set_never_beats_plain_decoding(gamma, per_token):
    """Its drafts cost what the target's own tokens cost, and the verification comes on top."""
    found = fastest([1.0], [1.0], lambda tokens: 1 + per_token * (tokens - 1), [gamma])
    assert (found.option, found.gamma, found.rate) == (None, 0, 1.0)


def test_a_cheap_draft_that_is_often_right_wins_with_its_best_gamma():
    found = fastest([0.9, 0.5], [0.2, 0.1], lambda tokens: 1.0, range(1, 20))
    rates = {gamma: tokens_per_time(0.9, gamma, 0.2, 1.0) for gamma in range(1, 20)}
    assert (found.option, found.gamma) == (0, max(rates, key=rates.get))
    assert 1 < found.gamma < 19
    assert fastest([0.0], [0.1], lambda tokens: 1.0, [3]).option is None


def test_tokens_per_layer_counts_blocks():
    """8 blocks, 10 of 16 sub-layers kept: 3 drafts run 15 blocks, the verification 8."""
    kept = [True] * 10 + [False] * 6
    assert tokens_per_layer(0.5, 3, kept) == pytest.approx(1.875 / 23)
    assert tokens_per_layer(1.0, 0, kept) == pytest.approx(1 / 8)
