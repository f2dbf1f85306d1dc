"""Shows the work of a rank's lanes in one iteration of a run recorded with --profile-lanes.

    python -m megatron_hybrid timeline runs/gpt
    python -m megatron_hybrid timeline runs/gpt --rank 1 --iteration 21 --output step.svg
    python -m megatron_hybrid timeline runs/gpt --merge all_ranks.json

PATH is a run's directory with its newest recording, a recording's directory, or the files of some
ranks. Prints for each lane how long it was busy, how much of that was hidden behind the
computation, and how long the computation waited for it. --output draws the iteration as SVG. The
files themselves open in https://ui.perfetto.dev; --merge puts all ranks into one of them.

The computation computes in its phases forward, backward, norm, step and evaluate, except while it
waits. The hidden share of a lane is the part of its busy time during which the computation
computes. A lane with a share of 1 costs no time; the exposed rest delayed the computation, or ran
while it waited for another lane. docs/training.md describes the rows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.files import Sync, published, read_regular
from megatron.core.help_format import ProgramParser
from megatron.core.log import counted, printable
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
    ROWS,
    WAIT,
    WORK,
    Slice,
    Trace,
    merged,
)
from megatron_hybrid.charts import SMALL, THEMES, Canvas, blended, fixed_axis
from megatron_hybrid.endings import one_line_errors

EXIT_NO_TIMELINE = 2

_FOLDER = "timelines"  # in a run's directory
_FILE = re.compile(r"trace_rank([0-9]{1,9})\.json")
_MOST_BYTES = 1 << 30  # of a file
_MOST_CHARACTERS = 1000  # of a line, since names in a file may have any length
COMPUTING = ("forward", "backward", "norm", "step", "evaluate")

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

Interval = tuple[float, float]


class TimelineError(ValueError):
    """The request cannot be shown, for the reason given in one line."""


def main(argv: Sequence[str] | None = None, program: str = "timeline") -> int:
    """Prints, draws or merges recordings; returns the exit code."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    with one_line_errors(program, (TimelineError, OSError)):
        if arguments.merge is not None:
            _merge(arguments)
        else:
            _show(arguments)
        return 0
    return EXIT_NO_TIMELINE


def _merge(arguments: argparse.Namespace) -> None:
    options = (arguments.output, arguments.rank, arguments.iteration)
    if arguments.json or any(each is not None for each in options):
        raise TimelineError(
            "--merge writes all ranks and iterations, so it takes no --output, --rank, --iteration "
            "or --json."
        )
    traces = [read_trace(file) for file in find_files(arguments.paths)]
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        got = ", ".join(map(str, ranks))
        raise TimelineError(f"--merge: expected each rank once, got the ranks {got}.")
    with published(arguments.merge, Sync.NOTHING) as stream:
        stream.write(merged(traces))
    print(f"{counted(len(ranks), 'rank')} in {arguments.merge}, for https://ui.perfetto.dev")


