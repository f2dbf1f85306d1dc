"""The end-to-end comparison: a panel for each thing measured, a bar for each side."""

from __future__ import annotations

import math
import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.reporting.contents import PeerPanel, Peers, SideBar
from benchmarks.reporting.drawing.style import (
    MARGIN,
    SMALL,
    WIDTH,
    Theme,
    axes_at,
    caption_height,
    figure_of,
    side_colors,
    write,
    write_caption,
    write_title,
)
from benchmarks.reporting.rounding import figures

# Inches.
HEAD, PANEL_HEAD, BAR_PITCH, PANEL_GAP = 0.42, 0.42, 0.34, 0.18
NAMES = 1.72
ACROSS = 3
PITCH = (WIDTH - MARGIN - NAMES) / ACROSS
BARS = PITCH - 0.95  # the rest is for the figures at the bars' ends
NAME_WIDTH = 24  # characters


def draw(contents: Peers, theme: Theme) -> Figure:
    """Panels beside each other, rows of them below; sides keep their row and their colour."""
    rows = math.ceil(len(contents.panels) / ACROSS)
    panel_height = PANEL_HEAD + BAR_PITCH * len(contents.sides)
    notes = [f"Not run: {side}, {why}" for side, why in contents.not_run]
    how = "Bars are medians; whiskers reach over the middle half of the rounds."
    caption = [*(line for note in notes for line in textwrap.wrap(note, 120)), how]
    caption += contents.caption

    height = HEAD + rows * panel_height + (rows - 1) * PANEL_GAP
    figure = figure_of(height + caption_height(caption))
    write_title(figure, "The same training run, end to end", theme)

    for index, panel in enumerate(contents.panels):
        top = HEAD + index // ACROSS * (panel_height + PANEL_GAP)
        left = NAMES + index % ACROSS * PITCH
        if index % ACROSS == 0:
            _write_sides(figure, contents.sides, top + PANEL_HEAD, theme)
        _draw_panel(figure, panel, contents.sides, (left, top), theme)
    write_caption(figure, caption, theme)
    return figure


def _write_sides(figure: Figure, sides: tuple[str, ...], top: float, theme: Theme) -> None:
    for index, side in enumerate(sides):
        lines = textwrap.wrap(side, NAME_WIDTH) or [""]
        first = top + (index + 0.5) * BAR_PITCH + 0.04 - 0.07 * (len(lines) - 1)
        for number, line in enumerate(lines):
            y = first + 0.14 * number
            write(figure, NAMES - 0.12, y, line, theme.text, align="right", is_bold=index == 0)


def _draw_panel(
    figure: Figure,
    panel: PeerPanel,
    sides: tuple[str, ...],
    corner: tuple[float, float],
    theme: Theme,
) -> None:
    left, top = corner
    write(figure, left, top + 0.16, _capital(panel.title or panel.unit), theme.text, is_bold=True)
    direction = "more is better" if panel.is_rate else "less is better"
    write(figure, left, top + 0.31, direction, theme.muted, size=SMALL)

    axes = axes_at(figure, left, top + PANEL_HEAD, BARS, BAR_PITCH * len(sides))
    axes.set_ylim(len(sides) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.axvline(0, color=theme.muted, linewidth=0.8, zorder=4)

    colors = side_colors(sides, theme)
    longest = max((max(0.0, bar.median, bar.high) for bar in panel.bars), default=0.0)
    bars = {bar.side: bar for bar in panel.bars}
    shown = dict(zip(bars, figures([bar.median for bar in bars.values()], panel.unit), strict=True))
    for row, side in enumerate(sides):
        baseline = top + PANEL_HEAD + (row + 0.5) * BAR_PITCH + 0.04
        if side in bars:
            end = _draw_bar(axes, row, bars[side], longest, colors[side], theme)
            write(figure, left + end * BARS + 0.07, baseline, shown[side], theme.text, size=SMALL)
        else:
            write(figure, left + 0.07, baseline, "not measured", theme.muted, size=SMALL)


def _draw_bar(
    axes: Axes, row: int, bar: SideBar, longest: float, color: str, theme: Theme
) -> float:
    """Returns where it ends, whisker and all, as a share of the axes."""
    length = _share(bar.median, longest)
    axes.barh(row, length, height=0.56, color=color, linewidth=0, zorder=2)
    low, high = _share(bar.low, longest), _share(bar.high, longest)
    if high > low:
        axes.plot([low, high], [row, row], color=theme.text, linewidth=1.0, zorder=3)
        axes.plot([low, high], [row, row], "|", color=theme.text, markersize=5, zorder=3)
    return max(length, high)


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]


def _share(value: float, longest: float) -> float:
    """Of the longest bar; nothing for a figure below 0."""
    share = value / longest if longest else 0.0
    return min(max(share, 0.0), 1.0)
