"""The drafting steps: whose position they are of, what is kept of it, and the pass that finds them."""

import math

import pytest
import torch

from specwave.artifacts import UserError
from specwave.data.conversations import Sample
from specwave.layers.steps import BASIS_ROWS, Sampling, basis, collect, frequent, step_places
from specwave.target.decoder import rms_norm


def samples(*lengths, prompt=4, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        Sample(torch.randint(3, 259, (length,), generator=draw).tolist(),
               [False] * prompt + [True] * (length - prompt), f"q{place}", "")
        for place, length in enumerate(lengths)
    ]  # fmt: skip


def test_the_table_of_positions():
    """Prompt x_0…x_4, answer x_5…x_8: rows are t = 4, 5, 6."""
    answer = [False] * 5 + [True] * 4
    assert step_places(answer).tolist() == [4, 5, 6]
    assert step_places([False] * 5 + [True]).tolist() == []  # an answer of one token has no step
    assert step_places([False, True, True, False, True, True, True]).tolist() == [0, 3, 4]  # two turns
    assert step_places([]).tolist() == step_places([True]).tolist() == step_places([True, True]).tolist() == []
    assert step_places([True, True, True]).tolist() == [0]


@pytest.mark.parametrize("rows", [200, 7])
def test_the_directions_are_the_principal_components(rows):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 12, generator=draw, dtype=torch.float64) * torch.arange(1, 13) + 3
    mean, axes = basis(x, 5)
    _, values, vectors = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    torch.testing.assert_close(mean, x.mean(0))
    expected = vectors[:5].T * (rows**0.5 / values[:5])
    torch.testing.assert_close(axes.abs(), expected.abs(), rtol=1e-6, atol=1e-8)  # a sign is no one's
    projected = (x - mean) @ axes
    eye = torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(projected.T @ projected / rows, eye, rtol=1e-8, atol=1e-8)


def test_directions_without_variance_are_left_empty():
    line = torch.arange(6.0)[:, None] * torch.tensor([1.0, 2.0, 0.0])
    _, axes = basis(line, 3)
    assert (axes.norm(dim=0) > 0).tolist() == [True, False, False]
    _, axes = basis(torch.ones(4, 3), 2)
    assert axes.eq(0).all()
    assert basis(torch.randn(2, 9), 5)[1].shape == (9, 5)  # fewer rows than directions asked for


