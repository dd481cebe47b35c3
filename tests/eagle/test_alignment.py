"""The worked table of the objective, row by row, and what each slot may see."""

from __future__ import annotations

import itertools

import pytest
import torch

from specwave.eagle.loss import ttt_loss
from specwave.eagle.reference import unrolled_logits, visible_keys
from specwave.eagle.slots import COUNT_FROM, ahead, answer_slots, counting_slots, targets_needed

# Prompt x_0…x_4, answer x_5…x_8 (x_8 the end token).
ANSWER = torch.tensor([[False] * 5 + [True] * 4])


@pytest.mark.parametrize(
    ("step", "reads", "predicts", "counts"),
    [
        (0, [4, 5, 6, 7, 8], [5, 6, 7, 8, None], [False, True, True, True, False]),
        (1, [5, 6, 7, 8, None], [6, 7, 8, None, None], [False, True, True, False, False]),
        (2, [6, 7, 8, None, None], [7, 8, None, None, None], [False, True, False, False, False]),
    ],
)
def test_the_worked_table(step, reads, predicts, counts):
    slots = [3, 4, 5, 6, 7]
    position = torch.arange(9)[None] + 1  # 0 stands for "runs past the end"
    read = ahead(position, step + 1)[0, slots].tolist()
    assert [value - 1 if value else None for value in read] == reads
    named = ahead(position, step + 2)[0, slots].tolist()
    assert [value - 1 if value else None for value in named] == predicts
    everywhere = torch.ones(1, 9, dtype=torch.bool)
    assert counting_slots(ANSWER, everywhere, 3)[step, 0, slots].tolist() == counts
    assert not counting_slots(ANSWER, everywhere, 3)[step, 0, [0, 1, 2, 8]].any()


@pytest.mark.parametrize(
    ("count_from", "counting"),
    [
        ("ours", [[4, 5, 6], [4, 5], [4]]),
        ("speculators", [[4, 5, 6, 7], [3, 4, 5, 6], [2, 3, 4, 5]]),
        ("eagle", [[5, 6, 7], [4, 5, 6], [3, 4, 5]]),
    ],
)
def test_the_worked_table_of_the_switches(count_from, counting):
    """Slots that count at steps 0, 1, 2; EAGLE's never have t = 4, s = 0, the first draft of the answer."""
    everywhere = torch.ones(1, 9, dtype=torch.bool)
    slots = counting_slots(ANSWER, everywhere, 3, count_from)
    assert [slots[step, 0].nonzero().flatten().tolist() for step in range(3)] == counting
    wanted = targets_needed(ANSWER, count_from)[0].nonzero().flatten().tolist()
    held_against = {t + 1 + step for step in range(3) for t in counting[step]}
    assert held_against <= set(wanted)


@pytest.mark.parametrize("count_from", COUNT_FROM)
def test_switches_by_their_sentence(count_from):
    """Every answer mask of two documents of 4 and 3 tokens: as each document alone, and the sentence written out."""
    documents, in_vocab = (
        torch.tensor([[0, 0, 0, 0, 1, 1, 1]]),
        torch.tensor([[True, False, True, True, True, True, True]]),
    )
    for bits in itertools.product([False, True], repeat=7):
        answer = torch.tensor([bits])
        whole = counting_slots(answer, in_vocab, 4, count_from, documents)
        needed = targets_needed(answer, count_from, documents)
        for part in (slice(0, 4), slice(4, 7)):
            own, known = bits[part], in_vocab[0, part].tolist()
            assert torch.equal(whole[:, :, part], counting_slots(answer[:, part], in_vocab[:, part], 4, count_from))
            assert torch.equal(needed[:, part], targets_needed(answer[:, part], count_from))
            for step, t in itertools.product(range(4), range(len(own))):
                p = t + 1 + step
                rules = {
                    "ours": p + 1 < len(own) and all(own[t + 1 : p + 2]),
                    "speculators": p < len(own) and own[p],
                    "eagle": p < len(own) and own[p - 1],
                }
                assert whole[step, 0, part][t].item() == (rules[count_from] and known[p])
                assert needed[0, part][min(p, len(own) - 1)].item() or not rules[count_from]


