"""Draws one iteration of a recorded timeline with matplotlib: SVG or PNG, light or dark."""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron.core.files import Sync, published
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
    Slice,
    Trace,
)
from megatron_hybrid.timeline_shares import (
    Interval,
    LaneShare,
    computing_in,
    length,
    shares_of,
    united,
    within,
    without,
)

_WIDTH_INCHES = 12.0
_ROW_INCHES = 0.46
_FRAME_INCHES = 1.48  # title, axis and legend
_BELOW_INCHES = 0.76  # of it, axis and legend
_BAR = 0.72  # of a row's height
_LABEL_SIZE = 7.5  # points
_CHARACTER_INCHES = 0.066  # of a label, on average
_LEFT, _RIGHT = 0.105, 0.845  # of the width: where the time axis begins and ends
_LEAST_INCHES = 0.008  # of what is drawn: shorter work would not be seen at all
_SLIVER_INCHES = 0.05  # of what has neither a border nor a hatch
_SEEN_INCHES = 0.003  # of a wait beside other things: shorter ones are not worth a line
_EXPOSED_ALPHA = 0.55

# The same on both backgrounds.
_PHASES = {
    "forward": "#4f86c6",
    "backward": "#2f5f9e",
    "norm": "#7b6fb8",
    "step": "#b07cc6",
    "evaluate": "#5aa0a8",
}
_OTHER_PHASE = "#9aa4af"  # the thread is busy with something else: data, report, save
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
_ON_COLOUR = "#ffffff"  # labels on bars


class _Theme(NamedTuple):
    background: str
    text: str
    faint: str  # text that matters less
    grid: str


THEMES = {
    "light": _Theme("#ffffff", "#1f2328", "#59636e", "#d8dee4"),
    "dark": _Theme("#0d1117", "#e6edf3", "#9198a1", "#2b3138"),
}


def draw(trace: Trace, iteration: int, path: Path, *, theme: str = "light") -> None:
    """Writes a picture of an iteration, in the format that the path's suffix names.

    The same trace gives the same bytes with the same version of matplotlib.
    """
    settings: dict[Any, Any] = {
        "svg.hashsalt": "megatron-hybrid",
        "font.family": "DejaVu Sans",
        "hatch.linewidth": 0.9,
        "axes.unicode_minus": False,
        "text.parse_math": False,  # a machine's name may have dollar signs
    }
    with mpl.rc_context(settings):
        figure = _Picture(trace, iteration, THEMES[theme]).figure()
        kind, background = path.suffix.removeprefix("."), THEMES[theme].background
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, dpi=160, metadata=metadata, facecolor=background)
    with published(path, Sync.NOTHING) as stream:
        stream.write(picture.getbuffer())


