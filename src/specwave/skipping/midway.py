"""How sure a draft is when it is right and when it is wrong, and the stop rule that stands midway. Pure arithmetic.

Counts are decayed: what happened a round ago weighs `decay` of what happens now. Worked, decay = 0.5, predictions as
(right, probability):

    round                          right   wrong   p right   p wrong   α        midway
    (yes, 0.9) (no, 0.4)           1       1       0.9       0.4       0.5      (0.9 + 0.4)/2 = 0.65
    (yes, 0.6)                     1.5     0.5     1.05      0.2       0.75     (0.7 + 0.4)/2 = 0.55

Source: DEL (arXiv 2504.05598); methods.md §4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specwave.artifacts import UserError
from specwave.decoding import Context, Verdict

_FORGOTTEN = 1e-6  # a count below it says nothing any more


@dataclass
class Tally:
    """Decayed counts of one predictor's right and wrong predictions, and sums of the probabilities it gave them."""

    decay: float
    right: float = 0.0
    wrong: float = 0.0
    p_right: float = 0.0
    p_wrong: float = 0.0

    def add(self, predictions: Iterable[tuple[bool, float]]) -> None:
        """A round: of each prediction whether it was right, and its probability."""
        for name in ("right", "wrong", "p_right", "p_wrong"):
            setattr(self, name, self.decay * getattr(self, name))
        for right, probability in predictions:
            if right:
                self.right, self.p_right = self.right + 1, self.p_right + probability
            else:
                self.wrong, self.p_wrong = self.wrong + 1, self.p_wrong + probability

    @property
    def alpha(self) -> float:
        """The share that was right; 0 before there is any."""
        count = self.right + self.wrong
        return self.right / count if count > _FORGOTTEN else 0.0

    @property
    def midway(self) -> float:
        """The mean of the mean probabilities of right and of wrong predictions; 0 while there is not one of each."""
        if min(self.right, self.wrong) < _FORGOTTEN:
            return 0.0
        return (self.p_right / self.right + self.p_wrong / self.wrong) / 2


@dataclass(frozen=True)
class Midway:
    """DEL's rule: a token drafted with a probability nearer to what wrong drafts had than to what right ones had is the
    last one.

    Beside another source than DEL's it learns from the drafts themselves: those that were accepted, and the first that
    was not. Every sequence has its own threshold, and none before a draft of either kind.
    """

    decay: float = 0.95

    label = "midway"

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay <= 1.0:
            raise UserError("decoding.decay", self.decay, "must be 0 (only the last round counts) to 1 (all count)")

    def start(self) -> Halfway:
        return Halfway(self.decay)


class Halfway:
    """`Midway` at work.

    Attributes:
        tallies: by row.
    """

    idle = False

    def __init__(self, decay: float):
        self.decay = decay
        self.begin([])

    def begin(self, contexts: Sequence[Context]) -> None:
        self.tallies = {context.row: Tally(self.decay) for context in contexts}
        self._asked: dict[int, list[float]] = {}  # by row: probabilities of this round's drafts

    def ends(self, contexts: Sequence[Context], probabilities: Sequence[float]) -> list[bool]:
        pairs = list(zip(contexts, probabilities, strict=True))
        for context, probability in pairs:
            self._asked.setdefault(context.row, []).append(probability)
        return [probability < self.tallies[context.row].midway for context, probability in pairs]

    def observe(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            accepted = len(verdict.path) - 1
            asked = self._asked.pop(verdict.context.row, [])[: len(verdict.tree)]
            judged = asked[: accepted + 1]  # of those behind the first rejected one nobody knows
            self.tallies[verdict.context.row].add((place < accepted, p) for place, p in enumerate(judged))
