"""Drawing for the report: SVG elements that live inside the page, and axes with round numbers.

Colours are the page's CSS variables, so light and dark are the page's affair; text is the page's text. Knows nothing of
methods or results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 640  # of every picture, in its own units; a letter of `SIZE` is about LETTER wide
SIZE, LETTER = 12.5, 6.9
SMALLEST = 1e-300  # span of an axis
SERIES = 8  # colours that the page has for series, and shapes of marks
_SHAPES = (  # around 0, as large to the eye as a circle of radius 4
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    "M-3.6-3.6H3.6V3.6H-3.6Z",
    "M0-4.9L4.6 3.4H-4.6Z",
    "M0-5.2L5.2 0L0 5.2L-5.2 0Z",
    "M0 4.9L4.6-3.4H-4.6Z",
    "M-1.5-4.6h3v3.1h3.1v3h-3.1v3.1h-3v-3.1h-3.1v-3h3.1Z",
    "M0-5.4L1.4-1.8L5.2-1.7L2.2.7L3.2 4.4L0 2.2L-3.2 4.4L-2.2.7L-5.2-1.7L-1.4-1.8Z",
    "M-4.4-2.4L-2.4-4.4L0-2L2.4-4.4L4.4-2.4L2 0L4.4 2.4L2.4 4.4L0 2L-2.4 4.4L-4.4 2.4L-2 0Z",
)
SQUARE = "M-5-5H5V5H-5Z"  # in legends, for parts of bars


def number(value: float) -> str:
    """A coordinate: two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def colour(series: int) -> str:
    return f"var(--series-{series % SERIES})"


def shape(series: int) -> str:
    """The path of a mark; no two of 64 series have both colour and shape in common."""
    return _SHAPES[(series + series // SERIES) % SERIES]


@dataclass
class Canvas:
    """What is drawn so far, in order."""

    height: float
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """`kind` is a CSS class: grid, axis, or reference (dashed)."""
        ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self.parts.append(f'<line class="{kind}" {ends}/>')

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> None:
        """At the baseline's start, middle or end."""
        where = f'x="{number(x)}" y="{number(y)}"'
        where += f' text-anchor="{anchor}"' if anchor != "start" else ""
        where += f' class="{kind}"' if kind else ""
        self.parts.append(f"<text {where}>{escape(words)}</text>")

    def upwards(self, x: float, y: float, words: str) -> None:
        """Text from bottom to top, its middle at (x, y)."""
        turned = f'transform="translate({number(x)} {number(y)}) rotate(-90)" text-anchor="middle"'
        self.parts.append(f"<text {turned}>{escape(words)}</text>")

    def mark(self, x: float, y: float, series: int, said: str) -> None:
        """A series' shape; `said` appears under the pointer."""
        place = f'transform="translate({number(x)} {number(y)})" fill="{colour(series)}"'
        self.parts.append(f'<path d="{shape(series)}" {place}><title>{escape(said)}</title></path>')

    def curve(self, points: Sequence[tuple[float, float]], series: int) -> None:
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self.parts.append(f'<path d="{path}" class="curve" stroke="{colour(series)}"/>')

    def whisker(self, x1: float, y1: float, x2: float, y2: float, series: int) -> None:
        path = f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"
        self.parts.append(f'<path d="{path}" class="whisker" stroke="{colour(series)}"/>')

    def bar(self, x: float, y: float, width: float, height: float, series: int, said: str) -> None:
        corner = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self.parts.append(f'<rect {corner} class="bar" fill="{colour(series)}"><title>{escape(said)}</title></rect>')

    def element(self, alt: str) -> str:
        """The picture; `alt` is what a screen reader says of it."""
        opening = f'<svg viewBox="0 0 {WIDTH} {number(self.height)}" role="img" aria-label="{escape(alt)}">'
        return opening + "".join(self.parts) + "</svg>"


# ---------------------------------------------------------------- axes


@dataclass(frozen=True)
class Axis:
    """From values to places: `low` … `high` lie at `start` … `end`; `ticks` are round numbers within."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    decimals: int

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def label(self, tick: float) -> str:
        plain = self.decimals < 7 and abs(tick) < 1e7
        return f"{tick + 0.0:.{self.decimals}f}" if plain else f"{tick:g}"  # -0.0 + 0.0 is 0.0


def axis(values: Sequence[float], start: float, end: float, count: int = 6, room: float = 0.06) -> Axis:
    """An axis that shows all values, with `room` of their span beside them and about `count` ticks."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    size = max(abs(low), abs(high))
    aside = room * (high - low) if high - low > 1e-9 * size else 0.1 * size  # equal ones, but for rounding
    aside = aside if aside > SMALLEST else 1.0
    return fixed_axis(low - aside, high + aside, start, end, count)


def fixed_axis(low: float, high: float, start: float, end: float, count: int = 6, whole: bool = False) -> Axis:
    """An axis from `low` to `high`; `whole`: ticks at whole numbers only."""
    step = _round_step((high - low) / count)
    step = max(1.0, round(step)) if whole else step
    first = math.ceil(low / step - 1e-9)
    ticks = tuple(place * step for place in range(first, math.floor(high / step + 1e-9) + 1))
    return Axis(low, high, start, end, ticks, max(0, -math.floor(math.log10(step) + 1e-9)))


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`."""
    least = max(least, SMALLEST)
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in (1.0, 2.0, 5.0) if factor * power >= least * (1 - 1e-9)), 10.0 * power)


def bottom_axis(canvas: Canvas, across: Axis, top: float, bottom: float, unit: str, grid: bool = True) -> None:
    """Ticks below `bottom`, their grid up to `top`, and what they count."""
    for tick in across.ticks:
        if grid:
            canvas.line(across(tick), top, across(tick), bottom, "grid")
        canvas.text(across(tick), bottom + 16, across.label(tick), "middle")
    canvas.line(across.start, bottom, across.end, bottom, "axis")
    canvas.text((across.start + across.end) / 2, bottom + 35, unit, "middle")


def left_axis(canvas: Canvas, up: Axis, left: float, right: float, unit: str) -> None:
    """Ticks left of `left`, their grid to `right`, and what they count, from bottom to top."""
    for tick in up.ticks:
        canvas.line(left, up(tick), right, up(tick), "grid")
        canvas.text(left - 7, up(tick) + 4, up.label(tick), "end")
    canvas.upwards(14, (up.start + up.end) / 2, unit)


def width_of(words: Sequence[str], longest: int = 26) -> float:
    """Room for the longest of these texts, of which `shortened` leaves so many letters."""
    return LETTER * max((min(len(text), longest) for text in words), default=0)


def shortened(words: str, longest: int = 26) -> str:
    return words if len(words) <= longest else words[: longest - 1] + "…"
