"""What a selection leaves beside selection.json: analysis.json, tensors, tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from specwave.app.collate import csv_text
from specwave.artifacts import Selection, write_json, write_tensors, write_text
from specwave.layers import analysis
from specwave.layers.analysis import Standing
from specwave.layers.calibrate import SPREAD, Calibrated
from specwave.layers.cka import cka_matrix, transitions
from specwave.layers.entropy import matrix_entropy
from specwave.layers.proxy import Foretold
from specwave.layers.ranking import Ranking
from specwave.layers.selectors import Outcome
from specwave.layers.sensitivity import Effect, table
from specwave.layers.stability import Stability

RANKED_ROWS = 100_000  # of ranking.csv at most


@dataclass
class Findings:
    """All that a run of select.py found out; entropies in nats."""

    name: str  # of the target
    selector: str
    alpha: float
    calibrated: Calibrated
    centre: bool
    grams: Tensor  # [N, R, R], scale and centre applied
    outcome: Outcome
    ranking: Ranking | None
    rules: list[Standing]
    chosen: Standing
    stability: list[Stability]
    effects: list[Effect]

    @cached_property
    def layer_entropy(self) -> Tensor:
        return matrix_entropy(self.grams, self.alpha)

    @cached_property
    def cka(self) -> Tensor:
        return cka_matrix(self.grams)

    @cached_property
    def transitions(self) -> Tensor:
        return transitions(self.cka)

    @cached_property
    def gains(self) -> Tensor:
        return analysis.pair_gains(self.grams, self.alpha)

    @cached_property
    def proxy(self) -> dict[str, Any] | None:
        """What the proxy says of the choice, where there was one."""
        foretold = self.outcome.foretold
        return foretold.facts(self.outcome.groups[0].layers) if foretold is not None else None

    @cached_property
    def spread(self) -> Tensor:
        """[3, P, N] of token states, centred as the Grams are."""
        return self.calibrated.spread[int(self.centre)]

    @cached_property
    def cuts(self) -> list[dict[str, Any]]:
        return analysis.variance_cuts(self.spread) if self.spread.shape[1] >= 2 else []

    def matrices(self) -> dict[str, Tensor]:
        """CKA by both estimators; the unbiased one where there are rows enough."""
        found = {"biased": self.cka}
        if self.grams.shape[-1] >= 4:
            found["unbiased"] = cka_matrix(self.grams, unbiased=True)
        return found

    def optimum(self) -> dict[str, Any] | None:
        """The best of all sets of the chosen one's size and how far the choice is from it; None if not computed."""
        if self.ranking is None:
            return None
        best = self.ranking.top(1)[0]
        gap = max(0.0, best.entropy - self.chosen.group.entropy)
        return {
            "layers": list(best.layers),
            "entropy": best.entropy,
            "gap": gap,
            "rank": self.chosen.rank,
            "sets": len(self.ranking),
        }


def show(tracker: Any, folder: Path) -> None:
    """A finished selection on a tracker: its sets and its layers as tables, its pictures, its files as an artefact."""
    chosen = Selection.load(folder)
    columns = list(dict.fromkeys(name for entry in chosen.beam for name in entry))
    sets: list[list[Any]] = [columns, *([entry.get(name) for name in columns] for entry in chosen.beam)]
    layers: list[list[Any]] = [["layer", "entropy", "chosen"]]
    layers += [[layer, nats, layer in chosen.layers] for layer, nats in enumerate(chosen.layer_entropy)]
    figures = {
        "m": chosen.m,
        "entropy": chosen.entropy,
        "score": chosen.score,
        "gap": (chosen.optimum or {}).get("gap"),
    }
    kinds = ("selection.json", "analysis.json", "*.csv", "*.md", "*.png")
    tracker.show(
        tables={"sets": sets, "layers": layers},
        pages={},
        figures={name: value for name, value in figures.items() if value is not None},
        files=[path for kind in kinds for path in sorted(folder.glob(kind))],
        kind="selection",
        pictures={path.stem: path for path in sorted(folder.glob("*.png"))},
    )


