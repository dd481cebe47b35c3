"""Draft & Verify: one kept set for all that is decoded, found offline by Bayesian optimisation, and kept in the cache.

The target answers a few prompts greedily. A candidate, 2N bits, is then valued by the tokens per second it should
bring:

    α     share of the answers' tokens that its drafts would have been right about (`matching.py`, one pass)
    rate  max over γ of TPT(α, γ) with the latency model's times at the answers' mean context (`tpt.py`)

The paper times real decoding instead. A modelled rate costs one forward per candidate where decoding costs hundreds,
and the same seed and latency file give the same plan whatever the machine is doing. Optuna's tree-structured Parzen
estimator proposes the candidates. Source: Draft & Verify (arXiv 2309.08168) §3.3; methods.md §4.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from specwave.artifacts import UserError, cache_dir, check_seed, read_json, reading, write_json
from specwave.data.conversations import Sample
from specwave.data.regenerate import answered
from specwave.data.render import prompts
from specwave.data.sources import builtin_conversations, file_conversations, spread
from specwave.decoding import Context, Sampling, Verdict
from specwave.skipping.latency import Latency
from specwave.skipping.matching import match_rate
from specwave.skipping.measure import latency
from specwave.skipping.plans import Plan, check_kept, read_plan
from specwave.skipping.proposer import SelfSpeculation
from specwave.skipping.settings import SelfDecoding
from specwave.skipping.stops import Adaptive, Rule
from specwave.skipping.tpt import tokens_per_time
from specwave.skipping.windows import gather
from specwave.target import Target, Wants
from specwave.target.clock import device_facts

Kept = tuple[bool, ...]  # 2N flags
Worth = tuple[float, float]  # modelled tokens per second, and α
_SCHEME = 1
_GREEDY = Sampling()


@dataclass(frozen=True)
class DraftVerifyDecoding(SelfDecoding):
    """`decoding=draft_verify`: `trials` candidates are valued on the target's answers of `max_new_tokens` to `limit`
    prompts, spread over those of the file `prompts` or, where it is null, the built-in ones. `plan`: a file with a kept
    set instead. `latency` and `contexts` are KnapSpec's."""

    stop: Any = None
    trials: int = 200
    prompts: str | None = None
    limit: int = 8
    max_new_tokens: int = 64
    seed: int = 0
    plan: str | None = None
    latency: str | None = None
    contexts: list[int] | None = None

    label = "draft_verify"
    own: ClassVar[Rule | None] = Adaptive()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, rule in (
            ("trials", "is a number of candidates, at least 1"),
            ("limit", "candidates are valued on the answers to at least 1 prompt"),
            ("max_new_tokens", "answers have at least 1 token"),
        ):
            if getattr(self, name) < 1:
                self.refuse(name, rule)
        if self.contexts is not None and self.latency is not None:
            self.refuse("contexts", "decoding.latency names times that were measured: leave one of them null")
        check_seed("decoding.seed", self.seed)

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> SelfSpeculation:
        """A proposer for `target`; the plan is read, or found now, before anything is timed."""
        if self.plan is not None:
            plan = read_plan(self.plan, target.num_layers, self.gamma)
            return replace(self, gamma=plan.gamma).compose(target, Fixed(plan))  # results name the γ of the file
        costs = latency(target, self.contexts, self.latency, self.batch_invariant)
        return self.compose(target, Fixed(*found_plan(target, self, costs)))


class Fixed:
    """A source with one plan, made before decoding began.

    Attributes:
        record: how it was found; None when it was given.
    """

    scope: Literal["sequence", "stream"] = "sequence"  # it learns nothing

    def __init__(self, present: Plan, record: dict[str, Any] | None = None):
        self.present, self.record = present, record

    def begin(self, contexts: Sequence[Context]) -> None: ...

    def end(self, row: int) -> None: ...

    def plan(self, contexts: Sequence[Context]) -> Plan | None:
        return self.present

    def wants(self, contexts: Sequence[Context]) -> Wants:
        return Wants()

    def observe(self, verdicts: Sequence[Verdict]) -> None: ...

    def report(self, folder: Path) -> None:
        """plan.json beside the answers; `decoding.plan=` takes it."""
        write_json(folder / "plan.json", {**self.present.describe(), **(self.record or {})})


# ---------------------------------------------------------------- the plan and its note


def found_plan(target: Target, settings: DraftVerifyDecoding, costs: Latency) -> tuple[Plan, dict[str, Any]]:
    """The plan of these settings with these costs: from the cache, or searched now (minutes) and noted there.

    Raises:
        UserError: no prompts, prompts beyond the target's context, optuna is not installed.
    """
    asked = questions(target, settings)
    facts = {
        "scheme": _SCHEME,
        **device_facts(target),
        "costs": digest(asdict(costs)),
        "prompts": digest([[name, ids] for name, _, ids in asked]),
        **{name: getattr(settings, name) for name in ("gamma", "trials", "max_new_tokens", "seed", "batch_invariant")},
    }
    note = cache_dir() / "plans" / f"{target.name}-{digest(facts)}.json"
    if note.is_file():
        with contextlib.suppress(UserError):  # damaged: found again
            return read_note(note, target.num_layers)
    find_optuna()  # before the target answers anything
    samples = answered(
        target, asked, max_new_tokens=settings.max_new_tokens, batch_size=len(asked), label="answers to plan on"
    )
    value, context = objective(target, samples, costs, settings.gamma)
    tried = optimise(value, 2 * target.num_layers, settings.trials, settings.seed)
    kept, (rate, alpha) = max(tried, key=lambda pair: pair[1][0])  # of equal ones the first
    plan = Plan(kept, settings.gamma, alpha, rate=rate)
    record = {
        "facts": facts,
        "context": context,
        "plain_rate": 1 / costs.t_target(1, context),
        "rates": [pair[1][0] for pair in tried],
    }
    with contextlib.suppress(OSError):
        write_json(note, {**plan.describe(), **record})
    return plan, record


