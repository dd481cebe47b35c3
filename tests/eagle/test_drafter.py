"""The block against its formula, the names of the tensors, and the start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.start import group_seed, initialise
from specwave.eagle.vocab import build_vocab_map


def test_tensor_table(make_case):
    """Names and shapes of the serving engines: H = 12, k = 2, 4 heads and 2 KV heads of 6, MLP 20, V = 23, V_d = 9."""
    expected = {
        "fc.weight": (12, 24),
        "midlayer.hidden_norm.weight": (12,),
        "midlayer.input_layernorm.weight": (12,),
        "midlayer.post_attention_layernorm.weight": (12,),
        "midlayer.self_attn.q_proj.weight": (24, 24),
        "midlayer.self_attn.k_proj.weight": (12, 24),
        "midlayer.self_attn.v_proj.weight": (12, 24),
        "midlayer.self_attn.o_proj.weight": (12, 24),
        "midlayer.mlp.gate_proj.weight": (20, 12),
        "midlayer.mlp.up_proj.weight": (20, 12),
        "midlayer.mlp.down_proj.weight": (12, 20),
        "norm.weight": (12,),
        "lm_head.weight": (9, 12),
        "d2t": (9,),
        "t2d": (23,),
    }
    assert {name: tuple(tensor.shape) for name, tensor in make_case().drafter.state_dict().items()} == expected


def test_one_step_by_its_formula(make_case):
    case = make_case((1, 4), (6,))
    drafter, w = case.drafter, case.drafter.state_dict()
    embedding, states = case.embedding[case.ids], [case.states[1], case.states[4]]
    positions = torch.tensor([[0, 1, 2, 5, 6, 9]])

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    got = drafter.forward_step(embedding, drafter.fuse(states), attend, positions)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[name]

    def turn(x, position):
        """Pairs (i, i+3) turn by position·100^(−i/3)."""
        out = x.clone()
        for i in range(3):
            angle = torch.tensor(position * 100.0 ** (-i / 3), dtype=x.dtype)
            out[i] = x[i] * angle.cos() - x[i + 3] * angle.sin()
            out[i + 3] = x[i + 3] * angle.cos() + x[i] * angle.sin()
        return out

    h = torch.cat(states, -1)[0] @ w["fc.weight"].T
    z = torch.cat([norm(embedding[0], "midlayer.input_layernorm.weight"), norm(h, "midlayer.hidden_norm.weight")], -1)
    q, k, v = (z @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
    mixed = torch.zeros(6, 24, dtype=h.dtype)
    for head in range(4):
        mine, shared = slice(6 * head, 6 * head + 6), slice(6 * (head // 2), 6 * (head // 2) + 6)
        for t in range(6):
            query = turn(q[t, mine], positions[0, t].item())
            scores = torch.stack([query @ turn(k[j, shared], positions[0, j].item()) for j in range(t + 1)])
            mixed[t, mine] = torch.softmax(scores / 6**0.5, 0) @ v[: t + 1, shared]
    h = h + mixed @ w["midlayer.self_attn.o_proj.weight"].T
    x = norm(h, "midlayer.post_attention_layernorm.weight")
    gate = x @ w["midlayer.mlp.gate_proj.weight"].T
    h = (
        h
        + (gate * torch.sigmoid(gate) * (x @ w["midlayer.mlp.up_proj.weight"].T)) @ w["midlayer.mlp.down_proj.weight"].T
    )
    torch.testing.assert_close(got[0], h, rtol=1e-6, atol=1e-6)  # the angles' frequencies are float32
    logits = norm(h, "norm.weight") @ w["lm_head.weight"].T
    torch.testing.assert_close(drafter.logits(got)[0], logits, rtol=1e-6, atol=1e-6)


def test_bfloat16_keeps_the_angles(make_case):
    drafter = make_case().drafter
    fine = drafter.rotary(torch.tensor([[50]]))
    coarse = drafter.to(torch.bfloat16).rotary(torch.tensor([[50]]))
    torch.testing.assert_close(coarse[0].double(), fine[0], rtol=0, atol=1e-5)


def fake_target(width=12, heads=4, kv=2, head_dim=6, mlp=20, vocab=23, layers=6):
    torch.manual_seed(5)
    shapes = {
        "self_attn.q_proj.weight": (heads * head_dim, width),
        "self_attn.k_proj.weight": (kv * head_dim, width),
        "self_attn.v_proj.weight": (kv * head_dim, width),
        "self_attn.o_proj.weight": (width, heads * head_dim),
        "mlp.gate_proj.weight": (mlp, width),
        "mlp.up_proj.weight": (mlp, width),
        "mlp.down_proj.weight": (width, mlp),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    blocks = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(layers)]
    return SimpleNamespace(
        num_layers=layers,
        block_weights=blocks.__getitem__,
        final_norm=torch.randn(width),
        head=torch.randn(vocab, width),
    )


def small(layers=(1, 4)) -> Eagle3Drafter:
    config = DrafterConfig(layers, 12, 12, 4, 2, 6, 20, 23, 9, 1e-5, 64, {"rope_type": "default", "rope_theta": 100.0})
    return Eagle3Drafter(config, *build_vocab_map(torch.arange(23) % 7, 9))


def test_start_from_the_target():
    """The target's last block on the last captured layer, and every slot looks at its own token first."""
    target, drafter = fake_target(), small()
    initialise(drafter, target, "target", seed=0)
    states = [torch.randn(1, 5, 12), torch.randn(1, 5, 12)]
    fused = drafter.fuse(states)
    assert (fused - states[1]).square().mean().sqrt() < 0.03  # 1 % of noise from each of two layers
    middle, block = drafter.midlayer, target.block_weights(5)
    query, key, value = (middle.self_attn[f"{name}_proj"].weight for name in "qkv")
    for weight, name, share in ((query, "q", 0.3), (key, "k", 0.3), (value, "v", 1.0)):
        torch.testing.assert_close(weight[:, 12:], share * block[f"self_attn.{name}_proj.weight"])
    # Heads 0 and 1 read the keys of key head 0, heads 2 and 3 those of key head 1.
    for head in range(4):
        own = slice(head // 2 * 6, head // 2 * 6 + 6)
        assert torch.equal(query[head * 6 : head * 6 + 6, :12], key[own, :12])
    assert torch.equal(middle.hidden_norm.weight, block["input_layernorm.weight"])
    assert torch.equal(middle.input_layernorm.weight, torch.ones(12))
    assert torch.equal(drafter.lm_head.weight, target.head[drafter.draft_ids])
    assert torch.equal(drafter.norm.weight, 0.5 * target.final_norm)


def started(target, **switches) -> Eagle3Drafter:
    config = DrafterConfig.of_target(target.arch, (2, 4, 5), 100, **switches)
    drafter = Eagle3Drafter(config, *build_vocab_map(torch.ones(512), 100))
    initialise(drafter, target, "target", seed=0)
    return drafter


@pytest.mark.parametrize("switch", ["fc_norm", "norm_before_fc"])
@torch.no_grad()
def test_start_behind_a_norm(tiny, switch):
    """`fc` gives a state the size back that the norm took; all else is the start of a plain drafter."""
    plain, normed = started(tiny), started(tiny, **{switch: True})
    size = float(normed.fc.weight[0, 0] / plain.fc.weight[0, 0])
    for name, weight in normed.state_dict().items():
        if name.startswith(("fc_norm.", "input_norm.")):
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            alike = plain.state_dict()[name]
            torch.testing.assert_close(weight, alike * size if name == "fc.weight" else alike)
    states = tiny.states(torch.randint(0, 512, (1, 200)), (2, 4, 5))
    read = torch.cat([states[layer] for layer in ((2, 4, 5) if switch == "norm_before_fc" else (5,))], -1)
    # Of random tokens here, of prompts in the start: their sizes are alike, and far from 1.
    assert size == pytest.approx(float(read.square().mean(-1).sqrt().median()), rel=0.1)
    assert abs(size - 1) > 0.3
    fused = normed.fuse([states[layer] for layer in (2, 4, 5)])
    assert F.cosine_similarity(fused, states[5], -1).min() > 0.99
    assert float(fused.norm(dim=-1).median() / states[5].norm(dim=-1).median()) == pytest.approx(1, rel=0.1)


def test_norm_output_starts_as_plain_does(tiny):
    plain, other = started(tiny).state_dict(), started(tiny, norm_output=True).state_dict()
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_every_slot_starts_out_looking_at_itself(tiny):
    """On a real (random) target: the mean weight of a slot's own key, at step 0, is far above an even share."""
    drafter = started(tiny)
    ids = torch.randint(0, 512, (1, 41))
    states = tiny.states(ids[:, :-1], (2, 4, 5))
    seen = []

    def attend(q, k, v):
        score = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
        score = score.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
        seen.append(score.diagonal(dim1=-2, dim2=-1)[..., 20:].mean())
        return score @ v.repeat_interleave(2, 1)

    with torch.no_grad():
        hidden = drafter.fuse([states[layer] for layer in (2, 4, 5)])
        drafter.forward_step(tiny.embed(ids[:, 1:]), hidden, attend, torch.arange(40)[None])
    assert float(seen[0]) > 0.5


@pytest.mark.parametrize("how", ["target", "random"])
def test_start_is_seeded_by_the_group(how):
    target = fake_target()
    first, again, other, later = small(), small(), small((1, 3)), small()
    for drafter, seed in ((first, 0), (again, 0), (other, 0), (later, 1)):
        torch.manual_seed(torch.randint(1000, ()).item())  # the global generator must not matter
        initialise(drafter, target, how, seed)
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert not torch.equal(first.fc.weight, later.fc.weight)
    assert group_seed(0, (4, 1)) == group_seed(0, (1, 4))
