"""The fingerprint of a target: which weights, tokenizer and chat template a result belongs to.

Reading a tokenizer takes seconds, so a fingerprint is noted in the cache beside the sizes and times of the files it was
taken from, and taken again when any of them has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from specwave.artifacts import UserError, cache_dir, write_json
from specwave.target.arch import read_arch
from specwave.target.folder import weight_files

SCHEME = 1  # raise it when `_take` changes what it hashes
_TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model")


def fingerprint(folder: Path, tokenizer: Callable[[], Any] | None = None) -> str:
    """A hash of architecture, tokenizer, chat template and stored weights; no dtype, path or version plays a part.

    Args:
        folder: config.json, safetensors and tokenizer files.
        tokenizer: gives the folder's tokenizer where the caller has it at hand.
    """
    path = cache_dir() / "fingerprints" / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]}.json"
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(folder.iterdir())}
    state = {"scheme": SCHEME, "files": files}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a note that cannot be read is taken again
        noted = json.loads(path.read_text(encoding="utf-8"))
        if noted["state"] == state:
            return str(noted["fingerprint"])
    found = _take(folder, tokenizer or (lambda: read_tokenizer(folder)))
    with contextlib.suppress(OSError):  # a cache that cannot be written costs seconds, no more
        write_json(path, {"state": state, "fingerprint": found})
    return found


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder.

    Raises:
        UserError: it is damaged, or of a kind that transformers does not know.
    """
    from transformers import AutoTokenizer  # seconds to import

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # tokenizers raises bare Exceptions
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}"
        remedy = f"its tokenizer cannot be read ({reason[:200]}); fetch or make the model's folder again"
        raise UserError("model.source", folder, remedy) from None


def _take(folder: Path, tokenizer: Callable[[], Any]) -> str:
    arch = read_arch(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    digest = hashlib.sha256(json.dumps(arch.describe(), sort_keys=True).encode())
    for name in _TOKENIZER:
        if (folder / name).exists():
            digest.update((folder / name).read_bytes())
    digest.update(str(tokenizer().chat_template).encode())
    for name, sample in sorted(_samples(folder)):
        digest.update(name.encode())
        digest.update(sample)
    return digest.hexdigest()[:32]


def _samples(folder: Path) -> list[tuple[str, bytes]]:
    """The first numbers of every stored tensor."""
    found = []
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - a safetensors handle is no dict
                found.append((name, stored.get_slice(name)[:1].reshape(-1)[:64].float().numpy().tobytes()))
    return found
