"""Draws curves over iterations, with marks where something happened.

Colors and fonts come from the page's style sheet, by class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from megatron_hybrid.charts import (
    SHAPES,
    Axis,
    Canvas,
    figures,
    fixed_axis,
    logarithmic_axis,
    px,
    value_axis,
)

NARROW, WIDE, HEIGHT = 600, 1222, 236  # a wide chart is as wide as two narrow ones
LEFT, RIGHT_MARGIN, TOP, BOTTOM = 50, 12, 18, 206  # of the plot
NUM_BINS = 560  # about a pixel and a half each
_MOST_DOTS = 60  # a curve with more values has no dots
_SPIKE = 40.0  # times the median: in a linear chart the rest would be flat

# Kinds of marks, which are classes of the style sheet, from the least to the most serious.
SAVE, RESTART, SKIP, TROUBLE = GRAVITY = ("save", "restart", "skip", "trouble")
Mark = tuple[int, str]  # an iteration and a kind
MARK_SHAPES = {SAVE: SHAPES["up"], RESTART: SHAPES["down"], SKIP: SHAPES["cross"]}
MARK_SHAPES[TROUBLE] = SHAPES["diamond"]


@dataclass(frozen=True)
class Curve:
    """A named line of a chart: the values, or bins of them where there are too many.

    Attributes:
        color: The number of a class of the style sheet.
        first, last: The iterations of a bin's first and last values.
        low, high, mean: The least, greatest and mean value of a bin.
    """

    name: str
    color: int
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.first)


class ChartLine(NamedTuple):
    """A column of the metrics file as a curve, in units of `scale`."""

    table: str
    column: str
    label: str
    scale: float = 1.0


class Chart(NamedTuple):
    """A chart. `is_from_zero`: the axis of values starts at 0."""

    title: str
    lines: Sequence[ChartLine]
    unit: str = ""
    is_from_zero: bool = False


def curve_of(
    name: str,
    color: int,
    iterations: NDArray[np.int64],
    values: NDArray[np.float64],
    num_bins: int = NUM_BINS,
) -> Curve:
    """The curve of the finite values.

    More than `num_bins` values are divided into bins of equal width. A bin keeps its extremes, so a
    single bad iteration is as high in the chart as it was in the run.
    """
    is_known = np.isfinite(values)
    x, y = iterations[is_known], values[is_known]
    if len(x) <= num_bins:
        return Curve(name, color, x, x, y, y, y)

    span = float(x[-1] - x[0] + 1)
    bins = np.minimum(((x - x[0]) / span * num_bins).astype(np.int64), num_bins - 1)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    ends = np.append(starts[1:], len(x)) - 1
    low, high = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    mean = np.add.reduceat(y, starts) / (ends - starts + 1)
    # Rounding must not put a mean outside of its bin.
    return Curve(name, color, x[starts], x[ends], low, high, np.clip(mean, low, high))


def figure_of(
    chart: Chart,
    curves: Sequence[Curve],
    iterations: tuple[int, int],
    marks: Sequence[Mark],
    width: int,
) -> dict[str, Any]:
    """A chart of this width for the page's template.

    Args:
        curves: The chart's lines that have a value.
        iterations: The first and the last iteration of the axis.
        marks: What happened, and when.
    """
    first, last = iterations
    x = fixed_axis(first, max(last, first + 1), LEFT, width - RIGHT_MARGIN, least_step=1.0)
    y = _value_axis(curves, is_from_zero=chart.is_from_zero)
    notes = [chart.unit.strip(), "logarithmic" if y.is_logarithmic else ""]
    return {
        "title": chart.title,
        "note": ", ".join(filter(None, notes)),
        "width": width,
        "height": HEIGHT,
        "svg": Markup(_svg(curves, x, y, marks)),
        "last": max(int(curve.last[-1]) for curve in curves),
        "keys": [(each.name, each.color, _reading(each, -1, chart.unit)) for each in curves],
        "data": {
            "width": width,
            "plot": [x.start, x.end],
            "domain": [x.low, x.high],
            "lines": [_readings(curve, x, y, chart.unit) for curve in curves],
        },
    }


def _value_axis(curves: Sequence[Curve], *, is_from_zero: bool) -> Axis:
    """Logarithmic if a spike would make most of a linear chart flat."""
    low = min(float(curve.low.min()) for curve in curves)
    high = max(float(curve.high.max()) for curve in curves)
    typical = float(np.median(np.concatenate([curve.mean for curve in curves])))
    if low > 0 and high > _SPIKE * typical:
        return logarithmic_axis(low, high, BOTTOM, TOP)
    return value_axis(min(low, 0.0) if is_from_zero else low, high, BOTTOM, TOP)


def _svg(curves: Sequence[Curve], x: Axis, y: Axis, marks: Sequence[Mark]) -> str:
    """The elements of the picture. The cursor and its dots are moved by the page's script."""
    canvas = Canvas(x.end + RIGHT_MARGIN, HEIGHT)
    for tick, label in zip(y.ticks, y.labels(), strict=True):
        place = y.place(tick)
        canvas.add("line", class_="grid", x1=LEFT, x2=x.end, y1=place, y2=place)
        canvas.add("text", label, class_="ytick", x=LEFT - 8, y=place)
    canvas.add("line", class_="axis", x1=LEFT, x2=x.end, y1=BOTTOM, y2=BOTTOM)
    for tick, label in zip(x.ticks, x.labels(), strict=True):
        place = x.place(tick)
        is_last = place > x.end - RIGHT_MARGIN  # a centered label would run over the edge
        canvas.add(
            "text", label, class_="xtick last" if is_last else "xtick", x=place, y=BOTTOM + 18
        )

    _draw_marks(canvas, x, marks)
    for curve in curves:
        _draw_curve(canvas, curve, x, y)
    canvas.add("line", class_="cursor", x1=0, x2=0, y1=TOP, y2=BOTTOM)
    for curve in curves:
        canvas.add("circle", class_=f"dot c{curve.color}", r=3.5)
    return canvas.inner_svg()


