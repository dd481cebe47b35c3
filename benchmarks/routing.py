"""What a drafter of its own for every category, or every question, would be worth over the best fixed one.

    python benchmarks/routing.py <run folder of evaluate.py> [<one more> …]
    python benchmarks/routing.py <run folder …> --router [--questions question.jsonl] [--layer 15]

The drafters of all folders, on the questions that all answered: the same target, questions, limit and sampling, or it
is refused. A Markdown table: τ of every way to choose and what it has more than the best fixed drafter, in hindsight
(with what that is worth by chance) and held out; then what it comes to, in words. docs/evaluation.md says what each is.
`--router` loads the target and has a ridge regression choose by the mean state of a question's first prompt at one
layer (the middle one); without it, no target is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specwave.artifacts import UserError
from specwave.benchmark import routing
from specwave.benchmark.answers import read_answers
from specwave.benchmark.bootstrap import Floats, ratio_interval
from specwave.benchmark.comparisons import asked
from specwave.benchmark.paper import is_plain, ranged
from specwave.benchmark.questions import BUILTIN, Question, fingerprint, read_questions
from specwave.benchmark.report import unique_labels
from specwave.benchmark.results import Result, load_run
from specwave.data.conversations import prompt_ids
from specwave.target import Target, load_target

FEWEST = 20  # questions, for folds to mean anything
Line = tuple[str, routing.Outcome, Floats | None]  # name, outcome, gains by chance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--router", action="store_true", help="have one choose by the prompt's states")
    parser.add_argument("--questions", type=Path, default=BUILTIN, help="their file; the built-in ones without")
    parser.add_argument("--model", help="the target, where its name in the results is none of conf/model")
    parser.add_argument("--layer", type=int, help="whose states the router reads; the middle one without")
    arguments = parser.parse_args()
    try:
        results = drafters(arguments.runs)
        answers = gathered(results)
        lines = ways(answers)
        if arguments.router:
            features = prompt_states(results[0], answers.ids, arguments.questions, arguments.model, arguments.layer)
            lines.append(("a router's of each question, held out", routing.by_router(answers, features), None))
    except UserError as error:
        parser.error(str(error))
    print("\n".join([*table(answers, lines), "", *words(lines)]))


def drafters(runs: Sequence[Path]) -> list[Result]:
    """The results of all runs that are not plain decoding's.

    Raises:
        UserError: fewer than two, or not of the same questions, target, limit and sampling.
    """
    found = [result for run in runs for result in load_run(run, "runs") if not is_plain(result)]
    if len(found) < 2:
        raise UserError("runs", ", ".join(map(str, runs)), "a choice takes two drafters or more")
    for result in found:
        if asked(result) != asked(found[0]):
            rule = f"other questions, target, limit or sampling than {found[0].folder}: their rounds cannot be compared"
            raise UserError("runs", result.folder, rule)
    return found


def gathered(results: Sequence[Result]) -> routing.Answers:
    rows = {
        label: read_answers(result.folder / "answers.jsonl", "runs")
        for label, result in zip(unique_labels(results), results, strict=True)
    }
    answers = routing.Answers.of(rows)
    if len(answers.ids) < FEWEST:
        raise UserError("runs", f"{len(answers.ids)} questions", f"all drafters answered these: {FEWEST} are needed")
    if np.bincount(answers.category).max() < 2:
        raise UserError("runs", f"{len(answers.ids)} categories", "each has one question: one needs two to be held out")
    return answers


def ways(answers: routing.Answers) -> list[Line]:
    """Every way to choose that needs no target."""
    by_chance = routing.chance_of_categories(answers), routing.chance_of_questions(answers)
    return [
        ("the best of each category, hindsight", routing.hindsight(answers.whole, answers.category), by_chance[0]),
        ("the best of each category, held out", routing.by_category(answers), None),
        ("the best of each question, hindsight", routing.hindsight(answers.whole), by_chance[1]),
        ("the best of each question, held out", routing.by_question(answers), None),
    ]


def table(answers: routing.Answers, lines: Sequence[Line]) -> list[str]:
    """Markdown; the best fixed drafter first. The names stand above."""
    best = routing.best_fixed(answers.whole)
    fixed = answers.whole[:, best]
    found = [
        f"{len(answers.drafters)} drafters ({'; '.join(answers.drafters)}), {len(answers.ids)} questions, "
        f"{answers.category.max() + 1} categories; 95 % intervals over questions.",
        "",
        "| choice | τ | more than the best fixed | by chance | reaches it by chance |",
        "|---|---|---|---|---|",
        f"| best fixed, {answers.drafters[best]} | {ranged(routing.ratio(fixed), ratio_interval(*fixed), 3)} | | | |",
    ]
    for name, outcome, chance in lines:
        more = ranged(outcome.gain, outcome.gain_interval, 3)
        floor = ["", ""] if chance is None else [f"{chance.mean():.3f}", f"{(chance >= outcome.gain).mean():.3f}"]
        found.append(f"| {name} | {outcome.tau:.3f} | {more} | {' | '.join(floor)} |")
    return found


def words(lines: Sequence[Line]) -> list[str]:
    """What it comes to: a sentence for categories, for questions and, where there is one, for the router."""
    found = []
    for name, (_, above, chance), (_, below, _) in (("category", *lines[:2]), ("question", *lines[2:4])):
        assert chance is not None
        ends = below.gain_interval
        sure = ends is not None and ends[0] > 0
        found.append(
            f"A drafter of its own for each {name}: {below.gain:+.3f} τ held out, {'' if sure else 'not '}told apart "
            f"from none; {above.gain:+.3f} in hindsight, of which chance makes {chance.mean():.3f}. Leads repeat with "
            f"a correlation of {below.trust:.2f}."
        )
        if name == "question":
            worth = "is worth a router's try" if sure else "leaves a router nothing that was found"
            found.append(f"The choice by question {worth}: {100 * below.gain / (below.tau - below.gain):+.1f} % of τ.")
    for _, outcome, _ in lines[4:]:
        found.append(
            f"The router's choice: {ranged(outcome.gain, outcome.gain_interval, 3)} τ more than the best fixed."
        )
    return found


# ---------------------------------------------------------------- features


def prompt_states(result: Result, ids: Sequence[Any], path: Path, model: str | None, layer: int | None) -> Floats:
    """[Q, D]: for each question the mean over the positions of its first prompt of one layer's states, which a prefill
    computes anyway.

    Raises:
        UserError: other questions or another target than the results'.
    """
    questions = asked_questions(result, path)
    name = model or str(result.settings["target"])
    target = load_target(name)
    if target.fingerprint != result.settings["fingerprint"]:
        raise UserError("--model", name, f"{result.folder} was measured with another target: name that one")
    chosen = target.num_layers // 2 if layer is None else layer
    if not 0 <= chosen < target.num_layers:
        raise UserError("--layer", chosen, f"must be 0 to {target.num_layers - 1}, a block of {target.name}")
    return np.stack([mean_state(target, questions[name], chosen) for name in ids])


def asked_questions(result: Result, path: Path) -> dict[Any, Question]:
    """By id."""
    rows = read_answers(result.folder / "answers.jsonl", "runs")
    answered = {row["question_id"] for row in rows}
    found = [question for question in read_questions(path) if question.id in answered]
    if fingerprint(found) != result.settings["benchmark"]["fingerprint"]:
        raise UserError("--questions", path, f"these are not the questions of {result.folder}: name their file")
    return {question.id: question for question in found}


@torch.inference_mode()
def mean_state(target: Target, question: Question, layer: int) -> Floats:
    """[D]. Without position 0, an attention sink whose norm would drown the others'."""
    ids = prompt_ids(target, [{"role": "user", "content": question.turns[0]}])
    states_TD = target.states(torch.tensor([ids], device=target.device), [layer])[layer][0]
    return states_TD[1:].double().mean(0).cpu().numpy()


if __name__ == "__main__":
    main()
