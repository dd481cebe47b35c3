"""The hand-written forward against Hugging Face's, for every family."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from specwave.artifacts import UserError
from specwave.decoding import generate
from specwave.target import load_target
from specwave.target.arch import read_arch
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


def test_up_to_its_window_sliding_attention_is_hugging_face_s_and_beyond_refused(family_folders, tmp_path):
    """transformers PR#47447: exact to the last position inside, by name outside."""
    folder = _with(family_folders["mistral"], tmp_path, sliding_window=32)
    target = load_target(folder, dtype="float32")
    assert target.max_length == 32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.randint(0, 512, (1, 9))
    wanted = model.generate(prompt, max_new_tokens=23, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert generate(target, None, prompt, max_new_tokens=23, eos_ids=()).tokens == wanted[0, 9:].tolist()
    with pytest.raises(UserError, match=r"must fit the target's 32 positions: changed's attention slides over so many"):
        generate(target, None, prompt, max_new_tokens=24)


@pytest.mark.parametrize(("window", "length"), [("absent", 4096), (None, 8192), (100, 100), (9000, 8192)])
def test_a_window_is_read_as_transformers_reads_it(window, length, family_folders, tmp_path):
    folder = _with(family_folders["mistral"], tmp_path, max_position_embeddings=8192, sliding_window=window)
    if window == "absent":
        config = json.loads((folder / "config.json").read_text())
        del config["sliding_window"]
        (folder / "config.json").write_text(json.dumps(config))
    arch = read_arch(json.loads((folder / "config.json").read_text()))
    assert (arch.max_length, arch.window) == (length, AutoConfig.from_pretrained(folder).sliding_window)
    assert "window" not in arch.describe()  # fingerprints noted in drafters' cards stay good


def test_a_lost_shard_is_named(family_folders, tmp_path):
    """Weights in three files, the middle one gone."""
    folder = _with(family_folders["llama"], tmp_path)
    (whole,) = folder.glob("*.safetensors")
    weights = load_file(whole)
    whole.unlink()
    names = sorted(weights)
    for part in range(3):
        own = {name: weights[name] for name in names[part * len(names) // 3 : (part + 1) * len(names) // 3]}
        save_file(own, folder / f"model-0000{part + 1}-of-00003.safetensors")
    load_target(folder, dtype="float32")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"^model\.source=.*damaged or of another kind.*fetch or make"):
        load_target(folder, dtype="float32")


@pytest.mark.parametrize("place", [".", "..", "inner/.."])
def test_a_folder_is_named_by_its_name_however_it_is_written(place, family_folders, tmp_path, monkeypatch):
    folder = _with(family_folders["llama"], tmp_path)
    (folder / "inner").mkdir()
    monkeypatch.chdir(folder / "inner" if place == ".." else folder)
    assert load_target(place, dtype="float32").name == "changed"


@pytest.mark.parametrize(
    ("name", "dtype", "device", "key"),
    [
        ("no-such-org/no-such-model", "auto", "auto", "model.source"),
        ("tiny", "float8", "auto", "model.dtype"),
        ("tiny", "auto", "warp", "model.device"),
        ("tiny", "auto", "meta", "model.device"),
        ("tiny", "auto", "cpu:1", "model.device"),
        ("tiny", "auto", "cuda:", "model.device"),
        ("tiny", "auto", "cuda:-1", "model.device"),
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
