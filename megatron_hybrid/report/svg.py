"""Draws a chart as SVG: curves over iterations, with marks where something happened.

Colours and fonts come from the page's style sheet, by class. Nothing that a file says gets in here
but numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hybrid.report.axis import Axis, figures, iteration_axis, value_axis
from megatron_hybrid.report.series import Curve, value_domain, wants_logarithm

NARROW, WIDE, HEIGHT = 600, 1222, 236  # a wide one is as wide as two narrow ones
LEFT, RIGHT_MARGIN, TOP, BOTTOM = 50, 12, 18, 206  # of the plot
# Kinds of marks, which are classes of the style sheet too.
SAVE, RESTART, SKIP, TROUBLE = GRAVITY = ("save", "restart", "skip", "trouble")
_MOST_DOTS = 60  # a curve with more values has no dots


@dataclass(frozen=True)
class Line:
    """A curve with its name in the chart's key. `color` is the number of a class."""

    name: str
    curve: Curve
    color: int


@dataclass(frozen=True)
class Mark:
    """Something that happened at an iteration."""

    iteration: int
    kind: str


@dataclass(frozen=True)
class Chart:
    """A chart. `is_from_zero`: its values are amounts, to be compared with none."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    is_from_zero: bool = False

    @property
    def curves(self) -> list[Curve]:
        """Those that have a value."""
        return [line.curve for line in self.lines if len(line.curve)]


@dataclass(frozen=True)
class Drawing:
    """A chart with its axes, in a picture of a width."""

    chart: Chart
    x: Axis
    y: Axis
    width: int


def drawing_of(chart: Chart, iterations: tuple[int, int], width: int = NARROW) -> Drawing:
    """The chart's axes, for iterations from the first to the last."""
    low, high = value_domain(chart.curves)
    is_logarithmic = wants_logarithm(chart.curves)
    low = min(low, 0.0) if chart.is_from_zero and not is_logarithmic else low
    x = iteration_axis(*iterations, LEFT, width - RIGHT_MARGIN)
    y = value_axis(low, high, BOTTOM, TOP, is_logarithmic=is_logarithmic)
    return Drawing(chart, x, y, width)


def svg_of(drawing: Drawing, marks: Sequence[Mark]) -> str:
    """The picture. The cursor in it is for the page's script to move."""
    chart, x, y = drawing.chart, drawing.x, drawing.y
    parts = [
        f'<svg viewBox="0 0 {drawing.width} {HEIGHT}" role="img" '
        f'aria-label="{chart.title} by iteration">',
        *_grid(x, y),
        *_marks(x, marks),
        *(part for line in chart.lines for part in _line(line, x, y)),
        f'<line class="cursor" x1="0" x2="0" y1="{TOP}" y2="{BOTTOM}"/>',
        *(f'<circle class="dot c{line.color}" r="3.5"/>' for line in chart.lines),
        "</svg>",
    ]
    return "".join(parts)


def _grid(x: Axis, y: Axis) -> list[str]:
    parts = []
    for tick, label in zip(y.ticks, y.labels(), strict=True):
        place = _px(y.place(tick))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{x.end}" y1="{place}" y2="{place}"/>')
        parts.append(f'<text class="ytick" x="{LEFT - 8}" y="{place}">{label}</text>')

    parts.append(f'<line class="axis" x1="{LEFT}" x2="{x.end}" y1="{BOTTOM}" y2="{BOTTOM}"/>')
    for tick, label in zip(x.ticks, x.labels(), strict=True):
        pixel = x.place(tick)
        # The last label would run over the edge.
        side = " last" if pixel > x.end - RIGHT_MARGIN else ""
        parts.append(f'<text class="xtick{side}" x="{_px(pixel)}" y="{BOTTOM + 18}">{label}</text>')
    return parts


def _marks(x: Axis, marks: Sequence[Mark]) -> list[str]:
    """One at a pixel, the gravest, and a save below it: a run of a million iterations may have
    saved a thousand times.
    """
    heads: dict[int, str] = {}
    saves: set[int] = set()
    for mark in marks:
        if x.low <= mark.iteration <= x.high:
            place = round(x.place(mark.iteration))
            if mark.kind == SAVE:
                saves.add(place)
            else:
                heads[place] = max(mark.kind, heads.get(place, mark.kind), key=GRAVITY.index)

    places = [(SAVE, place) for place in sorted(saves)]
    places += [(kind, place) for place, kind in sorted(heads.items())]
    return [f'<g class="mark {kind}">{symbol(kind, place)}</g>' for kind, place in places]


def symbol(kind: str, place: float) -> str:
    """A mark's shape, which tells its kind without its colour."""
    if kind == SAVE:
        return f'<path d="M{place} {BOTTOM + 1}l3.5 5h-7z"/>'
    stem = f'<line x1="{place}" x2="{place}" y1="{TOP}" y2="{BOTTOM}"/>'
    heads = {
        RESTART: f'<path d="M{place - 4} {TOP - 9}h8l-4 8z"/>',
        SKIP: f'<path class="cross" d="M{place - 3.5} {TOP - 9}l7 7m0 -7l-7 7"/>',
        TROUBLE: f'<path d="M{place} {TOP - 10}l4.5 4.5l-4.5 4.5l-4.5 -4.5z"/>',
    }
    return stem + heads[kind]


def _line(line: Line, x: Axis, y: Axis) -> list[str]:
    curve = line.curve
    if not len(curve):
        return []
    xs = [_px(x.place(each)) for each in (curve.first + curve.last) / 2]
    means = _pairs(xs, curve.mean, y)
    parts = []
    if curve.is_thinned:
        edge = _pairs(xs, curve.high, y) + _pairs(xs, curve.low, y)[::-1]
        parts.append(f'<path class="band c{line.color}" d="M{"L".join(edge)}Z"/>')
    parts.append(f'<path class="line c{line.color}" d="M{"L".join(means)}"/>')
    if len(curve) <= _MOST_DOTS:
        parts += [
            f'<circle class="point c{line.color}" cx="{cx}" cy="{cy}" r="2"/>'
            for cx, cy in (pair.split(" ") for pair in means)
        ]
    return parts


def _pairs(xs: Sequence[str], values: np.ndarray, y: Axis) -> list[str]:
    return [f"{x} {_px(y.place(value))}" for x, value in zip(xs, values.tolist(), strict=True)]


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def readings(drawing: Drawing) -> list[dict[str, list[object]]]:
    """What the page's script shows of each line: `at` the iterations at which bins end, their
    `text`, and where their points lie.
    """
    chart = drawing.chart
    return [
        {
            "at": line.curve.last.tolist(),
            "text": [reading(chart, line.curve, n) for n in range(len(line.curve))],
            "x": [
                _near(drawing.x.place(each)) for each in (line.curve.first + line.curve.last) / 2
            ],
            "y": [_near(drawing.y.place(each)) for each in line.curve.mean],
        }
        for line in chart.lines
    ]


def reading(chart: Chart, curve: Curve, index: int) -> str:
    """A bin's value as text, with its range if it has one."""
    text = f"{figures(float(curve.mean[index]))}{chart.unit}"
    low, high = float(curve.low[index]), float(curve.high[index])
    return text if low == high else f"{text} ({figures(low)} to {figures(high)})"


def _near(value: float) -> float:
    return round(float(value), 1)
