"""The pictures of benchmarks, drawn from their contents.

Pictures have a transparent background and two themes, for light and dark pages. Positions are
pixels from the upper left corner.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.helpers.result import Measurement, Ratio
from benchmarks.reporting import rounding
from benchmarks.reporting.contents import (
    Contents,
    Line,
    Memory,
    MemoryBar,
    PeerPanel,
    Peers,
    Ratios,
    Scaling,
    ScalingPanel,
    is_ours,
    margin,
)
from megatron_hybrid.charts import SMALL, THEMES, TITLE, Axis, Canvas, Theme

WIDTH, MARGIN = 768, 12
TO_BASELINE = 4  # from the middle of a line of text
LINE, SMALL_CHARACTER = 14, 6.6
TIMES = "\N{MULTIPLICATION SIGN}"
# Peers that appear in several pictures have the same color in all of them.
PEER_COLORS = {
    "FSDP2": 0, "PyTorch": 0, "DCP": 0, "DeepSpeed": 1, "Megatron": 2, "transformers": 3,
}  # fmt: skip


def svg_of(contents: Contents, theme_name: str) -> str:
    """The picture for "light" or "dark" pages."""
    theme = THEMES[theme_name]
    if isinstance(contents, Ratios):
        return _ratios(contents, theme).svg()
    if isinstance(contents, Peers):
        return _peers(contents, theme).svg()
    if isinstance(contents, Scaling):
        return _scaling(contents, theme).svg()
    return _memory(contents, theme).svg()


def side_colors(sides: Sequence[str], theme: Theme) -> dict[str, str]:
    """A color for each side."""
    colors: dict[str, str] = {}
    for side in sides:
        number = next((number for name, number in PEER_COLORS.items() if name in side), None)
        color = theme.ours if is_ours(side) else None if number is None else theme.peers[number]
        if color and color not in colors.values():
            colors[side] = color

    free = [color for color in reversed(theme.peers) if color not in colors.values()]
    for index, side in enumerate(side for side in sides if side not in colors):
        colors[side] = free[index % len(free)] if free else theme.muted
    return colors


class _Picture(Canvas):
    """An empty picture with a title, and a caption below `height`."""

    def __init__(self, title: str, height: float, caption: Sequence[str], theme: Theme) -> None:
        super().__init__(WIDTH, height + LINE * len(caption) + 20)
        self.theme = theme
        self.text(MARGIN, 25, title, theme.text, size=TITLE, is_bold=True)
        for index, line in enumerate(caption):
            self.small(MARGIN, height + LINE * (index + 1) + 12, line)

    def small(self, x: float, y: float, text: str, color: str = "", anchor: str = "start") -> None:
        """Adds small text, muted by default."""
        self.text(x, y, text, color or self.theme.muted, size=SMALL, anchor=anchor)

    def heading(self, x: float, y: float, text: str) -> None:
        self.text(x, y, text, self.theme.text, is_bold=True)

    def wrapped(
        self, x: float, y: float, text: str, width: int, *, anchor: str, is_bold: bool
    ) -> None:
        """Adds text in lines of at most `width` characters, with the middle line at `y`."""
        lines = _wrapped(text, width)
        for index, line in enumerate(lines):
            place = y + LINE * (index - (len(lines) - 1) / 2)
            self.text(x, place, line, self.theme.text, anchor=anchor, is_bold=is_bold)


# Ratios: a line from the bar to the measured value, on a scale that doubles.

RATIO_HEAD, ROW, GROUP_GAP = 82, 18, 10
SCALE_LEFT, SCALE_RIGHT, VERDICT_LEFT, MEASURED_RIGHT, BAR_LEFT = 319, 583, 591, 685, 697
NAME_WIDTH = 42  # characters
POWERS = range(-2, 5)
BEYOND = 0.25  # of a power of two: values outside of the scale have an arrow here


def _ratios(contents: Ratios, theme: Theme) -> _Picture:
    bottom = RATIO_HEAD + (ROW + GROUP_GAP) * len(contents.groups)
    bottom += sum(_ratio_height(row) for rows in contents.groups.values() for row in rows)
    how = "Circles: met. Crosses: missed. Lines begin at the bar; the scale doubles."
    picture = _Picture("Measured against the stated bars", bottom, (how, *contents.caption), theme)

    low, high = POWERS[0] - BEYOND, POWERS[-1] + BEYOND
    scale = Axis(low, high, SCALE_LEFT, SCALE_RIGHT, tuple(map(float, POWERS)))
    _ratio_heads(picture, scale, bottom)
    y = float(RATIO_HEAD)
    for benchmark, rows in contents.groups.items():
        y += ROW + GROUP_GAP
        picture.heading(MARGIN, y - ROW / 2 + TO_BASELINE, benchmark)
        for row in rows:
            height = _ratio_height(row)
            _ratio_row(picture, scale, row, y + height / 2)
            y += height
    return picture


def _ratio_heads(picture: _Picture, scale: Axis, bottom: float) -> None:
    bar = scale.place(0)
    for tick in scale.ticks:
        x, label = scale.place(tick), f"{2.0**tick:g}{TIMES}" if tick else "bar"
        picture.small(x, RATIO_HEAD - 7, label, anchor="middle")
        if tick:
            picture.line((x, RATIO_HEAD), (x, bottom), picture.theme.grid, 0.8)
    picture.line((bar, RATIO_HEAD), (bar, bottom), picture.theme.text, 1.3)
    for x, lift, text, anchor in (
        (bar - 10, 23, "← worse", "end"),
        (bar + 10, 23, "better →", "start"),
        (MEASURED_RIGHT, 7, "measured", "end"),
        (BAR_LEFT, 7, "bar", "start"),
    ):
        picture.small(x, RATIO_HEAD - lift, text, anchor=anchor)


def _ratio_height(row: Ratio) -> float:
    return ROW + LINE * (len(_wrapped(row.name, NAME_WIDTH)) - 1)


def _ratio_row(picture: _Picture, scale: Axis, row: Ratio, y: float) -> None:
    times = margin(row)
    is_number = 0 < times < math.inf
    power = math.log2(times) if is_number else math.copysign(math.inf, times - 1)
    x = scale.place(power)
    inside, outside = ("circle", "right") if row.is_met else ("cross", "left")
    color = picture.theme.ours if row.is_met else picture.theme.bad
    picture.line((scale.place(0), y), (x, y), color, 2.2)
    picture.marker(inside if scale.low <= power <= scale.high else outside, x, y, color)

    baseline, ink = y + TO_BASELINE, picture.theme.text if row.is_met else picture.theme.bad
    at = (MARGIN + 11, baseline)
    picture.wrapped(*at, row.name, NAME_WIDTH, anchor="start", is_bold=False)
    if not row.is_met:
        picture.text(VERDICT_LEFT, baseline, "missed", ink, is_bold=True)
    measured = rounding.ratio(row.value, row.at_least, row.at_most)
    picture.text(MEASURED_RIGHT, baseline, measured, ink, anchor="end", is_bold=not row.is_met)
    picture.text(BAR_LEFT, baseline, rounding.bar(row.at_least, row.at_most), picture.theme.muted)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width) or [""]


# The end-to-end comparison: a panel for each thing measured, a bar for each side.

HEAD, PANEL_HEAD, BAR_PITCH, BAR_HEIGHT, PANEL_GAP = 40, 40, 33, 18, 17
PANELS_LEFT, ACROSS, PANEL_PITCH, BARS_WIDTH = 172, 3, 195, 104
SIDE_WIDTH = 24  # characters


def _peers(contents: Peers, theme: Theme) -> _Picture:
    panel_height = PANEL_HEAD + BAR_PITCH * len(contents.sides) + PANEL_GAP
    rows = math.ceil(len(contents.panels) / ACROSS)
    not_run = [f"Not run: {side}, {why}" for side, why in contents.not_run]
    how = "Bars are medians; whiskers reach over the middle half of the rounds."
    caption = [line for note in not_run for line in textwrap.wrap(note, 120)]
    caption += [how, *contents.caption]
    height = HEAD + rows * panel_height - PANEL_GAP
    picture = _Picture("The same training run, end to end", height, caption, theme)

    for index, panel in enumerate(contents.panels):
        top = HEAD + index // ACROSS * panel_height
        if index % ACROSS == 0:
            _peer_names(picture, contents.sides, top + PANEL_HEAD)
        left = PANELS_LEFT + index % ACROSS * PANEL_PITCH
        _peer_panel(picture, panel, contents.sides, left, top)
    return picture


def _peer_names(picture: _Picture, sides: Sequence[str], top: float) -> None:
    for index, side in enumerate(sides):
        at = (PANELS_LEFT - 10, top + (index + 0.5) * BAR_PITCH + TO_BASELINE)
        picture.wrapped(*at, side, SIDE_WIDTH, anchor="end", is_bold=index == 0)


def _peer_panel(
    picture: _Picture, panel: PeerPanel, sides: Sequence[str], left: float, top: float
) -> None:
    title = panel.title or panel.unit
    picture.heading(left, top + 16, title[:1].upper() + title[1:])
    direction = "more is better" if panel.is_rate else "less is better"
    picture.small(left, top + 30, direction)

    colors, bars = side_colors(sides, picture.theme), {bar.side: bar for bar in panel.bars}
    longest = max((max(bar.median, bar.quartiles[1]) for bar in panel.bars), default=0.0)
    scale = Axis(0, max(longest, 0.0), left, left + BARS_WIDTH, ())
    values = [bar.median for bar in bars.values()]
    shown = dict(zip(bars, rounding.figures(values, panel.unit), strict=True))
    first = top + PANEL_HEAD
    for row, side in enumerate(sides):
        y, end = first + (row + 0.5) * BAR_PITCH, left
        if side in bars:
            end = _peer_bar(picture, scale, bars[side], y, colors[side])
        ink = picture.theme.text if side in bars else picture.theme.muted
        text = shown.get(side, "not measured")
        picture.small(end + 7, y + TO_BASELINE, text, ink)
    picture.line((left, first), (left, first + BAR_PITCH * len(sides)), picture.theme.muted)


def _peer_bar(picture: _Picture, scale: Axis, bar: Measurement, y: float, color: str) -> float:
    """Draws the bar and its whisker; returns where they end."""
    low, median, high = map(scale.place, (bar.quartiles[0], bar.median, bar.quartiles[1]))
    picture.rect(scale.start, y - BAR_HEIGHT / 2, median - scale.start, BAR_HEIGHT, color)
    if high > low:
        picture.line((low, y), (high, y), picture.theme.text, 1.3)
        for x in (low, high):
            picture.line((x, y - 3.5), (x, y + 3.5), picture.theme.text, 1.3)
    return max(median, high)


# How figures grow with a size: both axes logarithmic, lines named at their ends.

PLOT_TOP, PLOT_WIDTH, PLOT_HEIGHT, PANEL_FOOT = 29, 157, 168, 48
PLOT_LEFT, SCALING_PITCH, SCALING_ACROSS = 60, 372, 2
END_WIDTH = 22  # characters
MARKERS = ("circle", "square", "diamond", "up", "down", "plus", "cross", "right")
MOST_TICKS = 5
DOUBLING = math.log10(2)


class _End(NamedTuple):
    """The name of a line at its end."""

    y: float
    lines: list[str]
    color: str


def _scaling(contents: Scaling, theme: Theme) -> _Picture:
    pitch = PLOT_TOP + PLOT_HEIGHT + PANEL_FOOT
    height = HEAD + math.ceil(len(contents.panels) / SCALING_ACROSS) * pitch - 14
    how = "Medians. Both axes are logarithmic. Blue: this project's; other colors: others'."
    picture = _Picture("How costs grow with size", height, (how, *contents.caption), theme)
    for index, panel in enumerate(contents.panels):
        left = MARGIN + index % SCALING_ACROSS * SCALING_PITCH
        _scaling_panel(picture, panel, left, HEAD + index // SCALING_ACROSS * pitch)
    return picture


def _scaling_panel(picture: _Picture, panel: ScalingPanel, left: float, top: float) -> None:
    picture.heading(left, top + 17, panel.title)
    lines = [(line, _logarithms(line)) for line in panel.lines]
    x, y = _scaling_axes([p for _, points in lines for p in points], panel.unit, left, top)
    for tick in y.ticks:
        place, label = y.place(tick), rounding.figure(10.0**tick, _plain(panel.unit))
        picture.line((x.start, place), (x.end, place), picture.theme.grid, 0.8)
        at = (x.start - 5, place + TO_BASELINE)
        picture.small(*at, label, anchor="end")
    for tick in x.ticks:
        at = (x.place(tick), y.start + 14)
        picture.small(*at, f"{10**tick:,.0f}", anchor="middle")
    at = ((x.start + x.end) / 2, y.start + 26)
    picture.small(*at, panel.size_label, anchor="middle")

    peers = side_colors([line.side for line in panel.lines if not line.is_ours], picture.theme)
    ends = []
    for index, (line, points) in enumerate(lines):
        if points:
            color, marker = peers.get(line.side, picture.theme.ours), MARKERS[index % len(MARKERS)]
            places = [(x.place(size), y.place(value)) for size, value in points]
            for start, end in itertools.pairwise(places):
                picture.line(start, end, color, 2)
            for place in places:
                picture.marker(marker, *place, color)
            ends.append(_End(places[-1][1], _end_lines(line, panel.unit), color))
    _write_ends(picture, ends, x.end + 13, y.start + PANEL_FOOT - 14)


def _logarithms(line: Line) -> list[tuple[float, float]]:
    """The points of both logarithms, without figures of 0 or less."""
    return [(math.log10(x), math.log10(y)) for x, y in line.points if x > 0 and y > 0]


def _scaling_axes(
    points: Sequence[tuple[float, float]], unit: str, left: float, top: float
) -> tuple[Axis, Axis]:
    """Axes of logarithms. A line that hardly grows must not look as if it did, so the height shows
    at least as many decades per pixel as the width.
    """
    sizes = sorted({x for x, _ in points}) or [0.0]
    heights = [y for _, y in points] or [0.0]
    span = max(max(heights) - min(heights), (sizes[-1] - sizes[0]) * PLOT_HEIGHT / PLOT_WIDTH, 0.1)
    middle = (min(heights) + max(heights)) / 2
    low, high = middle - span * 0.54, middle + span * 0.54
    kept = sizes[:1]
    for size in sizes[1:]:
        is_apart = size - kept[-1] >= 0.17 * (sizes[-1] - sizes[0])
        kept += [size] if is_apart else []

    x_start, y_end = left + PLOT_LEFT, top + PLOT_TOP
    x_ends, y_ends = (x_start, x_start + PLOT_WIDTH), (y_end + PLOT_HEIGHT, y_end)
    return (
        Axis(sizes[0] - 0.04, sizes[-1] + 0.04, *x_ends, tuple(kept)),
        Axis(low, high, *y_ends, _round_logarithms(low, high, unit)),
    )


def _round_logarithms(low: float, high: float, unit: str) -> tuple[float, ...]:
    """Logarithms of round figures, where floats reach."""
    low, high = max(low, -307.0), min(high, 307.0)
    if unit in ("bytes", "KiB", "MiB", "GiB"):
        powers = range(math.ceil(low / DOUBLING), math.floor(high / DOUBLING) + 1)
        return tuple(power * DOUBLING for power in powers)[:: len(powers) // MOST_TICKS + 1]

    decades = range(math.floor(low), math.ceil(high) + 1)
    ticks: list[float] = []
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        places = (decade + math.log10(digit) for decade in decades for digit in digits)
        ticks = [place for place in places if low <= place <= high]
        if len(ticks) <= MOST_TICKS:
            break
    return tuple(ticks[:: len(ticks) // (MOST_TICKS + 1) + 1])


def _plain(unit: str) -> str:
    """The unit without its denominator, which the title has; rates stay rates."""
    return unit if unit.endswith("/s") else unit.partition("/")[0]


def _end_lines(line: Line, unit: str) -> list[str]:
    """The side and its last figure, which is not broken."""
    shown = rounding.figure(line.points[-1][1], _plain(unit)).replace(" ", "\N{NO-BREAK SPACE}")
    return textwrap.wrap(f"{line.side}: {shown}", END_WIDTH)


def _write_ends(picture: _Picture, ends: Sequence[_End], left: float, bottom: float) -> None:
    """Writes the names, moved apart where they would overlap."""
    ordered = sorted(ends, key=lambda end: end.y)
    heights = [13.0 * len(end.lines) for end in ordered]
    tops = [end.y - height / 2 for end, height in zip(ordered, heights, strict=True)]
    for index in range(1, len(tops)):
        tops[index] = max(tops[index], tops[index - 1] + heights[index - 1])
    for index in reversed(range(len(tops))):  # names that were moved too far down move up
        below = tops[index + 1] if index + 1 < len(tops) else bottom
        tops[index] = min(tops[index], below - heights[index])

    for end, top in zip(ordered, tops, strict=True):
        for index, line in enumerate(end.lines):
            picture.small(left, top + 13 * index + 10, line, end.color)


# Memory at rest: a bar of kinds for each side, on the device and in host memory.

KEY_HEAD, BARS_TOP, MEMORY_PITCH, MEMORY_HEIGHT, SIDE_GAP = 54, 71, 29, 21, 13
MEMORY_LEFT, MEMORY_WIDTH = 230, 450


def _memory(contents: Memory, theme: Theme) -> _Picture:
    sides = list(dict.fromkeys(bar.side for bar in contents.bars))
    bottom = BARS_TOP + MEMORY_PITCH * len(contents.bars) + SIDE_GAP * (len(sides) - 1)
    caption = ("Of one rank, between two steps.", *contents.caption)
    picture = _Picture("Memory at rest, by kind", bottom, caption, theme)

    kinds = list(dict.fromkeys(kind for bar in contents.bars for kind, _ in bar.parts))
    palette = (picture.theme.ours, *picture.theme.peers)
    colors = {kind: palette[index % len(palette)] for index, kind in enumerate(kinds)}
    x: float = MEMORY_LEFT
    for kind, color in colors.items():
        picture.rect(x, KEY_HEAD - 9, 11, 11, color)
        picture.small(x + 17, KEY_HEAD, kind, picture.theme.text)
        x += 30 + SMALL_CHARACTER * len(kind)

    longest = max(_total(bar) for bar in contents.bars)
    scale = Axis(0, longest, MEMORY_LEFT, MEMORY_LEFT + MEMORY_WIDTH, ())
    named = ""
    for index, bar in enumerate(contents.bars):
        y = BARS_TOP + MEMORY_PITCH * (index + 0.5) + SIDE_GAP * sides.index(bar.side)
        if bar.side != named:
            picture.heading(MARGIN, y + TO_BASELINE, bar.side)
        named = bar.side
        picture.text(MEMORY_LEFT - 10, y + TO_BASELINE, bar.place, picture.theme.text, anchor="end")
        _memory_bar(picture, scale, bar, y, colors)
    picture.line((MEMORY_LEFT, BARS_TOP), (MEMORY_LEFT, bottom), picture.theme.muted)
    return picture


def _memory_bar(
    picture: _Picture, scale: Axis, bar: MemoryBar, y: float, colors: dict[str, str]
) -> None:
    """The parts, each with its size where that fits, and the sum behind them."""
    end = 0.0
    for kind, size in bar.parts:
        left, right = scale.place(end), scale.place(end + size)
        end += size
        # A gap of a pixel between parts.
        picture.rect(
            left, y - MEMORY_HEIGHT / 2, max(right - left - 1, 0), MEMORY_HEIGHT, colors[kind]
        )
        shown, middle = rounding.figure(size, "bytes"), (left + right) / 2
        if SMALL_CHARACTER * len(shown) < right - left:
            ink = _ink_on(colors[kind])
            picture.small(middle, y + 3.5, shown, ink, "middle")

    at = (scale.place(end) + 8, y + TO_BASELINE)
    if bar.parts:
        picture.heading(*at, rounding.figure(_total(bar), "bytes"))
    else:
        picture.text(*at, "nothing", picture.theme.muted)


def _total(bar: MemoryBar) -> float:
    return math.fsum(size for _, size in bar.parts)


def _ink_on(color: str) -> str:
    """Black or white, whichever has more contrast."""
    red, green, blue = ((channel / 255) ** 2.2 for channel in bytes.fromhex(color[1:]))
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#ffffff"