def test_scale_and_rotation_of_the_states_do_not_matter():
    """No layer counts more for its norm, unlike in the entropy of a concatenation."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(300, 10, generator=draw, dtype=torch.float64) * torch.arange(1, 11)
    turn, _ = torch.linalg.qr(torch.randn(10, 10, generator=draw, dtype=torch.float64))
    mean, axes = basis(x, 4)
    other_mean, other_axes = basis(1000 * x @ turn, 4)
    torch.testing.assert_close(((1000 * x @ turn - other_mean) @ other_axes).abs(), ((x - mean) @ axes).abs())


def test_most_frequent_first_and_ties_by_id():
    ids = torch.tensor([9, 4, 4, 7, 2, 2, 9, 4])
    assert frequent(ids, 3).tolist() == [4, 2, 9]
    assert frequent(ids, 100).tolist() == [4, 2, 9, 7]


def test_equals_the_definition(tiny):
    """At full width the columns are the states themselves, turned: any state is foretold from its own exactly."""
    conversations = samples(60, 41, 90, 75, 50)
    found = collect(tiny, conversations, Sampling(width=64, token_width=64), 2)
    assert (found.num_layers, found.width, found.token_width) == (8, 64, 64)
    row, ordered = 0, sorted(conversations, key=lambda sample: len(sample.ids))
    states, embeddings = [], []
    for place, sample in enumerate(ordered):
        own = tiny.states(torch.tensor([sample.ids]), range(8))
        for t in range(3, len(sample.ids) - 2):  # the prompt has 4 tokens: x_4 and x_5 are the first answer tokens
            last = own[7][0, t + 1]
            torch.testing.assert_close(found.states[row], rms_norm(last, tiny.final_norm, tiny.arch.rms_eps),
                                       rtol=1e-4, atol=1e-4)  # fmt: skip
            assert found.vocabulary[found.tokens[row]] == tiny.logits(last).argmax()
            assert found.conversations[row] == place
            states.append(torch.stack([own[layer][0, t] for layer in range(8)]))
            embeddings.append(tiny.embed(torch.tensor(sample.ids[t + 1])))
            row += 1
    assert row == len(found.tokens) == found.seen == sum(length - 5 for length in (60, 41, 90, 75, 50))
    for layer, truth in [(None, torch.stack(embeddings)), *enumerate(torch.stack(states, 1))]:
        own = found.columns([] if layer is None else [layer])[0 if layer is None else 64 :]
        columns = torch.cat([found.inputs[:, own], torch.ones(row, 1)], 1).double()
        told = columns @ torch.linalg.lstsq(columns, truth.double()).solution
        torch.testing.assert_close(told, truth.double(), rtol=1e-3, atol=1e-3 * truth.abs().max().item())
    torch.testing.assert_close(found.head, tiny.head[found.vocabulary].float())


def test_a_padded_batch_equals_single_conversations(tiny):
    conversations = samples(30, 80, 55, 42)
    single, padded = (collect(tiny, conversations, Sampling(width=8, token_width=4), size) for size in (1, 4))
    # Directions come with either sign: what stays are inner products of rows. Float32 states, of other batches.
    products = [found.inputs @ found.inputs.T for found in (padded, single)]
    torch.testing.assert_close(*products, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(padded.states, single.states, rtol=1e-3, atol=1e-3)
    assert torch.equal(padded.conversations, single.conversations)


def test_a_sample_of_the_positions_is_of_them_all_and_the_same_again(tiny):
    conversations = samples(80, 70, 90)
    whole = collect(tiny, conversations, Sampling(width=4, token_width=4))
    part = collect(tiny, conversations, Sampling(positions=50, width=4, token_width=4))
    again = collect(tiny, conversations, Sampling(positions=50, width=4, token_width=4))
    other = collect(tiny, conversations, Sampling(positions=50, width=4, token_width=4, seed=1))
    assert (len(part.tokens), part.seen, len(whole.tokens)) == (50, whole.seen, whole.seen)
    assert torch.equal(part.inputs, again.inputs)
    assert not torch.equal(part.states, other.states)
    for state, conversation in zip(part.states, part.conversations, strict=True):
        distance = (whole.states - state).abs().amax(1)
        assert distance.min() < 1e-3
        assert whole.conversations[distance.argmin()] == conversation


def test_directions_come_from_some_of_many_conversations(tiny, monkeypatch):
    lengths, plain = [], tiny.states
    monkeypatch.setattr(tiny, "states", lambda ids, layers: lengths.append(ids.shape[0]) or plain(ids, layers))
    many = samples(*[70] * 40)
    collect(tiny, many, Sampling(width=2, token_width=2), 1)
    assert len(many) < len(lengths) < 2 * len(many)
    assert (len(lengths) - len(many)) * 65 >= BASIS_ROWS


def test_directions_come_from_short_and_long_conversations(tiny):
    """However long the answers are: of many long ones behind a short one as well."""
    found = collect(tiny, samples(8, *[150] * 30, prompt=5), Sampling(width=40, token_width=40), 1)
    first = found.inputs[:, found.columns([0])]
    assert int(torch.linalg.matrix_rank(first)) == 80


def test_a_vocabulary_leaves_rare_tokens_out(tiny):
    found = collect(tiny, samples(80, 90), Sampling(width=2, token_width=2, vocabulary=3))
    assert len(found.vocabulary) == len(found.head) == 3
    assert set(found.tokens.unique().tolist()) == {-1, 0, 1, 2}
    times = torch.bincount(found.tokens + 1)[1:]
    assert (times[:-1] >= times[1:]).all()


def test_answers_without_a_step(tiny):
    with pytest.raises(UserError, match="hold 0 steps of a drafter, at least 2 are needed") as caught:
        collect(tiny, samples(6, 6, prompt=5), Sampling())
    assert caught.value.key == "calibration"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_layer_that_is_not_finite_is_named(bad, tiny, monkeypatch):
    plain = tiny.states

    def broken(ids, layers):
        states = plain(ids, layers)
        states[3] = states[3].clone()
        states[3][:, 9, 2] = bad
        return states

    monkeypatch.setattr(tiny, "states", broken)
    with pytest.raises(UserError, match=r"layer 3 holds NaN or Inf in the calibration prompt 'q0'"):
        collect(tiny, samples(40), Sampling())
