"""How run.py talks to its workers: a JSON command a line on their stdin, its JSON answer on their stdout.

Only the standard library is imported, for every peer's environment runs this. Between two commands a worker is stopped
by a signal: waiting for a line is not enough, vLLM's idle threads take 2 % of a core.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

NGRAM = 3  # every prompt lookup looks for the last 3 tokens, then 2, then 1
PATIENCE = 900  # seconds for one answer; more is a worker that hangs

# (method, drafts a round, prompt ids, most new tokens) -> new token ids
Decode = Callable[[str, int, list[int], int], list[int]]


class PeerError(Exception):
    """Why a peer gave no answer, in a line."""


def serve(load: Callable[[dict[str, Any]], Decode], *packages: str) -> None:
    """A worker's life: `load` makes its decoder from the settings of the first command, every further one decodes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    decode: Decode | None = None
    for line in sys.stdin:
        try:
            command = json.loads(line)
            if decode is None:
                decode = load(command)
                answer = {"versions": {name: _version(name) for name in packages}}
            else:
                start, cpu = time.perf_counter(), time.process_time()
                tokens = decode(*command)
                seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
                answer = {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


class Worker:
    """The driver's end of a worker process."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        log: Path,
        settings: dict[str, Any],
        patience: float = PATIENCE,
    ):
        self.log, self.patience = log, patience
        with open(log, "ab") as stream:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=environment,
                process_group=0,  # of its own: should this process die, the kernel hangs up on the stopped ones
            )
        try:
            self.versions = self._ask(settings)["versions"]
        except PeerError:
            self.close()
            raise

    def decode(self, method: str, drafts: int, ids: list[int], new_tokens: int) -> tuple[list[int], float, float]:
        """(new tokens, seconds, processor seconds of all threads)."""
        answer = self._ask([method, drafts, ids, new_tokens])
        return answer["tokens"], answer["seconds"], answer["cpu_seconds"]

    def _ask(self, command: Any) -> dict[str, Any]:
        timer = threading.Timer(self.patience, self.process.kill)
        timer.start()
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise PeerError(self._ended())
        self.process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _ended(self) -> str:
        code = self.process.wait()
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"ended with exit code {code}")

    def close(self) -> None:
        """Ends the process, which leaves by itself when no commands can come."""
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.stdin.close()
            self.process.wait(timeout=30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
