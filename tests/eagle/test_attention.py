"""Chunked attention against one dense softmax, value and gradient, on both kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specwave.eagle import attention
from specwave.eagle.attention import attend_merged, merged_attention
from specwave.eagle.slots import lay_out

HEADS, GROUPS, WIDTH = 6, 2, 4


@pytest.fixture(params=["fused", "plain"])
def kernel(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(attention, "_fused", lambda x: False)


def draw(layout, steps, dtype, seed):
    """Query, step-0 key and value, own keys and values, and a gradient for the result."""
    generator = torch.Generator().manual_seed(seed)
    keys, slots = len(layout.keys), len(layout.slots)

    def normal(heads, count):
        return torch.randn(heads, count, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    kv = HEADS // GROUPS
    own = [(normal(kv, slots), normal(kv, slots)) for _ in range(steps)]
    return normal(HEADS, slots), normal(kv, keys), normal(kv, keys), own, normal(HEADS, slots).detach()


def dense(query, key0, value0, own, visible):
    """All scores of all keys in one masked softmax."""
    count = query.shape[1]
    keys = torch.cat([key0] + [key for key, _ in own], 1)
    values = torch.cat([value0] + [value for _, value in own], 1)
    mask = torch.cat([visible] + [torch.eye(count).bool()] * len(own), -1)
    return F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask, enable_gqa=True)[0]


def test_the_readable_one_equals_one_dense_softmax():
    torch.manual_seed(0)
    q, key, value = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    own = [(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)) for _ in range(2)]
    visible = torch.rand(2, 5, 7) < 0.5
    got = attend_merged(q, key, value, own, visible)
    for row in range(2):
        mine = [(k[row], v[row]) for k, v in own]
        # float32: the order of about 10 sums differs
        torch.testing.assert_close(
            got[row], dense(q[row], key[row], value[row], mine, visible[row]), rtol=1e-5, atol=1e-6
        )


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("chunk", [1, 3, 256])
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_value_and_gradient_equal_the_readable_one(chunk, steps, monkeypatch):
    """Random live slots of random documents. Float64: only the order of about 30 sums differs."""
    monkeypatch.setattr("specwave.eagle.slots._QUERIES", chunk)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        live = torch.rand(2, 17, generator=generator) < 0.6
        documents = (torch.rand(2, 17, generator=generator) < 0.2).long().cumsum(1)
        layout = lay_out(live, documents)
        query, key0, value0, own, grad = draw(layout, steps, torch.float64, seed)
        row, slot_row = layout.keys // 17, (layout.keys // 17)[layout.slots]
        number = documents.flatten()[layout.keys]
        same = (number == number[layout.slots][:, None]) & (row == slot_row[:, None])
        visible = same & (torch.arange(len(layout.keys)) <= layout.slots[:, None])
        inputs = [query, key0, value0, *(tensor for pair in own for tensor in pair)]
        pairs = [(key[None], value[None]) for key, value in own]
        expected = attend_merged(query[None], key0[None], value0[None], pairs, visible[None])[0]
        got = merged_attention(query, key0, value0, own, layout.slots, layout.chunks)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        want, have = torch.autograd.grad(expected, inputs, grad), torch.autograd.grad(got, inputs, grad)
        for place, (one, other) in enumerate(zip(have, want, strict=True)):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=f"input {place}")


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_narrow_numbers(dtype, error):
    """Against float64 on the same numbers: a few roundings of the type, 6e-8 and 4e-3, in sums of up to 44."""
    layout = lay_out(torch.ones(1, 41, dtype=torch.bool))
    query, key0, value0, own, grad = draw(layout, 3, dtype, 1)
    inputs = [query, key0, value0, *(tensor for pair in own for tensor in pair)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    pairs = list(zip(exact[3::2], exact[4::2], strict=True))
    expected = dense(*exact[:3], pairs, torch.ones(41, 41).tril().bool())
    got = merged_attention(query, key0, value0, own, layout.slots, layout.chunks)
    assert got.dtype == dtype
    want, have = torch.autograd.grad(expected, exact, grad.double()), torch.autograd.grad(got, inputs, grad)
    for one, other in zip((got, *have), (expected, *want), strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() < error * other.norm()


@pytest.mark.usefixtures("kernel")
def test_gradient_by_finite_differences():
    layout = lay_out(torch.tensor([[False, True, True, True, False, True]]))
    query, key0, value0, own, _ = draw(layout, 2, torch.float64, 0)

    def run(q, k, v, *flat):
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        return merged_attention(q, k, v, pairs, layout.slots, layout.chunks)

    flat = [tensor for pair in own for tensor in pair]
    assert torch.autograd.gradcheck(run, (query, key0, value0, *flat))


@pytest.mark.usefixtures("kernel")
def test_large_scores_stay_finite():
    """Scores of ±1e4: exp of one would be infinite. Their own rounding in float32 is about 1e-3."""
    layout = lay_out(torch.ones(1, 5, dtype=torch.bool))
    query, key0, value0, own, grad = draw(layout, 1, torch.float32, 0)
    query = (query * 1e4).detach().requires_grad_()
    got = merged_attention(query, key0, value0, own, layout.slots, layout.chunks)
    found = torch.autograd.grad(got, [query, key0, value0], grad)
    assert all(tensor.isfinite().all() for tensor in (got, *found))
    expected = dense(query, key0, value0, own, torch.ones(5, 5).tril().bool())
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
