"""`states.engine=vllm`, with a stand-in of the classes it asks: what is passed, what is taken, what is refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kept import FIRST, captured, prepared, samples, small_shards
from safetensors.torch import load_file, save_file

from specwave.artifacts import UserError
from specwave.data.producer import VllmStates
from specwave.data.states import Index
from specwave.eagle.offline import StatesConfig, check_states

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"


@pytest.fixture
def vllm(tiny, monkeypatch):
    """vLLM as far as it is asked: inputs of the blocks named to it, by the tiny target, as files that are removed."""
    seen = SimpleNamespace(options=[], asked=0, wrong=False)

    class LLM:
        def __init__(self, **options):
            seen.options.append(options)
            self.ids = options["speculative_config"]["draft_model_config"]["hf_config"][
                "eagle_aux_hidden_state_layer_ids"
            ]
            self.folder = Path(options["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"])

        def generate(self, asked, once, use_tqdm):
            assert once == {"max_tokens": 1, "temperature": 0.0}
            return [self.answer(one["prompt_token_ids"]) for one in asked]

        def answer(self, ids):
            seen.asked += 1
            blocks = tiny.states(torch.tensor([ids]), [place - 1 for place in self.ids])
            states = torch.stack([blocks[place - 1][0] for place in self.ids], 1)
            tokens = torch.tensor(ids) + int(seen.wrong)
            path = str(self.folder / f"{seen.asked}.safetensors")
            save_file({"hidden_states": states, "token_ids": tokens}, path)
            return SimpleNamespace(kv_transfer_params={"hidden_states_path": path})

    connector = SimpleNamespace(load_hidden_states=load_file, cleanup_hidden_states=lambda path: Path(path).unlink())
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: options))
    monkeypatch.setitem(sys.modules, CONNECTOR, connector)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    return seen


def rows_of(source, data):
    from specwave.data.states import digest

    keys = [digest(sample.ids) for sample in [*data.train, *data.validation]]
    return {name: [source.reader.rows(name, key) for key in keys] for name in source.reader.index.columns}


@pytest.mark.parametrize("targets", ["recompute", "top_k"])
def test_its_states_are_the_targets(tiny, vllm, tmp_path, monkeypatch, targets):
    """Every column of every sample, to what forwards of other shapes round apart; its files are gone with it."""
    small_shards(monkeypatch)
    changes = {"targets": targets, "k": 12}
    data, groups = prepared(), [(2, 4, 5)]
    theirs = rows_of(captured(tiny, tmp_path / "vllm", groups, data, engine="vllm", **changes), data)
    ours = rows_of(captured(tiny, tmp_path / "ours", groups, data, **changes), data)
    assert theirs.keys() == ours.keys()
    for name, rows in ours.items():
        for mine, its in zip(rows, theirs[name], strict=True):
            torch.testing.assert_close(its, mine, rtol=1e-4, atol=1e-4)
    assert vllm.asked == len(samples())
    (options,) = vllm.options  # one engine, whatever the number of shards
    assert options["speculative_config"]["method"] == "extract_hidden_states"
    assert (options["model"], options["dtype"]) == (str(tiny.folder), "float32")
    assert options["max_model_len"] == max(len(sample.ids) for sample in samples()) + 1
    named = options["speculative_config"]["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert named == [3, 5, 6, 8]  # inputs of blocks; 8 of 8 is what the last one hands on
    folder = Path(options["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"])
    assert not folder.exists()


def test_its_folder_serves_every_run(tiny, vllm, tmp_path):
    """Read where vLLM is not, and fewer layers of it too."""
    captured(tiny, tmp_path, engine="vllm")
    asked = vllm.asked
    for engine in ("specwave", "vllm"):
        captured(tiny, tmp_path, [(4, 5)], engine=engine)
    assert vllm.asked == asked
    assert len(vllm.options) == 1
    assert Index.load(tmp_path, "states.path").facts["engine"] == "vllm"


def test_a_capture_ends_as_it_was_begun(tiny, vllm, tmp_path, monkeypatch):
    small_shards(monkeypatch)
    from specwave.data import filling as room

    write = room.write_shard

    def breaking(folder, index, *given):
        if len(index.shards) == 2:
            raise KeyboardInterrupt
        write(folder, index, *given)

    with monkeypatch.context() as patched:
        patched.setattr(room, "write_shard", breaking)
        with pytest.raises(KeyboardInterrupt):
            captured(tiny, tmp_path, engine="vllm")
    with pytest.raises(UserError, match=r"states\.path=.*begun with states\.engine=vllm: go on with that, or delete"):
        captured(tiny, tmp_path)
    captured(tiny, tmp_path, engine="vllm")
    assert Index.load(tmp_path, "states.path").complete


def test_states_of_other_tokens_are_not_taken(tiny, vllm, tmp_path):
    vllm.wrong = True
    with pytest.raises(RuntimeError, match="states of other tokens than it was asked for"):
        captured(tiny, tmp_path, engine="vllm")
    assert not list(tmp_path.glob("shard*"))


def test_a_sample_that_fills_all_positions(tiny, vllm):
    with pytest.raises(
        UserError, match=r"data\.max_length=2048: vLLM needs a position behind a sample, llama has 2048"
    ):
        VllmStates(tiny, [2], 2048)
    assert vllm.options == []


def test_vllm_that_is_missing_is_said_first(tiny, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"states\.engine=vllm: vLLM is not installed: pip install 'specwave\[vllm\]'"):
        check_states(tiny, FIRST, StatesConfig("offline", engine="vllm"))
    with pytest.raises(UserError, match=r"states\.engine=vllm: nothing is kept online: add states\.mode=offline"):
        StatesConfig(engine="vllm")
