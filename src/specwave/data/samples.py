"""Training samples: conversations with a mask over their answers, cut to length, checked, and split by prompt.

`conf/data`: every option shares the keys of `TrainingData`; a subclass adds where its conversations come from.
Knows nothing about batches or drafters.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specwave.artifacts import UserError, cache_dir, filling_cache
from specwave.data.conversations import Sample, Samples
from specwave.data.engines import Regenerate
from specwave.data.sources import SHAREGPT, ULTRACHAT

if TYPE_CHECKING:
    from specwave.data.conversations import Conversation
    from specwave.target import Target


class Chosen(Samples):
    """Some of the samples, in order, cut to length when they are read; their lengths are known without reading them."""

    def __init__(self, samples: Sequence[Sample], places: Sequence[int], lengths: Sequence[int]):
        """`lengths`: of the chosen ones, after the cut."""
        self.samples, self.places, self.lengths = samples, places, lengths

    def __len__(self) -> int:
        return len(self.places)

    def at(self, place: int) -> Sample:
        return _cut(self.samples[self.places[place]], self.lengths[place])

    def __iter__(self) -> Iterator[Sample]:
        lengths = dict(zip(self.places, self.lengths, strict=True))
        for place, sample in enumerate(self.samples):  # in order: tables are read in one go
            if place in lengths:
                yield _cut(sample, lengths[place])


def _cut(sample: Sample, length: int) -> Sample:
    if len(sample.ids) == length:
        return sample
    return Sample(sample.ids[:length], sample.answer[:length], sample.id, sample.category)


@dataclass
class Prepared:
    """What training reads; both parts are disjoint in their prompts."""

    train: Sequence[Sample]
    validation: Sequence[Sample]
    cut: int  # samples shortened to max_length
    dropped: int  # samples where no slot counts: fewer than two answer tokens in a row
    row_length: int | None = None  # packing: conversations share rows of so many tokens
    benchmark: str | None = None  # a question file that the samples are compared with, beside the built-in one
    notes: list[str] = field(default_factory=list)  # lines for the console
    origin: dict[str, Any] = field(default_factory=dict)  # facts of the source

    def digest(self, counted: Sequence[int] = ()) -> str:
        """Names what is learnt from, as far as a run that goes on would be led astray: another amount of text, or what
        was `counted` in it, such as the ids of a draft vocabulary."""
        facts = {key: value for key, value in self.facts().items() if key not in self.origin}
        text = json.dumps([facts, list(counted)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def facts(self) -> dict[str, Any]:
        """Plain data for the card."""
        return {
            "samples": len(self.train),
            "validation_samples": len(self.validation),
            "tokens": sum(len(sample.ids) for sample in self.train),
            "answer_tokens": sum(sum(sample.answer) for sample in self.train),
            "cut": self.cut,
            "dropped": self.dropped,
            **self.origin,
        }


def prepare(
    samples: Sequence[Sample], max_length: int, validation: int, decode: Callable[[list[int]], str]
) -> Prepared:
    """Cuts, checks and splits.

    Held out are the `validation` prompts of smallest hash: the same ones whatever the seed and the other prompts. What
    opens with the same tokens, or was given the same name, is one prompt.

    Raises:
        UserError: a sample without answer text (shown decoded), nothing left to train on or to validate with.
    """
    kept: list[tuple[int, int, str]] = []  # place, length, id
    openings: dict[str, tuple[int, bytes]] = {}  # by id: the shortest text before an answer
    cut = 0
    for place, sample in enumerate(samples):
        if not any(sample.answer):
            shown = decode(sample.ids)
            shown = shown if len(shown) <= 300 else f"{shown[:300]}…"
            raise UserError(
                "data", sample.id, f"no token of this sample is answer text, nothing can be learnt from {shown!r}"
            )
        length = min(max_length, len(sample.ids))
        cut += length < len(sample.ids)
        # x_{t+1} and x_{t+2} are answer text for some slot t ≥ 0
        if any(first and second for first, second in itertools.pairwise(sample.answer[1:length])):
            kept.append((place, length, sample.id))
            first = sample.answer.index(True)
            opening = (first, hashlib.sha256(repr(sample.ids[:first]).encode()).digest())
            openings[sample.id] = min(opening, openings.get(sample.id, opening))
    dropped = len(samples) - len(kept)
    prompt = same_prompts(openings)
    held = set(sorted(set(prompt.values()), key=_order)[:validation])
    parts = [[entry for entry in kept if (prompt[entry[2]] in held) is out] for out in (False, True)]
    if not parts[0]:
        raise UserError(
            "data.validation",
            validation,
            f"nothing is left to train on: of {len(samples)} samples {dropped} have no answer text within "
            f"data.max_length={max_length} and those of {len(held)} prompts are held out",
        )
    train, out = (Chosen(samples, [place for place, *_ in part], [length for _, length, _ in part]) for part in parts)
    return Prepared(train, out, cut, dropped)


def same_prompts(openings: Mapping[str, Hashable]) -> dict[str, str]:
    """Of each name, that one of the names of its prompt which comes first in order.

    One prompt are equal openings, and a name and the same one with a number behind it (`x`, `x#2`: how a source tells
    apart rows of one name).
    """
    first, met = {name: name for name in openings}, dict[Hashable, str]()

    def find(name: str) -> str:
        while first[name] != name:
            first[name] = name = first[first[name]]
        return name

    for name, opening in openings.items():
        stem = name.rpartition("#")[0]
        for other in (met.setdefault(opening, name), stem if stem in openings else name):
            one, two = sorted((find(name), find(other)), key=_order)
            first[two] = one
    return {name: find(name) for name in openings}


def _order(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


# ---------------------------------------------------------------- conf/data


@dataclass
class TrainingData(ABC):
    """The keys of every data set."""

    max_length: int = 2048
    batch_size: int = 2
    packing: bool = False
    validation: int = 24
    limit: int | None = None
    check_benchmark: str | None = None

    def __post_init__(self) -> None:
        self.check_floors(max_length=3, batch_size=1, validation=1, limit=2)
        if self.limit is not None and self.limit <= self.validation:
            raise UserError(
                "data.limit", self.limit, f"must be above data.validation ({self.validation} prompts held out)"
            )

        if self.check_benchmark is not None and not Path(self.check_benchmark).is_file():
            remedy = "there is no such file: name a question.jsonl"  # said before the target answers anything
            raise UserError("data.check_benchmark", self.check_benchmark, remedy)

    def check_floors(self, **floors: int) -> None:
        for key, floor in floors.items():
            value = getattr(self, key)
            if value is not None and value < floor:
                raise UserError(f"data.{key}", value, f"must be ≥ {floor}")

    @abstractmethod
    def conversations(self) -> list[Conversation]:
        """Those that are used, as they were given."""

    @abstractmethod
    def samples(self, target: Target, notes: list[str], origin: dict[str, Any]) -> Sequence[Sample]:
        """Token ids and masks; what was done for them goes into `notes`, facts for the card into `origin`."""

    def prepared(self, target: Target) -> Prepared:
        """The samples for this target, cut to `max_length`, checked and split."""
        notes, origin, longest = list[str](), dict[str, Any](), min(self.max_length, target.max_length)
        data = prepare(self.samples(target, notes, origin), longest, self.validation, target.tokenizer.decode)
        data.row_length, data.benchmark = longest if self.packing else None, self.check_benchmark
        data.notes, data.origin = notes, origin
        return data


@dataclass
class BuiltinData(TrainingData):
    """`conf/data/builtin.yaml`: the built-in training prompts, answered by the target (greedily, cached)."""

    max_new_tokens: int = 128
    max_length: int = 512
    answer_batch_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_floors(max_new_tokens=2, answer_batch_size=1)

    def conversations(self) -> list[Conversation]:
        from specwave.data.conversations import Conversation, builtin_training_prompts
        from specwave.data.sources import spread

        chosen = spread(builtin_training_prompts(), self.limit)  # evenly over the templates
        return [Conversation((("user", text),), name, category) for name, category, text in chosen]

    def samples(self, target: Target, notes: list[str], origin: dict[str, Any]) -> Sequence[Sample]:
        from specwave.data.regenerate import answered
        from specwave.data.render import prompts

        return answered(
            target,
            prompts(target, self.conversations()),
            max_new_tokens=self.max_new_tokens,
            batch_size=self.answer_batch_size,
            label="training answers",
        )


@dataclass
class GivenData(TrainingData):
    """What data sets of conversations share: the answers they bring, or the target's own to every turn."""

    answers: Literal["given", "regenerate"] = "given"
    workers: int | None = None
    regenerate: Regenerate = field(default_factory=Regenerate)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_floors(workers=1)
        if self.answers == "regenerate" and self.regenerate.engine == "vllm":
            remedy = "would share the device with the target: run task=regenerate first and train on its answers.jsonl"
            raise UserError("regenerate.engine", "vllm", f"{remedy}, or use regenerate.engine=specwave")

    def samples(self, target: Target, notes: list[str], origin: dict[str, Any]) -> Sequence[Sample]:
        from specwave.data.tokenised import tokenised

        conversations = self.conversations()
        origin["conversations"] = len(conversations)
        if self.answers == "regenerate":
            conversations = self._answered(target, conversations, origin)
        found = tokenised(target, conversations, "data", self.workers)
        notes.append(found.note)
        if found.rewritten:
            origin["conversations_split"] = found.rewritten
            notes.append(
                f"the chat template of {target.name} writes earlier answers anew: in {found.rewritten} of "
                f"{len(conversations)} conversations each answer is a sample of its own"
            )
        return found.samples

    def _answered(
        self, target: Target, conversations: list[Conversation], origin: dict[str, Any]
    ) -> list[Conversation]:
        """The conversations with the target's own answers, from the cache as far as they are there."""
        from specwave.data.dialogues import answers_key, write_dialogues
        from specwave.data.engines import LoopEngine
        from specwave.data.sources import file_conversations

        own, longest = self.regenerate, min(self.max_length, target.max_length)
        key = answers_key(target.config.identify(), target, conversations, own, longest)
        path = cache_dir() / "dialogues" / f"{target.name}-{key}.jsonl"
        with filling_cache():
            engine = functools.partial(LoopEngine, target, own)
            counts = write_dialogues(target, engine, conversations, own, path, longest, "training answers")
        origin["regenerated"] = asdict(counts)
        return file_conversations(path, "cache")


