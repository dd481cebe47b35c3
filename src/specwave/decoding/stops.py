"""What ends a row: an end token, a stop string, the limit. Every committed token is looked at, wherever in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specwave.artifacts import UserError
from specwave.decoding.arguments import wholes
from specwave.decoding.protocol import Context
from specwave.decoding.text import BROKEN, Detokeniser


class Ends:
    """The ends of one batch's rows.

    Args:
        eos_ids: end tokens, or one; may be empty.
        stop: strings that end a row; see `check_stop`. They are looked for in the output's text alone, special tokens
            spelled out, and may begin and end anywhere in a token.
        tokenizer: called when there are stop strings; otherwise text is never met.
    """

    def __init__(self, eos_ids: Iterable[int] | int, stop: Sequence[str], tokenizer: Callable[[], Any]):
        self.eos_ids = frozenset(wholes("eos_ids", eos_ids, "end tokens are token ids, () for none"))
        self.stop = tuple(stop)
        self.tokenizer = tokenizer() if stop else None
        self.reach = max(map(len, stop), default=1) - 1  # characters before a token that a stop string may begin with
        self.texts: dict[int, tuple[Detokeniser, str]] = {}  # by row: the last `reach` characters that are complete
        self.ended: set[int] = set()

    def cut(self, context: Context, tokens: list[int]) -> list[int]:
        """The tokens of a round, not yet in the context, up to the first that ends the row, itself included."""
        tokens = tokens[: context.remaining]
        for place, token in enumerate(tokens):
            if token in self.eos_ids or (self.stop and self._completes(context.row, token)):
                self.ended.add(context.row)
                return tokens[: place + 1]
        return tokens

    def over(self, context: Context) -> bool:
        return context.remaining <= 0 or context.row in self.ended

    def _completes(self, row: int, token: int) -> bool:
        """Whether the row's text holds a stop string now; before this token it held none."""
        if row not in self.texts:
            self.texts[row] = Detokeniser(self.tokenizer, skip_special_tokens=False), ""
        detokeniser, tail = self.texts[row]
        text = tail + detokeniser.push(token)
        self.texts[row] = detokeniser, text[len(text) - min(self.reach, len(text)) :]
        # What is held back ends with an unfinished character; what stands before that may complete a string.
        return any(string in text + detokeniser.held for string in self.stop)


def check_stop(stop: Sequence[str] | str | None) -> tuple[str, ...]:
    """Stop strings, or one of them, as a tuple.

    Raises:
        UserError: an empty one, which every text contains; one with a replacement character, which stands for bytes
            that are no character; what is no string.
    """
    if stop is not None and not isinstance(stop, Iterable):
        raise UserError("stop", repr(stop), "a string, or several")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str):
            raise UserError("stop", repr(string), "a stop string is a text")
        if not string:
            raise UserError("stop", repr(string), "a stop string has at least one character")
        if BROKEN in string:
            remedy = "U+FFFD stands for bytes that are no character: stop at the characters beside it"
            raise UserError("stop", repr(string), remedy)
    return strings
