"""The latency model: fits of made-up timings, times between what was measured, files, a tiny target measured."""

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specwave.artifacts import UserError
from specwave.skipping import measure
from specwave.skipping.latency import POOR, Latency, fit_line, read_latency
from specwave.skipping.measure import latency, medians, spread_contexts
from specwave.skipping.search import forced_ends, largest_batches

CONTEXTS = (128, 512, 2048, 8192)


def model(attention=(1.0, 2.0, 3.0), mlp=(5.0,) * 3, contexts=(100, 200, 300), **more):
    keys = {
        "rest": (0.5,) * 3,
        "sizes": (1, 4),
        "forward": ((10.0, 16.0), (11.0, 20.0), (12.0, 24.0)),
        "search": (1.0, 2.0, 2.0),
        "num_layers": 3,
        "facts": {},
    }
    return Latency(contexts, tuple(attention), tuple(mlp), **(keys | more))


# ---------------------------------------------------------------- fits


@given(st.floats(1e-9, 1e-6), st.floats(1e-5, 1e-2))
def test_exact_timings_are_recovered(slope, intercept):
    fit = fit_line(CONTEXTS, [slope * context + intercept for context in CONTEXTS])
    assert fit.slope == pytest.approx(slope, rel=1e-6)
    assert fit.intercept == pytest.approx(intercept, rel=1e-6)
    assert fit.error < 1e-9
    assert fit(4000) == pytest.approx(slope * 4000 + intercept, rel=1e-6)


def test_it_is_the_least_sum_of_relative_squares():
    """No small step in any direction does better."""
    times = [1.05e-3, 1.9e-3, 6.2e-3, 2.3e-2]

    def loss(slope, intercept):
        return sum(((slope * x + intercept) / y - 1) ** 2 for x, y in zip(CONTEXTS, times, strict=True))

    fit = fit_line(CONTEXTS, times)
    assert fit.error == pytest.approx((loss(fit.slope, fit.intercept) / 4) ** 0.5)
    for step in (1e-3, -1e-3):
        assert loss(fit.slope * (1 + step), fit.intercept) > loss(fit.slope, fit.intercept)
        assert loss(fit.slope, fit.intercept * (1 + step)) > loss(fit.slope, fit.intercept)


def test_noise_shows_in_the_error():
    draw, errors = torch.Generator().manual_seed(0), []
    for noise in (0.01, 0.05, 0.2):
        shaken = 1 + noise * torch.randn(200, generator=draw)
        places = torch.linspace(100, 8000, 200)
        times = ((1e-6 * places + 1e-3) * shaken).tolist()
        errors.append(fit_line(places.tolist(), times).error)
        assert errors[-1] == pytest.approx(noise, rel=0.3)
    assert errors == sorted(errors)


def test_a_constant_and_a_single_point():
    assert fit_line((1, 2), (3.0, 3.0), flat=True).slope == 0.0
    assert fit_line((7,), (3.0,))(1000) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="positive times"):
        fit_line((1, 2), (3.0, 0.0))


# ---------------------------------------------------------------- times


def test_a_good_fit_is_used():
    costs = model()
    assert costs.poor is None
    assert costs.t_attention(150) == pytest.approx(1.5)
    assert costs.t_attention(1000) == pytest.approx(10.0)
    assert costs.t_mlp(1000) == pytest.approx(5.0)


def test_a_draft_step_is_its_parts_on_the_scale_of_the_whole():
    """Behind 200 tokens the parts of 3 blocks add up to 0.5 + 3·2 + 3·5 = 21.5, a forward was measured to take 11."""
    costs, kept = model(), [True, True, False, True, True, False]
    assert costs.t_draft([True] * 6, 200) == pytest.approx(11.0)
    assert costs.t_draft(kept, 200) == pytest.approx(11.0 * (0.5 + 2 * 2.0 + 2 * 5.0) / 21.5)
    assert costs.t_draft([False] * 6, 200) == pytest.approx(11.0 * 0.5 / 21.5)
    assert costs.whole_error == pytest.approx(24.5 / 12 - 1)
    right = model(forward=((18.5, 20.0), (21.5, 25.0), (24.5, 30.0)))
    assert right.whole_error == pytest.approx(0.0)
    assert right.t_draft(kept, 200) == pytest.approx(14.5)


