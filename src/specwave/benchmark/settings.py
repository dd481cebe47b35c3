"""The settings behind a measurement: what must be equal for two of them to be compared."""

from __future__ import annotations

import hashlib
import platform
import shutil
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specwave.artifacts import UserError
from specwave.benchmark.answers import differences, read_answers
from specwave.benchmark.comparisons import drawn
from specwave.benchmark.questions import Benchmark, Question, fingerprint
from specwave.benchmark.results import Baseline, load_results, save_results
from specwave.benchmark.rows import is_plain
from specwave.benchmark.tables import ONES

if TYPE_CHECKING:
    import torch

    from specwave.decoding import Sampling
    from specwave.target import Target

_NAMES = ("target (", "benchmark.name (")  # names may differ: fingerprints say whether it is the same thing


def shared_settings(
    target: Target,
    benchmark: Benchmark,
    questions: Sequence[Question],
    max_new_tokens: int,
    sampling: Sampling,
    batch_invariant: bool = False,
) -> dict[str, Any]:
    """Target, machine, limits and questions, as plain values: equal for all methods of a run."""
    import torch  # here: a report over settings that were measured needs none

    return {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "device_name": device_name(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "max_new_tokens": max_new_tokens,
        "sampling": asdict(sampling),
        "batch_invariant": batch_invariant,
        "benchmark": {
            "name": benchmark.name,
            "questions": len(questions),
            "fingerprint": fingerprint(questions),
        },
    }


def method_settings(shared: dict[str, Any], decoding: Any, checkpoint: Path | None) -> dict[str, Any]:
    """A method's settings: the shared ones, its own keys (none for plain decoding), its drafter's folder and a hash of
    its weights: a folder may be trained anew under the same name."""
    drafter: dict[str, Any] = {"checkpoint": None, "checkpoint_sha256": None}
    if checkpoint is not None:
        weights = checkpoint / "model.safetensors"
        digest = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else None
        drafter = {"checkpoint": str(checkpoint), "checkpoint_sha256": digest}
    return {**shared, "decoding": _named(decoding), **drafter}


def _named(value: Any) -> Any:
    """A decoding method's keys below its name, as plain values; the same for methods within it (arms, a drafter's)."""
    if isinstance(value, dict):
        return {key: _named(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_named(entry) for entry in value]
    if not is_dataclass(value) or isinstance(value, type):
        return {"name": value.label} if hasattr(value, "label") else value
    keys = {key.name: _named(getattr(value, key.name)) for key in fields(value)}
    keys.pop("batch_invariant", None)  # of all methods alike: a shared setting
    return {"name": value.label, **keys} if hasattr(value, "label") else keys


def default_settings(decoding: Any, sampling: Any) -> dict[str, Any]:
    """What `method_settings` says of keys that are at their defaults."""
    return {"decoding": _defaults(decoding), "sampling": _defaults(sampling), "batch_invariant": False}


def _defaults(value: Any) -> Any:
    """A dataclass's own defaults, and those of what its fields hold."""
    if isinstance(value, dict):
        return {key: _defaults(entry) for key, entry in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return {}
    found: dict[str, Any] = {}
    for key in fields(value):
        if key.name == "batch_invariant":
            continue
        held = getattr(value, key.name)
        if is_dataclass(held) or isinstance(held, dict):
            found[key.name] = _defaults(held)
        elif key.default is not MISSING:
            found[key.name] = _named(key.default)
    return found


def device_name(device: torch.device) -> str:
    """The GPU's or CPU's name: times of two machines are not compared."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine_of(device: torch.device) -> str:
    """A mark of this machine: eight digits of a hash of its name in the network and its device's.

    Settings tell kinds of machines apart; two of a kind still have clocks, loads and memories of their own.
    """
    return hashlib.sha256(f"{platform.node()} {device_name(device)}".encode()).hexdigest()[:8]


def earlier_baseline(source: str, shared: dict[str, Any], folder: Path) -> Baseline:
    """The baseline that the evaluation in `source` measured, copied to `folder`/baseline.

    Raises:
        UserError: when there is none, or it was measured under other settings (naming them).
    """
    place = Path(source).expanduser().resolve() / "baseline"
    if not (place / "results.json").is_file():
        remedy = "it holds no baseline/results.json: give auto, or the run folder of a finished evaluation"
        raise UserError("baseline", source, remedy)
    result = load_results(place, "baseline")
    ones = dict.fromkeys(ONES, 1)  # what settings do not name
    wanted = ones | shared | {"sampling": drawn(shared["sampling"])}
    earlier = {name: result.settings.get(name, ones.get(name)) for name in wanted}
    earlier["sampling"] = drawn(earlier["sampling"])
    other = [text for text in differences(earlier, wanted) if not text.startswith(_NAMES)]
    if other:
        raise UserError("baseline", source, f"it was measured under other settings: {'; '.join(other)}")
    rows = read_answers(place / "answers.jsonl", "baseline")
    if not is_plain(rows) or len(rows) != wanted["benchmark"]["questions"]:
        remedy = f"its baseline/answers.jsonl has to hold {wanted['benchmark']['questions']} answers of plain decoding"
        raise UserError("baseline", source, f"{remedy}: measure it again, or give auto")
    copy = folder / "baseline"
    if copy.resolve() != place:
        copy_baseline(place, copy)
        plain = {**result.content["baseline"], "source": str(place.parent)}
        save_results(copy, {**result.content, "baseline": plain})
    return Baseline(rows, str(place.parent))


def copy_baseline(source: Path, folder: Path) -> None:
    """The files of a finished measurement of plain decoding, results.json last: with it a baseline is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("answers.jsonl", "settings.json", "results.json"):
        shutil.copyfile(source / name, folder / f".{name}.part")
        (folder / f".{name}.part").replace(folder / name)
