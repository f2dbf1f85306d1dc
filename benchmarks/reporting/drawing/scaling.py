"""How figures grow with a size: a small panel each, both axes logarithmic, lines named at their
ends.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.reporting.contents import Line, Scaling, ScalingPanel
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
from benchmarks.reporting.rounding import figure as shown_figure

# Inches.
HEAD, PANEL_HEAD, PLOT_HEIGHT, PANEL_FOOT, GAP = 0.4, 0.3, 1.75, 0.36, 0.14
ACROSS = 2
PITCH = (WIDTH - 2 * MARGIN) / ACROSS
TICKS, LABELS = 0.62, 1.62
PLOT_WIDTH = PITCH - TICKS - LABELS
LABEL_WIDTH = 22  # characters
LABEL_PITCH = 0.135
MARKERS = "osD^vPX*"
MOST_TICKS = 5


class End(NamedTuple):
    """The end of a line: its height in inches from the picture's top, its name in lines."""

    y: float
    names: list[str]
    color: str


def draw(contents: Scaling, theme: Theme) -> Figure:
    """A panel for each benchmark that measures at several sizes."""
    rows = math.ceil(len(contents.panels) / ACROSS)
    panel_height = PANEL_HEAD + PLOT_HEIGHT + PANEL_FOOT + GAP
    how = "Medians. Both axes are logarithmic. Blue: this project's; other colours: others'."
    caption = (how, *contents.caption)
    figure = figure_of(HEAD + rows * panel_height - GAP + caption_height(caption))
    write_title(figure, "How costs grow with size", theme)

    for index, panel in enumerate(contents.panels):
        left = MARGIN + index % ACROSS * PITCH
        top = HEAD + index // ACROSS * panel_height
        _draw_panel(figure, panel, left, top, theme)
    write_caption(figure, caption, theme)
    return figure


def _draw_panel(figure: Figure, panel: ScalingPanel, left: float, top: float, theme: Theme) -> None:
    write(figure, left, top + 0.18, panel.title, theme.text, is_bold=True)
    axes = axes_at(figure, left + TICKS, top + PANEL_HEAD, PLOT_WIDTH, PLOT_HEIGHT)

    # Logarithms are drawn on plain scales: any positive figure has one, and a place.
    lines = [(line, _logarithms(line)) for line in panel.lines]
    sizes = sorted({x for _, points in lines for x, _ in points}) or [0.0]
    low, high = _height_range([y for _, points in lines for _, y in points], sizes)
    axes.set_xlim(sizes[0] - 0.04, sizes[-1] + 0.04)
    axes.set_ylim(low, high)
    _write_scales(axes, panel, sizes, (low, high), theme)

    ends = []
    colors = _colors(panel.lines, theme)
    for index, (line, points) in enumerate(lines):
        if points:
            color = colors[line.side]
            marker = MARKERS[index % len(MARKERS)]
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, f"-{marker}", color=color, linewidth=1.5, markersize=4, clip_on=False)
            y = top + PANEL_HEAD + PLOT_HEIGHT * (high - ys[-1]) / (high - low)
            ends.append(End(y, _end_names(line, panel.unit), color))
    bottom = top + PANEL_HEAD + PLOT_HEIGHT + PANEL_FOOT
    _write_ends(figure, ends, left + TICKS + PLOT_WIDTH + 0.14, bottom)


def _logarithms(line: Line) -> list[tuple[float, float]]:
    """The points of both logarithms; a figure of 0 or less has no place on the scale."""
    return [(math.log10(x), math.log10(y)) for x, y in line.points if x > 0 and y > 0]


def _height_range(heights: Sequence[float], sizes: Sequence[float]) -> tuple[float, float]:
    """What the height shows. Figures that hardly grow must not look as if they did, so it is no
    closer a look than the one across.
    """
    low, high = min(heights, default=0.0), max(heights, default=0.0)
    span = max(high - low, (sizes[-1] - sizes[0]) * PLOT_HEIGHT / PLOT_WIDTH, 0.1)
    middle = (low + high) / 2
    return middle - span * 0.54, middle + span * 0.54


