"""vLLM as the producer of block outputs (`states.engine=vllm`): a faster forward on a GPU.

Its method `extract_hidden_states` stands where a drafter would and leaves a file for each prompt, with the inputs of
the blocks that were named: the output of block l is the input of block l + 1, and id N is what the last block hands to
the final norm. A sample is a prompt of which one more token is asked, and dropped.

Written against vLLM 0.32 and not run: what it writes these files with takes a GPU. Knows nothing about shards.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specwave.artifacts import UserError
from specwave.data.engines import check_vllm
from specwave.target import Target

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"


class VllmStates:
    """A second copy of the target, in vLLM; it takes what memory there is, until it is let go of."""

    def __init__(self, target: Target, layers: Sequence[int], longest: int):
        """`longest`: tokens of the longest sample.

        Raises:
            UserError: vLLM is not installed; a sample fills the target's positions, and none is left for its one token.
        """
        check_vllm("states.engine")
        if longest >= target.max_length:
            remedy = f"vLLM needs a position behind a sample, {target.name} has {target.max_length}: lower it by one"
            raise UserError("data.max_length", longest, remedy)
        import vllm

        self.layers = list(layers)
        self._connector: Any = importlib.import_module(_CONNECTOR)
        self._folder = tempfile.TemporaryDirectory(prefix="specwave-states-")
        ids = {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.layers]}
        drafter = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
        self._model: Any = vllm.LLM(
            model=str(target.folder),
            dtype=str(target.dtype).removeprefix("torch."),
            max_model_len=longest + 1,
            enable_chunked_prefill=False,  # a prompt must be one forward
            enable_prefix_caching=False,
            speculative_config=drafter | {"draft_model_config": {"hf_config": ids}},
            kv_transfer_config={
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": self._folder.name},
            },
        )
        self._once = vllm.SamplingParams(max_tokens=1, temperature=0.0)

    def outputs(self, samples: Sequence[list[int]]) -> dict[int, Tensor]:
        """Layer → [n, D], one sample behind the other, on the CPU."""
        found = []
        asked = [{"prompt_token_ids": ids} for ids in samples]
        for ids, output in zip(samples, self._model.generate(asked, self._once, use_tqdm=False), strict=True):
            path = output.kv_transfer_params["hidden_states_path"]
            stored = self._connector.load_hidden_states(path)  # waits until it is written
            self._connector.cleanup_hidden_states(path)
            if stored["token_ids"][: len(ids)].tolist() != ids:
                raise RuntimeError(f"{path}: vLLM wrote the states of other tokens than it was asked for")
            found.append(stored["hidden_states"][: len(ids)])  # [T, layers, D]
        whole = torch.cat(found)
        return {layer: whole[:, place] for place, layer in enumerate(self.layers)}
