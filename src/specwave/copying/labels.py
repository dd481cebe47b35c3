"""Which tokens of a text are copied: the labels that SwitchSD's probe learns (methods.md §2).

A token is copied when it belongs to a run of n tokens that stood in the text before. Runs of more than n tokens are
chains of such windows. With n = 3 and `start` = 4:

    place    0 1 2 3 4 5 6 7 8
    token    a b c x a b c a b
    window   abc bcx cxa xab abc bca cab       by its first token: places 0 … 6
    before?  no  no  no  no  yes no  no
    label    – – – – 1 1 1 0 0                 – below `start`: never labelled

Knows nothing about models and answers; `start` is where the answer begins.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor


def copy_labels(tokens: Sequence[int] | Tensor, start: int, n: int = 5) -> Tensor:
    """bool [T]: the places ≥ `start` inside a window of n tokens that occurred before.

    The window may begin before `start` and overlap its earlier occurrence. O(T log n).

    Args:
        tokens: T ids, a list or a tensor [T].

    Raises:
        ValueError: n below 1, or tokens that are no single row.
    """
    if n < 1:
        raise ValueError(f"a run has at least one token, got n={n}")
    ids = tokens.tolist() if isinstance(tokens, Tensor) else [*tokens]
    if isinstance(tokens, Tensor) and tokens.dim() != 1:
        raise ValueError(f"one row of tokens is expected, got shape {list(tokens.shape)}")
    labels, end, newest = [False] * len(ids), 0, -1
    for place, window in enumerate(windows(ids, n)):
        if window > newest:
            newest = window
        else:
            end = place + n
        labels[place] = place < end
    for place in range(max(0, len(ids) - n + 1), len(ids)):  # no window begins here; one may reach here
        labels[place] = place < end
    for place in range(min(max(start, 0), len(ids))):
        labels[place] = False
    return torch.tensor(labels, dtype=torch.bool)


def windows(tokens: Sequence[int], n: int) -> list[int]:
    """A number for each of the T − n + 1 windows, equal for equal ones: counted up in the order they are first met.

    Windows of a width are pairs of narrower ones that overlap, so log2(n) passes number them exactly.
    """
    numbers, width = _numbered(tokens), 1
    while width < n:
        step = min(width, n - width)
        numbers = _numbered(zip(numbers, numbers[step:], strict=False))
        width += step
    return numbers


def _numbered(things: Iterable[Hashable]) -> list[int]:
    met: dict[Hashable, int] = {}
    return [met.setdefault(thing, len(met)) for thing in things]
