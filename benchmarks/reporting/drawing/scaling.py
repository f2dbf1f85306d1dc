"""How figures grow with a size: small panels, both scales logarithmic, lines named at their ends."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.reporting.contents import Line, Scaling, ScalingPanel
from benchmarks.reporting.drawing.style import (
    MARGIN,
    SMALL,
    TITLE,
    WIDTH,
    Theme,
    axes_at,
    caption_height,
    figure_of,
    side_colors,
    write,
    write_caption,
)
from benchmarks.reporting.rounding import figure as shown_figure

# Inches.
HEAD, PANEL_HEAD, PLOT_HEIGHT, PANEL_FOOT, GAP = 0.4, 0.3, 1.75, 0.42, 0.12
ACROSS = 2
PITCH = (WIDTH - 2 * MARGIN) / ACROSS
TICKS, LABELS = 0.62, 1.42
PLOT_WIDTH = PITCH - TICKS - LABELS
LABEL_WIDTH = 22  # characters
LABEL_PITCH = 0.145
MARKERS = "osD^vPX*"


def draw(contents: Scaling, theme: Theme) -> Figure:
    """A panel for each benchmark that measures at several sizes."""
    rows = math.ceil(len(contents.panels) / ACROSS)
    panel_height = PANEL_HEAD + PLOT_HEIGHT + PANEL_FOOT + GAP
    caption = ("Medians; both scales are logarithmic.", *contents.caption)
    figure = figure_of(HEAD + rows * panel_height + caption_height(caption))
    write(figure, MARGIN, 0.26, "How costs grow with size", theme.text, size=TITLE, is_bold=True)

    for index, panel in enumerate(contents.panels):
        left = MARGIN + index % ACROSS * PITCH
        top = HEAD + index // ACROSS * panel_height
        _draw_panel(figure, panel, left, top, theme)
    write_caption(figure, caption, theme)
    return figure


def _draw_panel(
    figure: Figure, panel: ScalingPanel, left: float, top: float, theme: Theme
) -> None:
    write(figure, left, top + 0.18, panel.title, theme.text, is_bold=True)
    axes = axes_at(figure, left + TICKS, top + PANEL_HEAD, PLOT_WIDTH, PLOT_HEIGHT)

    # Logarithms are drawn on plain scales: any finite figure has one, and a place.
    lines = [_logarithms(line) for line in panel.lines]
    heights = [y for line in lines for _, y in line] or [0.0]
    sizes = sorted({x for line in lines for x, _ in line}) or [0.0]
    low, high = min(heights), max(heights)
    room = max(high - low, 0.3) * 0.08
    axes.set_ylim(low - room, high + room)
    axes.set_xlim(sizes[0] - 0.06, sizes[-1] + 0.06)
    _write_scales(axes, panel, sizes, (low, high), theme)

    colors = side_colors([line.side for line in panel.lines], theme)
    ends = []
    for marker, line, points in zip(_markers(len(lines)), panel.lines, lines, strict=True):
        if points:
            xs, ys = zip(*points, strict=True)
            color = colors[line.side]
            axes.plot(xs, ys, f"-{marker}", color=color, linewidth=1.6, markersize=4, clip_on=False)
            share = (ys[-1] - low + room) / (high - low + 2 * room)
            ends.append((top + PANEL_HEAD + PLOT_HEIGHT * (1 - share), line, color))
    _write_ends(figure, panel.unit, ends, left + TICKS + PLOT_WIDTH + 0.14, theme)


def _logarithms(line: Line) -> list[tuple[float, float]]:
    """The points of both logarithms; a figure of 0 or less has no place on the scale."""
    return [(math.log10(x), math.log10(y)) for x, y in line.points if x > 0 and y > 0]


def _markers(count: int) -> str:
    return (MARKERS * (count // len(MARKERS) + 1))[:count]


def _write_scales(
    axes: Axes,
    panel: ScalingPanel,
    sizes: Sequence[float],
    heights: tuple[float, float],
    theme: Theme,
) -> None:
    kept = _apart(sizes, 0.16 * max(sizes[-1] - sizes[0], 0.1))
    style = {"color": theme.muted, "fontsize": SMALL}
    axes.set_xticks(kept, [f"{10**size:,.0f}" for size in kept], **style)
    axes.set_xlabel(panel.size_label, labelpad=2, **style)
    ticks = _ticks(*heights)
    axes.set_yticks(ticks, [shown_figure(10.0**tick, panel.unit) for tick in ticks], **style)
    for tick in ticks:
        axes.axhline(tick, color=theme.grid, linewidth=0.6, zorder=0)


def _apart(places: Sequence[float], distance: float) -> list[float]:
    """Those of the sorted places that leave room between labels, the first and last among them."""
    kept = [places[0]]
    for place in places[1:-1]:
        if place - kept[-1] >= distance and places[-1] - place >= distance:
            kept.append(place)
    return kept if len(places) == 1 else [*kept, places[-1]]


def _ticks(low: float, high: float) -> list[float]:
    """Up to five round figures between two powers of ten."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [decade + math.log10(digit) for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high and abs(tick) < 307]
        if len(ticks) <= 5:
            return ticks
    return ticks[:: math.ceil(len(ticks) / 5)]


def _write_ends(
    figure: Figure,
    unit: str,
    ends: list[tuple[float, Line, str]],
    left: float,
    theme: Theme,
) -> None:
    """Each line's side and last figure at its end, moved down where they would overlap."""
    y = 0.0
    for wanted, line, color in sorted(ends, key=lambda end: end[0]):
        names = textwrap.wrap(line.side, LABEL_WIDTH) or [""]
        names[-1] += f"  {shown_figure(line.points[-1][1], unit)}"
        y = max(wanted + 0.04, y + LABEL_PITCH)
        for name in names:
            write(figure, left, y, name, color, size=SMALL)
            y += LABEL_PITCH
        y -= LABEL_PITCH
