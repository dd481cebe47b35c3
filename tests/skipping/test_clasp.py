"""CLaSp's programme: against enumeration where it is exact, against its recurrence where it is not, and in the loop."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from specwave.artifacts import UserError
from specwave.decoding import generate
from specwave.skipping.clasp import Clasp, ClaspDecoding, skip_exactly
from specwave.skipping.plans import skipping_blocks
from specwave.target import Wants
from specwave.target.sublayers import Window

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4, 8], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17]]


def turned(state, angle):
    cos, sin = math.cos(angle), math.sin(angle)
    return state @ torch.tensor([[cos, sin], [-sin, cos]], dtype=state.dtype)


def turning(angles):
    """Blocks that turn a plane, and what the target's states then are."""
    states = [torch.tensor([[1.0, 0.0]], dtype=torch.float64)]
    for angle in angles:
        states.append(turned(states[-1], angle))
    return (lambda block, hidden: turned(hidden, angles[block])), states


@pytest.mark.parametrize(
    ("count", "skipped", "degrees"),
    [(0, (), 0), (1, (3,), 5), (2, (0, 3), 15), (3, (0, 2, 3), 35), (4, (0, 1, 2, 3), 75)],
)
def test_four_blocks_by_hand(count, skipped, degrees):
    """Blocks that turn by 10°, 40°, 20° and 5°: what is skipped is missing at the end, so the smallest turns go."""
    run, states = turning([math.radians(angle) for angle in (10, 40, 20, 5)])
    found = skip_exactly(run, states, count)
    assert tuple(block for block, runs in enumerate(found.kept) if not runs) == skipped
    assert found.cosine == pytest.approx(math.cos(math.radians(degrees)), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_the_programme_is_enumeration_where_states_keep_their_order(seed):
    """Blocks that turn alike whatever they are given keep the better of two states the better one, so the programme is
    exact: every choice of M blocks tried."""
    draw = torch.Generator().manual_seed(seed)
    angles = (torch.rand(7, generator=draw) * math.pi / 8).tolist()
    run, states = turning(angles)
    for count in range(8):
        values = {}
        for skipped in itertools.combinations(range(7), count):
            hidden = states[0]
            for block in range(7):
                hidden = hidden if block in skipped else run(block, hidden)
            values[skipped] = float(F.cosine_similarity(hidden, states[-1]))
        found = skip_exactly(run, states, count)
        assert tuple(block for block, runs in enumerate(found.kept) if not runs) == max(values, key=values.get)
        assert found.cosine == pytest.approx(max(values.values()), abs=1e-6)


def recurrence(run, states, count):
    """D(i, j) as it is written: {j: (cosine, kept, state)}, every block run alone."""
    cells = {0: (1.0, (), states[0])}
    for block in range(len(states) - 1):
        following = {}
        for j, (_, kept, state) in sorted(cells.items()):
            for where, flag, after in ((j, True, run(block, state[None])[0]), (j + 1, False, state)):
                value = float(F.cosine_similarity(after, states[block + 1], dim=-1).mean())
                if where <= count and (where not in following or value > following[where][0]):
                    following[where] = (value, (*kept, flag), after)
        cells = following
    return cells[count]


class Spied(Clasp):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def make(self, contexts):
        plan = super().make(contexts)
        self.seen.append((plan, [list(context.tokens) for context in contexts]))
        return plan


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_plans_are_made_on_the_last_accepted_token(family, mild):
    """The whole source against forwards of its own: the target's states at the last verified position of each row, the
    recurrence on them, and what a forward without the chosen blocks makes of that token."""
    target = mild[family]
    settings = ClaspDecoding(gamma=4, stop=0.0)
    method = settings.build(target)
    method.source = Spied(target, settings, 4)
    made = generate(target, method, PROMPTS, max_new_tokens=12, eos_ids=())
    assert len(method.source.seen) == made.rounds - 1  # after every verification but the last
    for plan, rows in method.source.seen[:: max(1, made.rounds // 3)]:
        assert sum(plan.kept) == 8
        assert plan.kept[::2] == plan.kept[1::2]  # whole blocks
        session = target.session(len(rows), max(map(len, rows)))
        padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens[:-2]) for tokens in rows], batch_first=True)
        session.forward(padded, logits=False)
        session.advance([len(tokens) - 2 for tokens in rows])
        last = torch.tensor([[tokens[-2]] for tokens in rows])
        output = session.forward(last, wants=Wants(tuple(range(8))))
        states = [target.embed(last)[:, 0], *(output.blocks[layer][:, 0] for layer in range(8))]
        trial = session.trial([Window(row, len(tokens) - 2, 1) for row, tokens in enumerate(rows)])
        value, _, _ = recurrence(lambda i, hidden, t=trial: t.mlp(i, t.attention(i, hidden)), states, 4)
        # float32; states of a tree's forward against those of one token
        assert plan.cosine == pytest.approx(value, abs=1e-4)
        drafted = session.forward(last, plan=plan.kept).hidden[:, 0]
        assert float(F.cosine_similarity(drafted, states[-1], dim=-1).mean()) == pytest.approx(plan.cosine, abs=1e-4)


def test_states_are_captured_only_before_a_plan(mild):
    target, asked = mild["llama"], []

    class Asked(Clasp):
        def wants(self, contexts):
            asked.append(bool(super().wants(contexts).blocks))
            return super().wants(contexts)

    settings = ClaspDecoding(gamma=2, every=4)
    method = settings.build(target)
    method.source = Asked(target, settings, 4)
    made = generate(target, method, PROMPTS[0], max_new_tokens=30, eos_ids=())
    assert asked == [place % 4 == 0 for place in range(made.rounds)]
    assert [row["round"] for row in method.source.log] == list(range(1, made.rounds, 4))


@pytest.mark.parametrize(("skip", "blocks", "count"), [(0.5, None, 4), (0.2, None, 2), (0.5, 7, 7), (0.9, None, 7)])
def test_how_many_blocks_are_skipped(skip, blocks, count):
    assert ClaspDecoding(skip=skip, blocks=blocks).skipped_of(8) == count


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"blocks": 8}, "decoding.blocks=8: must be 1 to 7: this target has 8 blocks"),
        ({"blocks": 30}, "decoding.blocks=30: must be 1 to 7"),
        ({"skip": 0.01}, "decoding.skip=0.01: skips 0 of the 8 blocks"),
        ({"skip": 0.99}, "decoding.skip=0.99: skips 8 of the 8 blocks"),
    ],
)
def test_what_does_not_fit_the_target_is_a_user_error(settings, words, tiny):
    with pytest.raises(UserError) as caught:
        ClaspDecoding(**settings).build(tiny)
    assert str(caught.value).startswith(words)


def test_whole_blocks():
    assert skipping_blocks(3, [1]) == (True, True, False, False, True, True)
