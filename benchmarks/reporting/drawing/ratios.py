"""All ratios with bars: how far each is on the right side of its own."""

from __future__ import annotations

import math
import textwrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.reporting.contents import RatioGroup, RatioRow, Ratios
from benchmarks.reporting.drawing.style import (
    MARGIN,
    SMALL,
    Theme,
    axes_at,
    caption_height,
    figure_of,
    write,
    write_caption,
    write_title,
)
from benchmarks.reporting.rounding import bar, ratio

# Inches.
ROW, LINE, GROUP_GAP = 0.19, 0.145, 0.1
HEAD = 0.86
PLOT_LEFT, PLOT_WIDTH = 3.32, 2.75
VERDICT_LEFT, MEASURED_RIGHT, BAR_LEFT = 6.16, 7.14, 7.26
TO_BASELINE = 0.04  # from the middle of a line of text
NAME_WIDTH = 42  # characters

TIMES = "\N{MULTIPLICATION SIGN}"

# The plot's ends, as powers of two; what is further out gets an arrow.
LOW, HIGH, BEYOND = -2, 4, 0.25


class Placed(NamedTuple):
    """A row and where it goes: inches from the top to its middle."""

    row: RatioRow
    names: list[str]
    middle: float


def draw(contents: Ratios, theme: Theme) -> Figure:
    """A line a ratio, from its bar to its figure, on a scale that doubles."""
    placed, headings, bottom = _layout(contents.groups)
    how = "Circles: met. Crosses: missed. Lines begin at the bar; the scale doubles."
    caption = (how, *contents.caption)
    figure = figure_of(bottom + caption_height(caption))

    write_title(figure, "Measured against the stated bars", theme)
    axes = axes_at(figure, PLOT_LEFT, HEAD, PLOT_WIDTH, bottom - HEAD)
    _prepare(axes, bottom, theme)
    _write_heads(figure, theme)
    for benchmark, y in headings:
        write(figure, MARGIN, y, benchmark, theme.text, is_bold=True)
    for one in placed:
        _draw_line(axes, one, theme)
        _write_row(figure, one, theme)
    write_caption(figure, caption, theme)
    return figure


def _layout(groups: tuple[RatioGroup, ...]) -> tuple[list[Placed], list[tuple[str, float]], float]:
    """(rows, headings with their baselines, where the last row ends)."""
    placed: list[Placed] = []
    headings: list[tuple[str, float]] = []
    y = HEAD
    for group in groups:
        y += GROUP_GAP if group is not groups[0] else 0.02
        headings.append((group.benchmark, y + ROW / 2 + TO_BASELINE))
        y += ROW
        for row in group.rows:
            names = textwrap.wrap(row.name, NAME_WIDTH) or [""]
            height = ROW + LINE * (len(names) - 1)
            placed.append(Placed(row, names, y + height / 2))
            y += height
    return placed, headings, y


def _prepare(axes: Axes, bottom: float, theme: Theme) -> None:
    """The scale, above the rows; y is in inches from the picture's top."""
    axes.set_xlim(LOW - BEYOND, HIGH + BEYOND)
    axes.set_ylim(bottom, HEAD)
    powers = range(LOW, HIGH + 1)
    labels = ["bar" if power == 0 else f"{2.0**power:g}{TIMES}" for power in powers]
    axes.set_xticks([float(power) for power in powers], labels, color=theme.muted, fontsize=SMALL)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=3)
    axes.set_yticks([])
    for power in powers:
        axes.axvline(power, color=theme.grid, linewidth=0.6, zorder=0)
    axes.axvline(0, color=theme.text, linewidth=1.0, zorder=1)


def _write_heads(figure: Figure, theme: Theme) -> None:
    bar_x = PLOT_LEFT + PLOT_WIDTH * (BEYOND - LOW) / (HIGH - LOW + 2 * BEYOND)
    for x, y, text, align in (
        (bar_x - 0.1, HEAD - 0.24, "← worse", "right"),
        (bar_x + 0.1, HEAD - 0.24, "better →", "left"),
        (MEASURED_RIGHT, HEAD - 0.07, "measured", "right"),
        (BAR_LEFT, HEAD - 0.07, "bar", "left"),
    ):
        write(figure, x, y, text, theme.muted, size=SMALL, align=align)


def _draw_line(axes: Axes, placed: Placed, theme: Theme) -> None:
    row = placed.row
    color = theme.ours if row.is_met else theme.missed
    end, is_outside = _position(row.margin)
    inside, outside = ("o", ">") if row.is_met else ("X", "<")

    axes.plot([0, end], [placed.middle] * 2, color=color, linewidth=1.6, zorder=2)
    size = 5.0 if row.is_met else 6.5
    axes.plot(
        [end],
        [placed.middle],
        outside if is_outside else inside,
        color=color,
        markersize=size,
        markeredgewidth=0,
        zorder=3,
    )


def _position(margin: float) -> tuple[float, bool]:
    """(where on the axis, whether the true place is outside of it)."""
    power = math.log2(margin) if 0 < margin < math.inf else math.copysign(math.inf, margin - 1)
    clipped = min(max(power, LOW - BEYOND / 2), HIGH + BEYOND / 2)
    return clipped, clipped != power


def _write_row(figure: Figure, placed: Placed, theme: Theme) -> None:
    row = placed.row
    baseline = placed.middle + TO_BASELINE
    first = baseline - LINE * (len(placed.names) - 1) / 2
    for index, name in enumerate(placed.names):
        write(figure, MARGIN + 0.12, first + index * LINE, name, theme.text)

    color = theme.text if row.is_met else theme.missed
    if not row.is_met:
        write(figure, VERDICT_LEFT, baseline, "missed", color, is_bold=True)
    shown = ratio(row.value, row.at_least, row.at_most)
    write(figure, MEASURED_RIGHT, baseline, shown, color, align="right", is_bold=not row.is_met)
    write(figure, BAR_LEFT, baseline, bar(row.at_least, row.at_most), theme.muted)
