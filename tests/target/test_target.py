"""The hand-written forward against Hugging Face's, for every family."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from specwave.artifacts import UserError
from specwave.target import load_target
from specwave.target.tiny import make_tiny

FAMILIES = ["llama", "llama3", "mistral", "qwen2", "qwen3"]
# float32 sums of 64 to 160 terms in another order, through 8 random blocks whose logits have σ ≈ 1.6
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def references(family_folders):
    return {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, folder in family_folders.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_states_are_block_outputs(family, families, references):
    """Off-by-one guard (vllm#43671): layer l is the output of block l; the last one before the final norm."""
    target, model = families[family], references[family]
    ids = torch.randint(0, 512, (2, 70))
    outputs = {}
    hooks = [
        block.register_forward_hook(lambda _m, _a, out, i=i: outputs.__setitem__(i, out))
        for i, block in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    states = target.states(ids, range(8))
    for layer in range(8):
        torch.testing.assert_close(states[layer], outputs[layer], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(target.logits(states[7]), logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_right_changes_nothing(family, families):
    target = families[family]
    rows = [torch.randint(0, 512, (length,)) for length in (17, 40, 5)]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    together = target.states(padded, [3, 7])
    for row, ids in enumerate(rows):
        alone = target.states(ids[None], [3, 7])
        for layer in (3, 7):
            torch.testing.assert_close(together[layer][row, : len(ids)], alone[layer][0], atol=1e-4, rtol=1e-4)


def test_dtype_does_not_change_the_fingerprint_and_weights_do(tmp_path):
    one, two = make_tiny(tmp_path / "one"), make_tiny(tmp_path / "two", seed=1)
    same = load_target(one, dtype="float32").fingerprint
    assert load_target(one, dtype="bfloat16").fingerprint == same
    assert load_target(two, dtype="float32").fingerprint != same
    moved = tmp_path / "elsewhere"
    shutil.copytree(one, moved)
    assert load_target(moved).fingerprint == same
    config = json.loads((moved / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages }}"
    (moved / "tokenizer_config.json").write_text(json.dumps(config))
    (moved / "chat_template.jinja").unlink(missing_ok=True)
    assert load_target(moved).fingerprint != same


def test_block_weights_and_head_are_as_stored(family_folders, families, references):
    for family in FAMILIES:
        own = dict(references[family].model.layers[3].named_parameters())
        weights = families[family].block_weights(3)
        assert weights.keys() == own.keys()
        assert all(torch.equal(weights[name], own[name]) for name in own)
        assert torch.equal(families[family].head, references[family].lm_head.weight)


def test_end_tokens_are_read_from_the_generation_config(tmp_path):
    folder = make_tiny(tmp_path / "m")
    assert load_target(folder).eos_ids == (2,)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_target(folder).eos_ids == (2, 7)
    path.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    assert load_target(folder).eos_ids == ()


def _with(folder, tmp_path, **changes):
    copy = tmp_path / "changed"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"model_type": "gpt2"}, "llama, mistral, qwen2, qwen3"),
        ("llama", {"hidden_act": "gelu"}, "silu"),
        ("llama", {"mlp_bias": True}, "bias"),
        ("qwen2", {"use_sliding_window": True}, "sliding"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "default, linear, llama3"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(family, changes, named, family_folders, tmp_path):
    with pytest.raises(UserError, match=named):
        load_target(_with(family_folders[family], tmp_path, **changes), dtype="float32")


def test_a_sliding_window_limits_the_context(family_folders, tmp_path):
    target = load_target(_with(family_folders["mistral"], tmp_path, sliding_window=32), dtype="float32")
    assert target.max_length == 32


@pytest.mark.parametrize(
    ("name", "dtype", "device", "key"),
    [
        ("no-such-org/no-such-model", "auto", "auto", "model.source"),
        ("tiny", "float8", "auto", "model.dtype"),
        ("tiny", "auto", "warp", "model.device"),
    ],
)
def test_bad_names_are_user_errors(name, dtype, device, key):
    with pytest.raises(UserError) as error:
        load_target(name, dtype=dtype, device=device)
    assert error.value.key == key


def test_a_folder_without_weights_or_config_is_refused(tmp_path, family_folders):
    with pytest.raises(UserError, match=r"config\.json"):
        load_target(tmp_path)
    shutil.copy(family_folders["llama"] / "config.json", tmp_path)
    with pytest.raises(UserError, match="safetensors"):
        load_target(tmp_path)
