"""What self-speculation can gain on this target and device: KnapSpec's bound, and what its kept sets come to.

    python benchmarks/bound.py --out <folder> [--contexts 128 512 2048 4096] [--questions 2] [--new-tokens 32]

Behind each context (prompts of long_context) the target answers plainly, watched at every sub-layer; then KnapSpec's
search is run on the whole answer. Of each kept set it finds, and of the first blocks alone, with which early-exit
methods draft: what a draft step costs, as a share of the target's own step; its α, the agreement on the answer; the
speedup by TPT that α gives with the best γ; the bound, that of α = 1; and the least α that is no loss. sets.csv has
them all, bound.png the speedups and bounds over the cost of a step, and attention's share of the skipped sub-layers
over the context. Every state is held against lemma 4.1 too: one that is above its token's bound and has another argmax
ends with exit code 1. A killed run goes on. Costs are measured once and cached: on a quiet machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from transformers.utils import logging

from specwave.artifacts import append_line, drop_torn_line, write_figure, write_json
from specwave.benchmark import LongContext
from specwave.data.conversations import prompt_ids
from specwave.decoding import BaseProposer, Context, Sampling, Verdict, generate
from specwave.skipping.drafting import agreement
from specwave.skipping.early_exit import exit_plan
from specwave.skipping.figures import STYLE
from specwave.skipping.latency import Latency
from specwave.skipping.lemma import least_cosine, violations
from specwave.skipping.measure import latency
from specwave.skipping.planner import Planner
from specwave.skipping.plans import Plan
from specwave.skipping.search import forced_ends, search
from specwave.skipping.tpt import tokens_per_time
from specwave.skipping.windows import Watch, every_sub_layer
from specwave.target import Target, Wants, load_target

GAMMAS = range(1, 9)
COLUMNS = ("context", "question", "kind", "attentions", "MLPs", "skipped_attention_share", "cosine", "cost", "alpha",
           "gamma", "speedup", "bound", "break_even", "states", "above", "violations")  # fmt: skip
KINDS = {"search": "Kept sets of KnapSpec's search:", "exit": "First blocks, as early-exit methods draft:"}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe & Ito's
MARKS = "os^Dv*"
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that is written to and gone on in")
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048, 4096], help="tokens of prompts")
    parser.add_argument("--questions", type=int, default=2, help="prompts of each length")
    parser.add_argument("--new-tokens", type=int, default=32, help="of the answers that sets are held against")
    parser.add_argument("--budget", type=float, default=0.5, help="share of the sub-layers' time that may be skipped")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    target = load_target(arguments.model, dtype=arguments.dtype)
    print(f"{target.name}, {target.dtype}, {target.device}, {torch.get_num_threads()} threads")
    costs = latency(target)
    rows = look_everywhere(target, costs, arguments)
    with open(arguments.out / "sets.csv", "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    for kind, words in KINDS.items():
        print(f"\n{words}")
        print_best([row for row in rows if row["kind"] == kind])
    picture(arguments.out / "bound", rows, target.name)
    states, above, broken = (sum(row[name] for row in rows) for name in ("states", "above", "violations"))
    print(f"lemma 4.1: {above:,} of {states:,} states are above their token's bound, {broken} of them violate it")
    return int(broken > 0)


def look_everywhere(target: Target, costs: Latency, arguments: argparse.Namespace) -> list[Row]:
    """Rows of all questions, those of an earlier run in this folder taken over."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "contexts", "questions")}
    settings |= {"target": target.fingerprint, "dtype": str(target.dtype), "costs": costs.facts}
    noted, kept = out / "bound.json", out / "sets.jsonl"
    if noted.is_file() and json.loads(noted.read_text(encoding="utf-8")) != settings:
        raise SystemExit(f"--out {out}: it holds sets under other settings ({noted})")
    write_json(noted, settings)
    drop_torn_line(kept)
    done = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.is_file() else []
    there = {(one["context"], one["question"]) for one in done}
    for length in arguments.contexts:
        asked = LongContext(lengths=[length], tasks=["summarization"], each=arguments.questions)
        for number, question in enumerate(asked.questions(target=target, room=arguments.new_tokens)):
            if (length, number) in there:
                continue
            prompt = prompt_ids(target, [{"role": "user", "content": question.turns[0]}])
            looking = Looking(target, costs, arguments.new_tokens, arguments.budget)
            generate(target, looking, prompt, max_new_tokens=arguments.new_tokens, eos_ids=())
            done.append({"context": length, "question": number, "sets": looking.found})
            with open(kept, "a", encoding="utf-8") as stream:
                append_line(stream, done[-1])
    chosen = [one for one in done if one["context"] in arguments.contexts and one["question"] < arguments.questions]
    return [{name: one[name] for name in ("context", "question")} | row for one in chosen for row in one["sets"]]


