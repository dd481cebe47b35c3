"""When chains end: each rule against numbers worked by hand, and against what the loop did."""

from types import SimpleNamespace

import pytest

from specwave.artifacts import UserError
from specwave.decoding import generate
from specwave.skipping import ClaspDecoding
from specwave.skipping.stops import Adaptive, Below, Moving, stop_rule

PROMPTS = [[5, 9, 200, 31, 7, 7, 80], [4, 8]]


def rows(*numbers):
    return [SimpleNamespace(row=number) for number in numbers]


def verdict(row, drafted, accepted):
    return SimpleNamespace(context=SimpleNamespace(row=row), tree=[0] * drafted, path=[0] * (accepted + 1))


def test_below_a_probability():
    assert Below(0.7).start().ends(rows(0, 1, 2), [0.69, 0.7, 0.71]) == [True, False, False]
    assert Below(0.0).idle
    assert not Below(0.1).idle


def test_the_threshold_moves_as_published():
    """First 0.8, target 0.9, step 0.01, AR halved, threshold kept by 0.9:

    accepted   AR        wanted            threshold
    2 of 4     0.25      0.8 + 0.01        0.9·0.8 + 0.1·0.81 = 0.801
    4 of 4     0.625     0.801 + 0.01      0.802
    2 of 2     0.8125    0.802 + 0.01      0.803
    3 of 3     0.90625   0.803 − 0.01      0.802
    8 of 8     0.953     stays: whole      0.802
    """
    rule, rate, threshold, seen = Adaptive(), 0.0, 0.8, []
    for accepted, drafted, whole in [(2, 4, False), (4, 4, True), (2, 2, False), (3, 3, False), (8, 8, True)]:
        rate, threshold = rule.moved(rate, threshold, accepted, drafted, whole)
        seen.append((rate, threshold))
    assert [one for one, _ in seen] == pytest.approx([0.25, 0.625, 0.8125, 0.90625, 0.953125])
    assert [one for _, one in seen] == pytest.approx([0.801, 0.802, 0.803, 0.802, 0.802])


def test_every_row_has_a_threshold_of_its_own():
    stop = Adaptive(first=0.5, keep=0.0, step=0.1, keep_rate=0.0).start()
    stop.begin(rows(0, 3))
    assert stop.ends(rows(0, 3), [0.4, 0.6]) == [True, False]
    assert stop.ends(rows(0, 3), [0.9, 0.4]) == [False, True]
    stop.observe([verdict(0, 1, 0), verdict(3, 2, 2)])
    assert stop.thresholds == pytest.approx({0: 0.6, 3: 0.4})  # too seldom right; right, and ended by the threshold
    stop.ends(rows(3), [0.9])
    stop.observe([verdict(0, 5, 5), verdict(3, 1, 1)])
    assert stop.thresholds == pytest.approx({0: 0.6, 3: 0.4})  # another's drafts teach it nothing; a whole chain
    stop.begin(rows(0))
    assert stop.thresholds == {0: 0.5}


class Spied(Moving):
    def begin(self, contexts):
        super().begin(contexts)
        self.told, self.seen = {context.row: [] for context in contexts}, {context.row: [] for context in contexts}

    def ends(self, contexts, probabilities):
        for context, probability in zip(contexts, probabilities, strict=True):
            self.told[context.row].append(probability)
        return super().ends(contexts, probabilities)

    def observe(self, verdicts):
        before = dict(self.thresholds)
        super().observe(verdicts)
        for each in verdicts:
            row = each.context.row
            told, self.told[row] = self.told[row], []
            self.seen[row].append((told, before[row], len(each.tree), len(each.path) - 1, self.thresholds[row]))


def test_in_the_loop_chains_end_at_the_threshold_and_move_it(mild):
    rule = Adaptive(first=0.1, step=0.05, keep=0.5, target=0.7)
    method = ClaspDecoding(gamma=5, skip=0.25, stop=rule).build(mild["llama"])
    method.stop = stop = Spied(rule)
    generate(mild["llama"], method, PROMPTS, max_new_tokens=40, eos_ids=())
    moved = 0
    for row in range(2):
        rate, committed = 0.0, 0
        for told, threshold, drafted, accepted, after in stop.seen[row]:
            committed += accepted + 1
            if not told or committed > 40 - 12:  # no plan yet; chains that may be cut at the limit
                continue
            low = [place for place, probability in enumerate(told) if probability < threshold]
            assert drafted == (low[0] + 1 if low else 5)
            rate = (rate + accepted / drafted) / 2
            step = 0.05 if rate < 0.7 else 0.0 if not low else -0.05
            assert after == pytest.approx(threshold + step / 2)
            moved += step != 0.0
    assert moved > 5


@pytest.mark.parametrize("given", [0, 0.7, 1])
def test_a_number_is_a_probability(given):
    assert stop_rule(given) == Below(float(given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (1.5, "decoding.stop=1.5: is a probability"),
        (-0.1, "decoding.stop=-0.1: is a probability"),
        (float("nan"), "decoding.stop=nan: is a probability"),
        (True, "decoding.stop=True: a probability"),
        ("soon", "decoding.stop=soon: a probability, 0"),
        (None, "decoding.stop=null: a probability, 0"),
        (ClaspDecoding(), "decoding.stop=ClaspDecoding: a probability, 0"),
        (Adaptive, "decoding.stop=type: a probability, 0"),
    ],
)
def test_what_is_no_rule_is_refused(given, words):
    with pytest.raises(UserError) as caught:
        stop_rule(given)
    assert str(caught.value).startswith(words)
    assert "specwave.skipping.Adaptive" in str(caught.value) or "is a probability" in words


@pytest.mark.parametrize("key", ["first", "target", "step", "keep_rate", "keep"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_bad_numbers_of_the_threshold(key, value):
    with pytest.raises(UserError, match=f"decoding.{key}="):
        Adaptive(**{key: value})
