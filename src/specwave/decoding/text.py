"""Tokens to text as they come, without decoding a sequence anew and without broken characters.

A worked example, é in two byte tokens (C3, A9) between a and b:

    token    a     C3    A9    b
    piece    "a"   ""    "é"   "b"
    held     ""    "�"   ""    ""
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"  # what tokenizers make of bytes that are no character, or not yet
PATIENCE = 16  # tokens after which bytes are taken for noise: a character has at most four


class Detokeniser:
    """The text of one growing sequence. What later tokens can still change is held back.

    The pieces and the last `flush`, joined, are what the tokenizer makes of all tokens at once. Every `push` decodes a
    few tokens: those held back, and the piece before them, on which some tokenizers' spaces depend.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True):
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.held = ""  # the text so far of what is held back
        self._window: list[int] = []  # the tokens of the last piece, then those held back
        self._given = 0  # how many tokens of the window are out,
        self._shown = ""  # and their text

    def push(self, token: int) -> str:
        """The characters that this token completes; often none, sometimes several tokens' worth."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(BROKEN):
            if len(self._window) - self._given >= PATIENCE:
                return self._give_up(text)
            self.held = text[len(self._shown) :]
            return ""
        piece, self.held = text[len(self._shown) :], ""
        if piece:
            self._window = self._window[self._given :]
            self._given, self._shown = len(self._window), self._decode(self._window)
        elif len(self._window) - self._given >= PATIENCE:
            self._forget(text)
        return piece

    def flush(self) -> str:
        """What is held back, at the end of the sequence: an unfinished character is a broken one now."""
        piece, self.held = self.held, ""
        return piece

    def _forget(self, text: str) -> None:
        """Drops the oldest of many tokens without text, such as special ones, where nothing shows it."""
        shorter = self._window[: self._given] + self._window[self._given + 1 :]
        if self._decode(shorter) == text:
            self._window = shorter

    def _give_up(self, text: str) -> str:
        """Lets a long run of bytes go, but for the last ones, which a character may still begin with."""
        for keep in range(1, 5):
            head, tail = self._decode(self._window[:-keep]), self._decode(self._window[-keep:])
            if head + tail == text:  # no character lies across
                break
        piece, self.held = head[len(self._shown) :], tail
        self._window, self._given, self._shown = self._window[-keep:], 0, ""
        return piece

    def _decode(self, tokens: Sequence[int]) -> str:
        # Cleaning up would change characters that are out already.
        return self.tokenizer.decode(list(tokens), skip_special_tokens=self.skip, clean_up_tokenization_spaces=False)
