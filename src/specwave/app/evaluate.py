"""`evaluate.py`: what a drafter is worth against plain decoding, or a report over earlier evaluations.

load → questions → every method on every question → results.json per method → report.html and a table.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from specwave.app.checkpoints import check_probe, checkpoint_of, method_for
from specwave.app.services import tracking
from specwave.artifacts import UserError
from specwave.benchmark.answers import AnswerFile
from specwave.benchmark.drafters import DrafterFolder, find_drafters, size_of
from specwave.benchmark.interop import load_all
from specwave.benchmark.questions import CATEGORIES, Question
from specwave.benchmark.results import Baseline, Result, build_results, load_results, save_results
from specwave.benchmark.rows import failed, machines
from specwave.benchmark.settings import (
    copy_baseline,
    default_settings,
    earlier_baseline,
    method_settings,
    shared_settings,
)
from specwave.benchmark.worth import Worth, read

if TYPE_CHECKING:  # with torch, seconds to import: a report needs none of it
    from specwave.app.run import Run
    from specwave.benchmark.answering import Answerer, Method
    from specwave.decoding import Sampling
    from specwave.target import Target

NOTED = ("tau", "tokens_per_second", "speedup")  # of a whole evaluation, in its run.yaml


def greedy() -> Sampling:
    from specwave.decoding import Sampling

    return Sampling()


@dataclass
class EvaluateConfig:
    """`conf/evaluate.yaml`, groups already built: a ModelConfig, a Benchmark, a decoding method, a Sampling."""

    model: Any
    benchmark: Any
    decoding: Any
    sampling: Any = field(default_factory=greedy)
    checkpoint: Any = None  # null, builtin, a drafter's folder, a training run's folder, or a list of these
    rules: dict[str, Any] | None = None
    probe_checkpoint: str | None = None
    limit: int | None = None
    categories: list[str] | None = None
    max_new_tokens: int = 64
    repeat: int = 1
    devices: int = 1
    minutes: float | None = None
    baseline: str = "auto"
    allow_other_target: bool = False
    report: list[str] | None = None
    worth: Worth | None = None
    logger: Any = None

    def __post_init__(self) -> None:
        for key in ("max_new_tokens", "repeat", "devices"):
            if getattr(self, key) < 1:
                raise UserError(key, getattr(self, key), "must be at least 1")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise UserError("minutes", self.minutes, "must be > 0, or null for no limit")
        if self.report is None and not hasattr(self.sampling, "temperature"):
            raise UserError("sampling", self.sampling, "it has keys of its own: set those, as in sampling.top_p=0.9")
        if self.report is not None and not self.report:
            raise UserError("report", self.report, "give null, or a list of run folders and answer files")
        if self.worth is not None and self.report is None:
            raise UserError("worth", "{…}", "it looks back on evaluations: name their run folders in report")


def idle(content: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that a run with this config does not read, so that what they name is neither imported nor built."""
    return ("model", "benchmark", "decoding", "sampling") if content.get("report") is not None else ()


def main(config: EvaluateConfig, run: Run) -> None:
    """Evaluates into the run's folder, or writes a report over earlier runs there; a tracker is shown either.

    Raises:
        SystemExit: when questions failed, with their number, after everything is written.
    """
    with tracking(config.logger, run) as tracker:
        if config.report is not None:
            results = load_all(config.report)
            study = None if config.worth is None else read(results, config.worth)  # its mistakes before the report
            finish(results, run, tracker)
            if study is not None:
                from specwave.app.worth import write_study

                write_study(study, results, run)
        else:
            evaluate(config, run, tracker)


def evaluate(config: EvaluateConfig, run: Run, tracker: Any) -> None:
    """Checks what can be checked without a target, then measures."""
    end = None if config.minutes is None else monotonic() + 60 * config.minutes
    chosen = (config.limit, config.categories)
    early = None if config.benchmark.needs_target else config.benchmark.questions(*chosen)  # mistakes show at once
    drafters = find_drafters(checkpoint_of(config), config.rules)
    decoding = method_for(config.decoding, drafters)
    check_probe(config)

    with own_target(config, run) as target:  # after the checks above, which need none
        measure(config, run, target, decoding, drafters, early, tracker, end)


