"""A search instead of a sweep: optuna suggests settings, jobs are launched as ever, what they come to is told back.

Hydra takes sweepers from packages below `hydra_plugins` only, so this one lies here. The suggestions are a function of
seed and results: given again, a command suggests the same, and its finished jobs are skipped. A suggestion made before
launches no job, its result is told again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from specwave.artifacts import UserError

STALE = 20  # suggestions in a row that were made before: the search is at its end


class OptunaSweeper(Sweeper):
    """See `conf/hydra/sweeper/optuna.yaml` for what the keys mean."""

    def __init__(
        self,
        direction: str = "maximize",
        n_trials: int = 24,
        n_jobs: int = 1,
        seed: int = 0,
        startup: int = 8,
        params: Mapping[str, str] | None = None,
    ):
        self.direction, self.n_trials, self.n_jobs = direction, n_trials, n_jobs
        self.seed, self.startup, self.params = seed, startup, dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Launches up to `n_trials` jobs; what they returned."""
        self.check()
        optuna = find_optuna()
        assert self.config is not None
        fixed, space = self.read(arguments)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        sampler = optuna.samplers.TPESampler(seed=self.seed, n_startup_trials=self.startup)
        study = optuna.create_study(direction=self.direction, sampler=sampler)
        known: dict[tuple[str, ...], float] = {}
        returns: list[Any] = []
        while len(returns) < self.n_trials:
            batch = self.suggest(study, space, known, min(self.n_jobs, self.n_trials - len(returns)))
            if not batch:
                break
            jobs = [[*fixed, *chosen] for chosen in batch]
            self.validate_batch_is_legal(jobs)
            done = self.launcher.launch(jobs, initial_job_idx=len(returns))
            for (chosen, trial), result in zip(batch.items(), done, strict=True):
                known[chosen] = tell(study, trial, result.return_value)
            returns += done
        return returns

    def check(self) -> None:
        """Refuses what cannot be; not where Hydra builds this object, since it would put an error of its own around."""
        if self.direction not in ("maximize", "minimize"):
            raise UserError("hydra.sweeper.direction", self.direction, "must be maximize or minimize")
        for key in ("n_trials", "n_jobs", "startup"):
            if getattr(self, key) < 1:
                raise UserError(f"hydra.sweeper.{key}", getattr(self, key), "must be ≥ 1")

    def suggest(self, study: Any, space: Mapping[str, Any], known: Mapping[tuple[str, ...], float], count: int) -> Any:
        """Overrides of up to `count` new jobs → their trials; fewer where nothing new is suggested any more."""
        batch: dict[tuple[str, ...], Any] = {}
        stale = 0
        while len(batch) < count and stale < STALE:
            trial = study.ask(dict(space))
            chosen = tuple(f"{key}={trial.params[key]}" for key in space)
            if chosen in known or chosen in batch:
                tell(study, trial, known.get(chosen))
                stale += 1
            else:
                batch[chosen] = trial
                stale = 0
        return batch

    def read(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """(overrides that every job gets, key → optuna's distribution of it); the command line is the stronger."""
        assert self.hydra_context is not None
        given = [f"{key}={value}" for key, value in self.params.items()]
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        fixed: dict[str, str] = {}
        space: dict[str, Any] = {}
        for override in parser.parse_overrides([*given, *arguments]):
            key = override.get_key_element()
            fixed.pop(key, None)
            space.pop(key, None)
            if override.is_sweep_override():
                space[key] = distribution(override)
            else:
                fixed[key] = f"{key}={override.get_value_element_as_str()}"
        if not space:
            remedy = (
                "nothing is to be searched: give choice(…), range(…) or interval(…), as in 'selector.m=choice(1,2,3)'"
            )
            raise UserError("hydra/sweeper", "optuna", remedy)
        return list(fixed.values()), space


def find_optuna() -> Any:
    """optuna, told to be silent."""
    try:
        import optuna
    except ImportError:
        remedy = "it searches with optuna, a package of its own: pip install 'specwave[bayes]'"
        raise UserError("hydra/sweeper", "optuna", remedy) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def distribution(override: Override) -> Any:
    """What optuna draws from: whole numbers and intervals as such, everything else as names."""
    import optuna

    value = override.value()
    if isinstance(value, IntervalSweep):
        low, high, log = value.start, value.end, "log" in value.tags
        assert low is not None
        assert high is not None
        if isinstance(low, int) and isinstance(high, int):
            return optuna.distributions.IntDistribution(low, high, log=log)
        return optuna.distributions.FloatDistribution(low, high, log=log)
    if isinstance(value, RangeSweep) and not value.shuffle and isinstance(value.step, int):
        values = list(override.sweep_string_iterator())
        if all(entry.lstrip("-").isdecimal() for entry in values):
            numbers = [int(entry) for entry in values]
            return optuna.distributions.IntDistribution(min(numbers), max(numbers), step=abs(value.step))
    return optuna.distributions.CategoricalDistribution(list(override.sweep_string_iterator()))


def tell(study: Any, trial: Any, value: Any) -> float:
    """Tells what a job came to: nan where it failed, or came to nothing."""
    from optuna.trial import TrialState

    number = float(value) if isinstance(value, int | float) else math.nan
    if math.isfinite(number):
        study.tell(trial, number)
    else:
        study.tell(trial, state=TrialState.FAIL)
    return number
