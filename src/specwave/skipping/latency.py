"""What sub-layers and forwards cost over the length of the context: KnapSpec's latency model, its fit, its file.

    t_mlp = c1      t_attn(n) = c2·n + c3      t_draft(S, n) = t_0 + Σ over kept sub-layers      t_target = T(k, n)

t_0 is what every draft step pays, whatever it skips: embedding, final norm, head, the choice of the token. T(k, n) is a
verification of k tokens behind n. Seconds, everywhere. Source: KnapSpec (arXiv 2602.20217); methods.md §4.
Knows nothing about how a time is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specwave.artifacts import UserError, read_json, reading, write_json
from specwave.target.clock import Clock

POOR = 0.1  # root mean square of the relative residuals from which on a fit is not believed
SCHEMA = 1


@dataclass(frozen=True)
class Fit:
    """y ≈ slope·x + intercept, and the root mean square of its relative residuals."""

    slope: float
    intercept: float
    error: float

    def __call__(self, x: float) -> float:
        return self.slope * x + self.intercept


def fit_line(x: Sequence[float], y: Sequence[float], flat: bool = False) -> Fit:
    """Least squares of *relative* residuals: times over contexts span two decades, and the short ones count as much.

    Minimises Σ ((a·x + b)/y − 1)², the normal equations with weights 1/y². One point, or `flat`, gives a constant.
    """
    if len(x) != len(y) or not x or min(y) <= 0:
        raise ValueError(f"a fit needs points with positive times, got {list(x)}, {list(y)}")
    weight = [1 / value**2 for value in y]
    total = sum(weight)
    mean_x = sum(w * a for w, a in zip(weight, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weight, y, strict=True)) / total
    spread = sum(w * (a - mean_x) ** 2 for w, a in zip(weight, x, strict=True))
    slope = 0.0
    if not flat and spread > 0:
        slope = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weight, x, y, strict=True)) / spread
    intercept = mean_y - slope * mean_x
    residuals = [(slope * a + intercept) / b - 1 for a, b in zip(x, y, strict=True)]
    return Fit(slope, intercept, (sum(one**2 for one in residuals) / len(residuals)) ** 0.5)


@dataclass(frozen=True)
class Latency:
    """Medians over contexts, in seconds.

    Attributes:
        contexts: ascending numbers of cached tokens.
        attention, mlp: one sub-layer for one token, behind each context.
        rest: t_0, behind each context.
        sizes: ascending numbers of new tokens.
        forward: T(k, n): for each context, one time per size.
        search: behind each context, how many times longer a search takes than its tokens would in forwards.
        num_layers: blocks of the target.
        facts: the target, device and settings they were taken with.
    """

    contexts: tuple[int, ...]
    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    rest: tuple[float, ...]
    sizes: tuple[int, ...]
    forward: tuple[tuple[float, ...], ...]
    search: tuple[float, ...]
    num_layers: int
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.contexts or not self.sizes or list(self.contexts) != sorted(set(self.contexts)):
            raise ValueError("contexts and sizes ascend, each once, and there is one of each at least")
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] != 1:
            raise ValueError("sizes ascend from 1")
        rows = (self.attention, self.mlp, self.rest, self.forward, self.search)
        if any(len(row) != len(self.contexts) for row in rows):
            raise ValueError("every context has its times")
        if any(len(row) != len(self.sizes) for row in self.forward):
            raise ValueError("every size has its time")
        parts = (*self.attention, *self.mlp, *self.rest, *self.search)
        times = (*parts, *(one for row in self.forward for one in row))
        if not all(0 < one < float("inf") for one in times):
            raise ValueError("times are positive")

    # ---------------------------------------------------------------- the fit

    @cached_property
    def attention_fit(self) -> Fit:
        return fit_line(self.contexts, self.attention)

    @cached_property
    def mlp_fit(self) -> Fit:
        return fit_line(self.contexts, self.mlp, flat=True)

    @property
    def poor(self) -> str | None:
        """What is wrong with the fit, in words; None when it is believed. A poor one is not used: medians are."""
        for name, fit in (("attention", self.attention_fit), ("MLP", self.mlp_fit)):
            if fit.error > POOR:
                return f"{name} times leave the line by {fit.error:.0%}"
        if self.attention_fit.slope < 0:
            return "attention times fall as the context grows"
        if self.attention_fit(self.contexts[0]) <= 0:
            return "the line gives attention no cost at short contexts"
        return None

    # ---------------------------------------------------------------- times

    def t_attention(self, context: int) -> float:
        if self.poor is None and self.attention_fit(context) > 0:
            return self.attention_fit(context)
        return _between(self.contexts, self.attention, context)

    def t_mlp(self, context: int) -> float:
        return self.mlp_fit.intercept if self.poor is None else _between(self.contexts, self.mlp, context)

    def t_draft(self, kept: Sequence[bool], context: int, rows: int = 1) -> float:
        """One draft step with a kept set, for a batch of `rows`.

        The sum of the parts, scaled so that the full set costs what its forward was measured to cost, T(rows, n): else
        an error of the sum would look like a gain, just where a small target decides between skipping little and
        nothing. A step of B rows multiplies as many tokens as a forward over B.
        """
        return self.t_target(rows, context) * self._sum(kept, context) / self._sum([True] * len(kept), context)

    def _sum(self, kept: Sequence[bool], context: int) -> float:
        """t_0 and the kept sub-layers, each timed apart."""
        attention = sum(kept[::2]) * self.t_attention(context)
        return _between(self.contexts, self.rest, context) + attention + sum(kept[1::2]) * self.t_mlp(context)

    @property
    def whole_error(self) -> float:
        """How far the sum of all parts is from the whole forward, relative, where it is furthest."""
        full = [True] * (2 * self.num_layers)
        ratios = [self._sum(full, context) / self.t_target(1, context) for context in self.contexts]
        return max((ratio - 1 for ratio in ratios), key=abs)

    def t_target(self, tokens: int, context: int) -> float:
        """T(k, n): between what was measured a straight line in both, beyond it the last slope; never less than one
        token costs."""
        columns = [Clock(self.sizes, row)(tokens) for row in self.forward]
        single = [row[0] for row in self.forward]
        return max(_between(self.contexts, columns, context), _between(self.contexts, single, context))

    def t_search(self, tokens: Sequence[int], final: int, context: int) -> float:
        """A search that runs `tokens[i]` tokens through sub-layer i and `final` of them through the head, at most."""
        each = {count: self.t_target(count, context) for count in set(tokens)}
        whole = [each[count] for count in tokens]
        share = 1 - _between(self.contexts, self.rest, context) / self.t_target(1, context)
        forwards = max(share, 0.0) * sum(whole) / len(whole) + self.t_target(final, context) * max(1 - share, 0.0)
        return _between(self.contexts, self.search, context) * forwards

    # ---------------------------------------------------------------- file

    def save(self, path: Path | str) -> None:
        """As JSON, with what the fit makes of it for readers."""
        fit = {
            "c1": self.mlp_fit.intercept,
            "c2": self.attention_fit.slope,
            "c3": self.attention_fit.intercept,
            "attention_error": self.attention_fit.error,
            "mlp_error": self.mlp_fit.error,
            "whole_error": self.whole_error,
            "poor": self.poor,
        }
        write_json(path, {"schema": SCHEMA, **asdict(self), "fit": fit})


def read_latency(path: Path | str, facts: dict[str, Any] | None = None, key: str = "decoding.latency") -> Latency:
    """A latency file.

    Args:
        facts: what it must have been measured with.

    Raises:
        UserError: no such file, a damaged one, one of another target, device or setting.
    """
    content = read_json(path, key)
    if content.get("schema") != SCHEMA:
        raise UserError(key, path, f"its schema is {content.get('schema')!r}, {SCHEMA} is read: measure again (null)")
    with reading(key, path, "measure again (null)"):
        found = Latency(
            contexts=tuple(map(int, content["contexts"])),
            attention=tuple(map(float, content["attention"])),
            mlp=tuple(map(float, content["mlp"])),
            rest=tuple(map(float, content["rest"])),
            sizes=tuple(map(int, content["sizes"])),
            forward=tuple(tuple(map(float, row)) for row in content["forward"]),
            search=tuple(map(float, content["search"])),
            num_layers=int(content["num_layers"]),
            facts=dict(content["facts"]),
        )
    other = [
        f"{name} is {found.facts.get(name)} there, {value} here"
        for name, value in (facts or {}).items()
        if found.facts.get(name) != value
    ]
    if other:
        raise UserError(key, path, f"it was measured elsewhere: {'; '.join(other)}; give null to measure here")
    return found


def _between(x: Sequence[int], y: Sequence[float], at: int) -> float:
    """Straight lines between points, the first value before them, the last slope behind them."""
    return Clock(tuple(x), tuple(y))(max(at, x[0]))