def measure(
    config: EvaluateConfig,
    run: Run,
    target: Target,
    decoding: Any,
    drafters: Sequence[DrafterFolder],
    early: list[Question] | None,
    tracker: Any = None,
    end: float | None = None,
) -> None:
    """Every method on every question, then the results.

    Args:
        early: the questions, where they could be read without a target.
        end: of `time.monotonic()`, when to begin no further question; None: all are answered.
    """
    from specwave.benchmark.answering import Answerer
    from specwave.benchmark.evaluator import Evaluator, predict

    if config.max_new_tokens >= target.max_length:
        rule = f"must be below the {target.max_length} positions of {target.name}, which hold the prompt too"
        raise UserError("max_new_tokens", config.max_new_tokens, rule)
    questions = early or config.benchmark.questions(config.limit, config.categories, target, config.max_new_tokens)
    invariant = getattr(decoding, "batch_invariant", False)
    if invariant:
        target.make_invariant("decoding.batch_invariant")  # or say so before the first question
    shared = shared_settings(target, config.benchmark, questions, config.max_new_tokens, config.sampling, invariant)
    shared |= {key: value for key in ("repeat", "devices") if (value := getattr(config, key)) > 1}
    fresh = config.baseline == "auto"
    earlier = earlier_baseline(config.baseline, shared, run.folder) if run.main and not fresh else None
    methods = build_methods(config, target, decoding, drafters, shared, run, measure_plain=fresh)
    answerer = Answerer(target, config.max_new_tokens, config.sampling, invariant, config.repeat)
    for method in methods:
        answerer.check_answers(method, questions)
    if run.main:
        meet_other_machines(answerer, methods, run)
    names = ", ".join(method.label for method in methods)
    run.say(f"{target.name}: {names} on {len(questions)} questions, up to {config.max_new_tokens} tokens a turn")
    unknown = sorted({question.category for question in questions} - set(CATEGORIES))
    if unknown:
        run.say(f"outside Spec-Bench's categories, so counted overall and in no subtask: {', '.join(unknown)}")
    evaluator = Evaluator(answerer, methods, questions, end)
    predict(evaluator, config.devices)
    if not run.main:
        return
    if config.devices > 1:
        for method in methods:
            method.answers.merge([question.id for question in questions])
    if waiting := len(evaluator.waiting()):
        stop_here(run, config, len(questions) - waiting, len(questions))
        return
    for method in methods:
        if hasattr(method.proposer, "report"):  # what a method learned: costs, plans
            method.proposer.report(method.answers.folder)
    if target.device.type == "cuda":  # taken anew for every question, so that of the process is the last question's
        rows = [row for method in methods for row in method.answers.rows]
        run.note(peak_gpu_memory_bytes=max(row["specwave"].get("peak_memory_bytes", 0) for row in rows))

    baseline = earlier or Baseline(methods[0].answers.rows)
    results = [judge(answerer, method, baseline, questions) for method in methods]
    if earlier is not None:
        results.insert(0, load_results(run.folder / "baseline", "baseline"))
    elif results[0].folder == run.folder:  # plain decoding alone is its own baseline
        copy_baseline(run.folder, run.folder / "baseline")
    note_figures(run, results[-max(1, len(drafters)) :])
    finish(results, run, tracker)
    lost = sum(failed(row) for method in methods for row in method.answers.rows)
    if lost:
        run.note(failed_answers=lost)
        total = len(methods) * len(questions)
        raise SystemExit(f"{lost} of {total} answers failed (failures in results.json); resume=true tries them again")


def meet_other_machines(answerer: Answerer, methods: Sequence[Method], run: Run) -> None:
    """Goes on behind another machine's answers: its half-answered questions are begun anew, and it is said whose times
    the results will hold."""
    unpaired = answerer.unpaired(methods)
    for method in methods:
        if unpaired & method.answers.done:
            method.answers.forget(unpaired)
    others = {mark for method in methods for mark in machines(method.answers.rows)} - {answerer.machine}
    if others:
        marks = ", ".join(sorted(others))
        run.say(
            f"some answers here were timed on other machines ({marks}; this one is {answerer.machine}): tokens per "
            "second will mix their clocks; a question is answered by all methods on one machine"
        )


def stop_here(run: Run, config: EvaluateConfig, answered: int, asked: int) -> None:
    """The time is up, questions are left."""
    run.status = "stopped"
    run.note(answered=answered)
    run.say(
        f"stopped after {config.minutes:g} minutes with {answered} of {asked} questions answered: go on with "
        f"resume=true hydra.run.dir={run.folder}"
    )


def note_figures(run: Run, measured: Sequence[Result]) -> None:
    """τ, tokens/s and speedup in run.yaml, from where the table of a sweep has them; of several drafters each one's,
    under its label. Nothing of questions that all failed."""
    for result in measured:
        mark = f"{result.label} " if len(measured) > 1 else ""
        figures = {f"{mark}{name}": result.content["overall"][name] for name in NOTED}
        run.note(**{name: value for name, value in figures.items() if value is not None})


