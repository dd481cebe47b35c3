"""Shared runs of words: known ones, and every run against brute force."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specwave.data.overlap import LENGTH, Index, Match, overlap, words_of

WORDS = [f"w{number}" for number in range(40)]


def run_of(start, count):
    return " ".join(WORDS[start : start + count])


def test_a_known_match_is_found_with_its_words():
    questions = [("7", f"Please say: {run_of(3, 20)}!"), ("8", run_of(0, 12)), ("9", "short")]
    samples = [("a", f"nothing, {run_of(3, 12)}"), ("b", f"well well {run_of(5, 15).upper()}, and so on")]
    found = overlap(samples, {"mine": questions})["mine"]
    assert found.questions == 3
    assert found.hit == {"7": Match(15, "7", "b", run_of(5, 15))}
    assert found.facts() == {
        "words_in_a_row": 13,
        "questions": 3,
        "questions_too_short": 2,
        "questions_hit": 1,
        "share": 1.0,
        "longest": [{"words": 15, "question": "7", "sample": "b", "text": run_of(5, 15)}],
    }


def test_thirteen_words_count_and_twelve_do_not():
    for place in range(9):  # wherever in the text: only every seventh position is looked up
        for size, hits in ((12, 0), (13, 1), (14, 1)):
            text = "x " * place + run_of(0, size) + " y"
            found = overlap([("s", text)], {"q": [("1", run_of(0, 40))]})["q"]
            assert [match.words for match in found.hit.values()] == [size] * hits


def test_of_a_question_the_longest_run_counts_and_turns_are_apart():
    questions = [("1", run_of(0, 13)), ("1", run_of(13, 20)), ("2", run_of(0, 33))]
    found = overlap([("s", run_of(0, 30)), ("t", run_of(13, 20))], {"q": questions})["q"]
    assert {name: (match.words, match.sample) for name, match in found.hit.items()} == {"1": (20, "t"), "2": (30, "s")}
    assert [match.question for match in found.longest(1)] == ["2"]


def test_several_benchmarks_in_one_pass():
    found = overlap(iter([("s", run_of(0, 13))]), {"a": [("1", run_of(0, 13))], "b": [("1", run_of(1, 13))]})
    assert (len(found["a"].hit), len(found["b"].hit)) == (1, 0)


def maximal_runs(asked, words):
    """(place in the question, place in the text, length) of every run of 13 or more that cannot be extended."""
    found = set()
    for i in range(len(asked)):
        for j in range(len(words)):
            if i and j and asked[i - 1] == words[j - 1]:
                continue
            size = 0
            while i + size < len(asked) and j + size < len(words) and asked[i + size] == words[j + size]:
                size += 1
            if size >= LENGTH:
                found.add((i, j, size))
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from("ab"), max_size=40),
    st.lists(st.sampled_from("ab"), max_size=40),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_against_brute_force(asked, words, start, end):
    words = words[:5] + asked[start : start + end] + words[5:]
    index = Index([("q", " ".join(asked))])
    got = sorted(" ".join([str(match.words), match.text]) for match in index.matches("s", words))
    expected = sorted(f"{size} {' '.join(words[j : j + size])}" for _, j, size in maximal_runs(asked, words))
    assert got == expected


def test_words():
    assert words_of("It's 3.5 — Été_1!") == ["it", "s", "3", "5", "été_1"]
