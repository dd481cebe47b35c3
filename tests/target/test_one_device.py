"""A target lies on one device, and says so where it is asked for more."""

from pathlib import Path

import pytest
import yaml

from specwave.artifacts import UserError
from specwave.target import ModelConfig

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
