"""The path used against the plain loops, and both against a server's way of running a drafter."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from specwave.artifacts import UserError
from specwave.eagle import divergence, slots
from specwave.eagle.divergence import FORMS
from specwave.eagle.loss import NORMALISERS, Outcome, acceptance, ttt_loss
from specwave.eagle.options import Eagle3
from specwave.eagle.reference import ttt_loss_reference, unrolled_logits
from specwave.eagle.slots import COUNT_FROM


def gradients(drafter, outcome: Outcome) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    outcome.loss.backward()
    return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


def reference(case, steps, decay=0.8, normaliser="counted", **switches):
    tensors = (case.ids, case.answer, case.states, case.embedding, case.logits)
    return ttt_loss_reference(case.drafter, *tensors, steps, decay, normaliser, documents_BT=case.documents, **switches)


def assert_equal(case, got: Outcome, expected: Outcome, **tolerance) -> None:
    """Value, gradient of every parameter and statistics."""
    torch.testing.assert_close(got.loss, expected.loss, **tolerance)
    torch.testing.assert_close(got.losses, expected.losses, **tolerance)
    for name in ("counts", "hits", "slots"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    want, have = gradients(case.drafter, expected), gradients(case.drafter, got)
    for name, gradient in want.items():
        scale = gradient.abs().max().item()
        loose = {"rtol": tolerance["rtol"], "atol": tolerance["atol"] * max(scale, 1.0)}
        torch.testing.assert_close(have[name], gradient, **loose, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("layers", "lengths", "steps"),
    [((3,), (9,), 1), ((1, 4), (9, 12, 7), 3), ((0, 2, 5), (14, 5, 4, 11), 4), ((0, 1, 2, 3), (10, 10), 2)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_path_used_equals_the_plain_loops(make_case, layers, lengths, steps, seed):
    """Float64, so only the order of sums may differ: about 100 roundings of 1e-16 each."""
    case = make_case(layers, lengths, seed=seed)
    assert_equal(case, ttt_loss(case.drafter, case.batch(), steps), reference(case, steps), rtol=1e-9, atol=1e-12)


SWITCHES = list(itertools.product(FORMS, COUNT_FROM, NORMALISERS))


@pytest.mark.parametrize(("loss", "count_from", "normaliser"), SWITCHES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_switch_equals_the_plain_loops(make_case, loss, count_from, normaliser, dtype, monkeypatch):
    """Random shapes, masks and documents per seed. Float32: sums of some hundred products, roundings of 6e-8 each."""
    monkeypatch.setitem(divergence._ROWS, "cpu", 5)  # many chunks, the last one short
    monkeypatch.setattr(slots, "_QUERIES", 4)
    loose = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        lengths = (torch.randint(6, 18, (3,), generator=draw)).tolist()
        steps = 2 + seed
        case = make_case((1, 4), lengths, dtype=dtype, seed=seed)
        case.documents = documents_for(lengths, draw)
        got = ttt_loss(
            case.drafter, case.batch(count_from=count_from), steps, 0.7, normaliser, loss=loss, count_from=count_from
        )
        expected = reference(case, steps, 0.7, normaliser, loss=loss, count_from=count_from)
        assert int(got.counts[0]) > 0
        assert_equal(case, got, expected, **loose)


def documents_for(lengths, draw) -> torch.Tensor:
    """Every row cut at random places; −1 behind its length."""
    borders = torch.rand(len(lengths), max(lengths), generator=draw) < 0.15
    documents = borders.long().cumsum(1)
    for row, length in enumerate(lengths):
        documents[row, length:] = -1
    return documents


def test_statistics_do_not_depend_on_what_the_loss_counts(make_case):
    case = make_case((1, 4), (14, 11))
    ours = ttt_loss(case.drafter, case.batch(), 3)
    for count_from in ("speculators", "eagle"):
        other = ttt_loss(case.drafter, case.batch(count_from=count_from), 3, count_from=count_from)
        assert torch.equal(other.hits, ours.hits)
        assert torch.equal(other.slots, ours.slots)
        assert not torch.equal(other.counts, ours.counts)


def test_forward_kl_is_the_cross_entropy_less_what_no_drafter_can_change(make_case):
    case = make_case((1, 4), (9, 12))
    batch = case.batch()
    soft, kl = (ttt_loss(case.drafter, batch, 3, loss=loss) for loss in ("cross_entropy", "forward_kl"))
    assert (kl.losses < soft.losses).all()
    want, have = gradients(case.drafter, soft), gradients(case.drafter, kl)
    assert all(torch.equal(have[name], want[name]) for name in want)


def test_checkpointing_changes_no_bit(make_case):
    case = make_case((1, 4), (9, 12))
    plain, again = (ttt_loss(case.drafter, case.batch(), 4, checkpointing=on) for on in (False, True))
    assert plain.loss == again.loss
    want, have = gradients(case.drafter, plain), gradients(case.drafter, again)
    assert all(torch.equal(have[name], want[name]) for name in want)


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.largest = max(self.largest, tensor.numel())
        return found


def test_memory_grows_with_the_length_not_with_its_square(make_case, monkeypatch):
    """Forward and backward: the largest tensor of all doubles with T."""
    monkeypatch.setattr(slots, "_QUERIES", 16)
    largest = []
    for length in (256, 512):
        case = make_case((1, 4), (length,), dtype=torch.float32)
        batch = case.batch()
        with Sizes() as sizes:
            ttt_loss(case.drafter, batch, 3).loss.backward()
        largest.append(sizes.largest)
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 4 * 512 * 512  # heads · T²


def test_logits_exist_for_a_chunk_of_rows_only(make_case, monkeypatch):
    monkeypatch.setitem(divergence._ROWS, "cpu", 6)
    case = make_case((1, 4), (20, 20))
    rows, head = [], case.drafter.lm_head
    head.register_forward_hook(lambda module, given, made: rows.append(len(made)))
    outcome = ttt_loss(case.drafter, case.batch(), 2)
    assert sum(rows) == outcome.counts.sum() > 12
    assert max(rows) == 6
    del rows[:]
    outcome.loss.backward()
    assert rows == []  # nothing is computed a second time


def test_without_gradient_the_value_is_the_same(make_case):
    case = make_case((1, 4), (9, 12))
    with torch.no_grad():
        quiet = ttt_loss(case.drafter, case.batch(), 3)
    assert not quiet.loss.requires_grad
    assert quiet.loss == ttt_loss(case.drafter, case.batch(), 3).loss


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


def test_padding_on_the_right_changes_nothing(make_case):
    case = make_case((1, 4), (9, 12, 7))
    whole = ttt_loss(case.drafter, case.batch(), 3)
    alone = [ttt_loss(case.drafter, case.batch(slice(row, row + 1), size), 3) for row, size in enumerate((9, 12, 7))]
    for name in ("losses", "counts", "hits", "slots"):
        torch.testing.assert_close(getattr(whole, name), sum(getattr(one, name) for one in alone), msg=name)
    case.ids[2, 7:], case.states[1][2, 7:], case.logits[0, 9:] = 0, 1e4, -1e4  # what stands in the padding is nobody's
    again = ttt_loss(case.drafter, case.batch(), 3)
    torch.testing.assert_close(again.loss, whole.loss)


@pytest.mark.parametrize(
    ("loss", "count_from"), [("cross_entropy", "ours"), ("forward_kl", "speculators"), ("lk", "eagle")]
)
def test_gradient_by_finite_differences(make_case, loss, count_from):
    """Central differences, ε = 1e-6: their error is about ε² ≈ 1e-12 beside the round-off 1e-16/ε = 1e-10."""
    case = make_case((1, 4), (9, 8))
    batch = case.batch(count_from=count_from)

    def value():
        return ttt_loss(case.drafter, batch, 3, loss=loss, count_from=count_from)

    have = gradients(case.drafter, value())
    generator = torch.Generator().manual_seed(1)
    for name, parameter in case.drafter.named_parameters():
        flat = parameter.data.view(-1)
        for place in torch.randint(0, flat.numel(), (3,), generator=generator).tolist():
            old, values = flat[place].item(), []
            for sign in (1, -1):
                flat[place] = old + sign * 1e-6
                values.append(value().loss.item())
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


@pytest.mark.parametrize("key", ["loss", "count_from", "normaliser"])
def test_an_unknown_switch_is_refused(key):
    with pytest.raises(UserError, match=rf"drafter\.{key}.*must be one of .*, "):
        Eagle3(**{key: "none"})


def test_acceptance():
    shares, tau = acceptance(torch.tensor([5, 2, 0]), torch.tensor([10, 4, 2]))
    assert shares == [0.5, 0.5, 0.0]
    assert tau == 1.75
    assert acceptance(torch.tensor([0, 0]), torch.tensor([0, 0])) == ([0.0, 0.0], 1.0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_under_autocast(make_case, checkpointing):
    """bf16-mixed, float32 parameters and gradients: a rounding of bfloat16 is 4e-3, some twenty come in a row."""
    case = make_case((1, 4), (20, 17), dtype=torch.float32)
    batch = case.batch()
    exact = ttt_loss(case.drafter, batch, 3)
    want = gradients(case.drafter, exact)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = ttt_loss(case.drafter, batch, 3, checkpointing=checkpointing)
    have = gradients(case.drafter, mixed)
    assert mixed.loss.dtype == torch.float32
    assert mixed.loss.item() == pytest.approx(exact.loss.item(), rel=0.05)
    together = [torch.cat([found[name].flatten() for name in want]) for found in (have, want)]
    assert torch.nn.functional.cosine_similarity(*together, dim=0) > 0.98
