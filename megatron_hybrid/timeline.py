"""Shows the work of a rank's lanes in one iteration of a run recorded with --profile-lanes.

    python -m megatron_hybrid timeline runs/gpt
    python -m megatron_hybrid timeline runs/gpt --rank 1 --iteration 21 --output step.svg
    python -m megatron_hybrid timeline runs/gpt --merge all_ranks.json

PATH is a run's directory with its newest recording, a recording's directory, or the files of some
ranks. Prints for each lane how long it was busy, how much of that was hidden behind the
computation, and how long the computation waited for it. --output draws the iteration, as SVG or
PNG. The files themselves open in https://ui.perfetto.dev; --merge puts all ranks into one of them.

docs/training.md describes the rows and shares.
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
from megatron_hybrid.timeline_picture import draw
from megatron_hybrid.timeline_shares import StepShares, shares_of

EXIT_NO_TIMELINE = 2

_FOLDER = "timelines"  # in a run's directory
_FILE = re.compile(r"trace_rank([0-9]{1,9})\.json")
_MOST_BYTES = 1 << 30  # of a file
_MOST_CHARACTERS = 1000  # of a line, since names in a file may have any length


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
    if output is not None and output.suffix not in (".svg", ".png"):
        raise TimelineError(f"--output: expected a file named .svg or .png, got {output}.")
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
