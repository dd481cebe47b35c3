"""Calibration passes, cached: the same conversations through the same target are never forwarded twice.

A cached pass is one safetensors file per row setting in the user's cache; scale, centre and every selector read the
same one. Its name is a hash of what it depends on, and it says itself which target it is of.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specwave.artifacts import UserError, cache_dir, reading, write_tensors
from specwave.layers.calibrate import Calibrated, calibrate
from specwave.layers.rows import Rows
from specwave.layers.settings import Calibration

if TYPE_CHECKING:
    from specwave.data.sources import Conversation
    from specwave.target import ModelConfig
    from specwave.target.load import Identity

SCHEME = 1  # raise it when the pass changes what it computes
_REMEDY = "delete it: the pass is made again"


@dataclass(frozen=True)
class Job:
    """One setting to calibrate, and the rest of the pass it belongs to."""

    settings: Calibration
    identity: Identity
    digest: str  # of the conversations and of how they are answered

    @property
    def path(self) -> Path:
        own = self.identity
        facts = [SCHEME, own.fingerprint, str(own.dtype), own.device.type, self.digest, asdict(self.settings.rows())]
        key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
        return cache_dir() / "calibration" / f"{own.name}-{key}.safetensors"


def calibrated(
    model: ModelConfig, settings: Sequence[Calibration], say: Callable[[str], None] = print
) -> list[Calibrated | UserError]:
    """The result of each setting: from the cache, and for the rest from one forward per set of conversations.

    A setting that leaves too few rows has its error as its result. Says what was re-used and what is run.

    Raises:
        UserError: see `calibrate`; a cached file of another target.
    """
    identity = model.identify()
    sources: dict[str, list[Conversation]] = {}
    jobs = []
    for own in settings:
        conversations = own.conversations()
        digest = own.digest(conversations)
        sources[digest] = conversations
        jobs.append(Job(own, identity, digest))
    missing = {job.path: job for job in jobs if not job.path.exists()}
    made: dict[Path, Calibrated | UserError] = {}
    distinct = {job.path for job in jobs}
    count = f"{len(distinct)} settings" if len(distinct) > 1 else "1 setting"
    if not missing:
        say(f"calibration: {count}, re-used from the cache")
    else:
        kept = f", {len(distinct) - len(missing)} re-used from the cache" if len(missing) < len(distinct) else ""
        say(
            f"calibration: {count}{kept}; one pass for {len(missing)}" if len(distinct) > 1 else "calibration: one pass"
        )
        target = model.load()
        for digest, conversations in sources.items():
            group = [job for job in missing.values() if job.digest == digest]
            if group:
                samples = group[0].settings.samples(target, conversations)
                found = calibrate(target, samples, [job.settings.rows() for job in group], group[0].settings.batch_size)
                for job, result in zip(group, found, strict=True):
                    made[job.path] = result
                    _save(job, result)
    return [made[job.path] if job.path in made else _load(job) for job in jobs]


def _save(job: Job, found: Calibrated | UserError) -> None:
    facts = {"fingerprint": job.identity.fingerprint, "rows": asdict(job.settings.rows())}
    tensors: dict[str, Tensor] = {}
    if isinstance(found, UserError):  # kept too, or every job of a sweep would run the pass again to meet it
        facts["error"] = [found.key, found.value, found.remedy]
    else:
        facts |= {"categories": found.categories, "counts": {name: getattr(found, name) for name in _COUNTS}}
        tensors = {name: getattr(found, name) for name in _TENSORS}
    write_tensors(job.path, tensors, {"facts": json.dumps(facts, ensure_ascii=False)})


_COUNTS = ("tokens_seen", "tokens_kept", "prompts_dropped", "rows_seen")
_TENSORS = ("grams", "labels", "spread")


def _load(job: Job) -> Calibrated | UserError:
    with reading("cache", job.path, _REMEDY, also=(SafetensorError,)), safe_open(job.path, framework="pt") as stored:
        facts = json.loads(stored.metadata()["facts"])
        own, fingerprint = Rows(**facts["rows"]), str(facts["fingerprint"])
        found: Calibrated | UserError
        if "error" in facts:
            found = UserError(*facts["error"])
        else:
            grams, labels, spread = (stored.get_tensor(name) for name in _TENSORS)
            seen, kept, dropped, rows_seen = (int(facts["counts"][name]) for name in _COUNTS)
            categories = list(facts["categories"])
            found = Calibrated(grams, labels, spread, categories, seen, kept, dropped, rows_seen, cached=True)
    if fingerprint != job.identity.fingerprint or own != job.settings.rows():
        raise UserError(
            "cache", job.path, "holds the calibration of another model, tokenizer, chat template or setting "
            f"(fingerprint {fingerprint}, this target's is {job.identity.fingerprint}): {_REMEDY}"
        )  # fmt: skip
    return found