class Looking(BaseProposer):
    """Plain decoding, watched; behind the last round KnapSpec's search on all of them.

    Attributes:
        found: what was found of each kept set, the one that skips least first.
    """

    def __init__(self, target: Target, costs: Latency, rounds: int, budget: float):
        self.target, self.costs, self.rounds = target, costs, rounds
        self.planner = Planner(target, costs, GAMMAS, budget)
        self.watch, self.wanted = Watch(target, rounds), Wants()
        self.found: list[Row] = []

    def begin(self, contexts: Sequence[Context]) -> None:
        self.wanted = every_sub_layer(self.target.num_layers)  # of rounds; a prompt's would be large

    def wants(self, contexts: Sequence[Context]) -> Wants:
        return self.wanted

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        self.watch.take(verdicts)
        if self.watch.rounds == self.rounds:
            self.found = self._look([verdict.context for verdict in verdicts])

    def _look(self, contexts: Sequence[Context]) -> list[Row]:
        evidence, target = self.watch.evidence(contexts), self.target
        place = len(contexts[0].tokens) - self.rounds // 2
        weights = self.planner.weights(place)
        trial, forced = contexts[0].session.trial(evidence.windows), forced_ends(target.num_layers)
        sets, final = search(trial.run, evidence.states, weights, self.planner.limit(weights), forced, prune=-1.0)
        exits = [exit_plan(block, target.num_layers, 1).kept for block in range(1, target.num_layers)]
        found = [("search", one.kept) for one in sets[1:]] + [("exit", kept) for kept in exits]  # not the whole target
        own_JTD = torch.cat([final[1:], torch.stack([evidence.states[sum(kept)] for kept in exits])])
        alphas = agreement(target.logits, own_JTD, evidence.tokens, Sampling(), evidence.sequences, evidence.positions)
        truth, head = evidence.states[-1], (target.head, target.final_norm)
        cosine_JT, least_T = F.cosine_similarity(truth.double(), own_JTD.double(), dim=-1), least_cosine(truth, *head)
        rows = []
        for (kind, kept), own, alpha, cosine in zip(found, own_JTD, alphas, cosine_JT, strict=True):
            plan = Plan(kept, 1)
            row = {"kind": kind, "attentions": plan.attentions, "MLPs": plan.mlps, "alpha": alpha}
            row |= {"skipped_attention_share": plan.skipped_attention_share, "cosine": float(cosine.mean())}
            row |= {"states": len(own), "above": int((cosine > least_T).sum())}
            row["violations"] = int(violations(truth, own, *head).sum())
            rows.append(row | worth(self.costs, kept, place, alpha))
        return rows


def worth(costs: Latency, kept: Sequence[bool], context: int, alpha: float) -> Row:
    """Cost of a draft step, speedups by TPT over plain decoding, and the least α that is no loss."""
    draft, single = costs.t_draft(kept, context), costs.t_target(1, context)

    def speedup(alpha: float) -> tuple[float, int]:
        """With the best γ."""
        rates = ((tokens_per_time(alpha, gamma, draft, costs.t_target(gamma + 1, context)), gamma) for gamma in GAMMAS)
        rate, gamma = max(rates)
        return rate * single, gamma

    found, gamma = speedup(alpha)
    bound = speedup(1.0)[0]
    even = smallest(lambda one: speedup(one)[0] >= 1.0) if bound >= 1.0 else None
    return {"cost": draft / single, "gamma": gamma, "speedup": found, "bound": bound, "break_even": even}


