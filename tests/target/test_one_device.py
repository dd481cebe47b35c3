"""A target lies on one device, and says so where it is asked for more."""

from pathlib import Path

import pytest
import torch
import yaml

from specwave.artifacts import UserError
from specwave.target import ModelConfig
from specwave.target.load import device_of

CONF = Path(__file__).resolve().parents[2] / "conf" / "model"


@pytest.mark.parametrize("asked", ["auto", "balanced", "sequential"])
def test_a_target_cut_over_devices_is_refused_by_name(asked):
    """Before anything is loaded, with the limit and what to do."""
    with pytest.raises(UserError) as refused:
        ModelConfig("big", "nobody/has-it", device_map=asked)
    assert str(refused.value) == (
        f"model.device_map={asked}: blocks and cache of specwave's own forward are on one device, a target cut over "
        "several is not computed: use null, with a smaller model.dtype or a device that holds it"
    )


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_option_has_every_key(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert content.keys() - {"_target_"} == ModelConfig.__dataclass_fields__.keys()
    assert content["device_map"] is None


@pytest.mark.parametrize(
    ("here", "wanted", "found"),
    [
        (2, "cuda:1", torch.device("cuda", 1)),
        (2, "cuda", torch.device("cuda")),
        (2, "auto", torch.device("cuda")),
        (2, "cpu", torch.device("cpu")),
        (2, "cuda:2", "there are 2 CUDA devices here, numbered from 0: choose cuda, cpu or auto"),
        (1, "cuda:1", "there is one CUDA device here, numbered from 0: choose cuda, cpu or auto"),
        (0, "cuda:0", "there is no CUDA device here; choose cpu or auto"),
        (0, "auto", torch.device("cpu")),
    ],
)
def test_a_gpu_by_its_number(here, wanted, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    if isinstance(found, torch.device):
        assert device_of(wanted) == found
        return
    with pytest.raises(UserError) as refused:
        device_of(wanted)
    assert str(refused.value) == f"model.device={wanted}: {found}"