def test_counting_by_its_sentence():
    """Every answer mask of 7 tokens, against the rule written out."""
    in_vocab = torch.tensor([True, False, True, True, False, True, True])
    for bits in itertools.product([False, True], repeat=7):
        answer = torch.tensor([bits])
        got, by_answer = counting_slots(answer, in_vocab[None], 4), answer_slots(answer, 4)
        for step in range(4):
            for t in range(7):
                chain = [t + r for r in range(1, step + 3)]
                whole = all(place < 7 and bits[place] for place in chain)
                assert by_answer[step, 0, t].item() == whole
                assert got[step, 0, t].item() == (whole and in_vocab[t + 1 + step].item())


def test_a_target_out_of_vocabulary_does_not_count():
    in_vocab = torch.ones(1, 9, dtype=torch.bool)
    in_vocab[0, 6] = False  # argmax y_6 has no draft id: slot 5 at step 0 and slot 4 at step 1 are held against it
    got = counting_slots(ANSWER, in_vocab, 3)
    assert got[0, 0].nonzero().flatten().tolist() == [4, 6]
    assert got[1, 0].nonzero().flatten().tolist() == [5]
    assert got[2, 0].nonzero().flatten().tolist() == [4]


def test_visible_keys_of_a_small_case():
    """T = 3, step 2: causal keys of step 0, then the diagonal of step 1 and of step 2."""
    expected = torch.tensor(
        [
            [1, 0, 0, 1, 0, 0, 1, 0, 0],
            [1, 1, 0, 0, 1, 0, 0, 1, 0],
            [1, 1, 1, 0, 0, 1, 0, 0, 1],
        ]
    ).bool()
    assert torch.equal(visible_keys(3, 2), expected)


def influence(value, inputs):
    """Positions at which an input [T, H] moves `value`."""
    (gradient,) = torch.autograd.grad(value, inputs, retain_graph=True)
    return gradient.abs().sum(-1).nonzero().flatten().tolist()


def test_what_a_slot_sees_in_the_reference(make_case):
    """States up to t, tokens up to t + 1 + s (x_0 is never read): no more and no less."""
    case = make_case(lengths=(8,))
    embedding = case.embedding[case.ids[0]].clone().requires_grad_()
    states = [state[0].clone().requires_grad_() for state in case.states.values()]
    logits = unrolled_logits(case.drafter, states, embedding, 3)
    for step in range(3):
        for t in range(8 - 2 - step):
            value = logits[step][t].square().sum()
            assert influence(value, embedding) == list(range(1, t + 2 + step))
            for state in states:
                assert influence(value, state) == list(range(t + 1))


def test_what_a_slot_sees_in_the_path_used(make_case):
    """ℓ = 1 at t+1 … t+4 leaves slots t, t+1, t+2 at step 0 and slot t alone at step 2."""
    case = make_case(lengths=(12,))
    steps, t = 3, 4
    case.answer[:] = False
    case.answer[0, t + 1 : t + steps + 2] = True
    case.drafter.t2d[:] = True
    batch = case.batch()
    batch.embedding = batch.embedding.clone().requires_grad_()
    for layer in case.states:
        batch.states[layer].requires_grad_()
    outcome = ttt_loss(case.drafter, batch, steps)
    assert outcome.counts.tolist() == [3, 2, 1]
    (by_token,) = torch.autograd.grad(outcome.loss, batch.embedding, retain_graph=True)
    assert by_token[0].abs().sum(-1).nonzero().flatten().tolist() == list(range(1, t + steps + 1))
    (by_state,) = torch.autograd.grad(outcome.loss, batch.states[1])
    assert by_state[0].abs().sum(-1).nonzero().flatten().tolist() == list(range(t + steps))