def _colors(lines: Sequence[Line], theme: Theme) -> dict[str, str]:
    """All lines of ours in one colour, told apart by their markers and names."""
    theirs = side_colors([line.side for line in lines if not line.is_ours], theme)
    return {line.side: theirs.get(line.side, theme.ours) for line in lines}


def _write_scales(
    axes: Axes,
    panel: ScalingPanel,
    sizes: Sequence[float],
    heights: tuple[float, float],
    theme: Theme,
) -> None:
    kept = _apart(sizes, 0.17 * (sizes[-1] - sizes[0]))
    axes.set_xticks(kept, [f"{10**size:,.0f}" for size in kept], color=theme.muted, fontsize=SMALL)
    axes.set_xlabel(panel.size_label, labelpad=2, color=theme.muted, fontsize=SMALL)
    ticks = _ticks(*heights, panel.unit)
    shown = [shown_figure(10.0**tick, _plain(panel.unit)) for tick in ticks]
    axes.set_yticks(ticks, shown, color=theme.muted, fontsize=SMALL)
    for tick in ticks:
        axes.axhline(tick, color=theme.grid, linewidth=0.6, zorder=0)


def _apart(places: Sequence[float], distance: float) -> list[float]:
    """Those of the sorted places that leave room between labels, the first and last among them."""
    kept = [places[0]]
    for place in places[1:-1]:
        if place - kept[-1] >= distance and places[-1] - place >= distance:
            kept.append(place)
    return kept if len(places) == 1 else [*kept, places[-1]]


def _ticks(low: float, high: float, unit: str) -> list[float]:
    """Some round figures between two powers of ten, where floats reach."""
    low, high = max(low, -307.0), min(high, 307.0)
    if unit in ("bytes", "KiB", "MiB", "GiB"):
        doubling = math.log10(2)
        powers = range(math.ceil(low / doubling), math.floor(high / doubling) + 1)
        return [power * doubling for power in powers][:: len(powers) // MOST_TICKS + 1]

    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks: list[float] = []
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        places = (decade + math.log10(digit) for decade in decades for digit in digits)
        ticks = [place for place in places if low <= place <= high]
        if len(ticks) <= MOST_TICKS:
            return ticks
    return ticks[:: len(ticks) // MOST_TICKS + 1]


def _plain(unit: str) -> str:
    """Without what it is per, which the panel's title says; rates stay rates."""
    return unit if unit.endswith("/s") else unit.partition("/")[0]


def _end_names(line: Line, unit: str) -> list[str]:
    """The side and its figure at the largest size, which stays in one piece."""
    shown = shown_figure(line.points[-1][1], _plain(unit)).replace(" ", "\N{NO-BREAK SPACE}")
    return textwrap.wrap(f"{line.side}: {shown}", LABEL_WIDTH)


def _write_ends(figure: Figure, ends: Sequence[End], left: float, bottom: float) -> None:
    """The names beside the ends, moved apart where they would overlap."""
    ordered = sorted(ends, key=lambda end: end.y)
    heights = [LABEL_PITCH * len(end.names) for end in ordered]
    tops = [end.y - height / 2 for end, height in zip(ordered, heights, strict=True)]
    for index in range(1, len(tops)):
        tops[index] = max(tops[index], tops[index - 1] + heights[index - 1])
    for index in reversed(range(len(tops))):  # what has been moved too far down moves up
        below = tops[index + 1] if index + 1 < len(tops) else bottom
        tops[index] = min(tops[index], below - heights[index])

    for end, top in zip(ordered, tops, strict=True):
        for index, name in enumerate(end.names):
            y = top + LABEL_PITCH * (index + 0.5) + 0.035
            write(figure, left, y, name, end.color, size=SMALL)
