"""What ends a row: stop strings, end tokens, limits; and the stream of what was committed until then."""

import pytest
import torch
from stubs import Coached, Oracle, RandomTrees
from transformers import AutoModelForCausalLM

from specwave.artifacts import UserError
from specwave.decoding import Context, Sampling, generate, stream
from specwave.decoding.stops import Ends, check_stop
from specwave.target.tiny import _tokenizer

V, PROMPT = 512, [5, 9, 200, 31, 7, 7, 80]
BYTES = _tokenizer(V)


def ids_of(text):
    return BYTES(text, add_special_tokens=False)["input_ids"]


def plain_text(target, tokens, skip=True):
    return target.tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def by_hand(tokens, stop, limit=10**6):
    """The readable reference: decode every prefix."""
    for count in range(1, min(len(tokens), limit) + 1):
        text = BYTES.decode(tokens[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if any(string in text for string in stop):
            return tokens[:count]
    return tokens[:limit]


def cut(tokens, stop, runs, eos=(), limit=10**6):
    """`Ends` on rows of one token list, committed in runs of these lengths, over and over."""
    ends = Ends(eos, check_stop(stop), lambda: BYTES)
    context = Context(0, 0, [1], 1, limit, None, 0)
    rest, number = list(tokens), 0
    while rest and not ends.over(context):
        size = runs[number % len(runs)]
        context.tokens += ends.cut(context, rest[:size])
        rest, number = rest[size:], number + 1
    return context.tokens[1:]


CASES = [
    ("one two three", ["two"]),
    ("one two three", ["e t"]),  # across words
    ("one two three", ["o", "two"]),  # the first to be complete, not the first in the list
    ("abababac", ["abac"]),  # its beginning comes again and again
    ("aaaab", ["aab"]),
    ("naïve café", ["é"]),  # ends in the middle of nothing: with its second byte
    ("naïve café", ["ï"]),
    ("go 😀😃 on", ["😃"]),  # shares three bytes with the one before
    ("日本語", ["本語"]),
    ("nothing of it", ["zzz", "nothing of it!"]),
    ("all of it", ["all of it"]),
    ("a\nb\n\nc", ["\n\n"]),
]


@pytest.mark.parametrize(("text", "stop"), CASES)
def test_a_stop_string_ends_the_row_wherever_it_is_completed(text, stop):
    """transformers#48039: every committed prefix is scanned, whatever the lengths of the runs."""
    tokens = ids_of(text)
    wanted = by_hand(tokens, stop)
    for runs in ([1], [2], [3, 1], [5], [len(tokens)]):
        assert cut(tokens, stop, runs) == wanted


def test_a_stop_string_may_begin_and_end_within_tokens():
    """Tokens of several characters, one that ends with half a character: the stop text stays in its token."""
    from tokenizers import Tokenizer, decoders, models

    half = "".join({0xF0: "ð", 0x9F: "Ł"}[byte] for byte in "😀".encode()[:2])
    words = ["st", "op!", "xs", "top", f"!{half}", "ĺ", "Ģ", "no"]  # 😀 is F0 9F 98 80 in ByteLevel's stand-ins
    core = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=[]))
    core.decoder = decoders.ByteLevel()

    class Words:
        def decode(self, tokens, **_):
            return core.decode(tokens, skip_special_tokens=False)

    assert Words().decode([4, 5, 6]) == "!😀"
    for tokens, stop, count in (
        ([7, 0, 1, 7], ["stop"], 3),
        ([2, 3, 7], ["stop"], 2),
        ([7, 4, 5, 6, 7], ["!"], 2),  # complete, though the token's last character is not
        ([7, 4, 5, 6, 7], ["!😀"], 4),
        ([7, 4, 5, 6, 7], ["😀n"], 5),
    ):
        for run in (1, len(tokens)):
            ends = Ends((), stop, Words)
            context = Context(0, 0, [1], 1, 99, None, 0)
            for start in range(0, len(tokens), run):
                if not ends.over(context):
                    context.tokens += ends.cut(context, tokens[start : start + run])
            assert context.tokens[1:] == tokens[:count]