def standing_table(found: Findings) -> str:
    """The table printed at the end: the chosen group, the runners-up, and where the fixed rules stand."""
    groups, best = found.outcome.groups, found.outcome.groups[0]
    rows = [(f"{found.selector} (chosen)", best, found.chosen.rank)]
    rows += [(f"{found.selector} #{place}", group, None) for place, group in enumerate(groups[1:3], start=2)]
    optimum = found.optimum()
    if optimum is not None and optimum["layers"] != list(best.layers) and found.ranking is not None:
        rows.append(("best of all sets", found.ranking.top(1)[0], 1))
    rows += [(standing.name, standing.group, standing.rank) for standing in found.rules]
    head = f"{'set':<18} {'layers':<16} {'entropy':>8} {'to chosen':>10}"
    foretold = found.outcome.foretold
    if foretold is not None:
        head += f" {'agreement':>10}"
    total = f"  rank of {len(found.ranking):,}" if found.ranking is not None else ""
    lines = [head + total]
    for name, group, rank in rows:
        layers = ",".join(map(str, group.layers))
        line = f"{name:<18} {layers:<16} {group.entropy:>8.4f} {group.entropy - best.entropy:>+10.4f}"
        if foretold is not None:
            enough = foretold.foresight.enough_rows(group.layers)
            line += f" {foretold.agreement(group.layers):>10.4f}" if enough else f" {'–':>10}"
        lines.append(line + (f"  {rank:>{len(total) - 2},}" if rank is not None else ""))
    return "\n".join(lines)


def proxy_text(proxy: dict[str, Any]) -> str:
    """What an agreement is, what it would be without layers, and how sure the gap to the fixed rules is."""
    low, high = proxy["interval"]
    lines = [
        f"agreement: share of {proxy['steps']:,} drafting steps of {proxy['conversations']} conversations at which a "
        f"ridge regression on the others names the target's next token; {proxy['agreement']:.3f} [{low:.3f}, "
        f"{high:.3f}] chosen, {proxy['token_alone']:.3f} from the next token alone"
    ]
    for name, rule in proxy["rules"].items():
        low, middle, high = rule["chosen_less_rule"]
        lines.append(f"chosen less {name}: {middle:+.3f} [{low:+.3f}, {high:+.3f}], conversations resampled")
    search = proxy["search"]
    trust = "–" if search["spearman"] is None else f"{search['spearman']:.2f}"
    lines.append(
        f"{search['sets']:,} sets compared on {search['shortlist']} tokens, {search['exact']} scored whole in all; on "
        f"{search['audited']} drawn at random both orders agree with Spearman's {trust} ({search['seconds']:.0f} s)"
    )
    return "\n".join(lines)


def write_data(folder: Path, found: Findings) -> list[str]:
    """analysis.json and .safetensors, ranking.csv for an exhaustive search, sensitivity.csv and .md; their names."""
    content = {
        "layer_entropy": found.layer_entropy.tolist(),
        "variance_cuts": found.cuts,
        "partners": analysis.best_partners(found.gains),
        "frontier": [[group.described() for group in beam] for beam in found.outcome.steps],
        "rules": [{"name": one.name, **one.group.described(), "rank": one.rank} for one in found.rules],
        "optimum": found.optimum(),
        "stability": [stability.content() for stability in found.stability],
        "sensitivity": table(found.effects) if found.effects else [],
    }
    write_json(folder / "analysis.json", content)
    tensors = {f"cka_{name}": cka for name, cka in found.matrices().items()}
    write_tensors(folder / "analysis.safetensors", {**tensors, "gains": found.gains, "spread": found.spread})
    written = ["analysis.json", "analysis.safetensors"]
    if found.outcome.ranking is not None:
        write_text(folder / "ranking.csv", _ranking_csv(found.outcome.ranking))
        written.append("ranking.csv")
    if found.outcome.foretold is not None:
        write_text(folder / "proxy.csv", _proxy_csv(found.outcome.foretold, found.ranking))
        written.append("proxy.csv")
    if found.effects:
        rows = table(found.effects)
        write_text(folder / "sensitivity.csv", csv_text(rows))
        write_text(folder / "sensitivity.md", as_markdown(rows))
        written += ["sensitivity.csv", "sensitivity.md"]
    return written


