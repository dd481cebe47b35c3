"""Passes over drafting steps, cached as those of `passes.py` are: by target, conversations and what is kept."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from specwave.artifacts import UserError, cache_dir, reading, write_tensors
from specwave.layers.passes import REMEDY, pass_path
from specwave.layers.settings import Calibration
from specwave.layers.steps import Sampling, Steps, collect

if TYPE_CHECKING:
    from specwave.target import ModelConfig

SCHEME = 1  # raise it when the pass changes what it computes
_TENSORS = ("inputs", "states", "tokens", "conversations", "vocabulary", "head")
_NUMBERS = ("width", "token_width", "seen")


def stepped(model: ModelConfig, settings: Calibration, own: Sampling, say: Callable[[str], None] = print) -> Steps:
    """The drafting steps of a calibration: from the cache, else from two streams of its conversations.

    Raises:
        UserError: a mistake in model or conversations; a cached file that is damaged or of another target.
    """
    identity, conversations = model.identify(), settings.conversations()
    digest = settings.digest(conversations)
    path = pass_path("steps", SCHEME, identity, digest, asdict(own))
    facts = {"fingerprint": identity.fingerprint, "digest": digest, "sampling": asdict(own)}
    if path.exists():
        say("drafting steps: re-used from the cache")
        return _load(path, facts)
    say("drafting steps: one pass")
    target = model.load()
    found = collect(target, settings.samples(target, conversations), own, settings.batch_size)
    numbers = {name: getattr(found, name) for name in _NUMBERS}
    try:
        tensors = {name: getattr(found, name) for name in _TENSORS}
        write_tensors(path, tensors, {"facts": json.dumps(facts | {"numbers": numbers})})
    except (OSError, SafetensorError) as error:
        warnings.warn(f"SPECWAVE_CACHE={cache_dir()}: the pass is not kept ({error})", stacklevel=2)
    return found


def _load(path: Path, facts: Mapping[str, object]) -> Steps:
    with reading("cache", path, REMEDY, also=(SafetensorError,)), safe_open(path, framework="pt") as stored:
        held = json.loads(stored.metadata()["facts"])
        numbers = held.pop("numbers")
        tensors = {name: stored.get_tensor(name) for name in _TENSORS}
        width, token_width, seen = (int(numbers[name]) for name in _NUMBERS)
        found = Steps(**tensors, width=width, token_width=token_width, seen=seen, cached=True)
        fingerprint = str(held["fingerprint"])
    if held != facts:
        raise UserError(
            "cache", path, "holds the drafting steps of another model, tokenizer, chat template, setting or other "
            f"conversations (fingerprint {fingerprint}, this target's is {facts['fingerprint']}): {REMEDY}"
        )  # fmt: skip
    return found
