"""The window of verified rounds that a plan is made on: the target's own states at every sub-layer, by row.

Letters: T tokens of all rows' windows, k tokens of one round, D hidden size, N blocks.

A round that commits k tokens to a row of then n tokens runs the target over positions n−1−k … n−2 (root and accepted
drafts): their states at depth 0 (embeddings), 1, …, 2N are the window's input, the k committed tokens what it should
have drafted there. The rounds of a window follow each other, so its prefix is what was committed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specwave.decoding import Context, Verdict
from specwave.target import Target, Wants
from specwave.target.sublayers import Window


def every_sub_layer(num_layers: int) -> Wants:
    """What a forward must hand out for a window."""
    return Wants(tuple(range(num_layers)), tuple(range(num_layers)))


@dataclass(frozen=True)
class Evidence:
    """Windows of live rows, joined along T.

    Attributes:
        windows: where each row's lies in the session.
        states: the target's own at depth 0 … 2N, each [T, D]; of windows that were not watched at depth 0 alone.
        tokens: int64 [T], what the target committed behind each position.
        sequences, positions: int64 [T], keys of the noise of these tokens.
        seen: bool [T, V], the distinct tokens before each; under a repetition penalty only.
    """

    windows: list[Window]
    states: list[Tensor]
    tokens: Tensor
    sequences: Tensor
    positions: Tensor
    seen: Tensor | None


class Watch:
    """Collects the states of the last `window` rounds, oldest first; rows that end take theirs away. There are more
    rounds than that where nobody asks for a plan, as while another method drafts."""

    def __init__(self, target: Target, window: int):
        self.target, self.window = target, window
        self.rounds = 0
        self._states: dict[int, list[list[Tensor]]] = {}  # by row: of each round, depths 1 … 2N

    def clear(self) -> None:
        self.rounds = 0
        self._states.clear()

    def drop(self, row: int) -> None:
        self._states.pop(row, None)

    def take(self, verdicts: Sequence[Verdict]) -> None:
        """A round whose forward captured `every_sub_layer`."""
        self.rounds += 1
        for verdict in verdicts:
            context = verdict.context
            states = [each[layer] for layer in range(self.target.num_layers)
                      for each in (context.attentions, context.blocks)]  # fmt: skip
            own = self._states.setdefault(context.row, [])
            own.append(states)
            del own[: -self.window]

    def evidence(self, contexts: Sequence[Context]) -> Evidence:
        """All that was taken, of the live rows."""
        rounds = [self._states[context.row] for context in contexts]
        found = gather(self.target, contexts, [sum(len(one[0]) for one in own) for own in rounds])
        depths = range(2 * self.target.num_layers)
        taken = [torch.cat([one[depth] for own in rounds for one in own]) for depth in depths]
        return replace(found, states=found.states + taken)


def gather(target: Target, contexts: Sequence[Context], lengths: Sequence[int]) -> Evidence:
    """The last `lengths[row]` tokens that the target committed to each row, and where it did; of states the embeddings
    alone, at depth 0."""
    windows: list[Window] = []
    inputs: list[int] = []
    tokens: list[int] = []
    sequences: list[int] = []
    positions: list[int] = []
    for context, length in zip(contexts, lengths, strict=True):
        end = len(context.tokens)
        start = end - 1 - length
        windows.append(Window(context.slot, start, length))
        inputs += context.tokens[start : end - 1]
        tokens += context.tokens[start + 1 :]
        sequences += [context.sequence] * length
        positions += range(start + 1, end)
    seen = None
    if contexts[0].sampling.penalised:
        pairs = zip(contexts, windows, strict=True)
        seen = torch.cat([_seen(target, context.tokens, window) for context, window in pairs])

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, device=target.device)

    embedded = target.embed(column(inputs)[None])[0]
    return Evidence(windows, [embedded], column(tokens), column(sequences), column(positions), seen)


def _seen(target: Target, tokens: Sequence[int], window: Window) -> Tensor:
    """bool [k, V]: the distinct tokens up to each position of a window, itself included."""
    seen = torch.zeros(window.length, target.vocab_size, dtype=torch.bool, device=target.device)
    seen[:, torch.tensor(tokens[: window.prefix + 1], device=seen.device)] = True
    for place in range(1, window.length):
        seen[place:, tokens[window.prefix + place]] = True
    return seen
