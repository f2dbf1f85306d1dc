"""Draws one iteration of a recorded timeline as SVG or PNG."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from megatron.core.files import Sync, published
from megatron.core.log import printable
from megatron.core.trace_file import (
    ACTIVATIONS,
    CHECKPOINT,
    COMPUTE,
    D2H,
    DISK,
    GATHER,
    H2D,
    HOST,
    PHASE,
    REDUCE,
    WAIT,
    WORK,
    Trace,
)
from megatron_hybrid.charts import SMALL, THEMES, Canvas, blended, fixed_axis
from megatron_hybrid.timeline_shares import (
    Interval,
    LaneShare,
    computing_in,
    length,
    near,
    shares_of,
    united,
    within,
    without,
)

# Pixels.
_WIDTH, _LEFT, _RIGHT, _TOP, _BELOW = 1152, 121, 973, 69, 73
_ROW, _BAR, _CHARACTER = 44, 32, 6.4
_LEAST = 0.8  # shorter bars are drawn this long
_SLIVER = 4.8  # shorter bars have neither an edge, nor a hatch, nor two parts
_SEEN = 0.3  # shorter waits are not drawn
_HATCH = 6.0  # between two lines
_EXPOSED = 0.55  # opacity

_PHASES = {
    "forward": "#4f86c6",
    "backward": "#2f5f9e",
    "norm": "#7b6fb8",
    "step": "#b07cc6",
    "evaluate": "#5aa0a8",
}
_OTHER_PHASE = "#9aa4af"  # data, report, save
_WAITING = "#e4572e"
_LANES = {
    GATHER: "#2a9d74",
    REDUCE: "#d08c2e",
    D2H: "#6aa84f",
    HOST: "#b5577f",
    H2D: "#3fa7b5",
    ACTIVATIONS + D2H: "#6aa84f",
    ACTIVATIONS + H2D: "#3fa7b5",
    CHECKPOINT: "#8a6d5a",
    DISK: "#a38f6d",
}
_ON_COLOR = "#ffffff"  # labels on bars


def draw(trace: Trace, iteration: int, path: Path, *, theme: str = "light") -> None:
    """Writes a picture of an iteration in the format of the path's suffix, .svg or .png.

    The same trace gives the same bytes.
    """
    canvas = _Picture(trace, iteration, theme).canvas
    content = canvas.png() if path.suffix == ".png" else canvas.svg().encode()
    with published(path, Sync.NOTHING) as stream:
        stream.write(content)


class _Picture:
    """One iteration of a rank: a row for the computation and one for each lane, over time."""

    def __init__(self, trace: Trace, iteration: int, theme: str) -> None:
        self._trace = trace
        self._theme = THEMES[theme]
        self._whole = trace.iterations[iteration]
        self._slices = within(trace.slices, self._whole)
        self._shares = shares_of(trace, iteration)
        self._computing = computing_in(self._slices)
        seconds = self._shares.seconds
        self._axis = fixed_axis(0.0, max(1e3 * seconds, 1e-6), _LEFT, _RIGHT, num_steps=10)
        self._pixels_per_second = (_RIGHT - _LEFT) / max(seconds, 1e-9)
        waits = united((one.begin, one.end) for one in self._slices if one.kind == WAIT)
        self._waits = [wait for wait in waits if self._pixels(wait) >= _SEEN]

        self._bottom = _TOP + _ROW * (1 + len(self._shares.lanes))
        self.canvas = Canvas(_WIDTH, self._bottom + _BELOW)
        self.canvas.rect(0, 0, _WIDTH, self.canvas.height, self._theme.background)
        self._draw_frame(iteration)
        self._draw_computation()
        for number, lane in enumerate(self._shares.lanes, start=1):
            self._draw_lane(number, lane)
        self._draw_legend()

    def _draw_frame(self, iteration: int) -> None:
        canvas, theme, trace = self.canvas, self._theme, self._trace
        began = datetime.fromtimestamp(trace.zero + self._whole.begin, timezone.utc)
        total = _milliseconds(self._shares.seconds)
        about = f"{printable(trace.machine)}  ·  {began:%Y-%m-%d %H:%M} UTC  ·  {total} in all"
        title = f"Iteration {iteration}, rank {trace.rank} of {trace.world_size}"
        canvas.text(14, 26, title, theme.text, size=17, is_bold=True)
        canvas.text(14, 47, about, theme.muted, size=12)

        band = blended(_WAITING, theme.background, 0.1)
        for begin, end in self._waits:
            left = self._place(begin)
            canvas.rect(left, _TOP, self._place(end) - left, self._bottom - _TOP, band)
        for tick, label in zip(self._axis.ticks, self._axis.labels(), strict=True):
            x = self._axis.place(tick)
            canvas.line((x, _TOP), (x, self._bottom + 4), theme.grid, 0.8)
            at = (x, self._bottom + 17)
            canvas.text(*at, label, theme.muted, size=SMALL, anchor="middle")
        canvas.line((_LEFT, self._bottom), (_RIGHT, self._bottom), theme.grid)
        at = ((_LEFT + _RIGHT) / 2, self._bottom + 32)
        unit = "milliseconds since the start of the iteration"
        canvas.text(*at, unit, theme.muted, size=SMALL, anchor="middle")

    def _draw_computation(self) -> None:
        shares, phases = self._shares, [one for one in self._slices if one.kind == PHASE]
        for one in phases:
            self._bars(0, [(one.begin, one.end)], _PHASES.get(one.name, _OTHER_PHASE))
        self._bars(0, self._waits, _WAITING)
        for one in phases:
            span = (one.begin, one.end)
            self._label(
                0, without([span], near(self._waits, *span)), printable(one.name), is_bold=True
            )
        share = shares.computing_seconds / shares.seconds if shares.seconds else 0.0
        waiting = _milliseconds(shares.waiting_seconds)
        self._row_text(0, COMPUTE, f"{share:.0%} computing", f"{waiting} waiting")

    def _draw_lane(self, number: int, lane: LaneShare) -> None:
        """Draws the row's hidden work in the lane's color, and exposed work pale and hatched."""
        color = _LANES[lane.lane]
        pale = blended(color, self._theme.background, _EXPOSED)
        for one in self._slices:
            if one.row != lane.lane or one.kind != WORK:
                continue
            span = (one.begin, one.end)
            exposed = without([span], near(self._computing, *span))
            if self._pixels(span) < _SLIVER:
                exposed = [span] if length(exposed) > length([span]) / 2 else []
            exposed = [piece for piece in exposed if self._pixels(piece) >= _SEEN]
            hidden = without([span], exposed) if exposed else [span]
            self._bars(number, hidden, color)
            self._bars(number, exposed, pale, is_hatched=True)
            parts = one.name.split(".")  # "layers.3" of "decoder.layers.3"
            name = ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
            self._label(number, hidden, printable(name))

        shown = "idle" if lane.hidden_share is None else f"{lane.hidden_share:.0%} hidden"
        busy, exposed_seconds = lane.busy_seconds, lane.busy_seconds - lane.hidden_seconds
        note = f"of {_milliseconds(busy)}, {_milliseconds(exposed_seconds)} exposed"
        self._row_text(number, lane.lane, shown, note)

    def _bars(
        self, row: int, intervals: Sequence[Interval], color: str, *, is_hatched: bool = False
    ) -> None:
        for begin, end in intervals:
            left, width = self._place(begin), max(self._pixels((begin, end)), _LEAST)
            is_sliver = width < _SLIVER
            edge = "" if is_sliver or is_hatched else self._theme.background
            self.canvas.rect(left, self._bar_top(row), width, _BAR, color, edge=edge)
            if is_hatched and not is_sliver:
                self._hatch(left, self._bar_top(row), width)

    def _hatch(self, left: float, top: float, width: float) -> None:
        """Draws diagonals over a bar."""
        for number in range(1, int((width + _BAR) / _HATCH) + 1):
            x = number * _HATCH  # where the diagonal meets the upper edge
            start = (left + max(0.0, x - _BAR), top + min(x, _BAR))
            end = (left + min(x, width), top + max(0.0, x - width))
            self.canvas.line(start, end, self._theme.background, 1.2)

    def _label(
        self, row: int, pieces: Sequence[Interval], text: str, *, is_bold: bool = False
    ) -> None:
        """Writes a name on the longest piece of a bar, if it has room for it."""
        begin, end = max(pieces, key=self._pixels, default=(0.0, 0.0))
        if len(text) * _CHARACTER * (1.15 if is_bold else 1.0) + 6 <= self._pixels((begin, end)):
            x, y = (self._place(begin) + self._place(end)) / 2, self._bar_top(row) + _BAR / 2 + 3.5
            ink = _ON_COLOR
            self.canvas.text(x, y, text, ink, size=SMALL, anchor="middle", is_bold=is_bold)

    def _row_text(self, row: int, name: str, first: str, second: str) -> None:
        canvas, theme, middle = self.canvas, self._theme, self._bar_top(row) + _BAR / 2
        canvas.text(_LEFT - 8, middle + 4, name, theme.text, size=12, anchor="end")
        canvas.text(_RIGHT + 10, middle - 2, first, theme.text, size=12, is_bold=True)
        canvas.text(_RIGHT + 10, middle + 12, second, theme.muted, size=9.5)

    def _draw_legend(self) -> None:
        names = dict.fromkeys(printable(one.name) for one in self._slices if one.kind == PHASE)
        entries = [(name, color) for name, color in _PHASES.items() if name in names]
        others = ", ".join(name for name in names if name not in _PHASES)
        entries += [(others, _OTHER_PHASE)] if others else []
        pale = blended(self._theme.muted, self._theme.background, _EXPOSED)
        entries += [("waiting", _WAITING), ("lane, hidden", self._theme.muted)]
        entries += [("lane, exposed", pale)]
        x, y = float(_LEFT), self._bottom + 53
        for name, color in entries:
            self.canvas.rect(x, y, 13, 9, color)
            if color == pale:
                for shift in (0, 5):
                    start, end = (x + shift, y + 9), (x + shift + 8, y)
                    self.canvas.line(start, end, self._theme.background, 1.2)
            self.canvas.text(x + 18, y + 8, name, self._theme.muted, size=SMALL)
            x += 36 + 0.9 * _CHARACTER * len(name)

    def _place(self, moment: float) -> float:
        return self._axis.place(1e3 * (moment - self._whole.begin))

    def _pixels(self, interval: Interval) -> float:
        return (interval[1] - interval[0]) * self._pixels_per_second

    @staticmethod
    def _bar_top(row: int) -> float:
        return _TOP + _ROW * row + (_ROW - _BAR) / 2


def _milliseconds(seconds: float) -> str:
    digits = 0 if seconds >= 0.1 else 1
    return f"{1e3 * seconds:,.{digits}f} ms"