def _show(arguments: argparse.Namespace) -> None:
    output = arguments.output
    if output is not None and output.suffix != ".svg":
        raise TimelineError(f"--output: expected a file named .svg, got {output}.")
    trace = _choose_rank(find_files(arguments.paths), arguments.rank)
    iteration = _choose_iteration(trace, arguments.iteration)
    shares = shares_of(trace, iteration)
    if output is not None:
        draw(trace, iteration, output, theme=arguments.theme)
    if arguments.json:
        print(json.dumps(as_plain(trace, iteration, shares), indent=1))
        return
    for line in lines_of(trace, iteration, shares):
        print(printable(line, _MOST_CHARACTERS))
    if output is not None:
        print(f"drawn in {output}")


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files of one recording, by rank where they are in a directory. TimelineError if there are
    none.
    """
    return [file for path in paths for file in (_files_in(path) if path.is_dir() else [path])]


def _files_in(folder: Path) -> list[Path]:
    """The files in a recording, or in the newest recording of a run."""
    found = _traces_in(folder)
    if found:
        return found
    parent = folder / _FOLDER if (folder / _FOLDER).is_dir() else folder
    recordings = [each for each in parent.iterdir() if each.is_dir() and _traces_in(each)]
    if not recordings:
        raise TimelineError(
            f"Expected a recording of --profile-lanes, got {folder} without trace_rank0.json."
        )
    return _traces_in(max(recordings, key=lambda each: (each.stat().st_mtime, each.name)))


def _traces_in(folder: Path) -> list[Path]:
    names = {path: _FILE.fullmatch(path.name) for path in folder.iterdir()}
    ranks = {path: int(name[1]) for path, name in names.items() if name is not None}
    return sorted(ranks, key=lambda path: ranks[path])


def read_trace(path: Path) -> Trace:
    """Reads a file of a recording. TimelineError for any other file."""
    content = read_regular(path, max_bytes=_MOST_BYTES, what="a recorded timeline")
    try:
        return Trace.from_json(content)
    except ValueError as error:
        raise TimelineError(
            f"Expected a file that --profile-lanes has written, got {path}: {error}."
        ) from None


def _choose_rank(files: Sequence[Path], rank: int | None) -> Trace:
    """The trace of a rank; of the first file by default."""
    known = []
    # The file's name usually has its rank, which saves reading thousands of others.
    for file in sorted(files, key=lambda path: path.name != f"trace_rank{rank}.json"):
        trace = read_trace(file)
        if rank in (None, trace.rank):
            return trace
        known.append(trace.rank)
    raise TimelineError(f"--rank: expected one of {', '.join(map(str, known))}, got {rank}.")


def _choose_iteration(trace: Trace, iteration: int | None) -> int:
    """The iteration to show; the last one by default."""
    recorded = sorted(trace.iterations)
    if not recorded:
        raise TimelineError("Expected a recorded iteration, got a timeline without any.")
    if iteration not in (None, *recorded):
        known = ", ".join(map(str, recorded))
        raise TimelineError(f"--iteration: expected one of {known}, got {iteration}.")
    return recorded[-1] if iteration is None else iteration


def as_plain(trace: Trace, iteration: int, shares: StepShares) -> dict[str, Any]:
    """The contents of --json: seconds, and shares between 0 and 1."""
    return {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "machine": trace.machine,
        "iteration": iteration,
        "recorded_iterations": sorted(trace.iterations),
        "began": _began(trace, iteration).isoformat(),
        **shares._asdict(),
        "lanes": [lane._asdict() | {"hidden_share": lane.hidden_share} for lane in shares.lanes],
    }


def lines_of(trace: Trace, iteration: int, shares: StepShares) -> list[str]:
    """The printed lines: the iteration, its phases, and a table of lanes."""
    computing = _percent(shares.computing_seconds, shares.seconds)
    waiting = _percent(shares.waiting_seconds, shares.seconds)
    phases = ", ".join(f"{name} {1e3 * each:.1f}" for name, each in shares.phases_seconds.items())
    lines = [
        f"iteration {iteration}, rank {trace.rank} of {trace.world_size}, {trace.machine}, "
        f"{_began(trace, iteration):%Y-%m-%d %H:%M:%S} UTC",
        f"{1e3 * shares.seconds:.1f} ms: computing {computing}, waiting {waiting}",
        f"phases (ms, waits included): {phases}",
        "",
        f"{'lane':<17}{'busy ms':>10}{'hidden':>9}{'exposed ms':>12}{'waited ms':>11}{'MiB':>9}",
    ]
    for lane in shares.lanes:
        busy, hidden, waited = (1e3 * each for each in lane[1:4])
        moved = f"{lane.bytes / 2**20:.1f}" if lane.bytes else "-"
        lines.append(
            f"{lane.lane:<17}{busy:>10.1f}{_percent(hidden, busy):>9}{busy - hidden:>12.1f}"
            f"{waited:>11.1f}{moved:>9}"
        )
    for_ranks = 1e3 * shares.waited_for_ranks_seconds
    return [*lines, f"{'other ranks':<17}{'':>31}{for_ranks:>11.1f}"] if for_ranks else lines


def _began(trace: Trace, iteration: int) -> datetime:
    return datetime.fromtimestamp(trace.zero + trace.iterations[iteration].begin, timezone.utc)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="a run's directory, a recording's directory, or trace files of some ranks",
    )
    parser.add_argument("--rank", type=int, help="rank to show (default: the lowest one recorded)")
    parser.add_argument(
        "--iteration", type=int, help="iteration to show (default: the last one recorded)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="draw the iteration into this .svg (default: print a table only)",
    )
    parser.add_argument(
        "--theme", choices=("light", "dark"), default="light", help="colors of the drawing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--merge", type=Path, metavar="FILE", help="write all ranks into one file for Perfetto"
    )
    return parser.parse_args(argv)


class LaneShare(NamedTuple):
    """The work of a lane in an iteration."""

    lane: str
    busy_seconds: float
    hidden_seconds: float
    waited_seconds: float  # by the computation, for this lane
    bytes: int  # of work that started in the iteration

    @property
    def hidden_share(self) -> float | None:
        """None for a lane that was never busy."""
        return self.hidden_seconds / self.busy_seconds if self.busy_seconds else None


class StepShares(NamedTuple):
    """The times of a rank in an iteration."""

    seconds: float
    computing_seconds: float
    waiting_seconds: float
    waited_for_ranks_seconds: float  # in collectives that no lane runs
    phases_seconds: dict[str, float]  # by name, waits included
    lanes: tuple[LaneShare, ...]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def near(intervals: Sequence[Interval], begin: float, end: float) -> Sequence[Interval]:
    """Returns the ordered, disjoint intervals that overlap [begin, end)."""
    first = bisect_right(intervals, begin, key=lambda interval: interval[1])
    stop = bisect_left(intervals, end, key=lambda interval: interval[0])
    return intervals[first:stop]


def without(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The moments of the first that are not in the second."""
    holes, found = united(second), list[Interval]()
    for begin, end in united(first):
        for hole_begin, hole_end in near(holes, begin, end):
            if begin < hole_begin:
                found.append((begin, hole_begin))
            begin = max(begin, hole_end)
        if begin < end:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The time that intervals cover, overlaps counted once."""
    return sum(end - begin for begin, end in united(intervals))


def computing_in(slices: Iterable[Slice]) -> list[Interval]:
    """When the computation computes."""
    own = [one for one in slices if one.row == COMPUTE]
    phases = [_times(one) for one in own if one.kind == PHASE and one.name in COMPUTING]
    return without(phases, [_times(one) for one in own if one.kind == WAIT])


def within(slices: Iterable[Slice], whole: Slice) -> list[Slice]:
    """The parts of slices during another slice."""
    return [
        one._replace(begin=max(one.begin, whole.begin), end=min(one.end, whole.end))
        for one in slices
        if one.begin < whole.end and whole.begin < one.end
    ]


def shares_of(trace: Trace, iteration: int) -> StepShares:
    """The times between the start and the end of an iteration, of work for any iteration."""
    whole = trace.iterations[iteration]
    slices = within(trace.slices, whole)
    computing = computing_in(slices)
    waits = [one for one in slices if one.kind == WAIT]

    def waited(what: str) -> float:
        return length(_times(one) for one in waits if one.name == f"wait for {what}")

    lanes = []
    for row in ROWS:
        own = [one for one in slices if one.row == row and one.kind == WORK]
        busy = length(map(_times, own))
        hidden = busy - length(without(map(_times, own), computing))
        num_bytes = sum(one.nbytes for one in own if one.iteration == iteration)
        lanes += [LaneShare(row, busy, hidden, waited(row), num_bytes)] if own else []

    phases: dict[str, float] = {}
    for one in slices:
        if one.kind == PHASE:
            phases[one.name] = phases.get(one.name, 0.0) + one.end - one.begin
    computing_seconds, waiting = length(computing), length(map(_times, waits))
    seconds, for_ranks = whole.end - whole.begin, waited("ranks")
    return StepShares(seconds, computing_seconds, waiting, for_ranks, phases, tuple(lanes))


def _times(one: Slice) -> Interval:
    return one.begin, one.end


def draw(trace: Trace, iteration: int, path: Path, *, theme: str = "light") -> None:
    """Writes a picture of an iteration as SVG. The same trace gives the same bytes."""
    with published(path, Sync.NOTHING) as stream:
        stream.write(_Picture(trace, iteration, theme).canvas.svg().encode())


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
