"""Conversations as token ids, by the target's own chat template, with a mask over what the assistant says.

The mask comes from incremental rendering. With R(…) the template's text of some messages and R⁺(…) the same with the
header that asks for an answer, the assistant's turn m_i is the text between two prefixes of the whole conversation:

    R⁺(m_0 … m_{i−1})                      ends where the answer begins
    R(m_0 … m_{i−1}, m_i)                  ends where the answer ends

Both are checked to be prefixes: a template that rewrites what was said (Qwen3 drops earlier thinking) fails, and then
only the last answer counts, or each answer becomes a sample of its own (`masked`). A token counts when all its text
lies in an answer, up to the first token that ends one and with it: what the template writes behind (a line break, say)
the target never says itself.

Knows nothing about files, selection or training.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from specwave.artifacts import UserError
from specwave.data.conversations import Conversation, Sample, Speaker, prompt_ids, template_options

Span = tuple[int, int]  # of characters; the end is not included

_SHOWN = 300  # characters of a text in a message
_PROBE = "A system turn stands here."


def prompts(target: Speaker, conversations: Sequence[Conversation]) -> list[tuple[str, str, list[int]]]:
    """(id, category, token ids) of each conversation up to where the assistant answers the last user turn.

    Earlier answers stay as they were given; one after the last user turn is dropped.

    Raises:
        UserError: the target has no chat template, or the template refuses a conversation.
    """
    template = template_of(target, conversations)
    return [
        (each.id, each.category, template.ids(each, template.messages(each, last="user"))) for each in conversations
    ]


def given(target: Speaker, conversations: Sequence[Conversation], key: str, max_length: int) -> list[Sample]:
    """The conversations up to their last answer, whole, with a mask over all answers as they were given.

    Args:
        key: the config key that named the conversations; messages name it and the `answers` beside it.
        max_length: in tokens; what is longer is cut there (and at the target's own length), and left out with a warning
            where no token of an answer is left.

    Raises:
        UserError: a conversation without an answer, no token of any answer, no or an unfit chat template.
    """
    template, limit = template_of(target, conversations), min(max_length, target.max_length)
    kept: list[Sample] = []
    unanswered: Sample | None = None
    rewritten = dropped = cut = 0
    for each in conversations:
        (whole,), anew = masked(template, each, key)
        rewritten += anew
        sample = Sample(whole.ids[:limit], whole.answer[:limit], each.id, each.category)
        if any(sample.answer):
            kept.append(sample)
        else:
            dropped, cut = dropped + 1, cut + any(whole.answer)
            unanswered = unanswered or sample
    if unanswered is not None and not kept:
        shown = _shortened(target.tokenizer.decode(unanswered.ids))
        remedy = f"raise the limit of {limit} tokens" if cut else _regenerate(key)
        raise UserError(
            key,
            unanswered.id,
            f"no token is text of an answer, here nor in any other conversation: {remedy}; {shown!r}",
        )
    if rewritten:
        rule = f"the chat template of {target.name} writes earlier answers anew, only the last answer counts"
        warnings.warn(f"{key}: in {rewritten} of {len(conversations)} conversations {rule}", stacklevel=2)
    if dropped:
        rule = f"conversations have no token of an answer among their first {limit} and are passed over"
        warnings.warn(f"{key}: {dropped} of {len(conversations)} {rule}", stacklevel=2)
    return kept


def masked(
    template: Template, conversation: Conversation, key: str, separate: bool = False
) -> tuple[list[Sample], bool]:
    """The conversation up to its last answer, and whether the template writes earlier answers anew.

    Where it does, the one sample has a mask over the last answer only; with `separate` there is a sample for every
    answer instead, the conversation up to it, as the target sees it when it gives that answer.

    Raises:
        UserError: no answer, or one that does not begin as the template asks for it.
    """
    if not any(role == "assistant" for role, _ in conversation.messages):
        raise UserError(key, conversation.id, f"this conversation has no answer: {_regenerate(key)}")
    messages = template.messages(conversation, last="assistant")
    turns = []  # (R⁺, R) of each answer
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = template.text(conversation, messages[:place], header=True)
            turns.append((before, template.text(conversation, messages[: place + 1])))
    whole = turns[-1][1]
    anew = not all(whole.startswith(before) and whole.startswith(after) for before, after in turns[:-1])
    for before, after in turns if anew and separate else turns[-1:]:
        if not after.startswith(before):
            raise UserError(
                key,
                conversation.id,
                f"the chat template of {template.target.name} asks for an answer with {before[-40:]!r} and writes it "
                f"down without, so answers cannot be found in it: {_regenerate(key)}",
            )
    spans = [(len(before), len(after)) for before, after in turns]
    if not anew:
        parts = [(whole, spans)]
    else:
        alone = [(after, [span]) for (_, after), span in zip(turns, spans, strict=True)]
        parts = alone if separate else alone[-1:]
    return [_masked(template.target, text, found, conversation) for text, found in parts], anew


def _regenerate(key: str) -> str:
    return f"set {key.partition('.')[0]}.answers=regenerate"


def _masked(target: Speaker, text: str, spans: Sequence[Span], conversation: Conversation) -> Sample:
    """The ids of `text`, as the template's own tokenisation has them, and the tokens that lie in the spans."""
    tokenizer = target.tokenizer
    if not tokenizer.is_fast:
        raise UserError("model", target.name, "its tokenizer does not say where its tokens lie, so no answer is found")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = list(found["input_ids"]), found["offset_mapping"]
    answer, at = [False] * len(ids), 0
    for start, end in spans:
        while at < len(ids) and offsets[at][1] <= start:
            at += 1
        while at < len(ids) and offsets[at][1] <= end:
            # a token across the border (a line break of the header and one of the answer) is never generated
            answer[at] = offsets[at][0] >= start
            at += 1
            if answer[at - 1] and ids[at - 1] in target.eos_ids:
                break
    return Sample(ids, answer, conversation.id, conversation.category)


def template_of(target: Speaker, conversations: Sequence[Conversation]) -> Template:
    """The target's chat template, for these conversations.

    Raises:
        UserError: it has none.
    """
    if target.tokenizer.chat_template is None:
        raise UserError("model", target.name, "its tokenizer has no chat template: choose a model made for chats")
    systems = sum(each.messages[0][0] == "system" for each in conversations)
    template = Template(target)
    if systems and not template.takes_system():
        rule = f"the chat template of {target.name} takes no system turn: its text is put before the first question"
        warnings.warn(f"{rule} in {systems} of {len(conversations)} conversations", stacklevel=3)
        return Template(target, folds=True)
    return template


@dataclass(frozen=True)
class Template:
    """A target's chat template, with the user's mistakes it can stand for as one line.

    `folds`: a system turn is put before the first question, since the template has no place for it.
    """

    target: Speaker
    folds: bool = False

    def takes_system(self) -> bool:
        """Some templates refuse a system turn, others pass over it in silence."""
        probe = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hello."}]
        try:
            return _PROBE in self._apply(probe, header=True)
        except TemplateError:
            return False

    def messages(self, conversation: Conversation, last: str) -> list[dict[str, str]]:
        """The messages up to the last one of the role `last`, in the form templates take."""
        turns = list(conversation.messages)
        while turns[-1][0] != last:
            turns.pop()
        if self.folds and turns[0][0] == "system":
            turns[:2] = [("user", f"{turns[0][1]}\n\n{turns[1][1]}")]
        return [{"role": role, "content": content} for role, content in turns]

    def text(self, conversation: Conversation, messages: list[dict[str, str]], header: bool = False) -> str:
        """The template's text; with `header`, up to where the assistant begins to answer."""
        try:
            return self._apply(messages, header)
        except TemplateError as error:
            raise self._refused(conversation, error) from None

    def ids(self, conversation: Conversation, messages: list[dict[str, str]]) -> list[int]:
        """Token ids up to where the assistant begins to answer."""
        try:
            return prompt_ids(self.target, messages)
        except TemplateError as error:
            raise self._refused(conversation, error) from None

    def _apply(self, messages: list[dict[str, str]], header: bool) -> str:
        return self.target.tokenizer.apply_chat_template(
            messages, add_generation_prompt=header, tokenize=False, **template_options(self.target)
        )

    def _refused(self, conversation: Conversation, error: TemplateError) -> UserError:
        reason = _shortened(str(error) or type(error).__name__)
        return UserError(
            "model", self.target.name, f"its chat template refuses conversation {conversation.id!r} ({reason})"
        )


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
