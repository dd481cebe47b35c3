"""Oracles of the calibration pass on the tiny model: padding, a written-out reference, counts, refusals."""

import math

import pytest
import torch

from specwave.artifacts import UserError
from specwave.data.conversations import Sample
from specwave.layers import calibrate as room
from specwave.layers.calibrate import Calibration, calibrate
from specwave.target import ModelConfig
from specwave.target.tiny import make_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    return ModelConfig(name="tiny", source=str(folder), dtype="float32", device="cpu").load()


def samples(*lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        Sample(torch.randint(3, 259, (length,), generator=draw).tolist(), [True] * length, f"q{place}")
        for place, length in enumerate(lengths)
    ]


def reference(target, conversations, settings):
    """The definition, one conversation at a time, with every position's logits at once."""
    rows = []
    for sample in sorted(conversations, key=lambda sample: len(sample.ids)):
        states = target.states(torch.tensor([sample.ids]), range(target.num_layers))
        log_p = torch.log_softmax(target.logits(states[target.num_layers - 1][0]), -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        places = range(settings.skip_first, len(sample.ids))
        kept = sorted(places, key=lambda t: -entropy[t].item())[: max(1, math.ceil(settings.rho * len(places)))]
        kept.sort()
        for start in range(0, len(kept) - settings.block_size + 1, settings.block_size):
            block = kept[start : start + settings.block_size]
            rows.append(torch.stack([states[layer][0, block].mean(0) for layer in states]))
    z = torch.stack(rows, 1).double()
    return z @ z.mT


def test_equals_the_definition(target):
    settings = Calibration(rho=0.5, block_size=4, batch_size=3)
    conversations = samples(40, 9, 77, 23, 61)
    found = calibrate(target, conversations, settings)
    expected = reference(target, conversations, settings)
    # float32 states of norm 100 give Grams of 1e4: relative 1e-4 is far above rounding, far below any wrong row.
    torch.testing.assert_close(found.grams, expected, rtol=1e-4, atol=1e-2)
    assert found.grams.dtype == torch.float64
    assert found.tokens_seen == 210
    assert found.tokens_kept == sum(math.ceil(0.5 * (length - 1)) for length in (40, 9, 77, 23, 61))
    assert found.rows == sum(math.ceil(0.5 * (length - 1)) // 4 for length in (40, 9, 77, 23, 61))


def test_a_padded_batch_equals_single_prompts(target):
    conversations = samples(12, 90, 45, 33, 64, 7)
    single, padded = (
        calibrate(target, conversations, Calibration(rho=0.6, block_size=4, batch_size=size)) for size in (1, 6)
    )
    torch.testing.assert_close(padded.grams, single.grams, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(padded.prompt_entropy, single.prompt_entropy, rtol=0, atol=1e-4)
    assert padded.counts() == single.counts()


def test_a_small_reservoir_draws_rows_of_the_whole(target):
    conversations = samples(60, 80, 70)
    whole = calibrate(target, conversations, Calibration(rho=1.0, block_size=8))
    part = calibrate(target, conversations, Calibration(rho=1.0, block_size=8, max_rows=5))
    assert (part.rows, part.rows_seen, whole.rows_seen) == (5, whole.rows, whole.rows)
    # Diagonals are squared norms of rows: each one kept is one of the whole set.
    for norm in part.grams[3].diagonal():
        assert (whole.grams[3].diagonal() - norm).abs().min() < 1e-6 * norm


def test_short_prompts_are_dropped_and_counted(target):
    found = calibrate(target, samples(1, 5, 80, 90), Calibration(rho=0.5, block_size=16))
    assert (found.prompts, found.prompts_dropped, found.rows) == (4, 2, 4)
    assert found.prompt_entropy.shape == (2, 8)  # two prompts have 32 kept positions
    assert (found.prompt_entropy > 0).all()
    assert (found.prompt_entropy <= math.log(room.SPREAD_TOKENS)).all()


def test_no_block_left_anywhere(target):
    with pytest.raises(UserError) as caught:
        calibrate(target, samples(20, 30), Calibration(rho=0.3, block_size=32))
    assert caught.value.key == "calibration.block_size"
    text = str(caught.value)
    assert "0 rows are left of 2 prompts" in text
    assert "keeps 15 of 50 positions" in text
    assert "smaller calibration.block_size" in text
    with pytest.raises(UserError, match="1 rows are left"):
        calibrate(target, samples(40, 40)[:1], Calibration(rho=1.0, block_size=32))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_layer_that_is_not_finite_is_named(target, bad, monkeypatch):
    plain = target.states

    def broken(ids, layers):
        states = plain(ids, layers)
        for layer in range(5, 8):
            states[layer][:, 3, 7] = bad
        return states

    monkeypatch.setattr(target, "states", broken)
    with pytest.raises(UserError, match=r"layer 5 holds NaN or Inf in the calibration prompt 'q0'"):
        calibrate(target, samples(40), Calibration(rho=1.0, block_size=4))


def test_what_lies_in_the_padding_does_not_matter(target, monkeypatch):
    plain, settings = target.states, Calibration(rho=1.0, block_size=4, batch_size=2)
    conversations = samples(20, 40)
    expected = calibrate(target, conversations, settings)

    def noisy(ids, layers):
        states = plain(ids, layers)
        for hidden in states.values():
            hidden[0, 20:] = math.nan
        return states

    monkeypatch.setattr(target, "states", noisy)
    assert torch.equal(calibrate(target, conversations, settings).grams, expected.grams)
