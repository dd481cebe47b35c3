"""Rows that hold several conversations: everything is as if each stood alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from specwave.data.conversations import Sample
from specwave.data.datamodule import collate
from specwave.eagle.divergence import FORMS
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.loss import ttt_loss
from specwave.eagle.module import GroupTraining
from specwave.eagle.options import Eagle3
from specwave.eagle.slots import COUNT_FROM, answer_slots, lay_out
from specwave.eagle.vocab import build_vocab_map
from specwave.target.documents import document_positions, document_spans

# Two rows: documents of 7, 4 and 9 tokens; 12 and 6 and two of padding.
LENGTHS = ((7, 4, 9), (12, 6))
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 4 + [2] * 9, [0] * 12 + [1] * 6 + [-1] * 2])
PLACES = [(row, start) for row, sizes in enumerate(LENGTHS) for start in itertools.accumulate((0, *sizes[:-1]))]
SPANS = [(row, start, start + size) for (row, start), size in zip(PLACES, itertools.chain(*LENGTHS), strict=True)]


@pytest.fixture
def packed(make_case):
    case = make_case((1, 4), (20, 18), seed=5)
    case.answer[:, 3:] = torch.rand(2, 17) < 0.9
    case.documents = DOCUMENTS
    case.answer[DOCUMENTS < 0] = False
    return case


def alone(case, row, start, end):
    """One conversation as a batch of its own."""
    own = (slice(row, row + 1), slice(start, end))
    return replace(
        case,
        ids=case.ids[own],
        answer=case.answer[own],
        logits=case.logits[own],
        states={layer: state[own] for layer, state in case.states.items()},
        documents=None,
    )


# ---------------------------------------------------------------- where documents are


def test_spans_and_positions():
    assert document_spans(DOCUMENTS) == SPANS
    positions = document_positions(DOCUMENTS)
    for row, start, end in SPANS:
        assert positions[row, start:end].tolist() == list(range(end - start))


def test_a_number_that_returns_is_another_document():
    documents = torch.tensor([[0, 0, 1, 0, 0]])
    assert document_spans(documents) == [(0, 0, 2), (0, 2, 3), (0, 3, 5)]
    assert document_positions(documents).tolist() == [[0, 1, 0, 0, 1]]


def test_runs_of_the_same_number_in_neighbouring_rows_are_two_documents():
    assert document_spans(torch.zeros(2, 3, dtype=torch.int64)) == [(0, 0, 3), (1, 0, 3)]


def test_answer_text_of_the_next_document_does_not_continue_a_chain():
    """Documents of 3 and 4 tokens, all answer text: slot 0 has one chain of two, slot 3 chains of two and three."""
    answer, documents = torch.ones(1, 7, dtype=torch.bool), torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    slots = answer_slots(answer, 2, documents)[:, 0]
    assert [slots[step].nonzero().flatten().tolist() for step in range(2)] == [[0, 3, 4], [3]]


def test_layout_leaves_out_padding_and_what_no_slot_sees(monkeypatch):
    """Live slots 1, 2 of a document at 0…3, none of one at 4…5, 7 of one at 6…8."""
    monkeypatch.setattr("specwave.eagle.slots._QUERIES", 1)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2, -1]])
    live = torch.zeros(1, 10, dtype=torch.bool)
    live[0, [1, 2, 7]] = True
    layout = lay_out(live, documents)
    assert layout.keys.tolist() == [0, 1, 2, 6, 7]
    assert layout.positions.tolist() == [0, 1, 2, 0, 1]
    assert layout.slots.tolist() == [1, 2, 4]
    assert layout.chunks == [(0, 1, 0, 2), (1, 2, 0, 3), (2, 3, 3, 5)]


# ---------------------------------------------------------------- the objective


@pytest.mark.parametrize("loss", FORMS)
@pytest.mark.parametrize("count_from", COUNT_FROM)
def test_packed_is_the_conversations_one_by_one(packed, loss, count_from):
    """Sums, statistics and the gradient under the whole's Σ M; float64, so only the order of sums may differ."""
    options = {"loss": loss, "count_from": count_from}
    whole = ttt_loss(packed.drafter, packed.batch(count_from=count_from), 3, **options)
    packed.drafter.zero_grad()
    whole.loss.backward()
    together = {name: parameter.grad.clone() for name, parameter in packed.drafter.named_parameters()}
    packed.drafter.zero_grad()
    parts = []
    for span in SPANS:
        batch = alone(packed, *span).batch(count_from=count_from)
        parts.append(ttt_loss(packed.drafter, batch, 3, normaliser=whole.counts, **options))
        parts[-1].loss.backward()
    assert (whole.counts > 0).all()
    for name in ("loss", "losses", "counts", "hits", "slots"):
        torch.testing.assert_close(getattr(whole, name), sum(getattr(part, name) for part in parts), msg=name)
    for name, parameter in packed.drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, together[name], rtol=1e-10, atol=1e-12, msg=name)


