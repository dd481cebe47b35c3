"""Whatever type the arguments of a call have: they work, or one line says what is wrong."""

import numpy as np
import pytest
import torch

from specwave.artifacts import UserError
from specwave.decoding import Sampling, generate, stream

PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def plain(tiny):
    return generate(tiny, None, PROMPT, max_new_tokens=8, eos_ids=()).tokens


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        torch.tensor(PROMPT),
        torch.tensor([PROMPT]),
        np.array(PROMPT),
        np.array([PROMPT]),
        [np.int64(token) for token in PROMPT],
        [torch.tensor(token) for token in PROMPT],
        range(5, 10),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_a_prompt_may_be_of_any_type(prompt, tiny, plain):
    made = generate(tiny, None, prompt, max_new_tokens=np.int64(8), eos_ids=()).tokens
    assert len(made) == 8
    if not isinstance(prompt, range):
        assert made == plain


def test_prompts_may_be_of_any_type(tiny, plain):
    for prompts in ([torch.tensor(PROMPT)], [np.array(PROMPT)], (tuple(PROMPT),)):
        assert generate(tiny, None, prompts, max_new_tokens=8, eos_ids=()).tokens == [plain]


@pytest.mark.parametrize(
    "prompt", [torch.tensor(3), 3, None, [[1], 2], [1, [2]], "12", ["1"], [1.5], torch.tensor([1.5]), [[[1]]], [None]]
)
def test_what_is_no_prompt_is_a_user_error(prompt, tiny):
    with pytest.raises(UserError) as error:
        generate(tiny, None, prompt, max_new_tokens=2)
    assert error.value.key == "input_ids"


@pytest.mark.parametrize("ends", ["int", "numpy", "tensor", "0-dim", "array", "set"])
def test_end_tokens_may_be_of_any_type(ends, tiny, plain):
    end = plain[3]
    given = {
        "int": end,
        "numpy": [np.int64(end)],
        "tensor": torch.tensor([end]),
        "0-dim": torch.tensor(end),
        "array": np.array([end]),
        "set": {end},
    }[ends]
    wanted = plain[: plain.index(end) + 1]
    assert generate(tiny, None, PROMPT, max_new_tokens=8, eos_ids=given).tokens == wanted


@pytest.mark.parametrize("ends", [2.0, [None], "2", [[2]], torch.tensor([2.5])])
def test_what_is_no_end_token_is_a_user_error(ends, tiny):
    with pytest.raises(UserError) as error:
        generate(tiny, None, PROMPT, max_new_tokens=2, eos_ids=ends)
    assert error.value.key == "eos_ids"


@pytest.mark.parametrize("keys", [[3], (3,), range(3, 4), torch.tensor([3]), np.array([3]), 3])
def test_noise_keys_may_be_of_any_type(keys, tiny):
    sampling = Sampling(1.2, seed=np.int64(4), top_k=np.int64(50))
    wanted = generate(tiny, None, PROMPT, max_new_tokens=8, sampling=Sampling(1.2, 4, 50), sequence_ids=[3]).tokens
    assert generate(tiny, None, PROMPT, max_new_tokens=8, sampling=sampling, sequence_ids=keys).tokens == wanted


@pytest.mark.parametrize("keys", [[1, 2], [], [1.5], ["a"], [1 << 63], 0.5])
def test_what_is_no_noise_key_is_a_user_error(keys, tiny):
    with pytest.raises(UserError) as error:
        generate(tiny, None, PROMPT, max_new_tokens=2, sequence_ids=keys)
    assert error.value.key == "sequence_ids"
    if keys == [1.5]:
        with pytest.raises(UserError, match="sequence_ids"):
            stream(tiny, None, PROMPT, max_new_tokens=2, sequence_id=1.5)


@pytest.mark.parametrize("limit", [2.0, "2", None])
def test_a_limit_is_a_whole_number(limit, tiny):
    with pytest.raises(UserError, match="max_new_tokens"):
        generate(tiny, None, PROMPT, max_new_tokens=limit)


def test_a_stop_is_a_string_or_strings(tiny):
    with pytest.raises(UserError, match=r"^stop="):
        generate(tiny, None, PROMPT, max_new_tokens=2, stop=3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_k", 20.0),
        ("top_k", float("nan")),
        ("top_k", float("inf")),
        ("top_k", -1),
        ("top_k", "2"),
        ("seed", 1.5),
        ("seed", None),
        ("temperature", float("nan")),
        ("top_p", float("nan")),
        ("min_p", float("nan")),
    ],
)
def test_settings_that_are_no_numbers_of_their_kind_are_user_errors(key, value):
    with pytest.raises(UserError) as error:
        Sampling(**{"temperature": 1.0, key: value})
    assert error.value.key == f"sampling.{key}"


def test_top_k_of_none_is_off():
    assert Sampling(1.0, top_k=None) == Sampling(1.0)
