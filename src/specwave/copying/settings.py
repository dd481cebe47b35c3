"""`probe` and `probe_data` in conf/train.yaml: what a probe learns, and from whose answers."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from specwave.artifacts import UserError, check_seed
from specwave.copying.answers import Answer
from specwave.copying.capture import SITES, ProbeStates
from specwave.copying.prompts import ProbePrompt, probe_prompts, read_prompts, split
from specwave.copying.simulate import Rounds
from specwave.data.sources import spread

if TYPE_CHECKING:
    from specwave.target import Target


@dataclass
class LinearProbe:
    """`probe=linear`: p(copied) = σ(w · h) without bias, for every layer and site.

    `n_train`: tokens of a run that must have stood before. `offset` 1: the state before a token says whether it is
    copied, as decoding must ask; 0: the token's own, for analysis. `kinds`: only prompts of these kinds or domains are
    trained on; `prompts`: only so many, spread evenly. `l2`: penalties tried; each probe keeps its best. `site` and
    `layer`: the card's choice, null: the best AUC on validation prompts. `threshold`: by best F1, or by simulated
    throughput under `rounds`. `resamples`: of prompts, for the intervals of the AUC; 0 is none. `transfer`: train on
    each domain alone too.
    """

    n_train: int = 5
    offset: int = 1
    kinds: list[str] | None = None
    prompts: int | None = None
    l2: list[float] = field(default_factory=lambda: [0.0001, 0.001, 0.01, 0.1])
    epochs: int = 4
    rate: float = 0.02
    batch_tokens: int = 1024
    site: Literal["attention", "block"] | None = None
    layer: int | None = None
    threshold: Literal["f1", "throughput"] = "f1"
    rounds: Rounds = field(default_factory=Rounds)
    resamples: int = 1000
    transfer: bool = True
    states: ProbeStates = field(default_factory=ProbeStates)
    seed: int = 0

    def __post_init__(self) -> None:
        floors = {"n_train": 1, "prompts": 1, "epochs": 1, "batch_tokens": 1, "resamples": 0, "layer": 0}
        for key, floor in floors.items():
            value = getattr(self, key)
            if value is not None and value < floor:
                raise UserError(f"probe.{key}", value, f"must be ≥ {floor}")
        if self.offset not in (0, 1):
            raise UserError("probe.offset", self.offset, "must be 1 (the state before a token) or 0 (its own)")
        if not self.l2 or not all(0 <= one < math.inf for one in self.l2):
            raise UserError("probe.l2", self.l2, "give at least one penalty, numbers ≥ 0")
        if not 0 < self.rate < math.inf:
            raise UserError("probe.rate", self.rate, "must be a positive number")
        if self.kinds == []:
            raise UserError("probe.kinds", "[]", "name kinds or domains, or give null for all")
        check_seed("probe.seed", self.seed)

    def check_layer(self, target: Target) -> None:
        """Refuses a layer that the target has not."""
        if self.layer is not None and self.layer >= target.num_layers:
            remedy = f"layer {self.layer} is unknown: {target.name} has layers 0 to {target.num_layers - 1}"
            raise UserError("probe.layer", self.layer, remedy)

    def chosen(self, answers: Sequence[Answer]) -> list[Answer]:
        """Of the training answers those that are learnt from.

        Raises:
            UserError: a kind that no prompt has.
        """
        kinds = self.kinds
        if kinds is not None:
            known = sorted({name for one in answers for name in (one.domain, one.kind) if name})
            strange = next((name for name in kinds if name not in known), None)
            if strange is not None:
                remedy = f"no training prompt is of the kind {strange}; there are {', '.join(known)}"
                raise UserError("probe.kinds", kinds, remedy)
            answers = [one for one in answers if one.among(kinds)]
        return spread(answers, self.prompts)


@dataclass(frozen=True)
class Parts:
    """Answers for training, for choosing (penalty, layer, threshold) and for the figures: no template is in two."""

    train: list[Answer]
    validation: list[Answer]
    test: list[Answer]

    @property
    def all(self) -> list[Answer]:
        return [*self.train, *self.validation, *self.test]


@dataclass
class ProbeData(ABC):
    """The keys of every set of prompts.

    `held_out`: share of the templates (of a file: of the prompts); half of them for choosing, half for the figures.
    """

    held_out: float = 0.3
    max_new_tokens: int = 192
    temperature: float = 0.0
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise UserError("probe_data.held_out", self.held_out, "must be a share between 0 and 1, both excluded")
        for key, floor in (("max_new_tokens", 2), ("batch_size", 1)):
            if getattr(self, key) < floor:
                raise UserError(f"probe_data.{key}", getattr(self, key), f"must be ≥ {floor}")
        if not 0 <= self.temperature < math.inf:
            raise UserError("probe_data.temperature", self.temperature, "must be 0 (greedy) or a positive number")
        check_seed("probe_data.seed", self.seed)

    @abstractmethod
    def prompts(self) -> list[ProbePrompt]:
        """Those that are answered."""

    def parts(self, target: Target, prompts: Sequence[ProbePrompt]) -> Parts:
        """The prompts with the target's own answers (cached), split by template.

        Raises:
            UserError: too few prompts to split, none that leaves room for an answer.
        """
        key, share = "probe_data.held_out", self.held_out
        train, held = split(prompts, share, self.seed, key)
        if len({prompt.template for prompt in held}) < 2:
            remedy = "holds out a single prompt or template, two are needed: raise it, or give more prompts"
            raise UserError(key, share, remedy)
        validation, test = split(held, 0.5, self.seed, key)
        answers = self.answered(target, prompts)
        parts = []
        for name, part in (("training", train), ("validation", validation), ("test", test)):
            templates = {prompt.template for prompt in part}
            parts.append([one for one in answers if one.template in templates])
            if not parts[-1]:
                remedy = f"none of the {len(part)} {name} prompts leaves room for so many tokens: lower it"
                raise UserError("probe_data.max_new_tokens", self.max_new_tokens, remedy)
        return Parts(*parts)

    def answered(self, target: Target, prompts: Sequence[ProbePrompt]) -> list[Answer]:
        """The prompts with the target's own answers; those that leave no room for one are passed over with a warning.

        Raises:
            UserError: no prompt leaves room.
        """
        from specwave.data.conversations import Conversation
        from specwave.data.regenerate import answered
        from specwave.data.render import prompts as rendered

        asked = [Conversation((("user", one.text),), f"probe-{place}", one.kind) for place, one in enumerate(prompts)]
        ids = rendered(target, asked)
        room = target.max_length - self.max_new_tokens
        kept = [(one, own) for one, own in zip(prompts, ids, strict=True) if len(own[2]) <= room]
        if len(kept) < len(prompts):
            rule = f"{len(prompts) - len(kept)} of {len(prompts)} prompts leave no room for so many tokens in the "
            rule += f"{target.max_length} positions of {target.name}"
            if not kept:
                raise UserError("probe_data.max_new_tokens", self.max_new_tokens, f"{rule}: lower it")
            warnings.warn(f"probe_data.max_new_tokens={self.max_new_tokens}: {rule}: passed over", stacklevel=2)
        samples = answered(
            target,
            [own for _, own in kept],
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            temperature=self.temperature,
            seed=self.seed,
            label="probe answers",
        )
        return [
            Answer(sample.ids, len(own[2]), one.kind, one.domain, one.template, sample.id)
            for (one, own), sample in zip(kept, samples, strict=True)
        ]


@dataclass
class BuiltinPrompts(ProbeData):
    """`probe_data=builtin`: `count` prompts of specwave's templates."""

    count: int = 1000

    def prompts(self) -> list[ProbePrompt]:
        return probe_prompts(self.count, self.seed)


@dataclass
class JsonlPrompts(ProbeData):
    """`probe_data=jsonl`: a file of `{"prompt", "kind", "domain"}` a line."""

    path: str = "???"

    def prompts(self) -> list[ProbePrompt]:
        return read_prompts(self.path, "probe_data.path")


def site_of(place: int, num_layers: int) -> tuple[str, int]:
    """Site and layer of the probe at this place among all (`capture.all_columns`)."""
    return SITES[place // num_layers], place % num_layers