def test_without_documents_a_row_is_another_thing(packed):
    """The test above would notice: runs go on over borders, and slots see the document before."""
    right = ttt_loss(packed.drafter, packed.batch(), 3)
    packed.documents = None
    wrong = ttt_loss(packed.drafter, packed.batch(), 3)
    assert (wrong.counts > right.counts).any()
    assert wrong.loss != right.loss


def test_what_stands_in_other_documents_is_nobodys(packed):
    """Loss of the middle document alone: no gradient reaches a token or a state outside of it."""
    packed.answer[:] = False
    packed.answer[0, 8:11] = True  # document 1 is at 7…10
    batch = packed.batch()
    batch.embedding = batch.embedding.clone().requires_grad_()
    batch.states[1].requires_grad_()
    outcome = ttt_loss(packed.drafter, batch, 2)
    assert outcome.counts.sum() > 0
    for gradient in torch.autograd.grad(outcome.loss, [batch.embedding, batch.states[1]]):
        touched = gradient.abs().sum(-1).nonzero().tolist()
        assert touched
        assert all(row == 0 and 7 <= place < 11 for row, place in touched)


# ---------------------------------------------------------------- the target's side


def test_the_target_reads_each_document_alone(tiny):
    """Float32: a different order of sums in attention and in matrices of other shapes, through eight blocks."""
    torch.manual_seed(0)
    ids = torch.randint(0, 500, DOCUMENTS.shape)
    together = tiny.states(ids, [0, 3, 7], DOCUMENTS)
    for row, start, end in SPANS:
        single = tiny.states(ids[row : row + 1, start:end], [0, 3, 7])
        for layer in (0, 3, 7):
            torch.testing.assert_close(together[layer][row, start:end], single[layer][0], rtol=1e-4, atol=1e-5)
    assert all(state.isfinite().all() for state in together.values())
    plain = tiny.states(ids, [7])[7]
    assert not torch.allclose(plain[0, 7:11], together[7][0, 7:11], atol=1e-3)


def test_one_document_per_row_is_no_documents(tiny):
    ids = torch.randint(0, 500, (2, 9))
    one, none = tiny.states(ids, [7], torch.zeros(2, 9, dtype=torch.int64)), tiny.states(ids, [7])
    torch.testing.assert_close(one[7], none[7], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [Eagle3(steps=2), Eagle3(steps=2, loss="lk", count_from="eagle", normaliser="all")])
def test_the_module_hands_documents_and_options_on(packed, tiny, options):
    """A packed batch through the target: the sums of its conversations, each a batch of its own."""
    torch.manual_seed(0)
    config = DrafterConfig.of_target(tiny.arch, (2, 5), 200)
    drafter = Eagle3Drafter(config, *build_vocab_map(torch.randint(0, 5, (tiny.vocab_size,)), 200))
    module = GroupTraining(tiny, {"one": drafter}, options, 5, 1)
    ids = torch.randint(0, tiny.vocab_size, DOCUMENTS.shape)
    batch = {"ids": ids, "answer": packed.answer, "documents": DOCUMENTS}
    whole = module._outcomes(batch)["one"]
    parts = []
    for row, start, end in SPANS:
        own = (slice(row, row + 1), slice(start, end))
        alone = {"ids": ids[own], "answer": packed.answer[own], "lengths": [end - start]}
        parts.append(module._outcomes(alone)["one"])
    assert whole.counts.sum() > 0
    assert torch.equal(whole.counts, sum(part.counts for part in parts))
    # float32 through the target and the drafter
    torch.testing.assert_close(whole.losses, sum(part.losses for part in parts), rtol=1e-4, atol=1e-4)
    read = module.read(batch)
    switches = {"loss": options.loss, "count_from": options.count_from}
    assert whole.loss == ttt_loss(drafter, read, options.steps, options.decay, options.normaliser, **switches).loss


def test_padding_never_counts_under_another_trainers_rule(tiny):
    """`eagle` tests one token: without the lengths of the rows, the slot behind a short row would count."""
    config = DrafterConfig.of_target(tiny.arch, (2, 5), 200)
    drafter = Eagle3Drafter(config, *build_vocab_map(torch.randint(0, 5, (tiny.vocab_size,)), 200))
    module = GroupTraining(tiny, {"one": drafter}, Eagle3(steps=2, count_from="eagle"), 5, 1)
    samples = [Sample(list(range(3, 3 + size)), [False] * 2 + [True] * (size - 2), str(size)) for size in (6, 11)]
    together = module._outcomes(collate(samples))["one"].counts
    alone = [module._outcomes(collate([sample]))["one"].counts for sample in samples]
    assert torch.equal(together, sum(alone))