def test_special_tokens_can_be_stopped_at_by_their_text():
    tokens = [*ids_of("ab"), 1, *ids_of("c")]
    assert cut(tokens, ["<|im_start|>"], [4]) == tokens[:3]
    assert cut(tokens, ["b<|im"], [1]) == tokens[:3]


def test_the_first_of_end_token_stop_string_and_limit_ends_the_row():
    tokens = ids_of("abcdef")
    assert cut(tokens, ["cd"], [6], eos=[tokens[1]]) == tokens[:2]
    assert cut(tokens, ["cd"], [6], eos=[tokens[4]]) == tokens[:4]
    assert cut(tokens, ["cd"], [6], limit=3) == tokens[:3]
    assert cut(tokens, ["cd"], [6], limit=4) == tokens[:4]


def test_only_a_bounded_tail_is_decoded():
    asked = []

    class Counting:
        def decode(self, tokens, **keys):
            asked.append(len(tokens))
            return BYTES.decode(tokens, **keys)

    ends, context = Ends((), ["never this"], Counting), Context(0, 0, [1], 1, 10**6, None, 0)
    for token in ids_of("naïve text 日本 ") * 40:
        context.tokens += ends.cut(context, [token])
    assert max(asked) < 10
    assert Ends((2,), (), pytest.fail).cut(context, [5, 2, 7]) == [5, 2]  # no stop string: no tokenizer


# ---------------------------------------------------------------- in the loop


@pytest.fixture(scope="module")
def plain(tiny):
    return generate(tiny, None, PROMPT, max_new_tokens=40, eos_ids=()).tokens


