"""All ratios with bars: how far each is on the right side of its own."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.reporting.contents import RatioGroup, RatioRow, Ratios
from benchmarks.reporting.drawing.style import (
    MARGIN,
    SMALL,
    TITLE,
    WIDTH,
    Theme,
    axes_at,
    caption_height,
    figure_of,
    write,
    write_caption,
)
from benchmarks.reporting.rounding import bar, number

# Inches.
ROW, LINE, GROUP_GAP = 0.19, 0.145, 0.1
HEAD = 0.72
PLOT_LEFT, PLOT_WIDTH = 3.5, 2.9
MEASURED_RIGHT, BAR_LEFT = 7.0, 7.12
NAME_WIDTH = 46  # characters

# The plot's ends, as powers of two; what is further out gets an arrow.
LOW, HIGH = -2.0, 4.0


class Placed(NamedTuple):
    """A row and where it goes: inches from the top to its middle."""

    row: RatioRow
    names: list[str]
    middle: float


def draw(contents: Ratios, theme: Theme) -> Figure:
    """A line a ratio, from its bar to its figure, on a scale that doubles."""
    placed, headings, bottom = _layout(contents.groups)
    how = "Filled circles are met, crosses missed. Lines begin at the bar; the scale doubles."
    caption = (how, *contents.caption)
    figure = figure_of(bottom + 0.1 + caption_height(caption))

    write(figure, MARGIN, 0.26, "Measured against the stated bars", theme.text, size=TITLE, is_bold=True)
    axes = axes_at(figure, PLOT_LEFT, HEAD, PLOT_WIDTH, bottom - HEAD)
    _prepare(axes, bottom, theme)
    for y, (title, y_title) in ((0.62, ("measured", MEASURED_RIGHT)), (0.62, ("bar", BAR_LEFT))):
        align = "right" if y_title == MEASURED_RIGHT else "left"
        write(figure, y_title, y, title, theme.muted, size=SMALL, align=align)

    for benchmark, y in headings:
        write(figure, MARGIN, y, benchmark, theme.text, is_bold=True)
    for one in placed:
        _draw_row(figure, axes, one, theme)
    write_caption(figure, caption, theme)
    return figure


def _layout(groups: tuple[RatioGroup, ...]) -> tuple[list[Placed], list[tuple[str, float]], float]:
    """(rows, headings with their baselines, where the last row ends)."""
    placed: list[Placed] = []
    headings: list[tuple[str, float]] = []
    y = HEAD
    for group in groups:
        y += GROUP_GAP
        headings.append((group.benchmark, y + ROW / 2 + 0.04))
        y += ROW
        for row in group.rows:
            names = textwrap.wrap(row.name, NAME_WIDTH) or [""]
            height = ROW + LINE * (len(names) - 1)
            placed.append(Placed(row, names, y + height / 2))
            y += height
    return placed, headings, y


def _prepare(axes: Axes, bottom: float, theme: Theme) -> None:
    """The scale, above the rows; y is in inches from the picture's top."""
    axes.set_xlim(LOW - 0.3, HIGH + 0.3)
    axes.set_ylim(bottom, HEAD)
    powers = range(int(LOW), int(HIGH) + 1)
    axes.set_xticks(
        [float(power) for power in powers],
        [_tick(power) for power in powers],
        color=theme.muted,
        fontsize=SMALL,
    )
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=2)
    axes.set_yticks([])
    for power in powers:
        axes.axvline(power, color=theme.grid, linewidth=0.6, zorder=0)
    axes.axvline(0, color=theme.text, linewidth=1.0, zorder=1)


def _tick(power: int) -> str:
    if power == 0:
        return "its bar"
    return f"{2**power}× better" if power == int(HIGH) else f"{2.0**power:g}×"


def _draw_row(figure: Figure, axes: Axes, placed: Placed, theme: Theme) -> None:
    row = placed.row
    color = theme.ours if row.is_met else theme.missed
    end, is_outside = _position(row.margin)

    axes.plot([0, end], [placed.middle] * 2, color=color, linewidth=1.6, zorder=2)
    if is_outside:
        marker = ">" if end > 0 else "<"
    else:
        marker = "o" if row.is_met else "X"
    axes.plot([end], [placed.middle], marker, color=color, markersize=5.5, markeredgewidth=0, zorder=3)

    for y, name in _baselines(placed):
        write(figure, MARGIN + 0.12, y, name, theme.text)
    weight = {"is_bold": not row.is_met}
    baseline = placed.middle + 0.04
    shown = number(row.value) if row.is_met else f"missed  {number(row.value)}"
    color = theme.text if row.is_met else theme.missed
    write(figure, MEASURED_RIGHT, baseline, shown, color, align="right", **weight)
    write(figure, BAR_LEFT, baseline, bar(row.at_least, row.at_most), theme.muted)


def _position(margin: float) -> tuple[float, bool]:
    """(where on the axis, whether the true place is outside of it)."""
    power = math.log2(margin) if 0 < margin < math.inf else math.copysign(math.inf, margin - 1)
    clipped = min(max(power, LOW - 0.15), HIGH + 0.15)
    return clipped, clipped != power


def _baselines(placed: Placed) -> Iterator[tuple[float, str]]:
    first = placed.middle + 0.04 - LINE * (len(placed.names) - 1) / 2
    for index, name in enumerate(placed.names):
        yield first + index * LINE, name


assert BAR_LEFT < WIDTH
