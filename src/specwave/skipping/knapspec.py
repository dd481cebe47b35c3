"""KnapSpec: decodes plainly until a window of rounds is watched, plans on it, drafts by the plan, plans again.

States are captured in the rounds of a window only. With window = 5 and every = 64:

    round          1 … 5        6 … 64       65 … 69      70 …
    forwards       watched      as usual     watched      as usual
    drafts         none         plan 1       plan 1       plan 2
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specwave.artifacts import UserError
from specwave.decoding import Context, Verdict
from specwave.skipping.latency import Latency
from specwave.skipping.logs import Logged, longest
from specwave.skipping.measure import latency
from specwave.skipping.planner import Planner
from specwave.skipping.plans import Plan, read_plan
from specwave.skipping.proposer import SelfSpeculation
from specwave.skipping.settings import SelfDecoding
from specwave.skipping.windows import Watch, every_sub_layer
from specwave.target import Target, Wants


@dataclass(frozen=True)
class KnapSpecDecoding(SelfDecoding):
    """`decoding=knapspec`: how plans are made, when they are made anew, and how far drafts go.

    `gamma`: the most drafts per round; how many pay is chosen with the plan, unless `fixed_gamma`. `plan`: a file with
    a kept set, which is then never changed.
    """

    fixed_gamma: bool = False
    adapt: bool = True
    window: int = 5
    every: int = 64
    growth: float = 0.25
    plan_share: float | None = 0.05
    budget: float = 0.5
    prune: float = 0.5
    resolution: int = 1
    plan: str | None = None
    latency: str | None = None
    contexts: list[int] | None = None

    label = "knapspec"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            self.refuse("window", "a plan is made on at least 1 round")
        if self.every < self.window:
            self.refuse("every", f"must be at least decoding.window={self.window}, the rounds watched before a plan")
        if not self.growth > 0.0:
            self.refuse("growth", "is a share of the context, above 0: 0.25 plans again when it is a quarter longer")
        if self.plan_share is not None and not self.plan_share > 0.0:
            self.refuse("plan_share", "is a share of decoding time, above 0; null lets plans cost what they cost")
        if not 0.0 < self.budget < 1.0:
            rule = "the share of all weight that may be skipped: above 0, and below 1, which keeps nothing"
            self.refuse("budget", rule)
        if not -1.0 <= self.prune < 1.0:
            self.refuse("prune", "is a cosine: must be at least -1 and below 1")
        if not 1 <= self.resolution <= 16:
            self.refuse("resolution", "must be 1 (the paper's weights) to 16")
        if self.contexts is not None and self.latency is not None:
            self.refuse("contexts", "decoding.latency names times that were measured: leave one of them null")

    def build(self, target: Target, checkpoint: Any = None, allow_other_target: bool = False) -> SelfSpeculation:
        """A proposer for `target`. Its latency model is read, or measured now, before anything is timed."""
        fixed = None if self.plan is None else read_plan(self.plan, target.num_layers, self.gamma)
        costs = latency(target, self.contexts, self.latency, self.batch_invariant)
        used = self if fixed is None else replace(self, gamma=fixed.gamma)  # results name the γ of the file
        return used.compose(target, KnapSpec(target, used, costs, fixed))


class KnapSpec(Logged):
    """The source of KnapSpec's plans."""

    scope: Literal["sequence", "stream"] = "sequence"

    def __init__(self, target: Target, settings: KnapSpecDecoding, costs: Latency, fixed: Plan | None = None):
        super().__init__(target)
        self.settings, self.costs, self.fixed = settings, costs, fixed
        gammas = [settings.gamma] if settings.fixed_gamma else range(1, settings.gamma + 1)
        self.planner = Planner(target, costs, gammas, settings.budget, settings.prune, settings.resolution)
        weights = self.planner.weights(costs.contexts[0])
        if fixed is None and self.planner.limit(weights) < min(weights):
            rule = f"is less than one of the {len(weights)} sub-layers weighs, so nothing could be skipped: allow more"
            raise UserError("decoding.budget", settings.budget, rule)
        self.everything = every_sub_layer(target.num_layers)
        self.watch = Watch(target, settings.window)
        self.begin([])

    def begin(self, contexts: Sequence[Context]) -> None:
        self.present: Plan | None = self.fixed
        self.watch.clear()
        self.watching = False
        self.rounds = self.planned_round = self.planned_length = 0
        self.decoded = self.planned = 0.0  # seconds by the latency model: rounds so far, plans so far
        self.affordable_at = 0.0  # not looked at before so many seconds were decoded

    def end(self, row: int) -> None:
        self.watch.drop(row)

    def wants(self, contexts: Sequence[Context]) -> Wants:
        self.watching = self.watching or self._due(contexts)
        return self.everything if self.watching else Wants()

    def plan(self, contexts: Sequence[Context]) -> Plan | None:
        if self.watch.rounds >= self.settings.window:
            self._replan(contexts)
        return self.present

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.rounds += 1
        self.decoded += self._cost(verdicts)
        if self.watching:
            self.watch.take(verdicts)

    # ---------------------------------------------------------------- when

    def _due(self, contexts: Sequence[Context]) -> bool:
        """Whether the rounds of the next window begin now."""
        if self.fixed is not None:
            return False
        if self.present is not None:
            if not self.settings.adapt:
                return False
            late = self.rounds - self.planned_round >= self.settings.every - self.settings.window
            grown = longest(contexts) >= (1 + self.settings.growth) * self.planned_length
            if not late and not grown:
                return False
        return self._affordable(contexts)

    def _affordable(self, contexts: Sequence[Context]) -> bool:
        """Whether this plan and those before it stay within their share of the time decoding took so far.

        Both by the latency model, so that the same latency file gives the same plans, whatever the machine does.
        """
        share = self.settings.plan_share
        if share is None:
            return True
        if self.decoded < self.affordable_at:
            return False
        committed = sum(len(context.tokens) - context.prompt_length for context in contexts)
        per_round = max(committed / (self.rounds * len(contexts)), 1.0) if self.rounds else 1.0
        tokens = round(self.settings.window * per_round * len(contexts))
        self.affordable_at = (self.planned + self.planner.seconds(contexts, tokens)) / share
        return self.decoded >= self.affordable_at

    def _cost(self, verdicts: Sequence[Verdict]) -> float:
        """Seconds of a round by the latency model."""
        contexts = [verdict.context for verdict in verdicts]
        steps, rows, context = max(len(verdict.tree) for verdict in verdicts), len(contexts), longest(contexts)
        drafting = 0.0
        if steps and self.present is not None:
            drafting = steps * self.costs.t_draft(self.present.kept, context, rows)
        return drafting + self.costs.t_target((1 + steps) * rows, context)

    # ---------------------------------------------------------------- what

    def _replan(self, contexts: Sequence[Context]) -> None:
        began = time.perf_counter()
        evidence = self.watch.evidence(contexts)
        self.present = self.planner.plan(contexts, evidence)
        expected = self.planner.seconds(contexts, len(evidence.tokens))
        self.planned += expected
        self.planned_round, self.planned_length = self.rounds, longest(contexts)
        self.watching = False
        self.watch.clear()
        self.note(
            contexts,
            self.rounds,
            self.present,
            time.perf_counter() - began,
            plain_rate=1 / self.costs.t_target(len(contexts), self.planned_length),
            window_tokens=len(evidence.tokens),
            expected_seconds=expected,
            decoded_seconds=self.decoded,
        )

    def report(self, folder: Path) -> None:
        """Into an answers' folder: latency.json with its picture, plans.jsonl with its."""
        from specwave.skipping.figures import latency_figure  # matplotlib takes a while to import

        super().report(folder)
        self.costs.save(folder / "latency.json")
        latency_figure(folder / "latency", self.costs, f"{self.target.name}, {str(self.target.dtype)[6:]}")
