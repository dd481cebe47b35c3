"""Both indexes against a look at every place of the text, after every token."""

import random
from array import array

import pytest

from specwave.copying import LastN, Match, SuffixAutomaton
from specwave.copying.match import continuation

CASES = 10_000


def brute(tokens, shortest, longest, occurrence):
    """The match by its definition: from every earlier end, how many tokens before it are the last ones."""
    size, best = len(tokens), None
    for end in range(1, size):
        length = 0
        while length < min(end, longest) and tokens[end - 1 - length] == tokens[size - 1 - length]:
            length += 1
        better = best is None or length > best.length or (length == best.length and occurrence == "recent")
        if length >= shortest and better:
            best = Match(length, end)
    return best


def texts(cases, seed):
    """Short texts of few letters, so that runs repeat: random, loops, loops that break, copies of their own parts."""
    draw = random.Random(seed)
    for case in range(cases):
        letters, size = draw.choice([1, 2, 2, 3, 5]), draw.randint(0, 16)
        text = [draw.randrange(letters) for _ in range(size)]
        if case % 4 == 1:
            text = (text[: draw.randint(1, 5)] * 16)[:size] + [draw.randrange(letters) for _ in range(3)]
        if case % 4 == 2:
            for _ in range(draw.randint(1, 2)):
                begin = draw.randint(0, len(text))
                text += [*text[begin : begin + draw.randint(0, 8)], draw.randrange(9)]
        yield text


@pytest.mark.parametrize("occurrence", ["first", "recent"])
def test_the_longest_run_of_bounded_length(occurrence):
    draw, matches = random.Random(1), 0
    for text in texts(CASES, 2):
        shortest = draw.randint(1, 4)
        longest = shortest + draw.randint(0, 4)
        index, taken = LastN(longest, shortest, occurrence), 0
        while taken < len(text):  # a round commits several tokens at once
            step = draw.randint(1, 6)
            index.extend(text[taken : taken + step])
            taken = min(taken + step, len(text))
            assert len(index) == taken
            found = index.find()
            assert found == brute(text[:taken], shortest, longest, occurrence)
            matches += found is not None
    assert matches > CASES


@pytest.mark.parametrize("occurrence", ["first", "recent"])
def test_the_longest_run_of_any_length(occurrence):
    draw, matches, long = random.Random(4), 0, 0
    for text in texts(CASES, 3):
        index, taken = SuffixAutomaton(occurrence), 0
        assert index.find() is None
        while taken < len(text):
            step = draw.randint(1, 5)
            index.extend(text[taken : taken + step])
            taken = min(taken + step, len(text))
            found = index.find()
            assert found == brute(text[:taken], 1, taken, occurrence)
            matches += found is not None
            long += found is not None and found.length > 5
    assert matches > CASES
    assert long > CASES / 2


def test_large_ids_are_no_smaller_ones():
    """Keys of 32 bits a token: no two runs share one, whatever the ids."""
    big = 2**31 - 2
    for index in (LastN(3), SuffixAutomaton()):
        index.extend([0, big, 0, 0, big])
        assert index.find() == Match(2, 2)
        index.extend([big, 1])
        assert index.find() is None


class Counted(array):
    """Counts the reads of its entries."""

    reads = 0

    def __getitem__(self, place):
        Counted.reads += 1
        return super().__getitem__(place)


def fibonacci(size):
    shorter, text = [0], [0, 1]
    while len(text) < size:
        shorter, text = text, text + shorter
    return text[:size]


def unequal_runs(size):
    """a b aa b aaa b …: every way through the automaton is long, and each breaks elsewhere."""
    text, run = [], 1
    while len(text) < size:
        text += [0] * run + [1]
        run += 1
    return text[:size]


TEXTS = {
    "one token": lambda size: [7] * size,
    "a loop": lambda size: [place % 37 for place in range(size)],
    "a loop with a tail before it": lambda size: [*range(100, 150), *(place % 37 for place in range(size - 50))],
    "a loop with repeats inside": lambda size: ([1, 2, 3, 1, 2, 4, 1, 5] * size)[:size],
    "fibonacci": fibonacci,
    "unequal runs": unequal_runs,
    "random, 2 letters": lambda size: random.Random(0).choices(range(2), k=size),
    "random, 1000 letters": lambda size: random.Random(0).choices(range(1000), k=size),
    "halves repeated": lambda size: random.Random(0).choices(range(50), k=size // 2) * 2,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("occurrence", ["first", "recent"])
def test_a_token_costs_the_same_however_long_the_text(name, occurrence):
    """Steps, counted: reads of the automaton's arrays, a thousand tokens against eight thousand."""
    reads = {}
    for size in (1_000, 8_000):
        text = TEXTS[name](size)
        assert len(text) == size
        index = SuffixAutomaton(occurrence)
        for field in ("length", "link", "token", "target", "known", "floor", "below", "taker"):
            setattr(index, field, Counted("i", getattr(index, field)))
        Counted.reads = 0
        index.extend(text)
        reads[size] = Counted.reads / size
        assert len(index.length) <= 2 * size  # states
    # The most recent ends may cost log n: 13 against 10. One that walks all suffixes reads 8 times as much in a loop.
    assert reads[8_000] < (1.5 if occurrence == "recent" else 1.15) * reads[1_000] + 1
    assert reads[8_000] < 90


def test_the_automaton_is_as_large_as_it_may_be():
    """At most 2 states and 3 transitions a token (Blumer et al. 1985)."""
    for name, make in TEXTS.items():
        index = SuffixAutomaton("recent")
        index.extend(make(3_000))
        own = sum(token >= 0 for token in index.token) + sum(map(len, index.others.values()))
        assert len(index.length) < 2 * 3_000, name
        assert own < 3 * 3_000, name


@pytest.mark.parametrize(
    ("start", "length", "overlap", "copied"),
    [
        (2, 2, False, [6, 7]),
        (2, 9, False, [6, 7, 8]),
        (2, 9, True, [6, 7, 8, 6, 7, 8, 6, 7, 8]),
        (4, 4, True, [8, 8, 8, 8]),
        (4, 1, True, [8]),
        (0, 3, True, [4, 5, 6]),
        (5, 3, False, []),
        (5, 3, True, []),
    ],
)
def test_continuation(start, length, overlap, copied):
    assert continuation([4, 5, 6, 7, 8], start, length, overlap) == copied


def test_a_copy_that_overlaps_itself_is_what_copying_token_by_token_gives():
    draw = random.Random(5)
    for _ in range(2_000):
        text = [draw.randrange(4) for _ in range(draw.randint(1, 12))]
        start, length = draw.randrange(len(text)), draw.randint(1, 20)
        grown = list(text)
        for place in range(length):
            grown.append(grown[start + place])
        assert continuation(text, start, length, overlap=True) == grown[len(text) :]


@pytest.mark.parametrize(("longest", "shortest"), [(0, 1), (2, 3), (3, 0)])
def test_runs_of_no_length_are_refused(longest, shortest):
    with pytest.raises(ValueError, match="there are none"):
        LastN(longest, shortest)
