"""`evaluate.py report=[…] worth={…}`: what was foretold of sets of layers against what their drafters came to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specwave.app.collate import csv_text
from specwave.artifacts import write_text
from specwave.benchmark.results import Result
from specwave.benchmark.worth import ONE_SIZE, OUTCOMES, Study, estimates, question_rows, set_rows

if TYPE_CHECKING:
    from specwave.app.run import Run


def write_study(study: Study, results: Sequence[Result], run: Run) -> None:
    """worth.md, worth.csv (all estimates), worth_sets.csv and worth_questions.csv (what they rest on), pictures."""
    from specwave.benchmark.worth_figures import worth_figure  # matplotlib
    from specwave.benchmark.worth_text import markdown, noise, sentence, setting

    found = estimates(study)
    target = next((str(name) for result in results if (name := result.settings.get("target"))), "a target")
    title = f"{target}: what foretells acceptance"
    pictures = []
    for outcome, symbol in OUTCOMES.items():
        ending = "" if outcome == "tau" else f"_{outcome}"
        head = f"{target}: {symbol} of {len(study.sets)} drafters against what was known of their layers"
        pictures += worth_figure(run.folder / f"worth{ending}", study, found, outcome, head)
    texts = {
        "worth_sets.csv": csv_text(set_rows(study)),
        "worth_questions.csv": csv_text(question_rows(study)),
        "worth.csv": csv_text([one.row() for one in found]),
        "worth.md": markdown(study, found, title),
    }
    for name, text in texts.items():
        write_text(run.folder / name, text)
    run.say(setting(study))
    for one in found:
        if one.outcome == "tau" and one.scope == ONE_SIZE:
            run.say(sentence(one))
    for line in noise(study):
        run.say(line)
    run.say(f"written: {', '.join([*texts, *(picture.name for picture in pictures)])}")
