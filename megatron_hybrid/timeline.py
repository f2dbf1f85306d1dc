"""Shows what a rank's lanes did in one iteration of a run that was recorded with --profile-lanes.

    python -m megatron_hybrid timeline runs/gpt
    python -m megatron_hybrid timeline runs/gpt --rank 1 --iteration 21 --output step.svg
    python -m megatron_hybrid timeline runs/gpt --merge all_ranks.json

PATH is a run's folder, of which the newest recording is taken, a recording's folder, or the files
of some ranks. Prints for each lane how long it was busy, how much of that was hidden behind the
computation, and how long the computation waited for it. --output draws the iteration, as SVG or
PNG. The files themselves open in https://ui.perfetto.dev; --merge puts all ranks into one of them.

docs/timeline.md says how to read all this.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron.core.files import Sync, published, read_regular
from megatron.core.help_format import ProgramParser
from megatron.core.log import counted, printable
from megatron.core.trace_file import Trace, merged
from megatron_hybrid.endings import one_line_errors
from megatron_hybrid.timeline_shares import LaneShare, StepShares, shares_of

EXIT_NO_TIMELINE = 2

_FOLDER = "timelines"  # in a run's folder
_FILE = re.compile(r"trace_rank([0-9]{1,9})\.json")
_MOST_BYTES = 1 << 30  # of a file
_MOST_CHARACTERS = 1000  # of a line: what a file says may be of any length
_SUFFIXES = (".svg", ".png")
_MILLISECONDS = 1e3
_MIB = 1 << 20


class TimelineError(ValueError):
    """What was asked for cannot be shown. One line that says why."""


def main(argv: Sequence[str] | None = None, program: str = "timeline.py") -> int:
    """Prints, draws and merges what is asked for; returns the exit code.

    Args:
        argv: the arguments; default: the command line's.
        program: the name that error messages begin with.
    """
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    with one_line_errors(program, (TimelineError, OSError)):
        if arguments.merge is not None:
            _merge(arguments)
        else:
            _show(arguments)
        return 0
    return EXIT_NO_TIMELINE


def _merge(arguments: argparse.Namespace) -> None:
    beside = {name: getattr(arguments, name) for name in ("output", "rank", "iteration")}
    given = [f"--{name}" for name, value in beside.items() if value is not None]
    given += ["--json"] if arguments.json else []
    if given:
        raise TimelineError(
            f"--merge: expected no other option, since all ranks and iterations are merged, got "
            f"{' and '.join(given)}."
        )

    traces = [read_trace(file) for file in find_files([Path(path) for path in arguments.paths])]
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        raise TimelineError(
            f"--merge: expected each rank once, got the ranks {', '.join(map(str, ranks))}."
        )
    with published(arguments.merge, Sync.NOTHING) as stream:
        stream.write(merged(traces))
    shown = counted(len(ranks), "rank")
    print(f"{shown} in {arguments.merge}, for https://ui.perfetto.dev")


def _show(arguments: argparse.Namespace) -> None:
    # First, so that nothing is half done where the library is missing.
    draw = None if arguments.output is None else _drawing(arguments.output)
    files = find_files([Path(path) for path in arguments.paths])
    trace = _choose_rank(files, arguments.rank)
    iteration = _choose_iteration(trace, arguments.iteration)
    shares = shares_of(trace, iteration)
    if draw is not None:
        draw(trace, iteration, arguments.output, theme=arguments.theme)
    if arguments.json:
        print(json.dumps(as_plain(trace, iteration, shares), indent=1))
    else:
        lines = lines_of(trace, iteration, shares)
        print("\n".join(printable(line, _MOST_CHARACTERS) for line in lines))
        if draw is not None:
            print(f"drawn in {arguments.output}")


def _drawing(output: Path) -> Any:
    """The function that draws. TimelineError for another kind of file, or without matplotlib."""
    if output.suffix not in _SUFFIXES:
        raise TimelineError(f"--output: expected a file named .svg or .png, got {output}.")
    try:
        # Not at the top: a second of imports, and an optional dependency.
        from megatron_hybrid.timeline_picture import draw
    except ImportError as error:
        raise TimelineError(
            f"--output: expected the package matplotlib (pip install '.[bench]' in the clone), "
            f"got: {error}."
        ) from None
    return draw


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files of one recording, by rank where they are in a folder. TimelineError if there are
    none.
    """
    files: list[Path] = []
    for path in paths:
        files += _files_in(path) if path.is_dir() else [path]
    return files


def _files_in(folder: Path) -> list[Path]:
    found = _traces_in(folder)
    if found:
        return found
    # A run's folder, or the folder of its recordings.
    parent = folder / _FOLDER if (folder / _FOLDER).is_dir() else folder
    recordings = [each for each in parent.iterdir() if each.is_dir() and _traces_in(each)]
    if not recordings:
        raise TimelineError(
            f"Expected a recording of --profile-lanes, got {folder} without trace_rank0.json."
        )
    return _traces_in(max(recordings, key=lambda each: (each.stat().st_mtime, each.name)))