@pytest.mark.parametrize(
    ("attention", "mlp", "words"),
    [
        ((1.0, 4.0, 1.2), (5.0,) * 3, "attention times leave the line"),
        ((3.0, 2.9, 2.8), (5.0,) * 3, "fall as the context grows"),
        ((1.0, 2.0, 3.0), (5.0, 9.0, 5.0), "MLP times leave the line"),
    ],
)
def test_a_poor_fit_warns_is_recorded_and_gives_way_to_medians(attention, mlp, words, tmp_path):
    costs = model(attention, mlp)
    assert words in costs.poor
    assert [costs.t_attention(context) for context in (100, 200, 300)] == pytest.approx(list(attention))
    assert [costs.t_mlp(context) for context in (100, 200, 300)] == pytest.approx(list(mlp))
    assert costs.t_attention(150) == pytest.approx((attention[0] + attention[1]) / 2)
    assert costs.t_attention(7) == attention[0]
    costs.save(tmp_path / "latency.json")
    noted = json.loads((tmp_path / "latency.json").read_text())["fit"]
    assert (noted["poor"], noted["whole_error"]) == (costs.poor, costs.whole_error)
    with pytest.warns(UserWarning, match="measured medians are used"):
        measure._warned(costs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure._warned(model()).poor is None
    assert 0 < POOR < 1


def test_verification_times_lie_on_lines_in_both_directions():
    costs = model()
    assert [costs.t_target(tokens, 100) for tokens in (1, 4, 7)] == [10.0, 16.0, 22.0]
    assert costs.t_target(4, 150) == pytest.approx(18.0)
    assert costs.t_target(2, 250) == pytest.approx((14.0 + 16.0) / 2)
    assert costs.t_target(4, 5) == 16.0  # before the first context: as at the first
    assert costs.t_target(4, 400) == pytest.approx(28.0)


def test_more_tokens_never_cost_less_than_one():
    costs = model(forward=((10.0, 8.0), (11.0, 8.0), (12.0, 8.0)))
    assert costs.t_target(64, 100) == 10.0


def test_a_batch_drafts_at_the_price_of_a_forward_over_its_rows():
    costs, kept = model(), [True] * 6
    assert costs.t_draft(kept, 100, rows=4) == pytest.approx(1.6 * costs.t_draft(kept, 100))


def test_a_search_costs_its_tokens():
    costs = model()
    assert costs.t_search([4, 4, 4], 4, 100) == pytest.approx(16.0)
    assert costs.t_search([1, 4, 7], 4, 100) == pytest.approx(16.0)
    assert costs.t_search([10, 40, 70], 4, 100) > 5 * costs.t_search([1, 4, 7], 4, 100)
    assert costs.t_search([4, 4, 4], 4, 300) == pytest.approx(2 * 24.0)  # and what a search adds, as measured


@pytest.mark.parametrize(
    "broken",
    [
        {"contexts": ()},
        {"contexts": (100, 100, 300)},
        {"attention": (1.0, 2.0)},
        {"sizes": (2, 4)},
        {"rest": (0.0,) * 3},
        {"forward": ((1.0,),) * 3},
        {"mlp": (float("nan"),) * 3},
    ],
)
def test_what_is_no_model_is_refused(broken):
    with pytest.raises(ValueError, match=r"ascend|every|positive"):
        model(**broken)


# ---------------------------------------------------------------- files


def test_a_file_is_read_as_it_was_written(tmp_path):
    costs = model(facts={"node": "here", "threads": 2})
    costs.save(tmp_path / "latency.json")
    assert read_latency(tmp_path / "latency.json", {"node": "here"}) == costs


def test_a_file_of_another_device_is_refused(tmp_path):
    model(facts={"node": "there", "threads": 2}).save(tmp_path / "latency.json")
    with pytest.raises(UserError) as caught:
        read_latency(tmp_path / "latency.json", {"node": "here", "threads": 2})
    assert caught.value.key == "decoding.latency"
    assert "node is there there, here here" in str(caught.value)
    assert "threads" not in str(caught.value)


@pytest.mark.parametrize("content", ["{}", '{"schema": 1}', '{"schema": 1, "contexts": "x"}', "[", '{"schema": 2}'])
def test_a_damaged_file_is_refused(content, tmp_path):
    (tmp_path / "latency.json").write_text(content)
    with pytest.raises(UserError, match=r"decoding\.latency"):
        read_latency(tmp_path / "latency.json")
    with pytest.raises(UserError, match="no such file"):
        read_latency(tmp_path / "none.json")


# ---------------------------------------------------------------- measuring


def test_contexts_end_where_the_target_does():
    assert spread_contexts(32768) == (128, 512, 2048, 8192)
    assert spread_contexts(2048) == (128, 512, 1984)
    assert spread_contexts(100) == (36,)
    assert spread_contexts(3, (1,)) == (2,)


def test_a_measurement_is_noted_and_read_again(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "_REPEAT", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how well a line fits is the machine's affair
        found = latency(tiny, contexts=[16, 128])
        assert found.contexts == (16, 128)
        assert found.sizes == measure.SIZES
        assert found.facts["fingerprint"] == tiny.fingerprint
        (note,) = (tmp_path / "latency").iterdir()
        with monkeypatch.context() as patch:
            patch.setattr(measure, "_measure", lambda *_: pytest.fail("noted already"))
            assert latency(tiny, contexts=[128, 16]) == found
            assert latency(tiny, path=str(note)) == found
        note.write_text("{}")
        assert latency(tiny, contexts=[16, 128]).contexts == (16, 128)
        with pytest.raises(UserError, match="measured elsewhere: batch_invariant is False there, True here"):
            latency(tiny, path=str(note), invariant=True)


@pytest.mark.parametrize("contexts", [[0, 100], [100, 2000], [5000], []])
def test_contexts_beyond_the_target_are_refused(contexts, tiny):
    with pytest.raises(UserError, match=r"decoding\.contexts=.*1 to 1984 tokens: .* has 2048 positions"):
        latency(tiny, contexts=contexts)


def test_a_cache_that_cannot_be_written_costs_seconds_no_more(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(measure, "_REPEAT", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert latency(tiny, contexts=[16]).contexts == (16,)


def test_every_round_gives_each_job_its_turn():
    order, settled = [], []
    jobs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    taken = medians(jobs, lambda: settled.append(1), repeat=3)
    assert set(taken) == set("abc")
    assert all(value >= 0 for value in taken.values())
    assert [sorted(order[at : at + 3]) for at in range(0, 15, 3)] == [["a", "b", "c"]] * 5
    assert order[:3] == order[3:6][::-1]
    assert len(settled) == 30


def test_the_kept_sets_that_are_timed(tiny, tmp_path, monkeypatch):
    """Made-up times, by what a forward runs: 1 for the head, 2 per attention, 3 per MLP, 10 per token of the target."""
    monkeypatch.setenv("SPECWAVE_CACHE", str(tmp_path))
    seconds = []
    forward = measure.Session.forward

    def timed(self, tokens, *args, plan=None, **more):
        kept = plan or [True] * 16
        seconds.append(10.0 * tokens.shape[1] if plan is None else 1 + 2 * sum(kept[::2]) + 3 * sum(kept[1::2]))
        return forward(self, tokens, *args, plan=plan, **more)

    def made_up(jobs, settle, repeat=5):
        found = {}
        for name, job in jobs.items():
            job()
            found[name] = float(seconds[-1])
        return found

    monkeypatch.setattr(measure.Session, "forward", timed)
    monkeypatch.setattr(measure, "medians", made_up)
    found = latency(tiny, contexts=[16, 64])
    assert found.attention == (2.0, 2.0)
    assert found.mlp == (3.0, 3.0)
    assert found.rest == (1.0, 1.0)
    assert found.forward[0] == tuple(10.0 * size for size in found.sizes)
    assert (found.attention_fit.slope, found.poor) == (0.0, None)
    again = replace(found, search=(1.0, 1.0))
    counts = largest_batches([1, 2] * 8, 12, forced_ends(8))  # 3 to 2 rounds to 2 (halves to even)
    tokens = [measure._WINDOW * count for count in counts]
    expected = [seconds[-1] / again.t_search(tokens, tokens[-1], context) for context in (16, 64)]
    assert found.search == pytest.approx(expected)
    assert os.environ["SPECWAVE_CACHE"] == str(tmp_path)
    assert Path(tmp_path / "latency").is_dir()