@contextlib.contextmanager
def own_target(config: EvaluateConfig, run: Run) -> Iterator[Target]:
    """The target of this process. Of a run on several devices each has a GPU of its own, or its share of the threads.

    Raises:
        UserError: more GPUs than there are, or one named by its number beside `devices`.
    """
    if config.devices == 1:
        yield config.model.load()
        return
    import torch

    model, threads = config.model, torch.get_num_threads()
    if model.identify().device.type == "cuda":
        found = torch.cuda.device_count()
        if config.devices > found:
            raise UserError("devices", config.devices, f"there are {found} GPUs: give that, or model.device=cpu")
        if model.device not in ("auto", "cuda"):
            raise UserError("model.device", model.device, "with devices > 1 every process takes one: give auto or cuda")
        model = replace(model, device=f"cuda:{rank_of(run)}")
    else:
        torch.set_num_threads(max(1, threads // config.devices))
    try:
        yield model.load()
    finally:
        torch.set_num_threads(threads)


def rank_of(run: Run) -> int:
    """This process's number among those of the run."""
    return 0 if run.main else int(os.environ.get("LOCAL_RANK") or 0)


def build_methods(
    config: EvaluateConfig,
    target: Any,
    decoding: Any,
    drafters: Sequence[DrafterFolder],
    shared: dict[str, Any],
    run: Run,
    measure_plain: bool,
) -> list[Method]:
    """What is to be measured, plain decoding first; their answers files take up what a killed run has finished."""
    from specwave.benchmark.answering import Method
    from specwave.decoding import Autoregressive

    folder, part = run.folder, rank_of(run) if config.devices > 1 else None
    methods = []
    each: list[DrafterFolder | None] = [*drafters] or [None]
    for drafter in each:
        checkpoint = drafter.path if drafter else None
        proposer = decoding.build(target, checkpoint, config.allow_other_target)
        label = drafter.label if drafter else "plain" if proposer is None else decoding.label
        place = folder / label if len(drafters) > 1 else folder
        used = getattr(proposer, "settings", decoding)  # what total_token=auto chose
        defaults = default_settings(decoding, config.sampling)
        answers = AnswerFile(place, method_settings(shared, used, checkpoint), part, defaults)
        if run.main and hasattr(proposer, "take_up"):
            proposer.take_up(place)
        methods.append(
            Method(
                label=label,
                name=decoding.label,
                proposer=proposer,
                answers=answers,
                layers=drafter.layers if drafter else None,
                rules=drafter.rules if drafter else (),
            )
        )
    if measure_plain and methods[0].proposer is not None:
        plain = Autoregressive()
        defaults = default_settings(plain, config.sampling)
        answers = AnswerFile(folder / "baseline", method_settings(shared, plain, None), part, defaults)
        methods.insert(0, Method("plain", plain.label, None, answers))
    return methods


def judge(answerer: Answerer, method: Method, baseline: Baseline, questions: Sequence[Question]) -> Result:
    """A method's results.json: its answers against plain decoding's."""
    verdicts, divergences = None, list[dict[str, Any]]()
    if answerer.sampling.greedy:
        verdicts, divergences = answerer.verdicts(method, baseline.rows, questions)
    content = build_results(
        label=method.label,
        method=method.name,
        rows=method.answers.rows,
        baseline=baseline,
        verdicts=verdicts,
        divergences=divergences,
        settings=method.answers.settings,
        layers=method.layers,
        rules=method.rules,
        drafter=size_of(Path(folder)) if (folder := method.answers.settings.get("checkpoint")) else None,
    )
    return save_results(method.answers.folder, content)


def finish(results: Sequence[Result], run: Run, tracker: Any = None) -> None:
    """report.html, table.md, table.tex, table.csv, and the table on the console; the same for a tracker."""
    from specwave.benchmark import tables, writers
    from specwave.benchmark.report import plot_pages, write_report

    report = write_report(run.folder, results)
    if tracker is not None:
        tracker.show(
            tables={"evaluation": writers.records(results), "categories": writers.by_category(results)},
            pages=plot_pages(results),
            figures=writers.figures(results),
            files=[report, *(run.folder / f"table.{kind}" for kind in ("csv", "md", "tex"))],
            kind="report",
        )
    run.say(writers.console(tables.summary(results)))
    run.say(f"report: {report}")
