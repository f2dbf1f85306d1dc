"""Static SVG for the run page, the timeline and the pictures of benchmarks: a canvas of shapes and
text, axes with ticks, colors, and numbers in four digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

TITLE, TEXT, SMALL = 14.0, 11.5, 10.0  # pixels
_FONTS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
_NUM_STEPS = 6  # of an axis, at most
_TINY = 1e-290  # powers of ten below 1e-308 are 0


class Theme(NamedTuple):
    """Colors for pages of one brightness.

    The series are Okabe and Ito's, which are distinct for the common color vision deficiencies.
    """

    background: str
    text: str
    muted: str
    grid: str
    ours: str
    peers: tuple[str, ...]
    bad: str


THEMES = {
    "light": Theme(
        background="#ffffff",
        text="#1f2328",
        muted="#59636e",
        grid="#d1d9e0",
        ours="#0072b2",
        peers=("#d55e00", "#009e73", "#a3568a", "#8c6d00", "#4d5763", "#7a5195"),
        bad="#c4320a",
    ),
    "dark": Theme(
        background="#0d1117",
        text="#e6edf3",
        muted="#9aa4af",
        grid="#3d444d",
        ours="#56b4e9",
        peers=("#f0883e", "#2fc49a", "#e29ac6", "#e3c341", "#aab4be", "#b794f4"),
        bad="#ff7b5c",
    ),
}

# Outlines of markers around (0, 0).
SHAPES = {
    "square": "M-3 -3h6v6h-6z",
    "diamond": "M0 -4.3l4.3 4.3l-4.3 4.3l-4.3 -4.3z",
    "up": "M0 -4l4 7.5h-8z",
    "down": "M0 4l4 -7.5h-8z",
    "plus": "M-1.2 -4h2.4v2.8h2.8v2.4h-2.8v2.8h-2.4v-2.8h-2.8v-2.4h2.8z",
    "cross": "M-4 -2.2l1.8 -1.8l2.2 2.2l2.2 -2.2l1.8 1.8l-2.2 2.2l2.2 2.2l-1.8 1.8"
    "l-2.2 -2.2l-2.2 2.2l-1.8 -1.8l2.2 -2.2z",
    "left": "M-4 0l7.5 -4v8z",
    "right": "M4 0l-7.5 -4v8z",
    "circle": "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0z",
}


class Canvas:
    """A picture of `width` by `height` pixels, to which elements are added from back to front."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self._elements: list[tuple[str, dict[str, float | str], str]] = []

    def add(self, tag: str, content: str = "", /, **attributes: float | str) -> None:
        """Adds an SVG element. `class_` is the attribute `class`, `stroke_width` `stroke-width`."""
        named = {name.rstrip("_").replace("_", "-"): each for name, each in attributes.items()}
        self._elements.append((tag, named, content))

    def rect(
        self, x: float, y: float, width: float, height: float, color: str, *, edge: str = ""
    ) -> None:
        """Adds a rectangle, with a thin line of the color `edge` around it."""
        stroke: dict[str, float | str] = {"stroke": edge, "stroke_width": 0.7} if edge else {}
        self.add("rect", x=x, y=y, width=width, height=height, fill=color, **stroke)

    def line(
        self, start: tuple[float, float], end: tuple[float, float], color: str, width: float = 1.0
    ) -> None:
        (x1, y1), (x2, y2) = start, end
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=color, stroke_width=width)

    def marker(self, shape: str, x: float, y: float, color: str) -> None:
        """Adds one of `SHAPES`."""
        self.add("path", d=SHAPES[shape], transform=f"translate({px(x)} {px(y)})", fill=color)

    def text(
        self,
        x: float,
        y: float,
        content: str,
        color: str,
        *,
        size: float = TEXT,
        anchor: str = "start",
        is_bold: bool = False,
    ) -> None:
        """Adds a line of text whose baseline is at `y`."""
        weight = {"font_weight": "bold"} if is_bold else {}
        style = {"fill": color, "text_anchor": anchor, **weight}
        self.add("text", content, x=x, y=y, font_size=size, **style)

    def inner_svg(self) -> str:
        """The elements without the `svg` element around them."""
        return "\n".join(
            f"<{tag} {_attributes(attributes)}>{escape(content, quote=False)}</{tag}>"
            if content
            else f"<{tag} {_attributes(attributes)}/>"
            for tag, attributes, content in self._elements
        )

    def svg(self) -> str:
        """The SVG file. The same elements give the same text."""
        size = {"width": self.width, "height": self.height}
        box = f"0 0 {px(self.width)} {px(self.height)}"
        head = _attributes({"xmlns": "http://www.w3.org/2000/svg", **size, "viewBox": box})
        return f'<svg {head} font-family="{_FONTS}">\n{self.inner_svg()}\n</svg>\n'


