"""What self-speculation costs, and what its criteria foretell, on one target and this device.

    python benchmarks/skipping.py costs [--contexts 128 512 2048]
    python benchmarks/skipping.py study --out <folder> [--plans 48] [--questions 6] [--new-tokens 48]

`costs`: one-token forwards with kept sets of every size, against what the whole one costs less what they skip; how long
plans take. `study`: kept sets, half of them found by KnapSpec's search, half drawn, each decode the same questions, in
turn with plain decoding, so that a machine that drifts slows both. TPT, TPL and the agreement, all known before, are
correlated with the speedup that came (Pearson, Spearman, bootstrap intervals): a table, plans.csv, a scatter picture. A
killed study goes on in its folder. Quiet machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers.utils import logging

from specwave.artifacts import append_line, write_figure, write_json, write_text
from specwave.benchmark import Benchmark
from specwave.data.conversations import builtin_calibration_prompts, prompt_ids, user_prompt_ids
from specwave.decoding import Sampling, generate
from specwave.skipping import KnapSpecDecoding
from specwave.skipping.correlation import bootstrap, pearson, spearman
from specwave.skipping.drafting import agreement
from specwave.skipping.figures import STYLE
from specwave.skipping.latency import Latency
from specwave.skipping.measure import latency, medians
from specwave.skipping.search import forced_ends, search
from specwave.skipping.tpt import tokens_per_layer, tokens_per_time
from specwave.skipping.windows import every_sub_layer
from specwave.target import Target, load_target
from specwave.target.clock import wait
from specwave.target.sublayers import Window

CRITERIA = ("TPT", "TPL", "agreement")
PUBLISHED = {"TPT": 0.837, "agreement": 0.538}  # KnapSpec's correlations with throughput, of TPT and acceptance rate
COLUMNS = ("origin", "kept", "attentions", "mlps", *CRITERIA, "tau", "speedup", "tokens_per_second", "plain")
Kept = tuple[bool, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("costs", "study"))
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048], help="lengths that are timed")
    parser.add_argument("--plans", type=int, default=48, help="kept sets of a study")
    parser.add_argument("--gamma", type=int, default=4, help="drafts per round of a study")
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0, help="of the kept sets that are drawn")
    parser.add_argument("--out", type=Path, help="folder of a study")
    arguments = parser.parse_args()
    if arguments.part == "study" and arguments.out is None:
        parser.error("--out: name the folder that a study writes to and goes on in")
    logging.disable_progress_bar()
    target = load_target(arguments.model, dtype=arguments.dtype)
    print(f"{target.name}, {target.dtype}, {target.device}, {torch.get_num_threads()} threads")
    costs = latency(target, arguments.contexts)
    if arguments.part == "costs":
        print_model(costs)
        print_forwards(target, costs, arguments.contexts, arguments.seed)
        print_plans(target, arguments.questions)
    else:
        study(target, costs, arguments)


# ---------------------------------------------------------------- costs


def print_model(costs: Latency) -> None:
    """The latency model, as measured."""
    print(f"{'context':>8} {'attention':>10} {'MLP':>8} {'t_0':>8}   T(1), T(4), T(8), T(16) in ms")
    for place, context in enumerate(costs.contexts):
        forwards = " ".join(f"{1e3 * costs.t_target(k, context):7.1f}" for k in (1, 4, 8, 16))
        parts = [1e3 * row[place] for row in (costs.attention, costs.mlp, costs.rest)]
        print(f"{context:8,} {parts[0]:10.3f} {parts[1]:8.3f} {parts[2]:8.2f}   {forwards}")
    fit = costs.attention_fit
    poor = "" if costs.poor is None else f"; not used: {costs.poor}"
    print(f"t_attn(n) = {1e9 * fit.slope:.3g} ns · n + {1e3 * fit.intercept:.3g} ms, within {fit.error:.1%}{poor}")


def print_forwards(target: Target, costs: Latency, contexts: Sequence[int], seed: int) -> None:
    """A forward with a kept set against (what it keeps + the rest) / everything; goal 1.1."""
    print(f"{'context':>8} {'kept':>5} {'ms':>8} {'of whole':>9} {'kept + rest':>12} {'ratio':>6}")
    everything, nothing = (True,) * (2 * target.num_layers), (False,) * (2 * target.num_layers)
    for context in contexts:
        session = target.session(1, context + 1)
        for start in range(0, context, 512):
            tokens = torch.randint(0, target.vocab_size, (1, min(512, context - start)), device=target.device)
            session.forward(tokens, logits=False)
            session.advance([tokens.shape[1]])
        token = torch.randint(0, target.vocab_size, (1, 1), device=target.device)
        draw = random.Random(seed)
        plans = [everything, *(drawn(target.num_layers, share, draw) for share in (0.75, 0.5, 0.25)), nothing]
        jobs = {kept: partial(session.forward, token, plan=kept) for kept in plans}
        taken = medians(jobs, lambda: wait(target), repeat=11)
        whole, rest = taken[everything], taken[nothing]
        one_attention, one_mlp = costs.t_attention(context), costs.t_mlp(context)
        each = (whole - rest) / (target.num_layers * (one_attention + one_mlp))  # the parts' times, to add up to this
        for kept in plans:
            parts = each * (sum(kept[::2]) * one_attention + sum(kept[1::2]) * one_mlp) + rest
            shares = taken[kept] / whole, parts / whole
            print(f"{context:8,} {sum(kept):5} {1e3 * taken[kept]:8.2f} {shares[0]:9.3f} {shares[1]:12.3f} "
                  f"{shares[0] / shares[1]:6.2f}")  # fmt: skip


def print_plans(target: Target, questions: int) -> None:
    """How long plans take, and their share of decoding where they are made whenever one is due, and by default."""
    for share, words in ((None, "plans whenever due"), (0.05, "at most 5 % of the time")):
        method = KnapSpecDecoding(plan_share=share).build(target)
        spent = 0.0
        for prompt in prompts_of(target, questions):
            made = generate(target, method, prompt, max_new_tokens=192, eos_ids=())
            spent += made.seconds - made.prefill_seconds
        log = method.source.log
        planning = sum(row["seconds"] for row in log)
        print(f"{words}: {len(log)} plans, {planning:.1f} of {spent:.1f} s, {planning / spent:.1%}; "
              f"{sum(row['gamma'] > 0 for row in log)} of them draft")  # fmt: skip


# ---------------------------------------------------------------- study


def study(target: Target, costs: Latency, arguments: argparse.Namespace) -> None:
    """Every kept set decodes the questions; what was foretold against what came."""
    out: Path = arguments.out
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "part")}
    settings |= {"target": target.fingerprint, "dtype": str(target.dtype), "threads": torch.get_num_threads()}
    prompts = prompts_of(target, arguments.questions)
    answers = [generate(target, None, prompt, max_new_tokens=arguments.new_tokens, eos_ids=()) for prompt in prompts]
    done = earlier(out, settings)
    for origin, kept in tqdm(
        kept_sets(target, arguments.plans, arguments.seed), desc="kept sets", total=arguments.plans
    ):
        if flags(kept) in {row["kept"] for row in done}:
            continue
        row = {"origin": origin, "kept": flags(kept), "attentions": sum(kept[::2]), "mlps": sum(kept[1::2])}
        context = round(statistics.fmean(map(len, prompts)) + arguments.new_tokens / 2)
        row |= foretold(target, costs, kept, arguments.gamma, context, prompts, [made.tokens for made in answers])
        row |= measured(target, kept, arguments.gamma, prompts, arguments.new_tokens, out)
        done.append(row)
        with open(out / "plans.jsonl", "a", encoding="utf-8") as stream:
            append_line(stream, row)
    with open(out / "plans.csv", "w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(done)
    print_correlations(done)
    scatter(out / "plans", done, f"{target.name}: {len(done)} kept sets, γ = {arguments.gamma}")


def earlier(out: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a study that was killed in this folder; none in a new one."""
    out.mkdir(parents=True, exist_ok=True)
    noted = out / "study.json"
    if noted.is_file() and json.loads(noted.read_text(encoding="utf-8")) != settings:
        raise SystemExit(f"--out {out}: it holds a study under other settings ({noted})")
    write_json(noted, settings)
    rows = out / "plans.jsonl"
    if not rows.is_file():
        return []
    whole = rows.read_text(encoding="utf-8").rpartition("\n")[0]  # the kill may have cut the last line
    write_text(rows, f"{whole}\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]


def kept_sets(target: Target, count: int, seed: int) -> Iterator[tuple[str, Kept]]:
    """`count` different kept sets: half found by the search, spread over what they skip, half drawn."""
    draw = random.Random(seed)
    found = frontier(target)
    chosen = {found[round(place * (len(found) - 1) / max(1, count // 2 - 1))]: "search" for place in range(count // 2)}
    while len(chosen) < count:
        chosen.setdefault(drawn(target.num_layers, draw.uniform(0.3, 1.0), draw), "drawn")
    for kept, origin in chosen.items():
        yield origin, kept


@torch.inference_mode()
def frontier(target: Target, budget: float = 0.9) -> list[Kept]:
    """The kept sets of the search for every weight skipped, on an answer to a calibration prompt."""
    prompt = user_prompt_ids(target, builtin_calibration_prompts())[0][2]
    answer = generate(target, None, prompt, max_new_tokens=64, eos_ids=()).tokens
    session, tokens, states = watched(target, prompt, answer)
    weights = [1] * (2 * target.num_layers)
    trial = session.trial([Window(0, len(prompt) - 1, tokens.shape[1])])
    survivors, _ = search(trial.run, states, weights, int(budget * len(weights)), forced_ends(target.num_layers), -1.0)
    return [one.kept for one in survivors[1:]]  # not the whole target


def watched(
    target: Target, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """A session behind `prompt` less its last token, the tokens that predict `answer`, the target's states on them."""
    session = target.session(1, len(prompt) + len(answer))
    if len(prompt) > 1:
        session.forward(torch.tensor([prompt[:-1]], device=target.device), logits=False)
        session.advance([len(prompt) - 1])
    tokens = torch.tensor([[prompt[-1], *answer[:-1]]], device=target.device)
    output = session.forward(tokens, wants=every_sub_layer(target.num_layers), logits=False)
    depths = [each[layer][0] for layer in range(target.num_layers) for each in (output.attentions, output.blocks)]
    return session, tokens, [target.embed(tokens)[0], *depths]


def drawn(num_layers: int, share: float, draw: random.Random) -> Kept:
    """A kept set of about this share of the sub-layers; the first and the last block are always in it."""
    kept = forced_ends(num_layers)
    free = range(2, 2 * num_layers - 2)
    for place in draw.sample(free, max(0, round(share * len(kept)) - 4)):
        kept[place] = True
    return tuple(kept)


def flags(kept: Kept) -> str:
    return "".join(str(int(one)) for one in kept)


def foretold(
    target: Target,
    costs: Latency,
    kept: Kept,
    gamma: int,
    context: int,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> dict[str, float]:
    """The criteria, from the share of the target's own tokens that the kept set would have drafted behind true ones."""
    hits = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        session, tokens, _ = watched(target, prompt, answer)
        with torch.inference_mode():
            hidden = session.forward(tokens, plan=kept, logits=False).hidden
            truth, none = torch.tensor(answer, device=target.device), torch.zeros(len(answer), dtype=torch.int64)
            hits += len(answer) * agreement(target.logits, hidden, truth, Sampling(), none, none)[0]
    alpha = hits / sum(map(len, answers))
    verify = costs.t_target(gamma + 1, context)
    return {
        "TPT": tokens_per_time(alpha, gamma, costs.t_draft(kept, context), verify),
        "TPL": tokens_per_layer(alpha, gamma, kept),
        "agreement": alpha,
    }


def measured(
    target: Target, kept: Kept, gamma: int, prompts: Sequence[Sequence[int]], new_tokens: int, out: Path
) -> dict[str, float]:
    """Tokens per second of this kept set and of plain decoding, question by question in turn."""
    plan = out / "plan.json"
    write_json(plan, {"kept": [int(one) for one in kept], "gamma": gamma})
    method = KnapSpecDecoding(gamma=gamma, stop=0.0, plan=str(plan)).build(target)
    seconds, rounds, tokens = {"plain": 0.0, "drafted": 0.0}, 0, 0
    for place, prompt in enumerate(prompts):
        order = ("plain", "drafted") if place % 2 else ("drafted", "plain")
        for name in order:
            proposer = method if name == "drafted" else None
            made = generate(target, proposer, prompt, max_new_tokens=new_tokens, eos_ids=())
            seconds[name] += made.seconds - made.prefill_seconds
            if proposer is not None:
                rounds, tokens = rounds + made.rounds, tokens + len(made.tokens)
    return {
        "tau": tokens / rounds,
        "speedup": seconds["plain"] / seconds["drafted"],
        "tokens_per_second": tokens / seconds["drafted"],
        "plain": tokens / seconds["plain"],
    }


def prompts_of(target: Target, questions: int) -> list[list[int]]:
    """First turns of the built-in benchmark."""
    chosen = Benchmark().questions(limit=questions)
    return [prompt_ids(target, [{"role": "user", "content": question.turns[0]}]) for question in chosen]


def print_correlations(rows: Sequence[dict[str, Any]]) -> None:
    """Each criterion against the speedup, as a Markdown table."""
    speedups = [row["speedup"] for row in rows]
    print("| criterion | Pearson | Spearman | published |\n|---|---|---|---|")
    for name in CRITERIA:
        values = [row[name] for row in rows]
        found = [bootstrap(statistic, values, speedups) for statistic in (pearson, spearman)]
        words = " | ".join(f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]" for one in found)
        print(f"| {name} | {words} | {PUBLISHED.get(name, '')} |")
    best = max(rows, key=lambda row: row["speedup"])
    kept = f"{best['attentions']} attentions and {best['mlps']} MLPs kept"
    print(f"fastest: {best['speedup']:.3f}× plain, {kept}, agreement {best['agreement']:.3f}, τ {best['tau']:.3f}")


def scatter(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """`path` without suffix: the speedup over each criterion, a point per kept set."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.8), layout="constrained")
        figure.suptitle(title, fontsize=10)
        for axes, name in zip(figure.subplots(1, 3, sharey=True), CRITERIA, strict=True):
            for origin, label, colour, mark in (
                ("search", "found", "#0072B2", "o"),
                ("drawn", "drawn", "#D55E00", "s"),
            ):
                some = [row for row in rows if row["origin"] == origin]
                points = [row[name] for row in some], [row["speedup"] for row in some]
                axes.plot(*points, mark, color=colour, alpha=0.7, label=f"kept sets {label}")
            axes.axhline(1, color="#6B6B6B", linewidth=0.8, linestyle=":", label="plain decoding")
            axes.set_xlabel({"TPT": "TPT, tokens/s", "TPL": "TPL, tokens per block", "agreement": "agreement α"}[name])
            found = pearson([row[name] for row in rows], [row["speedup"] for row in rows])
            paper = f" (KnapSpec's paper {PUBLISHED[name]})" if name in PUBLISHED else ""
            axes.set_title(f"Pearson {found:.3f}{paper}", fontsize=8)
        figure.axes[0].set_ylabel("speedup, measured")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize=7, ncols=3, loc="outside lower center")
        write_figure(path, figure)


if __name__ == "__main__":
    main()
