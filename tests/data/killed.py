"""Run as a script by test_dialogues.py and test_tokenised.py: child processes that kill themselves, until one finishes.

    python killed.py dialogues <model folder> <answers file>
    python killed.py tokens <cache folder>

Prints a line for every attempt. Children are forked before any tensor is computed here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import datasets  # noqa: F401 - seconds to import: here, not in every child

from specwave.data import dialogues, tokenised
from specwave.data.conversations import Chat, Conversation
from specwave.data.engines import LoopEngine, Regenerate
from specwave.target import ModelConfig, load_target
from specwave.target.identity import read_tokenizer
from specwave.target.tiny import _tokenizer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def attempt(name: str, work: Callable[[], None]) -> None:
    _, status = os.waitpid(start(work), 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    print(f"{name}: {'killed' if killed else f'exit {os.WEXITSTATUS(status)}'}", flush=True)


# ---------------------------------------------------------------- answers

SETTINGS = Regenerate(max_new_tokens=5, temperature=1.0, seed=3, batch_size=3)


def talks() -> list[Conversation]:
    """Eleven conversations of one to three turns, the fifth of them too long for any answer."""
    made = []
    for number in range(11):
        turns: list[tuple[str, str]] = [("system", "Be brief.")] if number % 4 == 0 else []
        for turn in range(1 + number % 3):
            turns += [("user", f"question {number} {turn}" * (40 if number == 4 else 1)), ("assistant", "given")]
        made.append(Conversation(tuple(turns), f"talk-{number}", "chat"))
    return made


def answer(model: str, path: Path, arm: Callable[[], None] = lambda: None) -> None:
    arm()
    target = load_target(model, dtype="float32")
    dialogues.write_dialogues(target, lambda: LoopEngine(target, SETTINGS), talks(), SETTINGS, path, 512)


def at_the_call(number: int) -> Callable[[], None]:
    """Dies when the engine is asked the n-th time."""

    def arm() -> None:
        ask, calls = LoopEngine.answers, iter(range(number + 1))

        def answers(self, prompts, keys):
            if next(calls) == number:
                die()
            return ask(self, prompts, keys)

        LoopEngine.answers = answers  # type: ignore[method-assign]

    return arm


def within_the_write(number: int, share: float) -> Callable[[], None]:
    """Dies in the n-th write of a batch, with a part of it on disk."""

    def arm() -> None:
        append, calls = dialogues.append_lines, iter(range(number + 1))

        def append_lines(stream, rows):
            start = stream.tell()
            append(stream, rows)
            if next(calls) == number:
                os.truncate(stream.name, start + int(share * (stream.tell() - start)))
                die()

        dialogues.append_lines = append_lines

    return arm


# ---------------------------------------------------------------- tokens


def chat() -> Chat:
    return Chat(_tokenizer(512), ModelConfig("stand-in", "nowhere"), "stand-in", (2,), 2048)


def many() -> list[Conversation]:
    return [Conversation((("user", f"q{n}"), ("assistant", "word " * (n % 9 + 1))), f"c{n}", "") for n in range(300)]


def tokenise(workers: int, arm: Callable[[], None] = lambda: None) -> None:
    arm()
    tokenised.tokenised(chat(), many(), "data", workers)


def in_a_batch() -> None:
    masked, calls = tokenised.masked, iter(range(10**6))

    def dying(*arguments, **options):
        if next(calls) == 130:
            die()
        return masked(*arguments, **options)

    tokenised.masked = dying


def while_workers_work() -> None:
    masked = tokenised.masked

    def slow(*arguments, **options):
        time.sleep(0.05)
        return masked(*arguments, **options)

    tokenised.masked = slow
    parent = os.getpid()

    def watch() -> None:
        while len(children(parent)) < 3:  # a manager and two workers
            time.sleep(0.02)
        time.sleep(0.3)
        die()

    threading.Thread(target=watch, daemon=True).start()


def before_the_rename() -> None:
    Path.rename = lambda self, final: die()  # type: ignore[method-assign,assignment,return-value]


def children(parent: int) -> list[int]:
    """Processes of a parent."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if stat and int(stat.rpartition(")")[2].split()[1]) == parent:
            found.append(int(entry.name))
    return found


def processes_with(mark: str) -> int:
    """Living processes whose environment holds a text, this one apart."""
    count = 0
    for entry in Path("/proc").iterdir():
        try:
            other = entry.name.isdigit() and int(entry.name) != os.getpid()
            alive = other and mark.encode() in (entry / "environ").read_bytes()
            count += alive and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            continue
    return count


if __name__ == "__main__":
    if sys.argv[1] == "dialogues":
        model, path = sys.argv[2], Path(sys.argv[3])
        read_tokenizer(Path(model))  # imports what every child needs
        for name, arm in {
            "the second question": at_the_call(1),
            "a torn line": within_the_write(0, 0.2),
            "between two lines and a third": within_the_write(0, 0.75),
            "the fourth question": at_the_call(3),
            "a whole batch": within_the_write(0, 1.0),
        }.items():
            attempt(name, lambda arm=arm: answer(model, path, arm))
        attempt("the last", lambda: answer(model, path))
        both = [start(lambda: answer(model, path.with_name("both.jsonl"))) for _ in range(2)]
        print("two at once:", *(f"exit {os.WEXITSTATUS(os.waitpid(child, 0)[1])}" for child in both))
    else:
        os.environ["SPECWAVE_CACHE"] = sys.argv[2]
        places = {"in a batch": (1, in_a_batch), "while workers work": (2, while_workers_work)}
        places["before the rename"] = (2, before_the_rename)
        for name, (workers, arm) in places.items():
            attempt(name, lambda workers=workers, arm=arm: tokenise(workers, arm))
            time.sleep(0.5)
            here = [entry.name for entry in (Path(sys.argv[2]) / "tokens").iterdir() if entry.name[0] != "."]
            print(f"results {here}, processes {processes_with(sys.argv[2])}", flush=True)
        attempt("the last", lambda: tokenise(2))
