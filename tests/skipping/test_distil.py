"""What the adapter learns by: the loss against a readable one, its figures against counting, packed and padded rows."""

import itertools

import pytest
import torch

from specwave.data import Sample
from specwave.data.datamodule import collate, collate_packed
from specwave.skipping import distil as room
from specwave.skipping.adapter import Adapter, AdapterConfig, initialise
from specwave.skipping.distil import DRAFTS, Sums, chains, cross_entropy, distil, following
from specwave.target.decoder import attend_causal

EXIT = 2


def test_the_loss_is_the_cross_entropy_of_whole_distributions(monkeypatch):
    """And its gradient autograd's, in float64, chunk after chunk."""
    monkeypatch.setattr(room, "CHUNK", 3)
    draw = torch.Generator().manual_seed(0)
    x, rows, head, weight = (
        torch.randn(*size, generator=draw, dtype=torch.float64) for size in ((7, 5), (7, 11), (11, 5), (7,))
    )
    score = lambda some: 2 * some  # noqa: E731
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    losses, drafted = cross_entropy(mine, head, score, rows)
    plain = -(score(rows).softmax(-1) * (other @ head.T).log_softmax(-1)).sum(-1)
    torch.testing.assert_close(losses, plain)
    assert drafted.tolist() == (x @ head.T).argmax(-1).tolist()
    (weight * losses).sum().backward()
    (weight * plain).sum().backward()
    torch.testing.assert_close(mine.grad, other.grad)
    assert not drafted.requires_grad


def test_the_loss_is_least_where_the_distributions_agree():
    """There it is the target's entropy, and its gradient is zero."""
    draw = torch.Generator().manual_seed(0)
    x, head = torch.randn(4, 5, generator=draw).requires_grad_(), torch.randn(9, 5, generator=draw)
    same = (x @ head.T).detach()
    losses, _ = cross_entropy(x, head, lambda rows: rows, same)
    torch.testing.assert_close(losses, torch.distributions.Categorical(logits=same).entropy())
    losses.sum().backward()
    torch.testing.assert_close(x.grad, torch.zeros_like(x), atol=1e-6, rtol=0)


# ---------------------------------------------------------------- figures


def flags(length, *places):
    found = torch.zeros(1, length, dtype=torch.bool)
    found[0, list(places)] = True
    return found


def test_the_table_at_the_head_of_the_file():
    answer = flags(9, 5, 6, 7, 8)
    live = following(answer)
    assert live[0].nonzero().flatten().tolist() == [4, 5, 6, 7]
    hits, slots = chains(flags(9, 4, 5, 7), live, 3)
    assert (hits.tolist(), slots.tolist()) == (
        [3, 1, 0],
        [4, 2, 1],
    )  # a third draft there is from 4 alone, of the miss at 6
    sums = Sums(hits=(3, 1, 0, 0, 0, 0), slots=(4, 2, 1, 0, 0, 0), loss=6.0)
    figures = sums.figures()
    assert figures["tau_hat"] == 1 + 3 / 4 + 3 / 4 * 1 / 2
    assert (figures["a_0"], figures["a_1"], figures["a_2"], figures["loss"]) == (0.75, 0.5, 0.0, 1.5)


def test_chains_are_counted_as_by_hand():
    draw = torch.Generator().manual_seed(3)
    live, hit = (torch.rand(4, 20, generator=draw) < share for share in (0.85, 0.7))
    hits, slots = chains(hit, live, 5)
    counted = [[0, 0] for _ in range(5)]
    for row, start in itertools.product(range(4), range(20)):
        for step in range(5):
            place = start + step
            if place == 20 or not live[row, place]:
                break
            counted[step][1] += 1
            if not hit[row, place]:
                break
            counted[step][0] += 1
    assert torch.stack([hits, slots], 1).tolist() == counted


# ---------------------------------------------------------------- batches


def sample(index, length):
    draw = torch.Generator().manual_seed(index)
    ids = torch.randint(3, 259, (length,), generator=draw).tolist()
    return Sample(ids, [False] * 4 + [True] * (length - 4), f"s{index}")


@pytest.fixture(scope="module")
def adapter(mild):
    made = Adapter(AdapterConfig.of_target(mild["qwen3"].arch, EXIT))
    initialise(made, mild["qwen3"])
    torch.nn.init.normal_(made.self_attn["o_proj"].weight, std=0.05, generator=torch.Generator().manual_seed(5))
    return made


def outcome(adapter, target, batch):
    states = target.states(batch["ids"], [EXIT - 1, 7], batch.get("documents"))
    adapter.zero_grad()
    found = distil(adapter, batch, states[EXIT - 1], target.logits, states[7], target.rope, target.head)
    found.loss.backward()
    return found, {name: parameter.grad.clone() for name, parameter in adapter.named_parameters()}


def test_rows_padded_packed_or_alone_teach_the_same(adapter, mild):
    target, samples = mild["qwen3"], [sample(0, 12), sample(1, 19), sample(2, 7)]
    alone = [outcome(adapter, target, collate([one])) for one in samples]
    counts = [int(found.slots[0]) for found, _ in alone]
    assert counts == [8, 15, 3]
    for batch in (collate(samples), collate_packed([samples[:2], samples[2:]])):
        found, gradients = outcome(adapter, target, batch)
        torch.testing.assert_close(found.total, sum(one.total for one, _ in alone), rtol=1e-5, atol=0)
        assert found.hits.tolist() == sum(one.hits for one, _ in alone).tolist()
        assert found.slots.tolist() == sum(one.slots for one, _ in alone).tolist()
        assert len(found.hits) == DRAFTS
        for name, gradient in gradients.items():
            parts = sum(count * own[name] for count, (_, own) in zip(counts, alone, strict=True)) / sum(counts)
            torch.testing.assert_close(gradient, parts, rtol=1e-3, atol=1e-5)  # float32, sums in another order


def test_gradients_are_those_of_whole_logits(adapter, mild):
    """Against autograd through the adapter and the head, in plain tensors."""
    target, batch = mild["qwen3"], collate([sample(4, 14)])
    _, gradients = outcome(adapter, target, batch)
    states = {layer: state.clone() for layer, state in target.states(batch["ids"], [EXIT - 1, 7]).items()}
    turn = tuple(table[:14, None] for table in target.rope)
    logits = adapter(states[EXIT - 1], turn, attend_causal)[0, 3:-1] @ target.head.T
    adapter.zero_grad()
    soft = target.logits(states[7])[0, 3:-1].clone().softmax(-1)
    torch.nn.functional.cross_entropy(logits, soft).backward()
    for name, parameter in adapter.named_parameters():
        assert float(parameter.grad.abs().max()) > 0
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)