@dataclass
class JsonlData(GivenData):
    """`conf/data/jsonl.yaml`: a file of ShareGPT rows, messages, or prompts (to be answered by the target)."""

    path: str = "???"

    def conversations(self) -> list[Conversation]:
        from specwave.data.sources import file_conversations, spread

        return spread(file_conversations(self.path, "data.path"), self.limit)


@dataclass
class ShareGptUltraChat(GivenData):
    """`conf/data/sharegpt_ultrachat.yaml`: EAGLE-3's training data, from the hub or local copies."""

    sharegpt: str = SHAREGPT[0]
    ultrachat: str = ULTRACHAT[0]
    weights: list[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None:
            from specwave.data.sources import check_weights

            check_weights(self.weights, 2, "data.weights")
            if self.limit is None:
                raise UserError("data.limit", "null", "weights share out a number of conversations: give it")

    def conversations(self) -> list[Conversation]:
        from specwave.data.sources import hub_conversations, mix, with_answers

        keys = ["data.sharegpt", "data.ultrachat"]
        named = [(self.sharegpt, SHAREGPT[1]), (self.ultrachat, ULTRACHAT[1])]
        parts = [hub_conversations(path, split, key) for (path, split), key in zip(named, keys, strict=True)]
        if self.answers == "given":
            parts = [with_answers(part) for part in parts]
        total = sum(map(len, parts))
        count = total if self.limit is None else self.limit
        if self.weights is None:  # as they are
            return mix(parts, [len(part) / total for part in parts], min(count, total), keys)
        return mix(parts, self.weights, count, keys)
