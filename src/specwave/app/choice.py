"""`choose` of train.py: the layers are selected within the run, so that a sweep can go over what chooses them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specwave.app.run import Run
from specwave.artifacts import UserError

if TYPE_CHECKING:
    from specwave.app.train import TrainConfig


@dataclass
class Choice:
    """What `select.py` would take: a Calibration and a selector."""

    calibration: Any
    selector: Any


def choose(choice: Choice, model: Any, run: Run) -> str:
    """The folder of a selection made below the run's; one that is there is taken.

    Raises:
        UserError: in a further process that finds none: several would select at once.
    """
    from specwave.app.select import SelectConfig, main
    from specwave.layers.analysis import Analysis

    folder = run.folder / "select"
    if not (folder / "selection.json").is_file():
        if not run.main:
            raise UserError("choose", "{…}", "one process selects: run select.py first and give selection=<its folder>")
        folder.mkdir(exist_ok=True)
        inner = Run(folder)
        main(SelectConfig(model, choice.calibration, choice.selector, Analysis(ranking="never", figures=False)), inner)
        run.note(layers=inner.facts["layers"], num_layers=inner.facts["num_layers"], entropy=inner.facts["entropy"])
    return str(folder)


def stand_in(config: TrainConfig, num_layers: int) -> TrainConfig:
    """For a forecast: groups of the size that would be chosen, in the place of the choice."""
    if config.choose is None:
        return config
    size = config.choose.selector.m_of(num_layers)
    coming = [list(range(place, place + size)) for place in range(min(config.top, num_layers - size + 1))]
    return replace(config, choose=None, top=1, groups=[*coming, *(config.groups or [])])
