"""`task=convert`: drafters of other tools become ours, ours are written in another format."""

from __future__ import annotations

import json

import pytest
import torch

from specwave.app import config as configs
from specwave.app.evaluate import main as evaluate
from specwave.app.run import Run
from specwave.app.train import main
from specwave.artifacts import UserError
from specwave.eagle import load_drafter
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.export import TargetFacts, read_drafter, write_drafter
from specwave.eagle.vocab import build_vocab_map


def a_drafter(target, folder, layers=(1, 6), **more):
    config = DrafterConfig.of_target(target.arch, layers, 64)
    drafter = Eagle3Drafter(config, *build_vocab_map(torch.arange(target.vocab_size) % 5, 64))
    facts = TargetFacts(target.name, target.fingerprint, target.num_layers)
    write_drafter(folder, drafter, facts, dtype=torch.float32, training={"tokens": 7}, **more)
    return drafter


def converted(family_folders, folder, *overrides):
    model = [f"model.source={family_folders['llama']}", "model.dtype=float32", "drafter.export_dtype=float32"]
    overrides = ["model=tiny", "task=convert", *model, *overrides]
    config = configs.build("train", configs.check("train", configs.compose("train", overrides)))
    run, said = Run(folder), []
    run.say = said.append
    main(config, run)
    return "\n".join(said)


@pytest.mark.parametrize("layout", ["engines", "speculators"])
def test_another_tools_drafter_becomes_one_of_ours(tiny, family_folders, tmp_path, layout):
    drafter = a_drafter(tiny, tmp_path / "theirs", layout=layout)
    (tmp_path / "theirs" / "card.json").unlink()
    said = converted(family_folders, tmp_path, f"convert.path={tmp_path / 'theirs'}")
    assert "layers 1, 6 (outputs of blocks), 64 draft tokens" in said
    _, tensors, card = read_drafter(tmp_path / "drafters" / "L1-6")
    assert card["target"]["fingerprint"] == tiny.fingerprint
    assert card["data"] == {"converted_from": "theirs"}
    assert all(torch.equal(value, tensors[name]) for name, value in drafter.state_dict().items())
    load_drafter(tmp_path / "drafters" / "L1-6", tiny)


def test_another_tools_drafter_is_evaluated(tiny, family_folders, tmp_path):
    """Weights of chance: what it drafts is hardly ever accepted, and the text is the target's own all the same."""
    a_drafter(tiny, tmp_path / "theirs")
    (tmp_path / "theirs" / "card.json").unlink()
    converted(family_folders, tmp_path, f"convert.path={tmp_path / 'theirs'}")
    model = [f"model.source={family_folders['llama']}", "model.dtype=float32", "limit=2", "max_new_tokens=8"]
    overrides = ["model=tiny", *model, "decoding=eagle3", f"checkpoint={tmp_path}"]
    config = configs.build("evaluate", configs.check("evaluate", configs.compose("evaluate", overrides)))
    (tmp_path / "evaluation").mkdir()
    evaluate(config, Run(tmp_path / "evaluation"))
    found = json.loads((tmp_path / "evaluation" / "results.json").read_text())
    assert (found["label"], found["layers"]) == ("L1-6", [1, 6])
    assert (found["overall"]["questions"], found["overall"]["exact_match_rate"]) == (2, 1.0)
    assert found["overall"]["acceptance"]["drafts"] > 0


def test_one_of_ours_in_another_format(tiny, family_folders, tmp_path):
    drafter = a_drafter(tiny, tmp_path / "ours")
    said = converted(family_folders, tmp_path, f"convert.path={tmp_path / 'ours'}", "export.format=speculators")
    assert "vLLM serves it alone" in said
    written = tmp_path / "drafters" / "L1-6"
    assert json.loads((written / "config.json").read_text())["speculators_model_type"] == "eagle3"
    _, tensors, card = read_drafter(written)
    assert card["training"] == {"tokens": 7}
    assert torch.equal(tensors["fc.weight"], drafter.fc.weight)


def test_what_is_refused(tiny, family_folders, tmp_path):
    with pytest.raises(UserError, match=r"convert\.path=null: name the drafter's folder"):
        converted(family_folders, tmp_path)
    with pytest.raises(UserError, match=r"convert\.path=.*there is no such folder"):
        converted(family_folders, tmp_path, "convert.path=nowhere")
    a_drafter(tiny, tmp_path / "theirs")
    (tmp_path / "theirs" / "card.json").unlink()
    path = tmp_path / "theirs" / "config.json"
    content = json.loads(path.read_text())
    for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
        del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"it names no layers.*\[1, 3, 4\] if EAGLE's own code trained it"):
        converted(family_folders, tmp_path, f"convert.path={tmp_path / 'theirs'}")
    with pytest.raises(UserError, match=r"convert\.layers=\[1, 9\]: layer 9 is unknown"):
        converted(family_folders, tmp_path, f"convert.path={tmp_path / 'theirs'}", "convert.layers=[1,9]")
    converted(family_folders, tmp_path, f"convert.path={tmp_path / 'theirs'}", "convert.layers=[1,6]")
    assert read_drafter(tmp_path / "drafters" / "L1-6")[2]["layers"] == [1, 6]