def px(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def blended(color: str, background: str, opacity: float) -> str:
    """The color of a surface of this opacity before a background."""
    pairs = zip(bytes.fromhex(color[1:]), bytes.fromhex(background[1:]), strict=True)
    mixed = bytes(round(front * opacity + back * (1 - opacity)) for front, back in pairs)
    return f"#{mixed.hex()}"


def _attributes(attributes: dict[str, float | str]) -> str:
    return " ".join(
        f'{name}="{px(each) if isinstance(each, (int, float)) else escape(each)}"'
        for name, each in attributes.items()
    )


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, at pixels from `start` to `end`; linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    is_logarithmic: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value. One beyond the axis is at its end."""
        value = min(max(value, self.low), self.high)
        if self.low == self.high:
            return self.start
        if self.is_logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def labels(self) -> list[str]:
        """The text of each tick."""
        if self.is_logarithmic:
            return [label for tick in self.ticks for label in tick_labels((tick,))]
        return tick_labels(self.ticks)


def fixed_axis(
    low: float,
    high: float,
    start: float,
    end: float,
    *,
    num_steps: int = _NUM_STEPS,
    least_step: float = 0.0,
) -> Axis:
    """A linear axis from `low` to `high`, with ticks at multiples of a round step."""
    step = max(least_step, _round_step(high - low, num_steps))
    return Axis(low, high, start, end, _multiples(low, high, step))


def value_axis(low: float, high: float, start: float, end: float) -> Axis:
    """A linear axis that ends at a tick where one is near, so that a curve fills its chart."""
    if high - low <= max(1e-9 * abs(low), 1e-9 * abs(high), _TINY):  # a flat line is in the middle
        margin = 0.1 * abs(low)
        low, high = (low - margin, high + margin) if margin > _TINY else (0.0, 1.0)
    step, margin = _round_step(high - low), 0.05 * (high - low)
    low = max(math.floor(low / step + 1e-9) * step, low - margin)
    high = min(math.ceil(high / step - 1e-9) * step, high + margin)
    return Axis(low, high, start, end, _multiples(low, high, step))


def logarithmic_axis(low: float, high: float, start: float, end: float) -> Axis:
    """An axis of whole decades, at most forty; smaller values are at its end."""
    high = max(high, 1e40 * _TINY)
    first, last = math.floor(math.log10(max(low, high * 1e-40))), math.ceil(math.log10(high))
    stride = math.ceil(max(1, last - first) / _NUM_STEPS)
    ticks = tuple(10.0**power for power in range(first, last + 1, stride))
    return Axis(10.0**first, 10.0**last, start, end, ticks, is_logarithmic=True)


def _round_step(span: float, num_steps: int = _NUM_STEPS) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that covers the span in few steps."""
    least = span / num_steps
    size = 10.0 ** math.floor(math.log10(least))
    return next(digit * size for digit in (1, 2, 2.5, 5, 10) if digit * size >= least * 0.999)


def _multiples(low: float, high: float, step: float) -> tuple[float, ...]:
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return tuple(number * step for number in range(first, last + 1))


def tick_labels(ticks: tuple[float, ...]) -> list[str]:
    """Labels with the digits that their distance needs: `0.80`, `0.85`; `0`, `20k`; `1e-4`."""
    largest = max(map(abs, ticks), default=0.0)
    if not 1e-2 <= largest < 1e15:
        return [_scientific(tick) for tick in ticks]
    size, unit = _unit_of(largest)
    decimals = 0
    while decimals < 6 and any(abs(t / size - round(t / size, decimals)) > 1e-6 for t in ticks):
        decimals += 1
    return [f"{tick / size:.{decimals}f}{unit}" if tick else "0" for tick in ticks]


def figures(value: float) -> str:
    """A value with four significant digits: `4.081`, `0.001500`, `12.35k`, `1.5e-4`."""
    if not 1e-3 <= abs(value) < 1e15:
        return _scientific(value)
    size, unit = _unit_of(abs(value))
    digits = max(0, 3 - math.floor(math.log10(abs(value / size))))
    return f"{value / size:.{digits}f}{unit}"


def _unit_of(value: float) -> tuple[float, str]:
    """A factor and its letter. Thousands are only abbreviated from ten thousand on."""
    units = ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
    return next(((size, unit) for least, size, unit in units if value >= least), (1.0, ""))


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"
