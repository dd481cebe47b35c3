"""What a source keeps of the plans it made, and where that goes: plans.jsonl beside the answers, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specwave.artifacts import append_lines, drop_torn_line
from specwave.decoding import Context
from specwave.skipping.plans import Plan
from specwave.target import Target


class Logged:
    """A source that logs its plans.

    Attributes:
        log: one row per plan made, over all decodings: where, what, expected, and what it took.
    """

    def __init__(self, target: Target):
        self.target = target
        self.log: list[dict[str, Any]] = []
        self._written = 0

    def note(self, contexts: Sequence[Context], rounds: int, plan: Plan, seconds: float, **more: Any) -> None:
        """A plan was made for these rows, after so many rounds, in so many seconds."""
        self.log.append(
            {
                "sequences": [context.sequence for context in contexts],
                "round": rounds,
                "context": longest(contexts),
                **plan.describe(),
                "skipped_attention_share": plan.skipped_attention_share,
                "seconds": seconds,
                **more,
            }
        )

    def take_up(self, folder: Path) -> None:
        """Goes on in a folder where a killed run may have left half a line, before anyone writes there."""
        drop_torn_line(folder / "plans.jsonl")

    def forget_log(self) -> None:
        """What was logged so far is on nobody's account."""
        self.log.clear()
        self._written = 0

    def flush(self, folder: Path) -> None:
        """Adds the plans made since the last time to plans.jsonl, so that a run that is killed keeps them."""
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "plans.jsonl", "a", encoding="utf-8") as stream:
            append_lines(stream, self.log[self._written :])
        self._written = len(self.log)

    def report(self, folder: Path) -> None:
        """Adds the plans made since the last time to plans.jsonl, and draws what all that it holds skip."""
        from specwave.skipping.figures import skipped_figure  # matplotlib takes a while to import

        self.flush(folder)
        lines = (folder / "plans.jsonl").read_text(encoding="utf-8").splitlines()
        if lines:
            skipped_figure(folder / "skipped", [json.loads(line) for line in lines], f"{self.target.name}: plans")


def longest(contexts: Sequence[Context]) -> int:
    """Tokens of the longest row."""
    return max(len(context.tokens) for context in contexts)