def smallest(enough: Callable[[float], bool]) -> float:
    """The smallest α in 0 … 1 that is enough, where 1 is."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# ---------------------------------------------------------------- words and a picture


def print_best(rows: Sequence[Row]) -> None:
    """Per context the set that promises most, means over questions, as a Markdown table."""
    print(
        "| context | kept attentions, MLPs | cost of a step | α | γ | speedup by TPT | bound, α = 1 | α to break even |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for context, own in by_context(rows).items():
        best = [max(some, key=lambda row: row["speedup"]) for some in by_question(own)]
        shown = ("cost", "alpha", "gamma", "speedup", "bound")
        mean = {name: statistics.fmean(row[name] for row in best) for name in ("attentions", "MLPs", *shown)}
        even = [row["break_even"] for row in best if row["break_even"] is not None]
        needed = f"{statistics.fmean(even):.2f}" if len(even) == len(best) else "none"
        figures = " | ".join(f"{mean[name]:.2f}" for name in shown)
        print(f"| {context:,} | {mean['attentions']:.1f} + {mean['MLPs']:.1f} | {figures} | {needed} |")


def by_context(rows: Sequence[Row]) -> dict[int, list[Row]]:
    return {
        context: [row for row in rows if row["context"] == context] for context in sorted({r["context"] for r in rows})
    }


def by_question(rows: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in rows if row["question"] == number] for number in sorted({row["question"] for row in rows})]


def picture(path: Path, rows: Sequence[Row], name: str) -> list[Path]:
    """`path` without suffix. Left: speedups and bounds over the cost of a draft step; right: attention's share of what
    the search skips over the context, of its sets that skip most, and of those that promise most."""
    parts, exits = (by_context([row for row in rows if row["kind"] == kind]) for kind in ("search", "exit"))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.8), layout="constrained")
        figure.suptitle(f"{name}: what kept sets promise", fontsize=10)
        gains, shares = figure.subplots(1, 2)
        for (context, own), colour, mark in zip(parts.items(), COLOURS, MARKS, strict=False):
            costs = [row["cost"] for row in own]
            gains.plot(costs, [row["speedup"] for row in own], mark, color=colour, markersize=3, alpha=0.6,
                       label=f"{context:,} tokens")  # fmt: skip
            line = sorted((row["cost"], row["bound"]) for row in own)
            gains.plot(*zip(*line, strict=True), "-", color=colour, linewidth=1)
            early = exits[context]
            gains.plot(
                [row["cost"] for row in early], [row["speedup"] for row in early], "x", color=colour, markersize=3
            )
        gains.plot([], [], "x", color="#6B6B6B", markersize=3, label="first blocks alone")
        gains.plot([], [], "-", color="#6B6B6B", linewidth=1, label="bound, α = 1")
        gains.axhline(1, color="#6B6B6B", linewidth=0.8, linestyle=":", label="plain decoding")
        gains.set_xlabel("cost of a draft step, share of the target's own")
        gains.set_ylabel("speedup by TPT, best γ")
        gains.legend(fontsize=7)
        for label, pick, colour, mark in (
            ("skip most", lambda row: -row["cost"], COLOURS[0], "o-"),
            ("promise most", lambda row: row["speedup"], COLOURS[1], "s--"),
        ):
            chosen = {context: [max(some, key=pick) for some in by_question(own)] for context, own in parts.items()}
            means = [statistics.fmean(row["skipped_attention_share"] for row in some) for some in chosen.values()]
            shares.plot(list(chosen), means, mark, color=colour, label=f"sets that {label}")
        shares.axhline(0.5, color="#6B6B6B", linewidth=0.8, linestyle=":")
        shares.set_xscale("log", base=2)
        shares.set_xticks(list(parts), [f"{context:,}" for context in parts])
        shares.minorticks_off()
        shares.set_ylim(-0.03, 1.03)
        shares.yaxis.set_major_formatter(PercentFormatter(1.0))
        shares.set_xlabel("tokens of context")
        shares.set_ylabel("attention's share of skipped sub-layers")
        shares.legend(fontsize=7)
        return write_figure(path, figure)


if __name__ == "__main__":
    raise SystemExit(main())
