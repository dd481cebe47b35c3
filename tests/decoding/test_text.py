"""Incremental detokenisation against decoding everything at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specwave.decoding.text import BROKEN, PATIENCE, Detokeniser
from specwave.target.tiny import _tokenizer

BYTES = _tokenizer(512)
TEXTS = ["naïve café", "日本語 and 한국어", "😀😀 👩‍👩‍👧", "plain\n\twords ", "e\u0301", "𝔘𝔫𝔦"]


@pytest.fixture(scope="module")
def pieces():
    """SentencePiece's manner: ▁ for spaces, the first one dropped, bytes where the vocabulary ends."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁ab", "▁a", "cd"]
    merges = [("▁", "a"), ("▁a", "b"), ("c", "d")]
    vocab = {word: place for place, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def spelled(tokenizer, tokens, skip=True):
    text = Detokeniser(tokenizer, skip)
    return [text.push(token) for token in tokens], text.flush()


def whole(tokenizer, tokens, skip=True):
    return tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_whole_characters_as_soon_as_they_are_whole(text):
    """A byte a token: each character comes with its last byte, none before, none broken."""
    tokens = BYTES(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(text.encode())
    found, rest = spelled(BYTES, tokens)
    assert rest == ""
    wanted = []
    for character in text:
        wanted += [""] * (len(character.encode()) - 1) + [character]
    assert found == wanted


@given(st.lists(st.integers(0, 511), max_size=60), st.booleans())
@settings(deadline=None, max_examples=200)
def test_any_bytes_add_up_to_what_the_tokenizer_says(tokens, skip):
    """Special tokens, fillers, bytes that are no character; joined as when decoded at once."""
    found, rest = spelled(BYTES, tokens, skip)
    assert "".join(found) + rest == whole(BYTES, tokens, skip)


@given(st.text(alphabet="aé日😀 b", min_size=1, max_size=30))
@settings(deadline=None, max_examples=100)
def test_no_piece_of_a_text_is_broken(text):
    found, rest = spelled(BYTES, ids_of(BYTES, text))
    assert "".join(found) == text
    assert rest == ""
    assert not any(BROKEN in piece for piece in found)


@pytest.mark.parametrize("noise", [[0x80] * 50, [0xE2, 0x82] * 30, [0xF0, 0x9F, 0x98] * 20, [0xFF] * 40 + [0xC3, 0xA9]])
def test_bytes_that_are_no_text_pass_and_what_follows_is_whole(noise):
    """A run of them is not decoded again and again: what waits stays short."""
    place = {chr(token): number for token, number in _byte_ids().items()}
    tokens = [place[chr(byte)] for byte in noise] + ids_of(BYTES, "é日!")
    text, found = Detokeniser(BYTES), []
    for token in tokens:
        found.append(text.push(token))
        assert len(text._window) <= 2 * PATIENCE
    assert "".join(found) + text.flush() == whole(BYTES, tokens)
    assert found[-1] == "!"
    assert found[-2].endswith("日")


def test_a_run_of_tokens_without_text_costs_no_more_than_its_length():
    """Special tokens that are left out: what is decoded at each of them stays short."""
    asked = []

    class Counting:
        def decode(self, tokens, **keys):
            asked.append(len(tokens))
            return BYTES.decode(tokens, **keys)

    tokens = [*ids_of(BYTES, "a"), *[1, 2] * 500, *ids_of(BYTES, "é b"), *[0] * 300, *ids_of(BYTES, "日")]
    found, rest = spelled(Counting(), tokens)
    assert "".join(found) + rest == "aé b日"
    assert max(asked) <= 2 * PATIENCE


@pytest.mark.parametrize("gap", [1, PATIENCE, 5 * PATIENCE])
def test_spaces_behind_a_run_without_text_stay(gap, pieces):
    """An added token is special here, so that SentencePiece's first space is dropped at the beginning only."""
    from copy import deepcopy

    tokenizer = deepcopy(pieces)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>"]})
    special = tokenizer.convert_tokens_to_ids("<s>")
    for words in (["ab", "cd ab"], ["", " ab"]):
        tokens = [*ids_of(tokenizer, words[0]), *[special] * gap, *ids_of(tokenizer, words[1])]
        found, rest = spelled(tokenizer, tokens)
        assert "".join(found) + rest == whole(tokenizer, tokens)


def _byte_ids():
    """Token id by byte, read off the tokenizer: ByteLevel's alphabet is sorted by its printable stand-ins."""
    table = {}
    for byte in range(256):
        stand_in = bytes([byte]).decode("latin-1") if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174 else None
        table[byte] = stand_in
    others = iter(chr(256 + n) for n in range(256))
    return {byte: BYTES.convert_tokens_to_ids(stand_in or next(others)) for byte, stand_in in table.items()}


@pytest.mark.parametrize("text", ["ab cd ab", "ab é cd", "a日b  ab", "cdé", "😀 ab 😀"])
def test_spaces_and_bytes_of_sentence_piece(text, pieces):
    tokens = ids_of(pieces, text)
    found, rest = spelled(pieces, tokens)
    assert whole(pieces, tokens) == text
    assert "".join(found) == text
    assert rest == ""
    assert not any(BROKEN in piece for piece in found)


def test_an_unfinished_character_is_held_and_flushed():
    tokens = ids_of(BYTES, "a日")[:-1]
    text = Detokeniser(BYTES)
    assert [text.push(token) for token in tokens] == ["a", "", ""]
    assert text.held == text.flush() == BROKEN
    assert text.flush() == ""