def strings_of(tiny, tokens):
    """Strings that first come in this output at three different depths, one early, one late."""
    text, found = plain_text(tiny, tokens, skip=False), {}
    for place in range(len(text) - 4):
        for length in (4, 1):
            string = text[place : place + length]
            if "\ufffd" not in string:
                found.setdefault(len(by_hand(tokens, [string])), string)
    depths = sorted(found)
    return [found[depths[place]] for place in (1, len(depths) // 2, -1)]


@pytest.mark.parametrize("drafter", ["plain", "oracle", "random", "tree"])
def test_output_is_cut_behind_the_stop_string(drafter, tiny, plain):
    for string in strings_of(tiny, plain):
        wanted = by_hand(plain, [string])
        proposer = {
            "plain": None,
            "oracle": Oracle([plain], 6, V),
            "random": RandomTrees(V),
            "tree": Coached([plain], 5, V),
        }[drafter]
        made = generate(tiny, proposer, PROMPT, max_new_tokens=40, eos_ids=(), stop=[string])
        assert made.tokens == wanted
        assert sum(made.accept_lengths) == len(wanted)  # vllm#56101: what was cut counts nowhere
        assert string in plain_text(tiny, made.tokens, skip=False)  # it stays in the output


def test_stop_strings_are_hugging_face_s(tiny, plain, family_folders):
    model = AutoModelForCausalLM.from_pretrained(family_folders["llama"], dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    for string in strings_of(tiny, plain):
        keys = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        keys |= {"stop_strings": [string], "tokenizer": tiny.tokenizer}
        wanted = model.generate(prompt, **keys)[0, len(PROMPT) :].tolist()
        assert (
            generate(tiny, Oracle([plain], 6, V), prompt, max_new_tokens=40, eos_ids=(), stop=string).tokens == wanted
        )


def test_a_stop_string_of_the_prompt_ends_nothing(tiny, plain):
    prompt = ids_of("end.") + PROMPT
    long = generate(tiny, None, prompt, max_new_tokens=10, eos_ids=())
    assert generate(tiny, None, prompt, max_new_tokens=10, eos_ids=(), stop=["end."]).tokens == long.tokens


def test_rows_of_a_batch_stop_by_themselves_and_the_cache_ends_with_the_tokens(tiny):
    prompts = [PROMPT, [4], [300, 12, 12, 8, 9]]
    plain = generate(tiny, None, prompts, max_new_tokens=30, eos_ids=()).tokens
    stop = [strings_of(tiny, row)[place] for row, place in zip(plain, (2, 1, 2), strict=True)]
    wanted = [by_hand(row, stop) for row in plain]
    assert len({*map(len, wanted)}) > 1
    seen = {}

    class Watching(Coached):
        def observe(self, verdicts):
            for verdict in verdicts:
                context = verdict.context
                seen[context.row] = list(context.tokens)
                assert context.session.lengths[context.slot] == len(context.tokens) - 1
                assert len(verdict.path) == len(verdict.tokens)

    made = generate(tiny, Watching(plain, 5, V), prompts, max_new_tokens=30, eos_ids=(), stop=stop)
    assert made.tokens == wanted
    assert [seen[row] for row in range(3)] == [prompt + row for prompt, row in zip(prompts, wanted, strict=True)]


@pytest.mark.parametrize("bad", ["", [""], ["ok", ""], ["\ufffd"], [3]])
def test_an_empty_stop_string_is_a_user_error(bad, tiny):
    with pytest.raises(UserError, match=r"^stop="):
        generate(tiny, None, PROMPT, max_new_tokens=4, stop=bad)


# ---------------------------------------------------------------- streaming


@pytest.mark.parametrize("drafter", ["plain", "oracle", "tree"])
@pytest.mark.parametrize("keys", [{}, {"sampling": Sampling(1.1, seed=4, top_k=30)}, {"limit": 9}], ids=str)
def test_a_stream_is_the_text_of_the_output(drafter, keys, tiny):
    keys = {"limit": 40, "sampling": Sampling()} | keys
    plain = generate(tiny, None, PROMPT, max_new_tokens=keys["limit"], sampling=keys["sampling"], sequence_ids=[3])
    proposer = {"plain": None, "oracle": Oracle([plain.tokens], 3, V), "tree": Coached([plain.tokens], 5, V)}[drafter]
    same = {"max_new_tokens": keys["limit"], "sampling": keys["sampling"], "sequence_id": 3}
    pieces = list(stream(tiny, proposer, PROMPT, **same))
    assert "".join(pieces) == plain_text(tiny, plain.tokens)
    assert "" not in pieces
    assert len(pieces) > 1


def test_a_stream_ends_at_the_end_token_inside_an_accepted_run(tiny, plain):
    """transformers#47912: cut in tokens, cache and stream."""
    end = plain[9]
    cut = plain[: plain.index(end) + 1]
    for proposer in (None, Oracle([plain], 6, V)):
        assert "".join(stream(tiny, proposer, PROMPT, max_new_tokens=40, eos_ids=(end,))) == plain_text(tiny, cut)


def test_a_stream_ends_behind_a_stop_string(tiny, plain):
    string = strings_of(tiny, plain)[1]
    text = "".join(stream(tiny, Oracle([plain], 6, V), PROMPT, max_new_tokens=40, eos_ids=(), stop=string))
    assert text == plain_text(tiny, by_hand(plain, [string]))
    assert string in text


def test_a_stream_takes_no_round_before_it_is_read_and_frees_its_row_when_closed(tiny, plain):
    calls = []

    class Noting(Oracle):
        def propose_row(self, context):
            calls.append("draft")
            return super().propose_row(context)

        def end(self, row):
            calls.append(f"end {row}")

    pieces = stream(tiny, Noting([plain], 3, V), PROMPT, max_new_tokens=40, eos_ids=())
    assert calls == []
    next(pieces)
    assert calls
    assert not torch.is_inference_mode_enabled()  # the reader's code runs as it did
    pieces.close()
    assert calls[-1] == "end 0"
    assert len(calls) < 10


def test_a_stream_refuses_what_generate_refuses_at_once(tiny):
    for prompt, keys, named in (
        ([], {}, "input_ids"),
        ([[1], [2]], {}, "one prompt"),
        ([1], {"stop": [""]}, "stop="),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
    ):
        with pytest.raises(UserError, match=named):
            stream(tiny, None, prompt, **{"max_new_tokens": 5} | keys)
