"""`select.py`: which layers of a target a drafter should see.

load → answer the calibration prompts → Grams → select → selection.json, grams.safetensors, two pictures, a table.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from specwave.artifacts import Selection, UserError, write_tensors
from specwave.layers.calibrate import SPREAD_TOKENS, Calibrated, calibrate, record
from specwave.layers.cka import borders, cka_matrix, transitions
from specwave.layers.entropy import matrix_entropy
from specwave.layers.search import Group, score
from specwave.layers.selectors import RULES, fixed_rule

if TYPE_CHECKING:
    from specwave.app.run import Run


@dataclass
class SelectConfig:
    """`conf/select.yaml`, groups already built: a ModelConfig, a Calibration, a selector."""

    model: Any
    calibration: Any
    selector: Any


def standing(found: Calibrated, groups: list[Group], selector: Any) -> str:
    """The table printed at the end: the chosen group, the runners-up, and where the fixed rules stand."""
    best = groups[0]
    rows = [(f"{selector.name} (chosen)", best)]
    rows += [(f"{selector.name} #{place}", group) for place, group in enumerate(groups[1:3], start=2)]
    for rule in RULES:
        try:
            layers = fixed_rule(rule, len(found.grams))
        except UserError:  # the model is too small for this rule
            continue
        rows.append((rule, score(found.grams, [layers], selector.alpha)[0]))
    lines = [f"{'set':<18} {'layers':<16} {'entropy':>8} {'to chosen':>10}"]
    for name, group in rows:
        layers_text = ",".join(map(str, group.layers))
        lines.append(f"{name:<18} {layers_text:<16} {group.entropy:>8.4f} {group.entropy - best.entropy:>+10.4f}")
    return "\n".join(lines)


def main(config: SelectConfig, run: Run) -> None:
    """Selects and writes into the run's folder."""
    from specwave.layers.figures import cka_figure, entropy_figure  # matplotlib takes a while to import

    target = config.model.load()
    settings, selector = config.calibration, config.selector
    selector.check(target.num_layers)  # before the answers, which take minutes
    found = calibrate(target, settings.samples(target), settings)
    groups = selector.select(found.grams)
    best = groups[0]

    layer_entropy = matrix_entropy(found.grams, selector.alpha)
    cka = cka_matrix(found.grams)
    delta = transitions(cka)
    write_tensors(run.folder / "grams.safetensors", {"grams": found.grams}, {"fingerprint": target.fingerprint})
    names = ", ".join(map(str, best.layers))
    pictures = entropy_figure(
        run.folder / "entropy",
        layer_entropy,
        found.prompt_entropy,
        best.layers,
        f"{target.name}: {selector.name} chooses {names}",
        SPREAD_TOKENS,
    )
    pictures += cka_figure(run.folder / "cka", cka, delta, borders(delta), f"{target.name}: CKA of {found.rows} rows")
    Selection(  # last: a folder with a selection is complete
        model=target.name,
        fingerprint=target.fingerprint,
        num_layers=target.num_layers,
        selector=selector.name,
        m=len(best.layers),
        layers=list(best.layers),
        entropy=best.entropy,
        beam=[{"layers": list(group.layers), "entropy": group.entropy} for group in groups],
        layer_entropy=layer_entropy.tolist(),
        transitions=delta.tolist(),
        calibration=record(settings, found, target.fingerprint),
        settings={"selector": asdict(selector), "calibration": asdict(settings)},
    ).save(run.folder / "selection.json")

    run.note(layers=list(best.layers), entropy=best.entropy, **found.counts())
    run.say(
        f"{found.rows} rows from {found.prompts} prompts ({found.prompts_dropped} without a block): "
        f"{found.tokens_kept} of {found.tokens_seen} positions kept"
    )
    run.say(standing(found, groups, selector))
    run.say("entropies in nats; a larger one says more directions, not by itself a better drafter")
    run.say(f"written: {', '.join(path.name for path in pictures)}, grams.safetensors, {run.folder / 'selection.json'}")
