"""Batch-invariant decoding: in bfloat16 too, a token's states have the same bits whatever they are computed among."""

import pytest
import torch
import torch.nn.functional as F
from stubs import Oracle, RandomTrees

from specwave.artifacts import UserError
from specwave.decoding import Sampling, generate, loop
from specwave.decoding.tree import ancestors
from specwave.target import load_target
from specwave.target.decoder import attend_exact
from specwave.target.linear import FrozenLinear

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def half(request, family_folders):
    target = load_target(family_folders[request.param], dtype="bfloat16", device="cpu")
    if target.least_rows is None:
        pytest.skip("on this machine linear layers round by their shape in bfloat16")
    return target


def test_attention_is_attention():
    query, key, value = (torch.randn(2, heads, size, 8) for heads, size in ((6, 5), (3, 9), (3, 9)))
    visible = torch.rand(2, 5, 9) > 0.4
    visible[:, :, 0] = True
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None], enable_gqa=True)
    found = attend_exact(query.transpose(1, 2), key, value, visible)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_every_node_of_a_tree_has_the_bits_of_its_path_decoded_token_by_token(half):
    prompt, drafts = torch.tensor([PROMPTS[2]]), torch.randint(512, (1, 12))
    parents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 4, 4, 7, 3, 3]])
    sees = ancestors(parents)

    def session():
        own = half.session(1, 64, invariant=True)
        own.forward(prompt, logits=False)
        own.advance([prompt.shape[1]])
        return own

    tree = session().forward(drafts, prompt.shape[1] + sees.sum(-1) - 1, sees).logits
    for node in range(12):
        own = session()
        for place in sees[0, node].nonzero()[:, 0].tolist():
            alone = own.forward(drafts[:, place : place + 1]).logits
            own.advance([1])
        assert torch.equal(alone[0, 0], tree[0, node])


def test_in_bfloat16_drafts_and_batches_change_nothing(half):
    for sampling in (Sampling(), Sampling(0.9, seed=3, top_p=0.9, repetition_penalty=1.2)):

        def decode(proposer, prompts=PROMPTS, keys=None, sampling=sampling):
            made = generate(half, proposer, prompts, max_new_tokens=24, sampling=sampling, sequence_ids=keys,
                            batch_invariant=True)  # fmt: skip
            return made.tokens

        plain = decode(None)
        assert decode(RandomTrees(512, size=20, seed=1)) == plain
        assert decode(Oracle(plain, 5, 512)) == plain
        for row, prompt in enumerate(PROMPTS):
            assert decode(None, [prompt], [row]) == [plain[row]]
            assert decode(RandomTrees(512, size=9, seed=row), [prompt], [row]) == [plain[row]]


def test_padding_up_to_the_least_rows_changes_no_value(half):
    layer = half.blocks[0].down
    rows = torch.randn(1, 1, layer.width).bfloat16()
    before, layer.least = layer.least, 7
    padded = layer(rows)
    layer.least = before
    assert padded.shape == (1, 1, layer.out)
    torch.testing.assert_close(padded, layer(rows), rtol=0.02, atol=0.02)


def test_a_device_that_rounds_by_shape_is_refused(tiny, monkeypatch):
    monkeypatch.setitem(vars(tiny), "least_rows", None)
    with pytest.raises(UserError, match="batch_invariant=true: on cpu"):
        generate(tiny, None, [1, 2], max_new_tokens=2, batch_invariant=True)


@pytest.mark.parametrize("chunk", [1, 3, 4, 10])
def test_a_prompt_in_chunks_is_the_prompt(chunk, families, monkeypatch):
    """Tokens, and the states that a proposer is handed, of rows of different length."""
    for target in families.values():
        whole, parts = RandomTrees(512, seed=2), RandomTrees(512, seed=2)
        expected = generate(target, whole, PROMPTS, max_new_tokens=12)
        monkeypatch.setattr(loop, "PREFILL", chunk)
        found = generate(target, parts, PROMPTS, max_new_tokens=12)
        monkeypatch.undo()
        assert found.tokens == expected.tokens
        for row in whole.seen:
            for layer, states in whole.seen[row].items():
                torch.testing.assert_close(torch.cat(parts.seen[row][layer]), torch.cat(states), rtol=1e-4, atol=1e-4)


def test_an_invariant_decoding_leaves_the_target_as_it_was(family_folders, monkeypatch):
    """What the linear layers are given before and after it, and the logits to the last bit."""
    target = load_target(family_folders["llama"], dtype="float32")
    monkeypatch.setitem(vars(target), "least_rows", 7)
    rows, multiply = [], FrozenLinear._multiply

    def noting(layer, x):
        rows.append(x.numel() // layer.width)
        return multiply(layer, x)

    monkeypatch.setattr(FrozenLinear, "_multiply", noting)

    def decode(invariant):
        rows.clear()
        seen = []

        class Seeing(Oracle):
            def observe(self, verdicts):
                seen.extend(verdict.logits for verdict in verdicts)

        made = generate(target, Seeing([[]], 0, 512), [4, 5], max_new_tokens=5, batch_invariant=invariant)
        return made.tokens, torch.cat(seen), min(rows)

    before, padded, after = decode(False), decode(True), decode(False)
    assert (before[2], padded[2], after[2]) == (1, 7, 1)
    assert torch.equal(before[1], after[1])
    assert before[0] == padded[0] == after[0]


def test_rows_are_probed_as_far_as_they_are_used(tiny, monkeypatch):
    """Trees of a batch and chunks of a prompt: a layer that rounds otherwise there is found."""
    prompt, head = [], []

    def noting(layer, x):
        (head if layer is tiny.lm_head else prompt).append(x.shape[1])
        return F.linear(x, torch.zeros(layer.out, layer.width)) + (x.shape[1] > 1000)

    monkeypatch.setattr(FrozenLinear, "__call__", noting)
    assert type(tiny).least_rows.func(tiny) is None
    assert max(prompt) == loop.PREFILL
    assert max(head) >= 4 * 61
