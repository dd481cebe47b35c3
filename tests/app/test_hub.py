"""`export.push_to_hub` against a hub that only writes down what it is sent."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from specwave.app import config as configs
from specwave.app import preflight
from specwave.app.hub import check_push, push, repositories
from specwave.app.run import Run
from specwave.app.train import main
from specwave.artifacts import UserError
from specwave.eagle.drafter import DrafterConfig, Eagle3Drafter
from specwave.eagle.export import Export, TargetFacts, read_drafter, write_drafter
from specwave.eagle.vocab import build_vocab_map

PUSH = Export(push_to_hub="me/drafter")


class Hub:
    """`HfApi` of a hub in memory: repository → (private, its files)."""

    def __init__(self):
        self.repositories, self.log, self.refuses = {}, [], ""

    def whoami(self):
        self._at_work("whoami")

    def create_repo(self, repo_id, private, exist_ok):
        self._at_work(f"create {repo_id}")
        assert exist_ok
        self.repositories.setdefault(repo_id, (private, {}))

    def upload_folder(self, repo_id, folder_path, commit_message, ignore_patterns):
        self._at_work(f"upload {repo_id}")
        read_drafter(folder_path)  # whole
        assert ignore_patterns == [".*"]
        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir() if path.name[0] != "."}
        self.repositories[repo_id][1].update(files)
        return SimpleNamespace(repo_url=f"hub/{repo_id}")

    def _at_work(self, what):
        self.log.append(what)
        if self.refuses and what.startswith(self.refuses):
            raise OSError("403 Forbidden:\n you have no right to write")


@pytest.fixture
def hub(monkeypatch):
    """A hub that is there, with somebody logged in."""
    found = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return found


def a_drafter(target, folder, layers=(1, 6)):
    config = DrafterConfig.of_target(target.arch, layers, 64)
    drafter = Eagle3Drafter(config, *build_vocab_map(torch.arange(target.vocab_size) % 5, 64))
    write_drafter(folder, drafter, TargetFacts(target.name, target.fingerprint, target.num_layers))
    return folder


def started(family_folders, folder, *overrides):
    """`train.py` on the tiny target: (what it said, the run)."""
    model = [f"model.source={family_folders['llama']}", "model.dtype=float32", "drafter.export_dtype=float32"]
    config = configs.build(
        "train", configs.check("train", configs.compose("train", ["model=tiny", *model, *overrides]))
    )
    run, said = Run(folder), []
    run.say = said.append
    main(config, run)
    return "\n".join(said), run


# ---------------------------------------------------------------- what is sent


def test_one_group_has_the_name_and_several_have_their_own_behind():
    assert repositories("me/drafter", ["L2-15-27"]) == {"L2-15-27": "me/drafter"}
    assert repositories("me/drafter", ["L2", "L2-9+fc_norm"]) == {
        "L2": "me/drafter-L2",
        "L2-9+fc_norm": "me/drafter-L2-9_fc_norm",
    }


def test_a_folder_goes_to_the_hub_with_its_card(hub, tiny, tmp_path):
    folder, said = a_drafter(tiny, tmp_path / "L1-6"), []
    (folder / ".model.safetensors.x.part").write_bytes(b"of a killed run")
    assert push(PUSH, {"L1-6": folder}, said.append) == {"L1-6": "hub/me/drafter"}
    private, files = hub.repositories["me/drafter"]
    assert private is True
    assert sorted(files) == ["README.md", "card.json", "config.json", "model.safetensors"]
    assert files["README.md"].startswith(b"---\nlibrary_name: specwave\n")
    assert said == ["pushed: hub/me/drafter"]


def test_nothing_is_sent_where_nothing_is_asked_for(hub, tmp_path):
    check_push(Export(), ["L1"])
    assert push(Export(), {"L1": tmp_path}, print) == {}
    assert hub.log == []


@pytest.mark.parametrize("lost", ["card.json", "model.safetensors", "config.json"])
def test_a_folder_that_is_not_whole_keeps_all_from_being_sent(hub, tiny, tmp_path, lost):
    folders = {name: a_drafter(tiny, tmp_path / name) for name in ("whole", "torn")}
    (folders["torn"] / lost).unlink()
    with pytest.raises(UserError, match="torn"):
        push(PUSH, folders, print)
    assert hub.log == []


def test_training_pushes_every_group_at_its_end(hub, family_folders, tmp_path):
    said, run = started(
        family_folders,
        tmp_path,
        "groups=[[2,5],{layers: [7], fc_norm: true}]",
        "trainer.max_steps=2",
        "trainer.decode=0",
        "data.limit=6",
        "data.validation=2",
        "data.max_new_tokens=8",
        "data.batch_size=2",
        "drafter.draft_vocab_size=64",
        "export.push_to_hub=me/tiny",
        "export.private=false",
    )
    assert hub.log == [
        "whoami",
        "create me/tiny-L2-5",
        "upload me/tiny-L2-5",
        "create me/tiny-L7_fc_norm",
        "upload me/tiny-L7_fc_norm",
    ]
    assert {private for private, _ in hub.repositories.values()} == {False}
    files = hub.repositories["me/tiny-L2-5"][1]
    assert "curves.png" in files  # the last thing that is added to a folder
    assert json.loads(files["card.json"])["layers"] == [2, 5]
    assert said.splitlines()[-2:] == ["pushed: hub/me/tiny-L2-5", "pushed: hub/me/tiny-L7_fc_norm"]
    assert run.facts["pushed"]["L2-5"] == "hub/me/tiny-L2-5"


def test_converting_pushes_too(hub, tiny, family_folders, tmp_path):
    a_drafter(tiny, tmp_path / "mine")
    said, _ = started(
        family_folders, tmp_path, "task=convert", f"convert.path={tmp_path / 'mine'}", "export.push_to_hub=me/mine"
    )
    assert hub.log == ["whoami", "create me/mine", "upload me/mine"]
    assert said.endswith("pushed: hub/me/mine")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("named", ["", "me", "me/a/b", "me/two words", "me/--x", f"me/{'x' * 97}"])
def test_a_name_that_no_repository_can_have(hub, named):
    with pytest.raises(UserError, match=r"export\.push_to_hub=") as refused:
        check_push(Export(push_to_hub=named), ["L1"])
    assert "\n" not in str(refused.value)
    assert hub.log == []


def test_the_group_s_name_counts_too(hub):
    """96 characters are allowed."""
    named = f"me/{'x' * 90}"
    check_push(Export(push_to_hub=named), ["L2-15-27"])
    with pytest.raises(UserError, match="no repository can be called so"):
        check_push(Export(push_to_hub=named), ["L2-15-27", "L1"])


def test_nobody_is_logged_in(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match=r"me/drafter: nobody is logged in: `hf auth login`, or set HF_TOKEN"):
        check_push(PUSH, ["L1"])
    assert hub.log == []


def test_the_hub_is_switched_off(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="switched off by HF_HUB_OFFLINE"):
        check_push(PUSH, ["L1"])
    assert hub.log == []


def test_a_hub_that_does_not_answer_is_one_line(hub):
    hub.refuses = "whoami"
    with pytest.raises(UserError) as refused:
        check_push(PUSH, ["L1"])
    assert str(refused.value) == (
        "export.push_to_hub=me/drafter: the hub does not take it (403 Forbidden: you have no right to write); use null "
        "to train without it"
    )
    check_push(PUSH, ["L1"], ask=False)  # the further processes of a run do not ask


@pytest.mark.parametrize("step", ["create", "upload"])
def test_a_refused_push_says_where_the_drafter_is(hub, tiny, tmp_path, step):
    folder = a_drafter(tiny, tmp_path / "L1-6")
    hub.refuses = step
    with pytest.raises(UserError, match=rf"the drafter is whole in {folder}; `hf upload me/drafter {folder}` sends it"):
        push(PUSH, {"L1-6": folder}, print)


def test_a_push_refused_midway_says_what_is_there_and_what_is_not(hub, tiny, tmp_path):
    folders = {name: a_drafter(tiny, tmp_path / name) for name in ("L1", "L2", "L3", "L4")}
    hub.refuses = "upload me/drafter-L2"
    with pytest.raises(UserError) as refused:
        push(PUSH, folders, print)
    said = str(refused.value)
    assert said.startswith("export.push_to_hub=me/drafter-L2: the hub does not take it (403 Forbidden")
    assert f"`hf upload me/drafter-L2 {folders['L2']}` sends it" in said
    assert said.endswith(f"; sent before it: hub/me/drafter-L1; not tried: {folders['L3']}, {folders['L4']}")
    assert set(hub.repositories["me/drafter-L1"][1]) >= {"card.json", "model.safetensors"}


def test_it_is_refused_before_the_target_is_loaded(hub, family_folders, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr("specwave.target.ModelConfig.load", lambda self: pytest.fail("the target was loaded"))
    monkeypatch.setattr(preflight, "system_memory", lambda: float("inf"))
    with pytest.raises(UserError, match="nobody is logged in"):
        started(family_folders, tmp_path, "export.push_to_hub=me/tiny")
