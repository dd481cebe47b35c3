"""Tree forwards, roll-back and sub-layers against plain forwards of the paths."""

import pytest
import torch

from specwave.decoding.tree import Tree, ancestors, nodes
from specwave.target import Wants

FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen3"]
# the same sums in another order: float32, 8 random blocks
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def random_parents(count: int, generator: torch.Generator) -> torch.Tensor:
    """Each draft hangs on the root or on an earlier draft."""
    return torch.tensor([int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(count)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(9, 9), (4, 13)])
def test_a_tree_forward_equals_the_forwards_of_its_paths(family, lengths, families):
    target, generator = families[family], torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 512, (length,), generator=generator) for length in lengths]
    trees = [Tree(torch.randint(0, 512, (7,), generator=generator), random_parents(7, generator)) for _ in lengths]
    session = target.session(2, 40)
    padded = torch.nn.utils.rnn.pad_sequence([prompt[:-1] for prompt in prompts], batch_first=True)
    session.forward(padded)
    session.advance([length - 1 for length in lengths])
    tokens, parents = (torch.stack(rows) for rows in zip(*map(nodes, trees), strict=True))
    tokens[:, 0] = torch.stack([prompt[-1] for prompt in prompts])
    sees = ancestors(parents)
    positions = torch.tensor(lengths)[:, None] - 1 + sees.sum(-1) - 1
    output = session.forward(tokens, positions, sees, wants=Wants((2, 7), (4,)))
    for row in range(2):
        for node in range(8):
            path = sees[row, node].nonzero()[:, 0]
            whole = torch.cat([prompts[row][:-1], tokens[row, path]])[None]
            states = target.states(whole, [2, 7])
            torch.testing.assert_close(output.blocks[2][row, node], states[2][0, -1], **CLOSE)
            torch.testing.assert_close(output.blocks[7][row, node], states[7][0, -1], **CLOSE)
            torch.testing.assert_close(output.logits[row, node], target.logits(states[7])[0, -1], **CLOSE)
    assert output.attentions[4].shape == (2, 8, 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_accepted_path_is_as_if_it_had_been_decoded(family, families):
    """Roll-back: after keep_paths the cache equals the one of a plain forward over prompt and path."""
    target = families[family]
    ids = torch.randint(0, 512, (2, 10))
    session, plain = target.session(2, 40), target.session(2, 40)
    session.forward(ids)
    session.advance([10, 10])
    parents = torch.tensor([[0, 0, 0, 1, 2, 2, 4], [0, 0, 1, 2, 0, 4, 5]])
    tokens, sees = torch.randint(0, 512, (2, 7)), ancestors(parents)
    session.forward(tokens, 10 + sees.sum(-1) - 1, sees)
    paths = [[0, 2, 4, 6], [0, 4]]
    session.keep_paths(paths)
    assert session.lengths == [14, 12]
    for row, path in enumerate(paths):
        whole = torch.cat([ids[row], tokens[row, path]])
        plain.rollback([0, 0])
        plain.forward(whole.expand(2, -1))
        count = len(whole)
        for layer in range(8):
            for ours, theirs in ((session.cache.keys, plain.cache.keys), (session.cache.values, plain.cache.values)):
                torch.testing.assert_close(ours[layer][row, :, :count], theirs[layer][row, :, :count], **CLOSE)
    # and the next token sees exactly that
    step = session.forward(torch.tensor([[5], [6]]))
    for row, path in enumerate(paths):
        whole = torch.cat([ids[row], tokens[row, path], torch.tensor([5 + row])])[None]
        torch.testing.assert_close(step.logits[row, 0], target.logits(target.states(whole, [7])[7])[0, -1], **CLOSE)


def test_mark_and_rollback_leave_no_trace(tiny):
    ids = torch.randint(0, 512, (1, 12))
    session = tiny.session(1, 40)
    session.forward(ids)
    session.advance([12])
    before = session.forward(torch.tensor([[7]])).logits
    mark = session.mark()
    for token in (3, 4, 5):
        session.forward(torch.tensor([[token]]), plan=[True, False] * 8)
        session.advance([1])
    session.rollback(mark)
    assert torch.equal(session.forward(torch.tensor([[7]])).logits, before)


def test_a_plan_skips_sub_layers(tiny):
    ids = torch.randint(0, 512, (1, 6))
    everything = tiny.session(1, 8).forward(ids).logits
    assert torch.equal(tiny.session(1, 8).forward(ids, plan=[True] * 16).logits, everything)
    nothing = tiny.session(1, 8).forward(ids, plan=[False] * 16)
    assert torch.equal(nothing.hidden, tiny.embed(ids))
    only = [False] * 16
    only[2 * 5 + 1] = True  # the MLP of block 5
    assert torch.equal(tiny.session(1, 8).forward(ids, plan=only).hidden, tiny.blocks[5].mlp(tiny.embed(ids)))


@pytest.mark.parametrize("family", FAMILIES)
def test_going_on_from_a_block_equals_a_fresh_forward(family, families):
    target = families[family]
    ids, drafts = torch.randint(0, 512, (2, 9)), torch.randint(0, 512, (2, 4))
    session = target.session(2, 20)
    session.forward(ids)
    session.advance([9, 9])
    whole = session.forward(drafts, wants=Wants((2,)))
    resumed = session.forward(None, start_block=3, hidden=whole.blocks[2])
    torch.testing.assert_close(resumed.logits, whole.logits, **CLOSE)
    torch.testing.assert_close(session.early_logits(whole.hidden), whole.logits, **CLOSE)


def test_branches_of_a_sub_layer_see_the_prefix_and_themselves(tiny):
    ids, drafts = torch.randint(0, 512, (1, 9)), torch.randint(0, 512, (3, 2))
    session = tiny.session(1, 20)
    session.forward(ids)
    session.advance([9])
    kept = [store.clone() for store in session.cache.keys]
    mixed = session.mlp(0, session.attention(0, tiny.embed(drafts), 9, branches=3))
    for branch in range(3):
        whole = torch.cat([ids, drafts[branch : branch + 1]], 1)
        torch.testing.assert_close(mixed[branch], tiny.states(whole, [0])[0][0, 9:], **CLOSE)
    assert all(torch.equal(now, before) for now, before in zip(session.cache.keys, kept, strict=True))


def test_rows_may_leave(tiny):
    ids = torch.randint(0, 512, (3, 8))
    session = tiny.session(3, 20)
    session.forward(ids)
    session.advance([8, 5, 8])
    session.select_rows([1, 2])
    step = session.forward(torch.tensor([[9], [9]]))
    for row, whole in enumerate((ids[1, :5], ids[2])):
        alone = tiny.states(torch.cat([whole, torch.tensor([9])])[None], [7])[7]
        torch.testing.assert_close(step.logits[row], tiny.logits(alone)[0, -1:], **CLOSE)


def test_a_full_cache_says_so(tiny):
    session = tiny.session(1, 4)
    with pytest.raises(ValueError, match="holds 4"):
        session.forward(torch.zeros(1, 5, dtype=torch.int64))
