"""DEL: which exit, how many drafts, where chains end: worked numbers, enumeration, predictions made afresh."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from specwave.artifacts import UserError
from specwave.decoding import Context, Sampling, Tree, generate
from specwave.decoding.sampling import TARGET, keyed_gumbel, scores
from specwave.skipping import DelDecoding, KnapSpec, KnapSpecDecoding, Midway, SelfSpeculation
from specwave.skipping.del_ import Del
from specwave.skipping.midway import Tally
from specwave.skipping.plans import Plan
from specwave.skipping.tpt import tokens_per_layer

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4, 8], [300, 12, 12, 12, 8, 9, 10, 11, 400, 3, 17]]


# ---------------------------------------------------------------- counts and the stop rule


def test_decayed_counts_of_the_worked_table():
    tally = Tally(0.5)
    assert (tally.alpha, tally.midway) == (0.0, 0.0)
    tally.add([(True, 0.9), (False, 0.4)])
    assert (tally.right, tally.wrong, tally.p_right, tally.p_wrong) == (1, 1, 0.9, 0.4)
    assert tally.alpha == 0.5
    assert tally.midway == pytest.approx(0.65)
    tally.add([(True, 0.6)])
    assert tally.alpha == 0.75
    assert tally.midway == pytest.approx(0.55)


def test_counts_are_what_a_sum_over_all_rounds_gives():
    draw = torch.Generator().manual_seed(0)
    rounds = [
        [(bool(torch.rand(1, generator=draw) < 0.7), float(torch.rand(1, generator=draw))) for _ in range(size % 4)]
        for size in range(1, 30)
    ]
    tally = Tally(0.95)
    for one in rounds:
        tally.add(one)
    weighed = [(0.95 ** (len(rounds) - 1 - place), *each) for place, one in enumerate(rounds) for each in one]
    right, wrong = (sum(w for w, hit, _ in weighed if hit is kind) for kind in (True, False))
    means = [sum(w * p for w, hit, p in weighed if hit is kind) for kind in (True, False)]
    assert tally.alpha == pytest.approx(right / (right + wrong))
    assert tally.midway == pytest.approx((means[0] / right + means[1] / wrong) / 2)


def test_what_was_right_only_has_no_threshold_and_what_is_forgotten_says_nothing():
    tally = Tally(0.5)
    tally.add([(True, 0.9)] * 3)
    assert (tally.alpha, tally.midway) == (1.0, 0.0)
    tally.add([(False, 0.2)])
    assert tally.midway == pytest.approx(0.55)
    for _ in range(60):
        tally.add([])
    assert (tally.alpha, tally.midway) == (0.0, 0.0)


def test_beside_another_source_the_rule_learns_from_drafts():
    """Row 0 drafts four tokens and gets two accepted: two right ones, one wrong one, of the fourth nobody knows."""
    stop = Midway(0.5).start()
    contexts = [Context(row, 0, [1], 1, 9, None, row) for row in (0, 1)]
    stop.begin(contexts)
    for pair in ((0.9, 0.3), (0.7, 0.1), (0.2, 0.1), (0.6, 0.1)):
        assert stop.ends(contexts, pair) == [False, False]  # nothing is known yet
    trees = [Tree.chain([5, 6, 7, 8]), Tree.chain([5])]
    paths = [[0, 1, 2], [0, 1]]
    verdicts = [
        SimpleNamespace(context=context, tree=tree, path=path)
        for context, tree, path in zip(contexts, trees, paths, strict=True)
    ]
    stop.observe(verdicts)
    assert (stop.tallies[0].right, stop.tallies[0].wrong) == (2, 1)
    assert stop.tallies[0].midway == pytest.approx((0.8 + 0.2) / 2)
    assert (stop.tallies[1].right, stop.tallies[1].wrong) == (1, 0)
    assert stop.ends(contexts, [0.49, 0.01]) == [True, False]
    assert stop.ends(contexts, [0.5, 0.01]) == [False, False]
    stop.begin(contexts)
    assert stop.ends(contexts, [0.01, 0.01]) == [False, False]


def test_knapspecs_plan_with_dels_stop_rule(mild, costs):
    target, settings = mild["llama"], KnapSpecDecoding(stop=Midway())
    source = KnapSpec(target, settings, costs(), Plan((True,) * 2 + (False,) * 8 + (True,) * 6, 6))
    method = SelfSpeculation(target, settings, source, settings.rule().start())
    plain = generate(target, None, PROMPTS, max_new_tokens=30, eos_ids=())
    made = generate(target, method, PROMPTS, max_new_tokens=30, eos_ids=())
    assert made.tokens == plain.tokens
    assert all(tally.wrong for tally in method.stop.tallies.values())
    assert len({level for row in made.draft_levels for level in row[:-1]}) > 1  # chains do not all end alike


# ---------------------------------------------------------------- the exit and the number of drafts


def source_with(target, alphas, gamma=8, exits=None):
    """A source that has seen each exit right so often."""
    exits = exits or list(range(1, target.num_layers))
    source = Del(target, exits, gamma, 0.95)
    source.rounds = 1
    for tally, alpha in zip(source.tallies, alphas, strict=True):
        tally.right, tally.wrong = alpha, 1 - alpha
    return source


CONTEXTS = [Context(0, 7, [1, 2, 3], 3, 9, None, 0)]


def test_the_worked_choice(tiny):
    """N = 8, γ ≤ 3: α = 0.8 at block 2 gives 2.952/14, α = 0.9 at block 4 gives 3.439/20; γ = 2: 2.44/12, 2.71/16."""
    source = source_with(tiny, [0.8, 0.9], 3, [2, 4])
    plan = source.plan(CONTEXTS)
    assert (sum(plan.kept), plan.gamma) == (4, 3)
    assert plan.rate == pytest.approx(2.952 / 14)
    assert plan.kept == (True,) * 4 + (False,) * 12
    source.tallies[0].right, source.tallies[0].wrong = 0.5, 0.5  # (1 + 0.5 + 0.25 + 0.125)/14 = 0.134
    plan = source.plan(CONTEXTS)
    assert (sum(plan.kept), plan.gamma, plan.alpha) == (8, 3, 0.9)
    assert plan.rate == pytest.approx(3.439 / 20)
    for tally in source.tallies:
        tally.right, tally.wrong = 0.1, 0.9
    assert source.plan(CONTEXTS).gamma == 0  # plain decoding promises 1/8
    assert [(row["gamma"], sum(row["kept"]) // 2) for row in source.log] == [(3, 2), (3, 4), (0, 8)]
    source.plan(CONTEXTS)
    assert len(source.log) == 3  # a row for every change


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_the_best_of_all(seed, tiny):
    draw = torch.Generator().manual_seed(seed)
    alphas = torch.rand(7, generator=draw).sort().values.tolist()
    plan = source_with(tiny, alphas, 6).plan(CONTEXTS)

    def promise(exit_at, gamma):
        blocks = 8 - exit_at + (gamma + 1) * exit_at
        return sum(alphas[exit_at - 1] ** power for power in range(gamma + 1)) / blocks

    best = max([1 / 8, *(promise(*pair) for pair in itertools.product(range(1, 8), range(1, 7)))])
    assert plan.rate == pytest.approx(best)
    if plan.gamma:
        assert promise(sum(plan.kept) // 2, plan.gamma) == pytest.approx(best)
        assert tokens_per_layer(alphas[sum(plan.kept) // 2 - 1], plan.gamma, plan.kept) == pytest.approx(best)


class Watched(Del):
    """Keeps the verdicts of every round, and what was counted of them."""

    def begin(self, contexts):
        super().begin(contexts)
        self.seen = []

    def observe(self, verdicts):
        before = [Tally(1.0, *(getattr(tally, name) for name in PARTS)) for tally in self.tallies]
        super().observe(verdicts)
        fresh = [
            [getattr(now, name) - self.decay * getattr(then, name) for name in PARTS]
            for now, then in zip(self.tallies, before, strict=True)
        ]
        self.seen.append(([(list(v.context.tokens), len(v.tokens), v.context.sequence) for v in verdicts], fresh))


PARTS = ("right", "wrong", "p_right", "p_wrong")


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7, seed=11, top_p=0.9), Sampling(1.1, 3, repetition_penalty=1.2)]
)
def test_shadow_predictions_are_what_each_exit_would_have_drafted(sampling, mild):
    """Of all exits, whichever drafted, at every committed position: against the text put through the target again."""
    target, exits = mild["llama"], [2, 4, 5, 7]
    method = DelDecoding(gamma=4, exits=exits).build(target)
    method.source = method.stop.source = Watched(target, exits, 4, 0.95)
    generate(target, method, PROMPTS, max_new_tokens=12, sampling=sampling, eos_ids=())
    drafted = {tuple(row["kept"]) for row in method.source.log if row["gamma"]}
    assert drafted
    for verdicts, fresh in method.source.seen:
        for block, found in zip(exits, fresh, strict=True):
            expected = [0.0] * 4
            for tokens, count, sequence in verdicts:
                states = target.states(torch.tensor([tokens]), [block - 1])[block - 1][0]
                for place in range(len(tokens) - count, len(tokens)):
                    seen = torch.zeros(1, target.vocab_size, dtype=torch.bool)
                    seen[0, tokens[:place]] = True
                    processed = scores(target.logits(states[place - 1 : place]), sampling, seen)
                    noise = 0.0
                    if not sampling.greedy:
                        key = torch.tensor([sequence]), TARGET, torch.tensor([place])
                        noise = keyed_gumbel(sampling.seed, *key, target.vocab_size)
                    token = int((processed + noise).argmax())
                    kind = int(token != tokens[place])
                    expected[kind] += 1
                    expected[2 + kind] += float(processed.softmax(-1)[0, token])
            assert found == pytest.approx(expected, abs=2e-3)  # float32, sums in another order


def test_the_first_round_is_plain_and_exits_change_with_what_is_seen(mild):
    target = mild["qwen2"]
    method = DelDecoding(gamma=4).build(target)
    made = generate(target, method, PROMPTS[:1], max_new_tokens=40, eos_ids=())
    assert made.draft_levels[0][0] == 0
    assert max(made.draft_levels[0]) > 0
    assert method.source.log[0]["round"] == 1
    assert len({sum(row["kept"]) for row in method.source.log}) > 1
    before = len(method.source.log)
    again = generate(target, method, PROMPTS[:1], max_new_tokens=40, eos_ids=())
    assert again.accept_lengths == made.accept_lengths  # a sequence learns for itself alone
    assert len(method.source.log) == 2 * before


def test_the_threshold_is_of_the_exit_that_drafts(tiny):
    method = DelDecoding(exits=[2, 4]).build(tiny)
    source = method.source
    source.rounds, source.option = 1, 1
    source.tallies[0] = Tally(0.95, 1.0, 1.0, 0.9, 0.1)
    source.tallies[1] = Tally(0.95, 1.0, 1.0, 0.8, 0.6)
    assert method.stop.ends(CONTEXTS, [0.69]) == [True]
    assert method.stop.ends(CONTEXTS, [0.71]) == [False]
    source.option = 0
    assert method.stop.ends(CONTEXTS, [0.49]) == [True]
    assert method.stop.ends(CONTEXTS, [0.51]) == [False]
    assert type(DelDecoding(stop=0.4).build(tiny).stop).__name__ == "Below"


def test_a_rule_that_would_count_otherwise_is_a_user_error():
    with pytest.raises(UserError) as caught:
        DelDecoding(stop=Midway(0.9))
    rule = "it counts as decoding.decay=0.95 says, not by 0.9: give null"
    assert str(caught.value) == f"decoding.stop=Midway: {rule}"
    assert DelDecoding(stop=Midway(0.9), decay=0.9).rule() == DelDecoding(decay=0.9).rule()
    with pytest.raises(UserError, match=r"decoding\.decay=2: must be 0"):
        Midway(2)
