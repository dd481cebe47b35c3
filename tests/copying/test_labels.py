"""`copy_labels` against the definition, window by window."""

import inspect
import random

import pytest
import torch

from specwave.copying import copy_labels
from specwave.copying.labels import windows


def quadratic(tokens, start, n):
    """Every window of n tokens against every earlier one."""
    labels = [False] * len(tokens)
    for begin in range(len(tokens) - n + 1):
        if any(tokens[begin : begin + n] == tokens[before : before + n] for before in range(begin)):
            for place in range(begin, begin + n):
                labels[place] = place >= start
    return labels


def test_ten_thousand_texts():
    draw, copied = random.Random(0), 0
    for _ in range(10_000):
        letters, size, n = draw.choice([1, 2, 3, 4]), draw.randint(0, 30), draw.randint(1, 7)
        text = [draw.randrange(letters) for _ in range(size)]
        start = draw.randint(0, size + 1)
        found = copy_labels(text, start, n)
        assert found.dtype == torch.bool
        assert found.shape == (size,)
        assert found.tolist() == quadratic(text, start, n)
        copied += int(found.sum())
    assert copied > 10_000


def test_the_table_in_the_docstring():
    text = [1, 2, 3, 9, 1, 2, 3, 1, 2]
    assert copy_labels(text, 4, 3).tolist() == [False] * 4 + [True, True, True, False, False]


def test_windows_may_begin_before_the_start_and_overlap_their_earlier_occurrence():
    assert copy_labels([5, 6, 7, 5, 6, 7], 5, 3).tolist() == [False] * 5 + [True]
    assert copy_labels([4] * 6, 0, 5).tolist() == [False] + [True] * 5


def test_lists_and_tensors():
    text = [1, 2, 3, 4, 5] * 3
    listed = copy_labels(text, 2)
    assert torch.equal(copy_labels(torch.tensor(text), 2), listed)
    assert torch.equal(copy_labels(torch.tensor(text, dtype=torch.int32), 2), listed)
    assert torch.equal(copy_labels(tuple(text), 2), listed)
    assert listed.tolist() == [False] * 5 + [True] * 10
    assert inspect.signature(copy_labels).parameters["n"].default == 5


@pytest.mark.parametrize("text", [[], [1], [1, 1, 1, 1]])
def test_texts_shorter_than_n_have_no_copies(text):
    assert not copy_labels(text, 0, 5).any()
    assert len(copy_labels(text, 0, 5)) == len(text)


def test_windows_are_numbered_as_they_are_met():
    assert windows([1, 2, 1, 2, 3, 1, 2], 2) == [0, 1, 0, 2, 3, 0]
    assert windows([1, 2], 3) == []


@pytest.mark.parametrize(("tokens", "n", "words"), [([1, 2], 0, "n=0"), (torch.ones(2, 3), 2, "shape")])
def test_what_has_no_labels_is_refused(tokens, n, words):
    with pytest.raises(ValueError, match=words):
        copy_labels(tokens, 0, n)
