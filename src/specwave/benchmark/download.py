"""Files from the network, fetched once: in the user's cache under their sha256, whole or absent."""

from __future__ import annotations

import hashlib
import http.client
import re
import urllib.parse
import urllib.request
from pathlib import Path

from specwave.artifacts import UserError, cache_dir, filling_cache, write_text

LARGEST = 256 << 20  # bytes: a file of questions is far smaller, a wrong address may not be
PATIENCE = 30.0  # seconds without a byte


def check_sha256_form(key: str, value: str | None) -> None:
    """64 hexadecimal digits, or None."""
    if value is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise UserError(key, value, "a sha256 has 64 hexadecimal digits: see sha256sum <file>")


def fetch(url: str, sha256: str, key: str) -> Path:
    """The text file at an address, from the cache where an earlier call left it.

    Args:
        sha256: what the file must have; it names the copy in the cache, too.
        key: the config group of the keys to blame: `<key>.url`, `<key>.sha256`.

    Raises:
        UserError: an address of another kind than http(s), a server that does not answer or has no such file, a file
            of another sha256 (nothing is kept of it), one that is no text.
    """
    from specwave.data.locks import wait_for  # with that room comes torch: not for a report's sake

    wanted = sha256.lower()
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UserError(f"{key}.url", url, f"an address begins with http:// or https://; a file is {key}.path")
    path = cache_dir() / "benchmarks" / wanted / "question.jsonl"
    with filling_cache():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_name(".lock"), "w") as lock:
            wait_for(lock)  # the processes of one run fetch once
            if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == wanted:
                return path
            content = _read(url, key)
            found = hashlib.sha256(content).hexdigest()
            if found != wanted:
                remedy = f"the file at {url} has {found}: give that if you trust it, or the right address"
                raise UserError(f"{key}.sha256", sha256, remedy)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                raise UserError(f"{key}.url", url, "the file there is no UTF-8 text") from None
            write_text(path, text)
    return path


def _read(url: str, key: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            content = answer.read(LARGEST + 1)
            if answer.length and len(content) <= LARGEST:
                raise ConnectionError(f"the answer broke off, {answer.length} bytes are missing")
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        reason = str(getattr(error, "reason", "") or error) or type(error).__name__
        remedy = f"it cannot be fetched ({reason}): check the address, or give the file as {key}.path"
        raise UserError(f"{key}.url", url, remedy) from None
    if len(content) > LARGEST:
        raise UserError(f"{key}.url", url, f"the file there is larger than {LARGEST >> 20} MiB: no file of questions")
    return content
