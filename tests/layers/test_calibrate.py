"""Oracles of the calibration pass on the tiny model: padding, a written-out reference, counts, refusals."""

import math

import pytest
import torch

from specwave.artifacts import UserError
from specwave.data.conversations import Sample
from specwave.layers import calibrate as room
from specwave.layers.calibrate import calibrate as many
from specwave.layers.rows import Rows
from specwave.target import ModelConfig
from specwave.target.tiny import make_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    return ModelConfig(name="tiny", source=str(folder), dtype="float32", device="cpu").load()


def calibrate(target, conversations, settings, batch_size=4):
    (found,) = many(target, conversations, [settings], batch_size)
    if isinstance(found, UserError):
        raise found
    return found


def samples(*lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        Sample(torch.randint(3, 259, (length,), generator=draw).tolist(), [True] * length, f"q{place}", "ab"[place % 2])
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
    settings = Rows(rho=0.5, block_size=4)
    conversations = samples(40, 9, 77, 23, 61)
    found = calibrate(target, conversations, settings, 3)
    expected = reference(target, conversations, settings)
    # float32 states of norm 100 give Grams of 1e4: relative 1e-4 is far above rounding, far below any wrong row.
    torch.testing.assert_close(found.grams, expected, rtol=1e-4, atol=1e-2)
    assert found.grams.dtype == torch.float64
    assert found.tokens_seen == 210
    assert found.tokens_kept == sum(math.ceil(0.5 * (length - 1)) for length in (40, 9, 77, 23, 61))
    assert found.rows == sum(math.ceil(0.5 * (length - 1)) // 4 for length in (40, 9, 77, 23, 61))


def test_a_padded_batch_equals_single_prompts(target):
    conversations = samples(12, 90, 45, 33, 64, 7)
    single, padded = (calibrate(target, conversations, Rows(rho=0.6, block_size=4), size) for size in (1, 6))
    torch.testing.assert_close(padded.grams, single.grams, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(padded.spread, single.spread, rtol=0, atol=1e-4)
    assert torch.equal(padded.labels, single.labels)
    assert padded.counts() == single.counts()


def test_a_small_reservoir_draws_rows_of_the_whole(target):
    conversations = samples(60, 80, 70)
    whole = calibrate(target, conversations, Rows(rho=1.0, block_size=8))
    part = calibrate(target, conversations, Rows(rho=1.0, block_size=8, max_rows=5))
    assert (part.rows, part.rows_seen, whole.rows_seen) == (5, whole.rows, whole.rows)
    # Diagonals are squared norms of rows: each one kept is one of the whole set.
    for norm in part.grams[3].diagonal():
        assert (whole.grams[3].diagonal() - norm).abs().min() < 1e-6 * norm


def test_short_prompts_are_dropped_and_counted(target):
    found = calibrate(target, samples(1, 5, 80, 90), Rows(rho=0.5, block_size=16))
    assert (found.prompts, found.prompts_dropped, found.rows) == (4, 2, 4)
    assert found.spread.shape == (2, 3, 2, 8)  # two prompts have 32 kept positions
    assert (found.spread > 0).all()
    assert (found.spread <= math.log(room.SPREAD)).all()


def test_no_block_left_anywhere(target):
    with pytest.raises(UserError) as caught:
        calibrate(target, samples(20, 30), Rows(rho=0.3, block_size=32))
    assert caught.value.key == "calibration.block_size"
    text = str(caught.value)
    assert "0 rows are left" in text
    assert "keeps 15 of 50 positions" in text
    assert "smaller calibration.block_size" in text
    with pytest.raises(UserError, match="1 rows are left"):
        calibrate(target, samples(40, 40)[:1], Rows(rho=1.0, block_size=32))


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
        calibrate(target, samples(40), Rows(rho=1.0, block_size=4))


def test_a_head_that_is_not_finite_is_named(target, monkeypatch):
    """Every state is finite: the certain positions could not be told from the others, silently."""
    plain = target.logits
    monkeypatch.setattr(target, "logits", lambda hidden: plain(hidden) * math.nan)
    with pytest.raises(UserError, match=r"the logits \(final norm or head\) hold NaN or Inf in the calibration prompt"):
        calibrate(target, samples(40), Rows(rho=1.0, block_size=4))


def test_what_lies_in_the_padding_does_not_matter(target, monkeypatch):
    plain, settings = target.states, Rows(rho=1.0, block_size=4)
    conversations = samples(20, 40)
    expected = calibrate(target, conversations, settings, 2)

    def noisy(ids, layers):
        states = plain(ids, layers)
        for hidden in states.values():
            hidden[0, 20:] = math.nan
        return states

    monkeypatch.setattr(target, "states", noisy)
    assert torch.equal(calibrate(target, conversations, settings, 2).grams, expected.grams)


def test_any_number_of_settings_share_one_forward(target, monkeypatch):
    """Each equals its own pass, and the target runs once (twice when the filter looks over the whole set)."""
    plain, calls = target.states, []
    monkeypatch.setattr(target, "states", lambda ids, layers: calls.append(len(ids)) or plain(ids, layers))
    conversations = samples(50, 90, 70)
    settings = [
        Rows(rho=rho, block_size=size, blocks=blocks, aggregate=aggregate)
        for rho in (0.3, 1.0)
        for size in (2, 4)
        for blocks in ("tokens", "rows")
        for aggregate in ("concatenate", "average")
    ]
    settings += [Rows(rho=0.5, block_size=4, skip_first=0), Rows(rho=0.5, block_size=4, keep="random")]
    together = many(target, conversations, settings, 3)
    assert calls == [3]
    for own, found in zip(settings, together, strict=True):
        torch.testing.assert_close(found.grams, calibrate(target, conversations, own, 3).grams, rtol=1e-5, atol=1e-3)
    calls.clear()
    many(target, conversations, [Rows(filter_scope="set", block_size=4), Rows(block_size=4)], 3)
    assert calls == [3, 3]


def test_a_setting_with_too_few_rows_does_not_stop_the_others(target):
    found = many(target, samples(40, 60), [Rows(block_size=64), Rows(rho=1.0, block_size=8)])
    assert isinstance(found[0], UserError)
    assert found[1].rows == 39 // 8 + 59 // 8


def test_the_filter_over_the_whole_set(target):
    """One threshold for all: the kept positions are the global head, and some prompts may keep none."""
    conversations = samples(30, 50, 40)
    entropies = []
    for sample in sorted(conversations, key=lambda sample: len(sample.ids)):
        states = target.states(torch.tensor([sample.ids]), [7])
        log_p = torch.log_softmax(target.logits(states[7][0]), -1)
        entropies.append(-(log_p.exp() * log_p).sum(-1)[1:])
    count = math.ceil(0.3 * (29 + 49 + 39))
    floor = torch.cat(entropies).sort(descending=True).values[count - 1]
    kept = [int((entropy >= floor).sum()) for entropy in entropies]
    found = calibrate(target, conversations, Rows(rho=0.3, filter_scope="set", block_size=2))
    assert found.tokens_kept == count == sum(kept)
    assert torch.bincount(found.labels, minlength=3).tolist() == [own // 2 for own in kept]


def test_labels_and_categories_follow_the_rows(target):
    found = calibrate(target, samples(60, 20, 40), Rows(rho=1.0, block_size=8))  # taken by length: q1, q2, q0
    assert found.categories == ["b", "a", "a"]
    assert found.labels.tolist() == [0] * (19 // 8) + [1] * (39 // 8) + [2] * (59 // 8)
    averaged = calibrate(target, samples(60, 20, 40), Rows(rho=1.0, block_size=8, aggregate="average"))
    assert averaged.labels.tolist() == [-1] * (59 // 8)


def test_the_kinds_of_the_spread_are_equal_when_all_is_kept(target):
    """At ρ = 1 and S positions after the sink, filtered, unfiltered and random are the same states."""
    found = calibrate(target, samples(33, 33), Rows(rho=1.0, block_size=4))
    for kind in (1, 2):
        torch.testing.assert_close(found.spread[:, kind], found.spread[:, 0])
    # Centred is another number than not centred.
    assert (found.spread[0] - found.spread[1]).abs().max() > 0.01


def test_batches_are_cut_to_memory(target, monkeypatch):
    plain, sizes = target.states, []
    monkeypatch.setattr(target, "states", lambda ids, layers: sizes.append(tuple(ids.shape)) or plain(ids, layers))
    conversations, settings = samples(20, 20, 20, 40, 40), Rows(rho=1.0, block_size=4)
    whole = calibrate(target, conversations, settings, 5)
    monkeypatch.setattr(room, "_STATE_BYTES", 2 * 40 * target.num_layers * target.hidden_size * 4)
    sizes.clear()
    part = calibrate(target, conversations, settings, 5)
    assert sizes == [(3, 20), (2, 40)] or sizes == [(4, 20), (1, 40)]
    torch.testing.assert_close(part.grams, whole.grams, rtol=1e-4, atol=1e-2)