def _traces_in(folder: Path) -> list[Path]:
    ranks = {path: _FILE.fullmatch(path.name) for path in folder.iterdir()}
    return sorted(
        (path for path, name in ranks.items() if name is not None),
        key=lambda path: int(path.stem.removeprefix("trace_rank")),
    )


def read_trace(path: Path) -> Trace:
    """TimelineError for a file that is not one of a recording."""
    content = read_regular(path, max_bytes=_MOST_BYTES, what="a recorded timeline")
    try:
        return Trace.from_json(content)
    except ValueError as error:
        raise TimelineError(
            f"Expected a file that --profile-lanes has written, got {path}: {error}."
        ) from None


def _choose_rank(files: Sequence[Path], rank: int | None) -> Trace:
    """The trace of a rank; of the lowest if none is asked for."""
    names = {path: _FILE.fullmatch(path.name) for path in files}
    # Thousands of files need not be read where their names tell.
    by_name = [path for path, name in names.items() if name and int(name[1]) == rank]
    traces = [read_trace(path) for path in (by_name or (files if rank is not None else files[:1]))]
    if rank is None:
        return traces[0]
    for trace in traces:
        if trace.rank == rank:
            return trace
    known = ", ".join(str(trace.rank) for trace in traces)
    raise TimelineError(f"--rank: expected one of {known}, got {rank}.")


def _choose_iteration(trace: Trace, iteration: int | None) -> int:
    """The iteration to show: the last that was recorded, if none is asked for."""
    recorded = sorted(trace.iterations)
    if not recorded:
        raise TimelineError("Expected a recorded iteration, got a timeline without any.")
    if iteration is None:
        return recorded[-1]
    if iteration not in recorded:
        known = ", ".join(map(str, recorded))
        raise TimelineError(f"--iteration: expected one of {known}, got {iteration}.")
    return iteration


def when(trace: Trace, iteration: int) -> datetime:
    """When an iteration began."""
    return datetime.fromtimestamp(trace.zero + trace.iterations[iteration].begin, timezone.utc)


def as_plain(trace: Trace, iteration: int, shares: StepShares) -> dict[str, Any]:
    """What --json prints: seconds, and shares between 0 and 1."""
    return {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "machine": trace.machine,
        "iteration": iteration,
        "recorded_iterations": sorted(trace.iterations),
        "began": when(trace, iteration).isoformat(),
        "seconds": shares.seconds,
        "computing_seconds": shares.computing,
        "waiting_seconds": shares.waiting,
        "waited_for_ranks_seconds": shares.waited_for_ranks,
        "phases_seconds": shares.phases,
        "lanes": [
            {
                "lane": lane.lane,
                "busy_seconds": lane.busy,
                "hidden_seconds": lane.hidden,
                "hidden_share": lane.hidden_share,
                "waited_seconds": lane.waited,
                "bytes": lane.nbytes,
            }
            for lane in shares.lanes
        ],
    }


def lines_of(trace: Trace, iteration: int, shares: StepShares) -> list[str]:
    """What is printed."""
    total = shares.seconds * _MILLISECONDS
    phases = ", ".join(
        f"{name} {seconds * _MILLISECONDS:.1f}" for name, seconds in shares.phases.items()
    )
    return [
        f"iteration {iteration}, rank {trace.rank} of {trace.world_size}, {trace.machine}, "
        f"{when(trace, iteration):%Y-%m-%d %H:%M:%S} UTC",
        f"{total:.1f} ms: computing {_percent(shares.computing, shares.seconds)}, waiting "
        f"{_percent(shares.waiting, shares.seconds)}",
        f"phases (ms, waits included): {phases}",
        "",
        f"{'lane':<17}{'busy ms':>10}{'hidden':>9}{'exposed ms':>12}{'waited ms':>11}{'MiB':>9}",
        *map(_lane_line, shares.lanes),
        *([_ranks_line(shares)] if shares.waited_for_ranks else []),
    ]


def _lane_line(lane: LaneShare) -> str:
    exposed = (lane.busy - lane.hidden) * _MILLISECONDS
    moved = f"{lane.nbytes / _MIB:.1f}" if lane.nbytes else "-"
    return (
        f"{lane.lane:<17}{lane.busy * _MILLISECONDS:>10.1f}{_percent(lane.hidden, lane.busy):>9}"
        f"{exposed:>12.1f}{lane.waited * _MILLISECONDS:>11.1f}{moved:>9}"
    )


def _ranks_line(shares: StepShares) -> str:
    return f"{'other ranks':<17}{'':>31}{shares.waited_for_ranks * _MILLISECONDS:>11.1f}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument(
        "paths",
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
        help="draw the iteration into this .svg or .png (default: print a table only)",
    )
    parser.add_argument(
        "--theme", choices=("light", "dark"), default="light", help="colors of the drawing"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--merge", type=Path, metavar="FILE", help="write all ranks into one file for Perfetto"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
