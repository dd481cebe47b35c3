"""What training runs came to, as a Markdown table: a line for each drafter, best checkpoint; more runs are more seeds.

    python benchmarks/groups.py <run folder of train.py> [<one with another seed> …]

Held-out figures of the cards. The last columns are τ̂ under each further run's seed, and the largest difference between
seeds of one group: what lies nearer to each other than that is not told apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specwave.artifacts import UserError, read_json
from specwave.benchmark.drafters import find_drafters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    arguments = parser.parse_args()
    try:
        print("\n".join(table([cards(run) for run in arguments.runs])))
    except UserError as error:
        parser.error(str(error))


def cards(run: Path) -> dict[str, dict[str, Any]]:
    """The card of every drafter of a run, by the drafter's name."""
    return {folder.label: read_json(folder.path / "card.json", "run") for folder in find_drafters(str(run))}


def table(runs: Sequence[dict[str, dict[str, Any]]]) -> list[str]:
    """Lines of the table; drafters by the first run's τ̂, the best one first."""
    first, others = runs[0], runs[1:]
    steps = max(card["training"]["steps"] for card in first.values())
    shares = [f"a_{step}" for step in range(steps)]
    decoded = any("tau" in card["training"]["validation"] for card in first.values())
    seeds = [{card["data"]["seed"] for card in run.values()} for run in runs]
    names = ["drafter", "rule", "step", "loss", *shares, "τ̂", *["τ"] * decoded]
    names += [f"τ̂, seed {', '.join(map(str, sorted(seed)))}" for seed in seeds[1:]] + ["between seeds"] * bool(others)
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for name, card in sorted(first.items(), key=lambda entry: -entry[1]["training"]["validation"]["tau_hat"]):
        training, held = card["training"], card["training"]["validation"]
        row = [name, training.get("rule") or "", str(training["step"]), f"{held['loss']:.3f}"]
        row += [f"{held[share]:.3f}" for share in shares] + [f"{held['tau_hat']:.3f}"]
        row += [f"{held['tau']:.3f}" if "tau" in held else ""] * decoded
        again = [run[name]["training"]["validation"]["tau_hat"] if name in run else None for run in others]
        row += ["" if tau is None else f"{tau:.3f}" for tau in again]
        seen = [held["tau_hat"], *(tau for tau in again if tau is not None)]
        row += [f"{max(seen) - min(seen):.3f}" if len(seen) > 1 else ""] * bool(others)
        lines.append(f"| {' | '.join(row)} |")
    return lines


if __name__ == "__main__":
    main()
