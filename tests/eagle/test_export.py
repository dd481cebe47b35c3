"""What is written is read back, means the same to every engine, and is refused when something is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specwave.artifacts import UserError
from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.export import TargetFacts, check_target, read_drafter, write_drafter

TARGET = TargetFacts("tiny", "f" * 64, 6)
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def made(make_case, layers, rope=None) -> Eagle3Drafter:
    drafter = make_case(layers, dtype=torch.float32).drafter
    if rope is None:
        return drafter
    again = Eagle3Drafter(replace(drafter.config, rope=rope))
    again.load_state_dict(drafter.state_dict())
    return again


def edit(path, **changes):
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key) if value is None else content.update({key: value})
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("layers", [(1, 4), (0, 2, 3), (5,), (0,), (3,)])
@pytest.mark.parametrize("rope", [None, ROPE])
def test_round_trip(make_case, tmp_path, layers, rope):
    drafter = made(make_case, layers, rope)
    write_drafter(tmp_path, drafter, TARGET, dtype=torch.float32, data={"samples": 3}, training={"tau_hat": 1.5})
    config, tensors, card = read_drafter(tmp_path)
    assert config == drafter.config  # rope whole, layers without the padding
    assert (card["data"], card["training"]) == ({"samples": 3}, {"tau_hat": 1.5})
    again = Eagle3Drafter(config)
    again.load_state_dict(tensors)
    assert all(torch.equal(value, tensors[name]) for name, value in drafter.state_dict().items())
    assert torch.equal(again.frequency, drafter.frequency)


def test_both_conventions_and_every_key(make_case, tmp_path):
    drafter = made(make_case, (1, 4), ROPE)
    assert write_drafter(tmp_path, drafter, TARGET) == []
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 4], "use_aux_hidden_state": True}
    assert content["eagle_aux_hidden_state_layer_ids"] == [2, 5]  # block inputs: ours + 1
    assert content["num_aux_hidden_states"] == 2
    assert content["architectures"] == ["LlamaForCausalLMEagle3"]
    assert content["rope_parameters"] == content["rope_scaling"] == ROPE
    assert content["rope_theta"] == 500000.0
    assert (content["draft_vocab_size"], content["head_dim"]) == (9, 6)
    assert content["tie_word_embeddings"] is False
    assert content["norm_before_residual"] is False
    assert all(content[name] is False for name in ("fc_norm", "norm_output", "norm_before_fc"))
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {
        torch.bfloat16,
        torch.int64,
        torch.bool,
    }
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["layers"] == [1, 4]
    assert card["layer_convention"] == "block_output"
    assert card["serves"] == ["vllm", "sglang"]


@pytest.mark.parametrize(("layer", "written"), [(5, [4, 5]), (0, [0, 1]), (3, [2, 3])])
def test_one_layer_is_padded_to_the_same_function(make_case, tmp_path, layer, written):
    drafter = made(make_case, (layer,))
    write_drafter(tmp_path, drafter, TARGET, dtype=torch.float32)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == written
    assert content["num_aux_hidden_states"] == 2
    assert 5 not in set(written) - {layer}  # the padding is never the last block
    stored = load_file(tmp_path / "model.safetensors")
    padded = Eagle3Drafter(replace(drafter.config, layers=tuple(written)))
    padded.load_state_dict(stored)
    states = {index: torch.randn(1, 4, 12) for index in written}
    embedding, positions = torch.randn(1, 4, 12), torch.arange(4)[None]
    logits = []
    for one in (padded, drafter):
        hidden = one.fuse([states[index] for index in one.config.layers])
        logits.append(one.logits(one.forward_step(embedding, hidden, lambda q, k, v: v.repeat(1, 2, 1, 1), positions)))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)  # 12 more zeros in each sum of fc


def test_the_last_block_serves_in_vllm_only(make_case, tmp_path):
    warnings = write_drafter(tmp_path, made(make_case, (2, 5)), TARGET)
    assert "SGLang cannot capture it" in warnings[0]
    assert read_drafter(tmp_path)[2]["serves"] == ["vllm"]


def test_pictures_travel_with_the_card(make_case, tmp_path):
    (tmp_path / "entropy.png").write_bytes(b"picture")
    write_drafter(tmp_path / "d", made(make_case, (1, 4)), TARGET, pictures=[tmp_path / "entropy.png"])
    assert (tmp_path / "d" / "entropy.png").read_bytes() == b"picture"
    assert read_drafter(tmp_path / "d")[2]["pictures"] == ["entropy.png"]


def test_no_card(tmp_path):
    with pytest.raises(UserError, match=r"checkpoint=.*card.json is missing"):
        read_drafter(tmp_path)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("card.json", {"layers": None}, "no layer ids"),
        ("card.json", {"layers": []}, "no layer ids"),
        ("config.json", {"eagle_config": None}, "no layer ids"),
        ("config.json", {"eagle_aux_hidden_state_layer_ids": None}, "no layer ids"),
        ("card.json", {"layer_convention": "block_input"}, "layer_convention is 'block_input'"),
        ("card.json", {"layers": [1, 3]}, "config.json names layers"),
        ("config.json", {"eagle_aux_hidden_state_layer_ids": [1, 4]}, "config.json names layers"),
        ("card.json", {"layers": [1, 9]}, "layer 9 is unknown"),
        ("config.json", {"head_dim": None}, "lacks 'head_dim'"),
        ("config.json", {"head_dim": 8}, "config.json asks for"),
        ("config.json", {"vocab_size": 40}, "t2d has 23 entries"),
        ("config.json", {"norm_before_residual": True}, "norm_before_residual=True"),
        ("config.json", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("config.json", {"max_position_embeddings": "x"}, "checkpoint="),
        ("config.json", {"max_position_embeddings": -1}, "max_position_embeddings=-1"),
        ("config.json", {"hidden_size": "abc"}, "checkpoint="),
        ("config.json", {"rope_parameters": None}, "checkpoint="),
        ("config.json", {"eagle_config": [1]}, "checkpoint="),
        ("card.json", {"layers": 5}, "checkpoint="),
        ("card.json", {"target": None}, "checkpoint="),
        ("card.json", {"target": {"name": "t", "num_layers": 6}}, "checkpoint="),
        ("card.json", {"training": [1]}, "checkpoint="),
        ("card.json", {"padding_layer": "x"}, "checkpoint="),
        ("card.json", {"schema": 2}, "schema"),
    ],
)
def test_incomplete_or_contradictory(make_case, tmp_path, file, changes, message):
    write_drafter(tmp_path, made(make_case, (1, 4)), TARGET)
    edit(tmp_path / file, **changes)
    with pytest.raises(UserError, match=message):
        read_drafter(tmp_path)


def test_damaged_tensors(make_case, tmp_path):
    write_drafter(tmp_path, made(make_case, (1, 4)), TARGET)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"][0] += 30
    save_file(tensors, path)
    with pytest.raises(UserError, match="points outside the target's 23 tokens"):
        read_drafter(tmp_path)
    tensors["d2t"][0] -= 30
    good = tensors["fc.weight"]
    for bad, words in ((good * float("nan"), "NaN"), (good.long(), "int64")):
        save_file(tensors | {"fc.weight": bad}, path)
        with pytest.raises(UserError, match=words):
            read_drafter(tmp_path)
    save_file(tensors | {"fc_norm.0.weight": good[:, 0].contiguous()}, path)
    with pytest.raises(UserError, match=r"holds fc_norm\.0\.weight"):
        read_drafter(tmp_path)
    del tensors["lm_head.weight"]
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"lacks lm_head.weight"):
        read_drafter(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="cannot be read"):
        read_drafter(tmp_path)


def test_a_map_that_does_not_fit_is_not_written(make_case, tmp_path):
    drafter = made(make_case, (1, 4))
    drafter.d2t[3] += 50
    with pytest.raises(UserError, match="points outside"):
        write_drafter(tmp_path / "d", drafter, TARGET)
    assert not (tmp_path / "d").exists()


def test_of_another_target(make_case, tmp_path):
    write_drafter(tmp_path, made(make_case, (1, 4)), TARGET)
    config, _, card = read_drafter(tmp_path)
    same = SimpleNamespace(name="tiny", fingerprint="f" * 64, num_layers=6, hidden_size=12, vocab_size=23)
    other = SimpleNamespace(name="hub", fingerprint="0" * 64, num_layers=6, hidden_size=12, vocab_size=23)
    larger = SimpleNamespace(name="big", fingerprint="f" * 64, num_layers=6, hidden_size=16, vocab_size=23)
    check_target(config, card, same)
    check_target(config, card, other, allow_other_target=True)
    with pytest.raises(UserError, match="allow_other_target=true"):
        check_target(config, card, other)
    with pytest.raises(UserError, match="the width 12, big 16"):
        check_target(config, card, larger, allow_other_target=True)
