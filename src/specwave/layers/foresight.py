"""How well sets of layers foretell the target's next step: ridge regressions, each part of the conversations foretold
from the others.

A drafter maps the states of its layers and the next token to the state that the target's head will read; what a linear
map manages of that, without any training, is a proxy of what a drafter will. `agreement` is the share of steps at which
it names the target's own most likely token, among those of the vocabulary: a_0 of a linear drafter.

Shapes: S steps, F columns, D hidden size, V tokens of the vocabulary, C sets of m layers, P parts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from specwave.artifacts import UserError
from specwave.layers.groups import Layers, in_threads
from specwave.layers.ridge import Ridge, Sums, affine
from specwave.layers.steps import Steps

ROWS_PER_UNKNOWN = 2  # fewer fit noise: from one row for each unknown on it is foretold perfectly
SEARCH_ROWS = 2048  # of the first part, evenly spread, that all sets are compared on
_AT_ONCE = 512  # rows whose logits exist together
_PART = 32  # sets of one task


class Foresight:
    """The fits of every part from the others, by blocks of one table.

    Args:
        steps: of a calibration.
        parts: 2 or more; a conversation lies in one.
        damping: of `Ridge`.

    Raises:
        UserError: there are fewer conversations than parts.
    """

    def __init__(self, steps: Steps, parts: int, damping: float):
        self.steps = steps
        part_S = parts_of(steps.conversations, parts)
        self.rows = [(part_S == part).nonzero()[:, 0] for part in range(parts)]
        self._columns = [steps.inputs[rows] for rows in self.rows]
        sums = [Sums.of(x, steps.states[rows]) for x, rows in zip(self._columns, self.rows, strict=True)]
        whole = functools.reduce(operator.add, sums)
        self._fits = [Ridge(whole - own, damping) for own in sums]

    @property
    def fitted(self) -> int:
        """Rows behind a fit, at least."""
        return min(fit.count for fit in self._fits)

    def enough_rows(self, layers: Layers) -> bool:
        """A fit with too few rows for its unknowns learns them by heart."""
        return self.fitted >= ROWS_PER_UNKNOWN * len(self.steps.columns(layers))

    def refuse_few_rows(self, layers: Layers) -> None:
        """
        Raises:
            UserError: naming the set.
        """
        if not self.enough_rows(layers):
            unknowns = len(self.steps.columns(layers))
            names = ",".join(map(str, layers))
            raise UserError(
                "selector.width", self.steps.width,
                f"the regression for {{{names}}} has {unknowns} unknowns and {self.fitted} rows to fit them, at least "
                f"{ROWS_PER_UNKNOWN * unknowns} are needed: calibrate on more conversations or longer answers, or use "
                "a smaller selector.width or selector.token_width",
            )  # fmt: skip

    # ---------------------------------------------------------------- one set, all there is

    def hits(self, layers: Layers) -> Tensor:
        """bool [S]: where these layers (none: the next token alone) foretell the target's token, which is a miss where
        it is no token of the vocabulary. Every step is foretold, by the fit without its own part."""
        steps, columns = self.steps, self.steps.columns(layers)
        found = torch.zeros(len(steps.tokens), dtype=torch.bool)
        for rows, x_SF, fit in zip(self.rows, self._columns, self._fits, strict=True):
            told_SD = fit.foretell(x_SF, columns)
            for some, part_SD in zip(rows.split(_AT_ONCE), told_SD.split(_AT_ONCE), strict=True):
                found[some] = (part_SD @ steps.head.T).argmax(1) == steps.tokens[some]
        return found

    # ---------------------------------------------------------------- many sets, compared

    def search(self, sets_Cm: Tensor, shortlist: int) -> tuple[Tensor, Tensor]:
        """(agreement [C], explained [C]) of many sets, float64, on up to `SEARCH_ROWS` steps of the first part.

        For speed the outputs are not D state directions but the logits of the `shortlist` most frequent tokens, a
        linear map of them, so that no head is needed behind the fit; a step with another token is a miss for all.
        `explained` is the share of these logits' variance (each row's mean left out, which no choice turns on).
        """
        steps = self.steps
        head = steps.head[:shortlist]
        head = head - head.mean(0)
        fit = self._fits[0].mapped(head)
        place = torch.linspace(0, len(self.rows[0]) - 1, min(SEARCH_ROWS, len(self.rows[0]))).round().long()
        x_SF, rows = self._columns[0][place], self.rows[0][place]
        logits_SV = steps.states[rows] @ head.T
        token_S = steps.tokens[rows]
        total = (logits_SV - fit.mean_D.to(logits_SV)).square().sum().double()

        def score(sets: Tensor) -> Tensor:
            scores = torch.empty(len(sets), 2, dtype=torch.float64)
            for number, layers in enumerate(sets.tolist()):
                columns = steps.columns(layers)
                told_SV = affine(x_SF[:, columns], fit.mean_F[columns], fit.weights(columns), fit.mean_D)
                scores[number, 0] = (told_SV.argmax(1) == token_S).double().mean()
                scores[number, 1] = 1 - told_SV.sub_(logits_SV).square_().sum().double() / total
            return scores

        found = []
        with tqdm(total=len(sets_Cm), desc="proxy of all sets", unit="set", disable=None) as bar:
            for part in in_threads(score, sets_Cm.split(_PART)):
                found.append(part)
                bar.update(len(part))
        agreement, explained = torch.cat(found).unbind(1)
        return agreement, explained


def parts_of(conversation_S: Tensor, parts: int) -> Tensor:
    """The part of each row, 0 … P − 1: conversations are dealt out in turn.

    Raises:
        UserError: there are fewer conversations than parts.
    """
    names, place_S = conversation_S.unique(return_inverse=True)
    if len(names) < parts:
        rule = f"{len(names)} conversations have a step, which is fewer than parts: calibrate on more of them"
        raise UserError("selector.parts", parts, rule)
    return place_S % parts


def resampled(values_S: Tensor, conversation_S: Tensor, resamples: int, seed: int) -> Sequence[float]:
    """2.5 %, median and 97.5 % of the mean over rows when conversations are drawn with replacement."""
    names, place_S = conversation_S.unique(return_inverse=True)
    sums = torch.zeros(2, len(names), dtype=torch.float64)
    sums[0].index_add_(0, place_S, values_S.double())
    sums[1].index_add_(0, place_S, torch.ones(len(values_S), dtype=torch.float64))
    draw = torch.randint(len(names), (resamples, len(names)), generator=torch.Generator().manual_seed(seed))
    total, count = sums[:, draw].sum(-1)
    points = torch.tensor([0.025, 0.5, 0.975], dtype=torch.float64)
    return (total / count).quantile(points).tolist()