class _Picture:
    """One iteration of a rank, on its way to paper. Times on the axis are milliseconds."""

    def __init__(self, trace: Trace, iteration: int, theme: _Theme) -> None:
        self._trace = trace
        self._iteration = iteration
        self._theme = theme
        self._whole = trace.iterations[iteration]
        self._slices = within(trace.slices, self._whole)
        self._shares = shares_of(trace, iteration)
        self._milliseconds = 1e3 * self._shares.seconds
        self._computing = computing_in(self._slices)
        waits = united((one.begin, one.end) for one in self._slices if one.kind == WAIT)
        self._waits = [wait for wait in waits if self._is_seen(wait)]
        self._rows = [COMPUTE, *(lane.lane for lane in self._shares.lanes)]

    def figure(self) -> Figure:
        height = _FRAME_INCHES + _ROW_INCHES * len(self._rows)
        figure = Figure(figsize=(_WIDTH_INCHES, height))
        axes = figure.add_axes(
            (
                _LEFT,
                _BELOW_INCHES / height,
                _RIGHT - _LEFT,
                _ROW_INCHES * len(self._rows) / height,
            )
        )
        self._set_up(axes)
        self._draw_waits_behind(axes)
        self._draw_computation(axes)
        for number, lane in enumerate(self._shares.lanes, start=1):
            self._draw_lane(axes, number, lane)
        self._draw_titles(figure, height)
        self._draw_legend(figure)
        return figure

    def _set_up(self, axes: Axes) -> None:
        theme = self._theme
        axes.set_facecolor(theme.background)
        axes.set_xlim(0, self._milliseconds)
        axes.set_ylim(len(self._rows) - 0.5, -0.5)
        axes.set_yticks(range(len(self._rows)), self._rows)
        axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=theme.text, pad=6)
        axes.tick_params(axis="x", color=theme.grid, labelsize=8, labelcolor=theme.faint)
        axes.set_xlabel(
            "milliseconds since the iteration began", fontsize=8, color=theme.faint, labelpad=3
        )
        axes.grid(axis="x", color=theme.grid, linewidth=0.6)
        axes.set_axisbelow(True)
        for name, spine in axes.spines.items():
            spine.set_visible(name == "bottom")
            spine.set_color(theme.grid)

    # Rows

    def _draw_waits_behind(self, axes: Axes) -> None:
        """A faint band through all rows wherever the computation waits."""
        for begin, end in self._moved(self._waits):
            axes.axvspan(begin, end, color=_WAITING, alpha=0.10, linewidth=0, zorder=0)

    def _draw_computation(self, axes: Axes) -> None:
        bars = defaultdict[str, list[Interval]](list)  # by colour
        for one in self._slices:
            if one.kind == PHASE:
                bars[_PHASES.get(one.name, _OTHER_PHASE)].append((one.begin, one.end))
                pieces = without([(one.begin, one.end)], _near(one, self._waits))
                self._label(axes, 0, pieces, one.name, _Style(weight="bold"))
        for colour, phases in bars.items():
            self._bar(axes, 0, self._moved(phases), colour)

        self._bar(axes, 0, self._moved(self._waits), _WAITING, zorder=3)
        share = self._shares.computing / self._shares.seconds if self._shares.seconds else 0.0
        waiting = 1e3 * self._shares.waiting
        self._note(axes, 0, f"{share:.0%} computing", f"{_ms(waiting)} waiting")

    def _draw_lane(self, axes: Axes, number: int, lane: LaneShare) -> None:
        own = [one for one in self._slices if one.row == lane.lane and one.kind == WORK]
        # A row's bars are drawn together: one by one, thousands would take a minute.
        colour, drawn, exposed = _LANES[lane.lane], list[Interval](), list[Interval]()
        for one in own:
            pieces = without([(one.begin, one.end)], _near(one, self._computing))
            hidden = without([(one.begin, one.end)], filter(self._is_seen, pieces))
            is_exposed = length(pieces) > (one.end - one.begin) / 2
            if self._is_sliver(one):
                # Too narrow for two parts.
                exposed += [(one.begin, one.end)] if is_exposed else []
                hidden = [] if is_exposed else [(one.begin, one.end)]
            else:
                exposed += filter(self._is_seen, pieces)
            drawn += hidden
            self._label(axes, number, hidden, _short(one.name), _Style())
        self._bar(axes, number, self._moved(drawn), colour)
        self._bar(axes, number, self._moved(exposed), colour, is_exposed=True)

        exposed_ms = 1e3 * (lane.busy - lane.hidden)
        shown = "idle" if lane.hidden_share is None else f"{lane.hidden_share:.0%} hidden"
        self._note(axes, number, shown, f"of {_ms(1e3 * lane.busy)}, {_ms(exposed_ms)} exposed")

    def _bar(
        self,
        axes: Axes,
        row: int,
        intervals: Iterable[Interval],
        colour: str,
        *,
        is_exposed: bool = False,
        zorder: int = 2,
    ) -> None:
        least, sliver = _LEAST_INCHES / self._inches_per_ms, _SLIVER_INCHES / self._inches_per_ms
        spans = [(begin, max(end - begin, least)) for begin, end in intervals]
        for is_sliver in (False, True):
            axes.broken_barh(
                [span for span in spans if (span[1] < sliver) == is_sliver],
                (row - _BAR / 2, _BAR),
                facecolor=to_rgba(colour, _EXPOSED_ALPHA if is_exposed else 1.0),
                edgecolor=self._theme.background,
                linewidth=0.0 if is_sliver or is_exposed else 0.5,
                hatch="////" if is_exposed and not is_sliver else None,
                zorder=zorder,
            )

    def _label(
        self, axes: Axes, row: int, pieces: Sequence[Interval], text: str, style: _Style
    ) -> None:
        """A name on the longest piece of a bar, if it has room for it."""
        begin, end = max(self._moved(pieces), key=lambda one: one[1] - one[0], default=(0.0, 0.0))
        room = (end - begin) * self._inches_per_ms
        if len(text) * _CHARACTER_INCHES * style.width + 0.06 > room:
            return
        axes.text(
            (begin + end) / 2,
            row,
            text,
            ha="center",
            va="center",
            fontsize=_LABEL_SIZE,
            fontweight=style.weight,
            color=_ON_COLOUR,
            zorder=4,
            clip_on=True,
        )

    def _note(self, axes: Axes, row: int, first: str, second: str) -> None:
        """Two lines of text beside a row."""
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "left"}
        theme = self._theme
        axes.text(
            1.012, row - 0.06, first, va="bottom", fontsize=9, color=theme.text,
            fontweight="bold", **place,
        )  # fmt: skip
        axes.text(1.012, row + 0.08, second, va="top", fontsize=7, color=theme.faint, **place)

    # Around them

    def _draw_titles(self, figure: Figure, height: float) -> None:
        trace = self._trace
        title = f"Iteration {self._iteration}, rank {trace.rank} of {trace.world_size}"
        began = _date(trace, self._whole)
        subtitle = f"{trace.machine}  ·  {began}  ·  {_ms(self._milliseconds)} in all"
        figure.text(
            0.012, 1 - 0.12 / height, title, va="top", fontsize=13, fontweight="bold",
            color=self._theme.text,
        )  # fmt: skip
        figure.text(
            0.012, 1 - 0.40 / height, subtitle, va="top", fontsize=8.5, color=self._theme.faint
        )

    def _draw_legend(self, figure: Figure) -> None:
        names = [one.name for one in self._slices if one.kind == PHASE]
        entries = [
            Patch(facecolor=colour, label=name) for name, colour in _PHASES.items() if name in names
        ]
        others = [name for name in dict.fromkeys(names) if name not in _PHASES]
        if others:
            entries.append(Patch(facecolor=_OTHER_PHASE, label=", ".join(others)))
        entries += [
            Patch(facecolor=_WAITING, label="waiting"),
            Patch(facecolor=self._theme.faint, label="lane, hidden"),
            Patch(
                facecolor=to_rgba(self._theme.faint, _EXPOSED_ALPHA),
                edgecolor=self._theme.background,
                linewidth=0,
                hatch="/////",
                label="lane, exposed",
            ),
        ]
        legend = figure.legend(
            handles=entries,
            loc="lower left",
            bbox_to_anchor=(_LEFT - 0.006, 0.0),
            ncols=len(entries),
            fontsize=7.5,
            frameon=False,
            handlelength=1.3,
            handleheight=0.9,
            columnspacing=1.4,
            handletextpad=0.5,
        )
        for text in legend.get_texts():
            text.set_color(self._theme.faint)

    # Times

    @property
    def _inches_per_ms(self) -> float:
        return _WIDTH_INCHES * (_RIGHT - _LEFT) / max(self._milliseconds, 1e-9)

    def _is_seen(self, interval: Interval) -> bool:
        return 1e3 * (interval[1] - interval[0]) * self._inches_per_ms >= _SEEN_INCHES

    def _is_sliver(self, one: Slice) -> bool:
        return 1e3 * (one.end - one.begin) * self._inches_per_ms < _SLIVER_INCHES

    def _moved(self, intervals: Sequence[Interval]) -> list[Interval]:
        first = self._whole.begin
        return [(1e3 * (begin - first), 1e3 * (end - first)) for begin, end in intervals]


class _Style(NamedTuple):
    """Of a label on a bar."""

    weight: str = "normal"

    @property
    def width(self) -> float:
        """Of a character, compared with one of normal weight."""
        return 1.15 if self.weight == "bold" else 1.0


def _near(one: Slice, intervals: Sequence[Interval]) -> Sequence[Interval]:
    """Those that may overlap a slice, of intervals that are apart and in order."""
    first = bisect_right(intervals, one.begin, key=lambda interval: interval[1])
    stop = bisect_left(intervals, one.end, key=lambda interval: interval[0])
    return intervals[first:stop]


def _short(name: str) -> str:
    """A module's name without the parts that all have: "layers.3" of "decoder.layers.3"."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"


def _date(trace: Trace, whole: Slice) -> str:
    moment = datetime.fromtimestamp(trace.zero + whole.begin, timezone.utc)
    return f"{moment:%Y-%m-%d %H:%M} UTC"
