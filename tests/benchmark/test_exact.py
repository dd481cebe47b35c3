"""The float32 equality contract, on a machine whose logits we write ourselves."""

import pytest
import torch

from specwave.benchmark.exact import TargetScorer, compare, first_divergence, judge

V = 8


class Script:
    """A reference model whose next-token scores depend on the last token only; `noise` moves the incremental ones."""

    def __init__(self, noise=1e-5):
        self.noise, self.asked = noise, 0
        self.table = torch.eye(V).roll(1, 1)  # after token t comes t + 1, ahead of all others by 1

    def tie(self, after, token, gap):
        self.table[after, token] = self.table[after, (after + 1) % V] - gap

    def one_shot(self, ids, start):
        self.asked += 1
        return self.table[list(ids)[start:]]

    def incremental(self, ids, start):
        return self.one_shot(ids, start) + self.noise

    def greedy(self, ids, limit, flip=None):
        """Greedy output; `flip` (token before, tied token) lets the tie fall the other way."""
        made = []
        while len(made) < limit:
            last = (list(ids) + made)[-1]
            made.append(flip[1] if flip and last == flip[0] else int(self.table[last].argmax()))
        return made


def run(script, candidate, flip=None, limit=12):
    prompt = [0]
    reference = script.greedy(prompt, limit)
    return compare(
        prompt,
        reference,
        candidate,
        scorer=script,
        again=lambda ids, count: script.greedy(ids, count, flip),
        max_new_tokens=limit,
    )


def test_first_divergence():
    assert first_divergence([1, 2], [1, 2]) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2, 3], [1, 2]) == 2
    assert first_divergence([], [1]) == 0


def test_equal_output_costs_no_forward():
    script = Script()
    assert run(script, script.greedy([0], 12)).divergences == []
    assert script.asked == 0


def test_near_ties_are_listed_and_decoding_is_taken_up_again():
    script = Script(noise=1e-4)
    script.tie(after=3, token=6, gap=5e-4)
    flip = (3, 6)
    comparison = run(script, script.greedy([0], 12, flip), flip)
    assert comparison.equal
    # tokens 1 2 3 | 4 5 6 7 0 1 2 3 | 4: token 3 comes twice, and each time the candidate leaves for 6
    assert [(each.position, each.reference, each.candidate) for each in comparison.near_ties] == [(3, 4, 6), (11, 4, 6)]
    assert comparison.near_ties[0].gap == pytest.approx(5e-4, rel=1e-2)
    assert comparison.near_ties[0].noise == pytest.approx(1e-4, rel=1e-2)


def test_a_gap_beyond_ten_times_the_noise_is_a_divergence():
    script = Script(noise=1e-5)
    script.tie(after=3, token=6, gap=5e-4)
    comparison = run(script, script.greedy([0], 12, (3, 6)), (3, 6))
    assert not comparison.equal
    assert [each.near_tie for each in comparison.divergences] == [False]


def test_a_true_divergence_behind_a_near_tie_is_found():
    script = Script(noise=1e-4)
    script.tie(after=3, token=6, gap=5e-4)
    wrong = script.greedy([0], 12, (3, 6))
    comparison = compare(
        [0],
        script.greedy([0], 12),
        wrong,
        scorer=script,
        again=lambda ids, count: [5, 5, 5, 5][:count],  # after 1 2 3 4: 5 is right, the second 5 is not
        max_new_tokens=12,
    )
    assert [(each.position, each.near_tie) for each in comparison.divergences] == [(3, True), (5, False)]
    assert not comparison.equal


def test_a_third_token_is_not_excused_by_a_tie_of_the_first_two():
    scores = torch.tensor([1.0, 1.0 - 1e-5, 0.0])
    assert judge(scores, 0, 0, 1, 1e-5).near_tie
    third = judge(scores, 0, 0, 2, 1e-5)
    assert not third.near_tie
    assert third.top2_gap == pytest.approx(1e-5, rel=0.1)
    assert third.gap == pytest.approx(1.0)


@pytest.mark.parametrize("cut", [slice(0, 5), slice(0, 0)])
def test_an_output_that_stops_early_is_never_excused(cut):
    script = Script(noise=1e3)
    comparison = run(script, script.greedy([0], 12)[cut])
    assert not comparison.equal
    assert comparison.divergences[0].candidate is None


def test_an_output_that_goes_on_is_never_excused():
    script = Script(noise=1e3)
    comparison = run(script, script.greedy([0], 15))
    assert [(each.position, each.reference) for each in comparison.divergences] == [(12, None)]
    assert not comparison.equal


def test_below_float32_the_first_divergence_is_described_and_nothing_excused():
    script = Script(noise=1e3)
    script.tie(after=3, token=6, gap=1e-6)
    reference = script.greedy([0], 12)
    comparison = compare([0], reference, script.greedy([0], 12, (3, 6)), scorer=script, again=None, max_new_tokens=12)
    (only,) = comparison.divergences
    assert (only.position, only.noise, only.near_tie) == (3, None, False)
    assert only.gap == pytest.approx(1e-6, rel=0.2)


def test_scores_of_a_target_are_the_same_both_ways(tiny):
    ids = torch.randint(3, tiny.vocab_size, (40,)).tolist()
    scorer = TargetScorer(tiny)
    one_shot, incremental = scorer.one_shot(ids, 15), scorer.incremental(ids, 15)
    assert one_shot.shape == incremental.shape == (25, tiny.vocab_size)
    # float32 sums in other orders: noise of random weights is near 1e-5; a wrong row would differ by the logits' scale
    assert float((one_shot - incremental).abs().max()) < 1e-3 * float(one_shot.std())
    whole = scorer.incremental(ids, 0)
    assert torch.allclose(whole[15:], one_shot, atol=1e-3 * float(one_shot.std()))
