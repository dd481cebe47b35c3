"""What text needs of a target, without weights: a tokenizer at hand with a template of choice."""

import pytest

from specwave.data.conversations import Chat
from specwave.target import ModelConfig
from specwave.target.tiny import _tokenizer


@pytest.fixture(scope="session")
def make_chat():
    """Byte tokens and <|im_end|> (2), or further special tokens that are added to them."""

    def make(template=None, special=(), end="<|im_end|>", date_string=None, max_length=4096):
        tokenizer = _tokenizer(512)
        tokenizer.add_tokens(list(special), special_tokens=True)
        if template is not None:
            tokenizer.chat_template = template
        config = ModelConfig("stand-in", "nowhere", date_string=date_string)
        return Chat(tokenizer, config, "stand-in", (tokenizer.convert_tokens_to_ids(end),), max_length)

    return make