def _draw_marks(canvas: Canvas, x: Axis, marks: Sequence[Mark]) -> None:
    """Draws one mark at a pixel, the most serious, and a save below it: a run of a million
    iterations may have saved a thousand times.
    """
    found: dict[tuple[bool, int], str] = {}
    for iteration, kind in marks:
        if x.low <= iteration <= x.high:
            key = (kind != SAVE, round(x.place(iteration)))
            found[key] = max(kind, found.get(key, kind), key=GRAVITY.index)
    for (has_stem, place), kind in sorted(found.items()):
        at = f"translate({place} {TOP - 5})" if has_stem else f"translate({place} {BOTTOM + 4})"
        if has_stem:
            canvas.add("line", class_=f"mark {kind}", x1=place, x2=place, y1=TOP, y2=BOTTOM)
        canvas.add("path", class_=f"mark {kind}", d=MARK_SHAPES[kind], transform=at)


def _draw_curve(canvas: Canvas, curve: Curve, x: Axis, y: Axis) -> None:
    places = _places(curve, x)
    means = _points(places, curve.mean, y)
    if np.any(curve.first != curve.last):
        edge = _points(places, curve.high, y) + _points(places, curve.low, y)[::-1]
        canvas.add("path", class_=f"band c{curve.color}", d=f"M{'L'.join(edge)}Z")
    canvas.add("path", class_=f"line c{curve.color}", d=f"M{'L'.join(means)}")
    if len(curve) <= _MOST_DOTS:
        for place, mean in zip(places, curve.mean.tolist(), strict=True):
            canvas.add("circle", class_=f"point c{curve.color}", cx=place, cy=y.place(mean), r=2)


def _places(curve: Curve, x: Axis) -> list[float]:
    return [x.place(each) for each in ((curve.first + curve.last) / 2).tolist()]


def _points(places: Sequence[float], values: NDArray[np.float64], y: Axis) -> list[str]:
    pairs = zip(places, values.tolist(), strict=True)
    return [f"{px(place)} {px(y.place(value))}" for place, value in pairs]


def _readings(curve: Curve, x: Axis, y: Axis, unit: str) -> dict[str, list[Any]]:
    """The values that the page's script shows: the iterations at which bins end, their text, and
    the positions of their points.
    """
    return {
        "at": curve.last.tolist(),
        "text": [_reading(curve, n, unit) for n in range(len(curve))],
        "x": [round(place, 1) for place in _places(curve, x)],
        "y": [round(y.place(mean), 1) for mean in curve.mean.tolist()],
    }


def _reading(curve: Curve, index: int, unit: str) -> str:
    """A bin's value as text, with its range if it has one."""
    text = f"{figures(float(curve.mean[index]))}{unit}"
    low, high = float(curve.low[index]), float(curve.high[index])
    return text if low == high else f"{text} ({figures(low)} to {figures(high)})"
