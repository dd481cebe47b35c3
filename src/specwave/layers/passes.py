"""Calibration passes, cached: the same conversations through the same target are never forwarded twice.

A cached pass is one safetensors file per row setting in the user's cache; scale, centre and every selector read the
same one. Its name is a hash of what it depends on, and it says itself which target it is of.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specwave.artifacts import UserError, cache_dir, reading, write_tensors
from specwave.layers.calibrate import Calibrated, calibrate
from specwave.layers.rows import Rows
from specwave.layers.settings import Calibration

if TYPE_CHECKING:
    from specwave.data.sources import Conversation
    from specwave.target import ModelConfig, Target
    from specwave.target.load import Identity

SCHEME = 1  # raise it when the pass changes what it computes
REMEDY = "delete it: the pass is made again"


@dataclass(frozen=True)
class Job:
    """One setting to calibrate, and the rest of the pass it belongs to."""

    settings: Calibration
    identity: Identity
    digest: str  # of the conversations and of how they are answered

    @property
    def path(self) -> Path:
        return pass_path("calibration", SCHEME, self.identity, self.digest, asdict(self.settings.rows()))


def pass_path(folder: str, scheme: int, own: Identity, digest: str, settings: dict[str, Any]) -> Path:
    """Where a pass is kept: its name is a hash of all that it depends on."""
    facts = [scheme, own.fingerprint, str(own.dtype), own.device.type, own.date_string, own.eos_ids, digest, settings]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    return cache_dir() / folder / f"{own.name}-{key}.safetensors"


def calibrated(
    model: ModelConfig, settings: Sequence[Calibration], say: Callable[[str], None] = print
) -> list[Calibrated | UserError]:
    """The result of each setting: from the cache, and for the rest from one forward per set of conversations.

    Mistakes of a setting or its conversations (too few rows, no such file, NaN in a layer) are its result, so that the
    other settings go on. Says what was re-used and what is run.

    Raises:
        UserError: a mistake in the model itself.
    """
    identity = model.identify()
    results: list[Calibrated | UserError | None] = [None] * len(settings)
    sources: dict[str, list[Conversation]] = {}
    jobs: dict[int, Job] = {}
    for place, own in enumerate(settings):
        try:
            conversations = own.conversations()
        except UserError as error:
            results[place] = error
            continue
        jobs[place] = Job(own, identity, own.digest(conversations))
        sources[jobs[place].digest] = conversations
    missing = {job.path: job for job in jobs.values() if not job.path.exists()}
    made: dict[Path, Calibrated | UserError] = {}
    if jobs:
        say(_announcement(len({job.path for job in jobs.values()}), len(missing)))
    target = model.load() if missing else None
    for digest, conversations in sources.items():
        group = [job for job in missing.values() if job.digest == digest]
        if target is not None and group:
            made |= _run(target, group, conversations)
    for place, job in jobs.items():
        results[place] = made[job.path] if job.path in made else _load(job)
    return [result for result in results if result is not None]


def _announcement(count: int, missing: int) -> str:
    settings = f"{count} settings" if count > 1 else "1 setting"
    if not missing:
        return f"calibration: {settings}, re-used from the cache"
    if count == 1:
        return "calibration: one pass"
    kept = f", {count - missing} re-used from the cache" if missing < count else ""
    return f"calibration: {settings}{kept}; one pass for {missing}"


def _run(
    target: Target, group: Sequence[Job], conversations: Sequence[Conversation]
) -> dict[Path, Calibrated | UserError]:
    """One pass over the conversations for settings that share them, kept in the cache where it can be written."""
    try:
        samples = group[0].settings.samples(target, conversations)
        rows = [job.settings.rows() for job in group]
        found = calibrate(target, samples, rows, group[0].settings.batch_size)
    except UserError as error:
        return {job.path: error for job in group}
    try:
        for job, result in zip(group, found, strict=True):
            _save(job, result)
    except (OSError, SafetensorError) as error:
        warnings.warn(f"SPECWAVE_CACHE={cache_dir()}: the pass is not kept ({error})", stacklevel=2)
    return {job.path: result for job, result in zip(group, found, strict=True)}


def _save(job: Job, found: Calibrated | UserError) -> None:
    facts: dict[str, Any] = {
        "fingerprint": job.identity.fingerprint,
        "digest": job.digest,
        "rows": asdict(job.settings.rows()),
    }
    tensors: dict[str, Tensor] = {}
    if isinstance(found, UserError):  # kept too, or every job of a sweep would run the pass again to meet it
        facts["error"] = [found.key, str(found.value), found.remedy]
    else:
        facts |= {"categories": found.categories, "counts": {name: getattr(found, name) for name in _COUNTS}}
        tensors = {name: getattr(found, name) for name in _TENSORS}
    write_tensors(job.path, tensors, {"facts": json.dumps(facts, ensure_ascii=False)})


_COUNTS = ("tokens_seen", "tokens_kept", "prompts_dropped", "rows_seen")
_TENSORS = ("grams", "labels", "spread")


def _load(job: Job) -> Calibrated | UserError:
    try:
        with (
            reading("cache", job.path, REMEDY, also=(SafetensorError,)),
            safe_open(job.path, framework="pt") as stored,
        ):
            facts = json.loads(stored.metadata()["facts"])
            own, fingerprint, digest = Rows(**facts["rows"]), str(facts["fingerprint"]), str(facts["digest"])
            found: Calibrated | UserError
            if "error" in facts:
                found = UserError(*facts["error"])
            else:
                grams, labels, spread = (stored.get_tensor(name) for name in _TENSORS)
                seen, kept, dropped, rows_seen = (int(facts["counts"][name]) for name in _COUNTS)
                categories = list(facts["categories"])
                found = Calibrated(grams, labels, spread, categories, seen, kept, dropped, rows_seen, cached=True)
    except UserError as error:
        return error
    if fingerprint != job.identity.fingerprint or (own, digest) != (job.settings.rows(), job.digest):
        return UserError(
            "cache", job.path, "holds the calibration of another model, tokenizer, chat template, setting or other "
            f"conversations (fingerprint {fingerprint}, this target's is {job.identity.fingerprint}): {REMEDY}"
        )  # fmt: skip
    return found
