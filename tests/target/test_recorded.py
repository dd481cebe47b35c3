"""Recorded forwards: what is replayed from fixed inputs over a lent cache is what eager decoding computes.

Without a GPU, `capture` is replaced by one that runs the function again on the held inputs and writes into the outputs
of the first time: all but the graph itself.
"""

import gc
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from specwave.artifacts import UserError
from specwave.decoding import BaseProposer, Sampling, Tree, generate
from specwave.target import ModelConfig, Wants, load_target, recorded


class Siblings(BaseProposer):
    """A tree of the same shape every round, so that its forward is recorded; wants states."""

    def wants(self, contexts):
        return Wants(blocks=(2,))

    def begin(self, contexts):
        self.states = [context.blocks[2] for context in contexts]

    def propose_row(self, context):
        last = context.tokens[-1]
        return Tree(torch.tensor([last, last + 1, last + 2]) % 512, torch.tensor([-1, -1, 0]))

    def observe(self, verdicts):
        for verdict in verdicts:
            self.states.append(verdict.context.blocks[2])


PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3]]


@pytest.mark.parametrize("proposer", [None, Siblings], ids=["plain", "trees"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "batch"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_recorded_decoding_equals_eager_decoding(proposer, prompts, temperature, recording, tiny):
    made = []
    for target in (tiny, recording):
        method = proposer and proposer()
        arguments = {"max_new_tokens": 20, "sampling": Sampling(temperature), "eos_ids": ()}
        made.append((generate(target, method, prompts, **arguments), method))
    (expected, eager), (found, replayed) = made
    assert found.tokens == expected.tokens
    if proposer:
        for one, other in zip(eager.states, replayed.states, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)  # sums over more slots, all masked
    assert len(recording.shelf.take(len(prompts), 256).programs) >= 1


def test_a_shape_met_once_is_not_recorded(recording):
    session = recording.session(1, 40)
    for count in (1, 2, 3):
        session.forward(torch.ones(1, count, dtype=torch.int64))
    assert len(session.programs) == 0
    session.forward(torch.ones(1, 2, dtype=torch.int64))
    assert len(session.programs) == 1
    assert session.warmup_seconds > 0


def test_a_session_goes_on_with_the_programs_of_the_one_before(recording):
    for expected in (1, 1):
        session = recording.session(1, 40)
        for _ in range(3):
            session.forward(torch.ones(1, 1, dtype=torch.int64))
            session.advance([1])
        assert len(session.programs) == expected
        place = session.programs
        del session
        gc.collect()
    assert recording.session(1, 200).programs is place  # sizes are rounded up
    assert recording.session(2, 200).programs is not place


def test_two_sessions_at_once_share_nothing(recording):
    first, second = recording.session(1, 40), recording.session(1, 40)
    assert first.cache is not second.cache
    assert first.programs is not second.programs


def test_outputs_outlive_the_next_replay(recording):
    session = recording.session(1, 40)
    kept = []
    for token in (5, 6, 7):
        kept.append(session.forward(torch.tensor([[token]])).logits)
    copies = [logits.clone() for logits in kept]
    session.forward(torch.tensor([[8]]))
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
    assert not torch.equal(kept[1], kept[2])


def test_a_batch_that_shrinks_records_anew(recording, tiny):
    limits = {"max_new_tokens": 24, "sampling": Sampling(0.9)}
    plain = generate(tiny, None, PROMPTS, eos_ids=(), **limits).tokens
    ends = [plain[0][2], plain[1][7]]  # two of the three rows end early, the batch is halved
    expected = generate(tiny, None, PROMPTS, eos_ids=ends, **limits).tokens
    assert generate(recording, None, PROMPTS, eos_ids=ends, **limits).tokens == expected
    assert len({len(row) for row in expected}) > 1


def test_warm_up_is_part_of_no_other_figure(recording, monkeypatch, replaying):
    slow = []

    def capture(run, inputs, pool):
        slow.append(1)
        time.sleep(0.3)
        return replaying(run, inputs, pool)

    monkeypatch.setattr(recorded, "capture", capture)
    start = time.perf_counter()
    made = generate(recording, None, PROMPTS[0], max_new_tokens=8, eos_ids=())
    whole = time.perf_counter() - start
    assert len(slow) == 1
    assert 0.3 <= made.warmup_seconds <= whole - made.seconds  # however busy the machine is
    assert made.prefill_seconds + made.draft_seconds + made.verify_seconds <= made.seconds


def test_recording_what_drafts_is_warm_up_too(recording, monkeypatch, replaying):
    """A proposer that drafts with five kept sets in turn: one more than are kept, so that recordings are dropped."""
    spent = []

    def capture(run, inputs, pool):
        spent.append(0.05)
        time.sleep(0.05)
        return replaying(run, inputs, pool)

    class Planning(BaseProposer):
        def propose_row(self, context):
            skipped = len(context.tokens) % 5
            for _ in range(2):
                context.session.forward(torch.tensor([[7]]), plan=[place != skipped for place in range(16)])
            return Tree.empty()

    monkeypatch.setattr(recorded, "capture", capture)
    start = time.perf_counter()
    made = generate(recording, Planning(), PROMPTS[0], max_new_tokens=11, eos_ids=())
    whole = time.perf_counter() - start
    assert len(spent) > 5
    assert sum(spent) <= made.warmup_seconds <= whole - made.seconds
    assert made.prefill_seconds + made.draft_seconds + made.verify_seconds <= made.seconds


def test_a_lent_cache_brings_nothing_of_those_before(recording):
    """Masked slots weigh nothing, but nothing times NaN is NaN."""
    session = recording.session(1, 40)
    for store in (*session.cache.keys, *session.cache.values):
        store.fill_(torch.nan)
    del session
    gc.collect()
    found = recording.session(1, 40).forward(torch.tensor([[5, 6]])).logits
    assert bool(found.isfinite().all())


def test_graphs_are_captured_and_replayed_on_the_tensors_device(monkeypatch):
    """Of a GPU only the calls: each of them must find the tensors' device current, whatever it was before."""
    current, calls = ["cuda:0"], []

    @contextmanager
    def device(wanted):
        before, current[0] = current[0], str(wanted)
        yield
        current[0] = before

    def call(name):
        def noting(*_, **__):
            calls.append((name, current[0]))
            return SimpleNamespace(wait_stream=call("wait"), replay=call("replay"))

        return noting

    def scope(name):
        @contextmanager
        def within(*_, **__):
            calls.append((name, current[0]))
            yield

        return within

    monkeypatch.setattr(torch.cuda, "device", device)
    for name in ("Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, call(name))
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, scope(name))
    replay = recorded.capture(
        lambda tensor: calls.append(("run", current[0])), (SimpleNamespace(device="cuda:1"),), None
    )
    replay()
    assert {place for _, place in calls} == {"cuda:1"}
    assert [name for name, _ in calls].count("run") == 2
    assert calls[-1] == ("replay", "cuda:1")
    assert current == ["cuda:0"]


def test_a_compiled_step_can_be_traced_whole(family_folders, monkeypatch, tiny, replaying):
    """fullgraph=True: nothing of it falls back to Python. The packed weights of a CPU cannot be traced."""
    from specwave.target import linear

    monkeypatch.setattr(recorded, "capture", replaying)
    monkeypatch.setattr(linear, "_can_pack", lambda weight: False)
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **options: compiler(run, backend="aot_eager", **options))
    target = load_target(family_folders["llama"], dtype="float32")
    target.forwards = "compiled"
    prompt = PROMPTS[1]
    expected = generate(tiny, None, prompt, max_new_tokens=6, eos_ids=()).tokens
    assert generate(target, None, prompt, max_new_tokens=6, eos_ids=()).tokens == expected


@pytest.mark.parametrize("kind", ["graphs", "compiled"])
def test_graphs_without_a_gpu_are_refused(kind):
    with pytest.raises(UserError, match="CUDA device"):
        ModelConfig("tiny", "tiny", device="cpu", forwards=kind).load()


def test_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match="auto, eager, graphs, compiled"):
        ModelConfig("tiny", "tiny", forwards="fast")
