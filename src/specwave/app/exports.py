"""The drafter folders of a training run: `drafters/` as they were when they validated best, `last/` as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specwave.artifacts import read_json
from specwave.eagle.export import add_pictures

BEST, LAST = "drafters", "last"


class Exports:
    """Writes drafters whole, at any time: a killed run leaves the last ones written.

    Args:
        module: the training: its `drafters`, `options`, `engine`, `validated`, `stopped`, `tokens` and `global_step`.
        groups: by drafter what its card says beside: the rule that chose its layers, switches.
        write: writes a drafter's folder from (folder, drafter, what its card says of training) and returns warnings.
        say: gets the warnings, once.
        main: False in the further processes of a run, which write nothing; they take part where weights are cut up.
    """

    def __init__(
        self,
        folder: Path,
        module: Any,
        groups: Mapping[str, Mapping[str, Any]],
        write: Callable[[Path, Any, dict[str, Any]], list[str]],
        say: Callable[[str], None],
        main: bool = True,
    ):
        self.folder, self.module, self.groups = folder, module, groups
        self.write, self.say, self.main = write, say, main
        self._said: set[str] = set()
        self.best = {name: found for name in self.groups if (found := self._written(name)) is not None}

    def _written(self, name: str) -> float | None:
        """The τ̂ of a best drafter that an earlier attempt wrote."""
        card = self.folder / BEST / name / "card.json"
        training = read_json(card, "resume")["training"] if card.is_file() else {}
        return training["validation"]["tau_hat"] if training.get("validated_at") == training.get("step", -1) else None

    def saved(self) -> None:
        """After a checkpoint: `last/`, and `drafters/` where nothing was validated yet."""
        for name in self.groups:
            self._write([LAST] if name in self.best else [LAST, BEST], name)

    def validated(self) -> None:
        """After a validation: `drafters/` where it is the best so far, of equal ones the later; `last/`, with it."""
        for name, figures in self.module.validated["figures"].items():
            better = figures["tau_hat"] >= self.best.get(name, 0.0)
            self.best[name] = figures["tau_hat"] if better else self.best[name]
            self._write([BEST, LAST] if better else [LAST], name)

    def finish(self, curves: Sequence[Path]) -> None:
        """Adds the pictures of the run to all of them."""
        for kind in (BEST, LAST):
            for name in self.groups:
                add_pictures(self.folder / kind / name, curves)

    def _write(self, kinds: Sequence[str], name: str) -> None:
        with self.module.engine.whole(self.module.drafters[name]):
            for kind in kinds if self.main else ():
                self._write_one(kind, name)

    def _write_one(self, kind: str, name: str) -> None:
        module, own = self.module, dict(self.groups[name])
        training = own | {"step": module.global_step, "tokens": module.tokens} | asdict(module.options) | own
        validated = module.validated if module.validated.get("step") == module.global_step else {}  # these weights
        training |= {"validated_at": validated.get("step"), "validation": validated.get("figures", {}).get(name, {})}
        if name in module.stopped:
            training["stopped"] = module.stopped[name]
        warnings = self.write(self.folder / kind / name, module.drafters[name], training)
        for warning in warnings if name not in self._said else ():
            self.say(f"{name}: {warning}")
        self._said.add(name)