def _ranking_csv(ranking: Ranking) -> str:
    """rank, layers, entropy, precision: float64 entries are exact, float32 ones to within the ranking's tolerance."""
    lines = ["rank,layers,entropy,precision"]
    for rank, place in enumerate(ranking.order()[:RANKED_ROWS].tolist(), start=1):
        layers = " ".join(map(str, ranking.sets[place].tolist()))
        precision = "float64" if ranking.exact[place] else "float32"
        lines.append(f"{rank},{layers},{ranking.entropy[place].item():.9f},{precision}")
    return "\n".join(lines) + "\n"


def _proxy_csv(found: Foretold, ranking: Ranking | None) -> str:
    """layers, agreement (of those scored whole, which come first), rough agreement, share explained, entropy where all
    were ranked."""
    size = found.sets.shape[1]
    entropy = ranking.entropy if ranking is not None and ranking.sets.shape[1] == size else None
    every = {tuple(layers): place for place, layers in enumerate(found.sets.tolist())}
    known = found.known()
    rest = sorted(every.keys() - set(known), key=lambda layers: (-found.rough[every[layers]].item(), layers))
    rows = []
    for layers in [*known, *rest][:RANKED_ROWS]:
        place, whole = every[layers], found.agreement(layers) if layers in known else None
        numbers = [found.rough[place].item(), found.explained[place].item()]
        own = {"layers": " ".join(map(str, layers)), "agreement": whole, "rough": numbers[0], "explained": numbers[1]}
        rows.append(own | ({"entropy": entropy[place].item()} if entropy is not None else {}))
    return csv_text(rows)


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    lines += [f"| {' | '.join(_cell(value) for value in row.values())} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def draw(folder: Path, found: Findings) -> list[str]:
    """Every picture that the findings hold; their names."""
    from specwave.layers import figures, search_figures  # matplotlib takes a while to import

    best, name = found.outcome.groups[0], found.name
    names = ", ".join(map(str, best.layers))
    written = figures.entropy_figure(
        folder / "entropy", found.layer_entropy, found.spread, best.layers,
        f"{name}: {found.selector} chooses {names}", SPREAD, found.cuts,
    )  # fmt: skip
    title = f"{name}: CKA over {found.calibrated.rows} rows"
    written += figures.cka_figure(folder / "cka", found.matrices(), title)
    partners = analysis.best_partners(found.gains)
    written += search_figures.partners_figure(folder / "partners", found.gains, partners, f"{name}: gain of a pair")
    if len(found.outcome.steps) > 1:
        optimum = found.ranking.top(1)[0] if found.ranking is not None else None
        title = f"{name}: the beam of {found.selector}"
        written += search_figures.frontier_figure(
            folder / "frontier", found.outcome.steps, found.rules, optimum, title
        )  # fmt: skip
    if found.ranking is not None:
        title = f"{name}: all {len(found.ranking):,} sets of {len(best.layers)} layers"
        written += search_figures.ranking_figure(
            folder / "ranking", found.ranking, [found.chosen, *found.rules], title
        )  # fmt: skip
    if found.outcome.foretold is not None:
        from specwave.layers.proxy_figures import proxy_figure

        title = f"{name}: what {found.selector} foretells"
        named = {"chosen": best.layers} | found.outcome.foretold.rules
        written += proxy_figure(folder / "proxy", found.outcome.foretold, found.ranking, named, title)
    if found.stability:
        title = f"{name}: {found.stability[0].resamples} bootstrap resamples"
        written += search_figures.stability_figure(folder / "stability", found.stability, title)
    if found.effects:
        from specwave.app.sweep_figures import sweep_figure

        title = f"{name}: what {found.selector} chooses with one option changed"
        written += sweep_figure(folder / "sensitivity", _effects_as_jobs(found), title)
    return [path.name for path in written]


def _effects_as_jobs(found: Findings) -> list[dict[str, Any]]:
    """The sensitivity table as a sweep's, whose picture fits it."""
    return [
        {
            "job": str(place),
            "option": row["option"],
            "value": str(row["value"]),
            "status": "finished" if row["layers"] else row["note"],
            "layers": row["layers"],
            "num_layers": len(found.grams),
            "entropy": row["entropy"],
        }
        for place, row in enumerate(table(found.effects))
    ]
