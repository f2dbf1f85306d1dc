"""Memory at rest: what lies on the device and what in host memory, by kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.reporting.contents import Memory, MemoryBar
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
from benchmarks.reporting.rounding import figure as shown_figure

# Inches.
HEAD, KEY, PITCH, SIDE_GAP = 0.4, 0.34, 0.3, 0.14
NAMES, PLACES, BARS = 1.62, 0.62, 4.75
LEFT = NAMES + PLACES
SWATCH = 0.11
CHARACTER = 0.068  # a small one's width, at most


def draw(contents: Memory, theme: Theme) -> Figure:
    """Two bars a side, on the device and in host memory, of one scale."""
    tops, bottom = _layout(contents.bars)
    caption = ("Of one rank, between two steps.", *contents.caption)
    figure = figure_of(bottom + caption_height(caption))
    write_title(figure, "Memory at rest, by kind", theme)

    first = HEAD + KEY
    axes = axes_at(figure, LEFT, first, BARS, bottom - first)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom, first)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.axvline(0, color=theme.muted, linewidth=0.8, zorder=4)

    kinds = list(dict.fromkeys(kind for bar in contents.bars for kind, _ in bar.parts))
    colors = {
        kind: [theme.ours, *theme.peers][index % (len(theme.peers) + 1)]
        for index, kind in enumerate(kinds)
    }
    _write_key(figure, axes, colors, theme)

    longest = max(_total(bar) for bar in contents.bars)
    before = None
    for bar, top in zip(contents.bars, tops, strict=True):
        baseline = top + PITCH / 2 + 0.04
        if bar.side != before:
            write(figure, MARGIN, baseline, bar.side, theme.text, is_bold=True)
        write(figure, LEFT - 0.1, baseline, bar.place, theme.text, align="right")
        _draw_bar(figure, axes, bar, top, longest, colors, theme)
        before = bar.side
    write_caption(figure, caption, theme)
    return figure


def _layout(bars: Sequence[MemoryBar]) -> tuple[list[float], float]:
    """(where each bar's row begins, where the last one ends)."""
    tops = []
    y = HEAD + KEY
    for index, bar in enumerate(bars):
        y += SIDE_GAP if index and bar.side != bars[index - 1].side else 0.0
        tops.append(y)
        y += PITCH
    return tops, y


def _write_key(figure: Figure, axes: Axes, colors: Mapping[str, str], theme: Theme) -> None:
    """A square and a name for each kind, in the order of the bars' parts."""
    x, y = LEFT, HEAD + 0.17
    for kind, color in colors.items():
        square = Rectangle(
            ((x - LEFT) / BARS, y - SWATCH),
            SWATCH / BARS,
            SWATCH,
            color=color,
            linewidth=0,
            clip_on=False,
        )
        axes.add_patch(square)
        write(figure, x + SWATCH + 0.06, y - 0.01, kind, theme.text, size=SMALL)
        x += SWATCH + 0.2 + CHARACTER * len(kind)


def _draw_bar(
    figure: Figure,
    axes: Axes,
    bar: MemoryBar,
    top: float,
    longest: float,
    colors: Mapping[str, str],
    theme: Theme,
) -> None:
    """The parts side by side, each with its size where that fits, and the sum behind them."""
    middle = top + PITCH / 2
    start = 0.0
    for kind, size in bar.parts:
        width = size / longest
        axes.barh(
            middle,
            width,
            left=start,
            height=PITCH * 0.72,
            color=colors[kind],
            edgecolor=theme.page,
            linewidth=0.8,
        )
        shown = shown_figure(size, "bytes")
        if CHARACTER * len(shown) < width * BARS:
            x = LEFT + (start + width / 2) * BARS
            ink = _ink_on(colors[kind])
            write(figure, x, middle + 0.035, shown, ink, size=SMALL, align="center")
        start += width

    x = LEFT + start * BARS + 0.08
    if bar.parts:
        total = shown_figure(_total(bar), "bytes")
        write(figure, x, middle + 0.04, total, theme.text, is_bold=True)
    else:
        write(figure, x, middle + 0.04, "nothing", theme.muted)


def _total(bar: MemoryBar) -> float:
    return math.fsum(size for _, size in bar.parts)


def _ink_on(color: str) -> str:
    """Black or white, whichever stands out more."""
    red, green, blue = (channel**2.2 for channel in to_rgb(color))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if luminance > 0.18 else "#ffffff"