def read_note(path: Path, num_layers: int) -> tuple[Plan, dict[str, Any]]:
    content = read_json(path, "decoding.plan")
    with reading("decoding.plan", path):
        kept = check_kept(content["kept"], num_layers, "decoding.plan")
        plan = Plan(kept, int(content["gamma"]), float(content["alpha"]), rate=float(content["rate"]))
        return plan, {name: content[name] for name in ("facts", "context", "plain_rate", "rates")}


def questions(target: Target, settings: DraftVerifyDecoding) -> list[tuple[str, str, list[int]]]:
    """(id, category, token ids) of the prompts that candidates are valued on."""
    key = "decoding.prompts"
    given = builtin_conversations() if settings.prompts is None else file_conversations(settings.prompts, key)
    asked = prompts(target, spread(given, settings.limit))
    short = [prompt for prompt in asked if len(prompt[2]) + settings.max_new_tokens <= target.max_length]
    if len(short) < len(asked):
        rule = f"leaves {len(asked) - len(short)} of {len(asked)} prompts no room in the {target.max_length} positions"
        if not short:
            raise UserError("decoding.max_new_tokens", settings.max_new_tokens, f"{rule} of {target.name}: lower it")
        warnings.warn(f"decoding.max_new_tokens={settings.max_new_tokens}: {rule}; they are passed over", stacklevel=2)
    return short


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- what a candidate is worth, and which are tried


@torch.inference_mode()
def objective(
    target: Target, samples: Sequence[Sample], costs: Latency, gamma: int
) -> tuple[Callable[[Kept], Worth], int]:
    """(what a kept set is worth: its modelled tokens per second and its α; the context these are modelled at)."""
    session = target.session(len(samples), max(len(sample.ids) for sample in samples))
    counts = [len(sample.ids) - 1 for sample in samples]
    padded = torch.zeros(len(samples), max(counts), dtype=torch.int64)
    for row, sample in enumerate(samples):
        padded[row, : counts[row]] = torch.tensor(sample.ids[:-1])
    session.forward(padded.to(target.device), logits=False)
    session.advance(counts)
    contexts = [
        Context(row, row, sample.ids, sample.answer.index(True), sum(sample.answer), session, row)
        for row, sample in enumerate(samples)
    ]
    evidence = gather(target, contexts, [sum(sample.answer) for sample in samples])
    trial, context = session.trial(evidence.windows), sum(counts) // len(counts)
    verify = {drafts: costs.t_target(drafts + 1, context) for drafts in range(1, gamma + 1)}

    def value(kept: Kept) -> Worth:
        if not any(kept):
            return 0.0, 0.0  # nothing that could draft
        alpha, draft = match_rate(target, trial, evidence, kept, _GREEDY), costs.t_draft(kept, context)
        return max(tokens_per_time(alpha, drafts, draft, seconds) for drafts, seconds in verify.items()), alpha

    return value, context


def optimise(value: Callable[[Kept], Worth], bits: int, trials: int, seed: int) -> list[tuple[Kept, Worth]]:
    """The candidates in the order they were tried, each with what it is worth; the first number is maximised.

    The first fifth are drawn by chance, each with a share of skipped sub-layers between none and half: of bits that are
    all drawn evenly, hardly one candidate drafts anything right, and there is nothing to learn from.

    Raises:
        UserError: optuna is not installed.
    """
    optuna = find_optuna()
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # else a line for each trial
    try:
        names, draw, starts = [f"{bit}" for bit in range(bits)], random.Random(f"{seed}/draft_verify"), -(-trials // 5)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=starts, multivariate=True)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for _ in range(starts):
            share = 0.5 * draw.random()
            study.enqueue_trial({name: draw.random() >= share for name in names})
        tried: list[tuple[Kept, Worth]] = []
        known: dict[Kept, Worth] = {}
        for _ in range(trials):
            trial = study.ask()
            kept = tuple(trial.suggest_categorical(name, [False, True]) for name in names)
            if kept not in known:
                known[kept] = value(kept)
            study.tell(trial, known[kept][0])
            tried.append((kept, known[kept]))
    finally:
        optuna.logging.set_verbosity(before)
    return tried


def find_optuna() -> Any:
    """The module.

    Raises:
        UserError: it is not installed.
    """
    try:
        import optuna
    except ImportError:
        remedy = "a plan is searched with optuna, a package of its own: pip install 'specwave[bayes]', or name a file"
        raise UserError("decoding.plan", "null", remedy) from None
    return optuna
