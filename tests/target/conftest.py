"""What tests of recorded forwards share."""

import pytest
import torch

from specwave.target import load_target, recorded


@pytest.fixture
def replaying():
    """All of a recording but the graph: runs the function again on the held inputs, into the outputs of the first
    time."""

    def capture(run, inputs, pool):
        outputs = run(*inputs)

        def replay():
            torch.utils._pytree.tree_map(lambda held, fresh: held.copy_(fresh), outputs, run(*inputs))
            return outputs

        return replay

    return capture


@pytest.fixture
def recording(family_folders, monkeypatch, replaying):
    """A tiny target whose decoding steps are recorded."""
    monkeypatch.setattr(recorded, "capture", replaying)
    target = load_target(family_folders["llama"], dtype="float32")
    target.forwards = "graphs"
    return target
