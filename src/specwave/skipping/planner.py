"""A plan from evidence: the search over hidden states (stage 1), then (S, γ) by tokens per time (stage 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specwave.decoding import Context
from specwave.skipping.drafting import agreement
from specwave.skipping.knapsack import integer_weights
from specwave.skipping.latency import Latency
from specwave.skipping.logs import longest
from specwave.skipping.plans import Plan
from specwave.skipping.search import forced_ends, largest_batches, search
from specwave.skipping.tpt import fastest
from specwave.skipping.windows import Evidence
from specwave.target import Target


@dataclass(frozen=True)
class Planner:
    """KnapSpec's plans for one target with the costs of one device.

    Attributes:
        gammas: how many drafts per round are considered.
        budget: the largest share of all sub-layer weight that may be skipped.
        prune: branches of a smaller cosine are given up.
        resolution: weight of the cheaper kind of sub-layer; 1 in the paper.
    """

    target: Target
    latency: Latency
    gammas: Sequence[int]
    budget: float = 0.5
    prune: float = 0.5
    resolution: int = 1

    def weights(self, context: int) -> list[int]:
        """Of the 2N sub-layers, behind so many tokens: attention outweighs the MLP once contexts are long."""
        pair = integer_weights(self.latency.t_attention(context), self.latency.t_mlp(context), self.resolution)
        return [*pair] * self.target.num_layers

    def limit(self, weights: Sequence[int]) -> int:
        return int(self.budget * sum(weights))

    @torch.inference_mode()
    def plan(self, contexts: Sequence[Context], evidence: Evidence) -> Plan:
        """The plan of most expected tokens per second for all rows together; γ = 0 where plain decoding is faster."""
        session, sampling = contexts[0].session, contexts[0].sampling
        rows, context = len(contexts), longest(contexts)
        weights = self.weights(context)
        trial = session.trial(evidence.windows)
        forced = forced_ends(self.target.num_layers)
        found, final_JTD = search(trial.run, evidence.states, weights, self.limit(weights), forced, self.prune)
        alphas = agreement(
            self.target.logits,
            final_JTD,
            evidence.tokens,
            sampling,
            evidence.sequences,
            evidence.positions,
            evidence.seen,
        )
        drafts = [self.latency.t_draft(one.kept, context, rows) for one in found]
        best = fastest(alphas, drafts, lambda tokens: self.latency.t_target(tokens * rows, context), self.gammas)
        if best.option is None:
            return Plan.full(self.target.num_layers, alpha=1.0, cosine=1.0, rate=best.rate)
        chosen = found[best.option]
        return Plan(chosen.kept, best.gamma, alphas[best.option], chosen.cosine, best.rate)

    def seconds(self, contexts: Sequence[Context], tokens: int) -> float:
        """What a plan on a window of so many tokens costs by the latency model, were no branch pruned."""
        context = longest(contexts)
        weights = self.weights(context)
        branches = largest_batches(weights, self.limit(weights), forced_ends(self.target.num_layers))
        return self.latency.t_search([count * tokens for count in branches], branches[-1] * tokens, context)
