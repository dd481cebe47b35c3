"""Who answers prompts when training data is made on-policy: the decoding loop of specwave, or vLLM.

An engine takes token ids and gives token ids. Knows nothing about conversations or files.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from specwave.artifacts import UserError, check_seed
from specwave.data.conversations import Chat
from specwave.decoding import Sampling, generate
from specwave.target import ModelConfig, Target
from specwave.target.arch import read_arch
from specwave.target.folder import local_folder
from specwave.target.identity import read_tokenizer


@dataclass
class Regenerate:
    """`regenerate` in conf/train.yaml: how the target answers a data set."""

    engine: Literal["specwave", "vllm"] = "specwave"
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 32

    def __post_init__(self) -> None:
        for key, floor in (("max_new_tokens", 2), ("batch_size", 1)):
            if getattr(self, key) < floor:
                raise UserError(f"regenerate.{key}", getattr(self, key), f"must be ≥ {floor}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError("regenerate.temperature", self.temperature, "must be 0 (greedy) or a positive number")
        check_seed("regenerate.seed", self.seed)


class Engine(Protocol):
    def answers(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[list[int]]:
        """New tokens of each prompt, the end token included where there is one. `keys` are of the rows' noise."""


class LoopEngine:
    """`specwave.decoding.generate`, plain."""

    def __init__(self, target: Target, settings: Regenerate):
        self.target, self.settings = target, settings

    def answers(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[list[int]]:
        own = self.settings
        found = generate(
            self.target,
            None,
            list(prompts),
            max_new_tokens=own.max_new_tokens,
            sampling=Sampling(own.temperature, own.seed),
            sequence_ids=keys,
        )
        return found.tokens


class VllmEngine:
    """vLLM on token ids: many times faster on a GPU; its draws are its own.

    Written against vLLM 0.32 and not run with specwave.
    """

    def __init__(self, model: ModelConfig, chat: Chat, settings: Regenerate):
        """Raises UserError where vLLM is not installed."""
        check_engine(settings)
        import vllm

        self.vllm: Any = vllm
        self.settings, self.eos = settings, list(chat.eos_ids)
        self.model = vllm.LLM(
            model=str(local_folder(model.source, model.revision)),
            dtype=model.dtype,
            max_model_len=chat.max_length,
            seed=settings.seed,
        )

    def answers(self, prompts: Sequence[list[int]], keys: Sequence[int]) -> list[list[int]]:
        own = self.settings
        each = [
            self.vllm.SamplingParams(
                temperature=own.temperature,
                max_tokens=own.max_new_tokens,
                seed=(own.seed * 1_000_003 + key) % 2**31,
                stop_token_ids=self.eos,
            )
            for key in keys
        ]
        found = self.model.generate([{"prompt_token_ids": prompt} for prompt in prompts], each, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in found]


def check_engine(settings: Regenerate) -> None:
    """Refuses an engine that is not installed."""
    if settings.engine == "vllm":
        check_vllm("regenerate.engine")


def check_vllm(key: str) -> None:
    """Refuses what `key` asks of vLLM where that is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(key, "vllm", f"vLLM is not installed: pip install 'specwave[vllm]', or use {key}=specwave")


def read_chat(model: ModelConfig) -> Chat:
    """Tokenizer and template of a model whose weights are not loaded."""
    identity, folder = model.identify(), local_folder(model.source, model.revision)
    arch = read_arch(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return Chat(read_tokenizer(folder), model, model.name, identity.eos_ids, arch.max_length)
