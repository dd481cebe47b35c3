"""What SGLang makes of our files. It does not run here: its reading is re-enacted from its public code (0.5.23).

Three things matter. Layers: nested ids are outputs of blocks, it adds 1 and captures inputs of those blocks while it
runs through them, so that nothing is captured behind the last one; without nested ids it takes its default and says
nothing. `fc`: applied only where the joined states are wider than the drafter. Norms of EAGLE-3.1: by its keys.
"""

from __future__ import annotations

import json
from itertools import chain, combinations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from specwave.artifacts import UserError
from specwave.eagle import export
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.engines import engine_config, padding_layer, served_by
from specwave.eagle.export import TargetFacts, read_drafter, write_drafter
from specwave.eagle.vocab import build_vocab_map
from specwave.layers.selectors import fixed_rule

IDS = "eagle_aux_hidden_state_layer_ids"
BLOCKS, WIDTH = 8, 12
TARGET = TargetFacts("tiny", "f" * 64, BLOCKS)
SWITCHES = [{}, {"fc_norm": True}, {"norm_output": True}, {"fc_norm": True, "norm_output": True}]


def blocks_entered(content: dict, num_layers: int) -> list[int]:
    """The blocks whose inputs SGLang captures, of those that it enters."""
    nested = content.get("eagle_config") or {}
    outputs = nested.get(IDS)
    wanted = [layer + 1 for layer in outputs] if outputs else [2, num_layers // 2, num_layers - 3]
    return [block for block in range(num_layers) if block in wanted]


def first_state(content: dict, stored: dict[str, Tensor], inputs: list[Tensor]) -> Tensor:
    """What SGLang's drafter begins with; `inputs[i]` is block i's input."""
    captured = [inputs[block] for block in blocks_entered(content, len(inputs))]
    if content.get("fc_norm"):
        eps = content["rms_norm_eps"]
        captured = [F.rms_norm(x, x.shape[-1:], stored[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(captured)]
    joined = torch.cat(captured, -1)
    return joined if joined.shape[-1] == content["hidden_size"] else F.linear(joined, stored["fc.weight"])


def drafter_of(layers, **switches) -> Eagle3Drafter:
    config = DrafterConfig(
        layers=tuple(layers),
        target_hidden_size=WIDTH,
        hidden_size=WIDTH,
        num_heads=2,
        num_kv_heads=1,
        head_dim=6,
        intermediate_size=16,
        vocab_size=20,
        draft_vocab_size=9,
        rms_eps=1e-5,
        max_length=64,
        rope={"rope_type": "default", "rope_theta": 100.0},
        **switches,
    )
    drafter = Eagle3Drafter(config, *build_vocab_map(torch.arange(20), 9))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return drafter


def served(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.fixture
def states():
    """Inputs of the blocks, and their outputs: what enters one block has left the one before."""
    outputs = list(torch.randn(BLOCKS, 3, WIDTH))
    return [torch.randn(3, WIDTH), *outputs[:-1]], outputs


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("layers", [(3,), (0,), (BLOCKS - 2,), (2, 5), (0, 1), (1, 3, 4), (2, 4, 5), (0, 3, 6)])
def test_it_begins_with_our_first_state(layers, switches, states, tmp_path):
    """One layer, two, three, with EAGLE-3.1's switches and without."""
    inputs, outputs = states
    drafter = drafter_of(layers, **switches)
    write_drafter(tmp_path, drafter, TARGET, dtype=torch.float32)
    content, stored = served(tmp_path)
    assert read_drafter(tmp_path)[2]["serves"] == ["vllm", "sglang"]
    ours = drafter.fuse([outputs[layer] for layer in layers])
    torch.testing.assert_close(
        first_state(content, stored, inputs), ours, rtol=1e-5, atol=1e-5
    )  # sums of 12 more zeros
    assert {name: content[name] for name in switches} == switches
    assert content["eagle_config"]["use_aux_hidden_state"] is True


def test_one_layer_alone_would_be_served_without_fc(states, tmp_path, monkeypatch):
    """What the padding is for: a single layer is as wide as the drafter, and fc is passed over without a word."""
    inputs, outputs = states
    drafter = drafter_of((3,))
    monkeypatch.setattr(export, "padding_layer", lambda *_: None)
    write_drafter(tmp_path, drafter, TARGET, dtype=torch.float32)
    assert torch.equal(first_state(*served(tmp_path), inputs), outputs[3])
    assert not torch.allclose(drafter.fuse([outputs[3]]), outputs[3], atol=0.1)


def test_it_serves_exactly_what_it_can_capture():
    """Every group of one to three layers: `sglang` is among the engines where all layers written are captured."""
    groups = chain.from_iterable(combinations(range(BLOCKS), size) for size in (1, 2, 3))
    told = {True: 0, False: 0}
    for layers in groups:
        config = drafter_of(layers).config
        spare = padding_layer(config, BLOCKS)
        written = sorted(layers if spare is None else {*layers, spare})
        content = engine_config(config, written, torch.bfloat16)
        whole = [block - 1 for block in blocks_entered(content, BLOCKS)] == written
        assert ("sglang" in served_by(written, BLOCKS)[0]) == whole == (BLOCKS - 1 not in layers), layers
        assert content["num_aux_hidden_states"] == len(written)
        told[whole] += 1
    assert told == {True: 63, False: 29}


def test_the_last_block_is_missed_and_said_so(states, tmp_path):
    """{5, 23, 35} of 36 is such a group: fc would get fewer states than it has columns for."""
    warnings = write_drafter(tmp_path, drafter_of((2, BLOCKS - 1)), TARGET, dtype=torch.float32)
    content, _ = served(tmp_path)
    assert blocks_entered(content, BLOCKS) == [3]
    assert read_drafter(tmp_path)[2]["serves"] == ["vllm"]
    assert warnings == [f"layer {BLOCKS - 1} is the last block: SGLang cannot capture it, vLLM can"]
    assert warnings[0] in (tmp_path / "README.md").read_text()


def test_without_nested_ids_it_would_read_its_default(states, tmp_path):
    """vllm#50170's kind of fault: no message, other layers. Top-level ids, which vLLM reads, do not help."""
    inputs, _ = states
    write_drafter(tmp_path, drafter_of((1, 2, 6)), TARGET, dtype=torch.float32)
    content, stored = served(tmp_path)
    meant = first_state(content, stored, inputs)
    assert torch.equal(first_state(content | {IDS: [1, 2, 3]}, stored, inputs), meant)
    silent = {key: value for key, value in content.items() if key != "eagle_config"}
    assert content[IDS] == [2, 3, 7]
    assert tuple(block - 1 for block in blocks_entered(silent, BLOCKS)) == fixed_rule(
        "eagle3_release", BLOCKS, "groups"
    )
    assert not torch.allclose(first_state(silent, stored, inputs), meant, atol=0.1)


def test_one_norm_over_two_layers_is_another_function():
    """The padding would be seen by it, so one layer with `norm_before_fc` is refused."""
    with pytest.raises(UserError, match="norm_before_fc"):
        drafter_of((3,), norm_before_fc=True)


def test_speculators_format_is_not_for_it(tmp_path):
    """It nests no ids: SGLang would take its default, so the card does not name it."""
    write_drafter(tmp_path, drafter_of((1, 3)), TARGET, layout="speculators")
    assert "eagle_config" not in json.loads((tmp_path / "config.json").read_text())
    assert read_drafter(tmp_path)[2]["serves"] == ["vllm"]
