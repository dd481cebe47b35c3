"""The path used against the plain loops, and both against a server's way of running a drafter."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from specwave.eagle.loss import Outcome, acceptance, attend_merged, soft_cross_entropy, ttt_loss
from specwave.eagle.reference import ttt_loss_reference, unrolled_logits


def gradients(drafter, outcome: Outcome) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    outcome.loss.backward()
    return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


def reference(case, steps, decay=0.8):
    return ttt_loss_reference(
        case.drafter, case.ids, case.answer, case.states, case.embedding, case.logits, steps, decay
    )


@pytest.mark.parametrize(
    ("layers", "lengths", "steps"),
    [((3,), (9,), 1), ((1, 4), (9, 12, 7), 3), ((0, 2, 5), (14, 5, 4, 11), 4), ((0, 1, 2, 3), (10, 10), 2)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_path_used_equals_the_plain_loops(make_case, layers, lengths, steps, seed):
    """Value, gradient of every parameter and statistics; float64, so only the order of sums may differ (1e-12)."""
    case = make_case(layers, lengths, seed=seed)
    expected, got = reference(case, steps), ttt_loss(case.drafter, case.batch(), steps)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-12, atol=1e-12)
    for name in ("counts", "hits", "slots"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    want, have = gradients(case.drafter, expected), gradients(case.drafter, got)
    for name, gradient in want.items():
        torch.testing.assert_close(have[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_statistics_are_not_empty(make_case):
    """The comparison above means something: hits, misses and out-of-vocabulary slots all occur."""
    case = make_case((1, 4), (40, 40), seed=3)
    case.drafter.lm_head.weight.data.zero_()
    case.drafter.lm_head.weight.data[2] = 1.0  # argmax is draft id 2 or 0, by the sign of the mean
    case.drafter.norm.weight.data.fill_(1.0)
    case.ids[:] = case.drafter.draft_ids[2]
    got = ttt_loss(case.drafter, case.batch(), 3)
    expected = reference(case, 3)
    assert torch.equal(got.hits, expected.hits)
    assert torch.equal(got.slots, expected.slots)
    assert 0 < got.hits[0] < got.counts[0] < got.slots[0]
    assert got.slots[1] <= got.hits[0]  # a chain goes on only where its draft was the data token


def test_a_server_gives_the_unrolled_logits(make_case):
    """Prefill the step-0 keys of a prefix, then draft with a growing cache: the logits of slot t at every step."""
    case = make_case((1, 4), (10,))
    drafter, steps, length = case.drafter, 4, 10
    embedding = case.embedding[case.ids[0]]
    states = [state[0] for state in case.states.values()]
    unrolled = unrolled_logits(drafter, states, embedding, steps)
    for t in range(length - steps - 1):
        cache: dict[str, torch.Tensor] = {}

        def attend(q, k, v, cache=cache):
            cache["k"] = torch.cat([cache["k"], k], 2) if cache else k
            cache["v"] = torch.cat([cache["v"], v], 2) if "v" in cache else v
            start = cache["k"].shape[2] - q.shape[2]
            mask = torch.arange(cache["k"].shape[2]) <= start + torch.arange(q.shape[2])[:, None]
            return F.scaled_dot_product_attention(q, cache["k"], cache["v"], attn_mask=mask, enable_gqa=True)

        hidden = drafter.fuse([state[None, : t + 1] for state in states])
        positions = torch.arange(t + 1)[None]
        hidden = drafter.forward_step(embedding[None, 1 : t + 2], hidden, attend, positions)
        for step in range(steps):
            torch.testing.assert_close(drafter.logits(hidden[0, -1]), unrolled[step][t], rtol=1e-10, atol=1e-10)
            token = embedding[None, None, t + 2 + step]
            hidden = drafter.forward_step(token, hidden[:, -1:], attend, torch.tensor([[t + 1 + step]]))


def test_merged_attention_equals_one_dense_softmax():
    torch.manual_seed(0)
    q, key, value = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    own = [(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)) for _ in range(2)]
    visible = torch.rand(2, 5, 7) < 0.5
    keys = torch.cat([key] + [k for k, _ in own], 2)
    values = torch.cat([value] + [v for _, v in own], 2)
    mask = torch.cat([visible, torch.eye(5).bool().expand(2, 5, 5), torch.eye(5).bool().expand(2, 5, 5)], -1)
    dense = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[:, None], enable_gqa=True)
    # float32: the order of about 10 sums differs
    torch.testing.assert_close(attend_merged(q, key, value, own, visible), dense, rtol=1e-5, atol=1e-6)


def test_padding_on_the_right_changes_nothing(make_case):
    case = make_case((1, 4), (9, 12, 7))
    whole = ttt_loss(case.drafter, case.batch(), 3)
    alone = [ttt_loss(case.drafter, case.batch(slice(row, row + 1), size), 3) for row, size in enumerate((9, 12, 7))]
    for name in ("losses", "counts", "hits", "slots"):
        torch.testing.assert_close(getattr(whole, name), sum(getattr(one, name) for one in alone), msg=name)
    case.ids[2, 7:], case.states[1][2, 7:], case.logits[0, 9:] = 0, 1e4, -1e4  # what stands in the padding is nobody's
    again = ttt_loss(case.drafter, case.batch(), 3)
    torch.testing.assert_close(again.loss, whole.loss)


def test_gradient_by_finite_differences(make_case):
    """Central differences, ε = 1e-6: their error is about ε² ≈ 1e-12 beside the round-off 1e-16/ε = 1e-10."""
    case = make_case((1, 4), (9, 8))
    batch = case.batch()
    have = gradients(case.drafter, ttt_loss(case.drafter, batch, 3))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in case.drafter.named_parameters():
        flat = parameter.data.view(-1)
        for place in torch.randint(0, flat.numel(), (3,), generator=generator).tolist():
            old, values = flat[place].item(), []
            for sign in (1, -1):
                flat[place] = old + sign * 1e-6
                values.append(ttt_loss(case.drafter, batch, 3).loss.item())
            flat[place] = old
            slope = (values[0] - values[1]) / 2e-6
            assert slope == pytest.approx(have[name].view(-1)[place].item(), rel=1e-5, abs=1e-8), (name, place)


def test_normaliser_of_all_ranks(make_case):
    """Halves of a batch under the whole's Σ M add up to the whole's gradient."""
    case = make_case((1, 4), (9, 12))
    whole = ttt_loss(case.drafter, case.batch(), 3)
    parts = [ttt_loss(case.drafter, case.batch(slice(row, row + 1)), 3, normaliser=whole.counts) for row in (0, 1)]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)


def test_no_counting_slot_is_no_loss(make_case):
    case = make_case((1, 4), (9,))
    case.answer[:] = False
    got = ttt_loss(case.drafter, case.batch(), 3)
    got.loss.backward()
    assert got.loss.item() == 0.0
    assert got.counts.tolist() == [0, 0, 0]


def test_soft_cross_entropy():
    logits = torch.tensor([[0.0, math.log(3.0)]])
    target = torch.tensor([[0.5, 0.5]])
    assert soft_cross_entropy(logits, target).item() == pytest.approx(-0.5 * math.log(0.25) - 0.5 * math.log(0.75))


def test_acceptance():
    shares, tau = acceptance(torch.tensor([5, 2, 0]), torch.tensor([10, 4, 2]))
    assert shares == [0.5, 0.5, 0.0]
    assert tau == 1.75
    assert acceptance(torch.tensor([0, 0]), torch.tensor([0, 0])) == ([0.0, 0.0], 1.0)
