"""ASD as we read it: which attentions are dropped, by hand, and the cosines they are dropped by, in the loop."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from specwave.decoding import generate
from specwave.skipping.asd import Asd, AsdDecoding, kept_attentions
from specwave.target import Wants

PROMPT = [5, 9, 200, 31, 7, 7, 80]


def test_four_blocks_by_hand():
    """Blocks 1 and 2 may lose theirs; of a cosine at the threshold an attention stays."""
    assert kept_attentions([0.96, 0.95], 0.95) == (True, True, False, True, True, True, True, True)
    assert kept_attentions([0.97, 0.99], 0.95) == (True, True, False, True, False, True, True, True)
    assert all(kept_attentions([0.1, -1.0], 0.95))


class Spied(Asd):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def make(self, contexts):
        (context,) = contexts
        found = self.cosines()
        self.seen.append((found, super().make(contexts), list(context.tokens), len(context.blocks[0])))
        return self.seen[-1][1]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_cosines_are_those_of_the_stream_before_and_after_each_attention(family, mild):
    target, settings = mild[family], AsdDecoding(gamma=3, threshold=0.9, window=1, every=1, stop=0.0)
    method = settings.build(target)
    method.source = Spied(target, settings)
    generate(target, method, PROMPT, max_new_tokens=24, eos_ids=())
    assert len(method.source.seen) > 4
    for found, plan, tokens, count in method.source.seen:
        session = target.session(1, len(tokens))
        every = tuple(range(8))
        output = session.forward(torch.tensor([tokens[:-1]]), wants=Wants(every, every))
        expected = [
            float(F.cosine_similarity(output.blocks[i - 1], output.attentions[i], dim=-1)[0, -count:].mean())
            for i in range(1, 7)
        ]
        assert found == pytest.approx(expected, abs=1e-4)  # float32, states of other forwards
        assert plan.kept == kept_attentions(found, 0.9)
        assert plan.gamma == (0 if all(plan.kept) else 3)
        assert plan.mlps == 8
        assert plan.kept[0]
        assert plan.kept[14]
    assert any(plan.attentions < 8 for _, plan, _, _ in method.source.seen)


def test_the_window_is_of_the_last_rounds_however_long_nobody_asks(mild):
    """As within a composite, while copies are drafted: the plan is made on the rounds just verified."""
    target = mild["llama"]
    source = Asd(target, AsdDecoding(window=2, every=4))
    source.watching = True
    draw = torch.Generator().manual_seed(0)
    rounds = []
    for count in (3, 1, 2, 4):
        blocks, attentions = torch.randn(2, 8, count, 6, generator=draw)
        rounds.append(F.cosine_similarity(blocks[:6], attentions[1:7], dim=-1))
        context = SimpleNamespace(blocks=dict(enumerate(blocks)), attentions=dict(enumerate(attentions)))
        source.observe([SimpleNamespace(context=context)])
    assert source.cosines() == pytest.approx(torch.cat(rounds[2:], 1).mean(1).tolist())


def test_where_nothing_is_dropped_nothing_is_drafted(mild):
    settings = AsdDecoding(threshold=0.999999, window=2, every=6)
    method = settings.build(mild["llama"])
    made = generate(mild["llama"], method, PROMPT, max_new_tokens=20, eos_ids=())
    assert made.rounds == 20
    assert {(row["gamma"], all(row["kept"])) for row in method.source.log} == {(0, True)}


def test_when_states_are_captured_and_plans_are_made(mild):
    asked = []

    class Asked(Asd):
        def wants(self, contexts):
            wanted = super().wants(contexts)
            asked.append(bool(wanted.blocks))
            return wanted

    settings = AsdDecoding(gamma=2, threshold=0.9, window=2, every=5)
    method = settings.build(mild["llama"])
    method.source = Asked(mild["llama"], settings)
    made = generate(mild["llama"], method, PROMPT, max_new_tokens=40, eos_ids=())
    plans = [row["round"] for row in method.source.log]
    assert plans == list(range(2, made.rounds, 5))
    assert len(plans) > 1
    assert asked == [place % 5 < 2 for place in range(made.rounds)]


def test_a_target_of_two_blocks_decodes_plainly(five):
    plain = generate(five, None, [1, 2], max_new_tokens=12)
    made = generate(five, AsdDecoding(window=1, every=1).build(five), [1, 2], max_new_tokens=12)
    assert made.tokens == plain.tokens
    assert made.rounds == plain.rounds
