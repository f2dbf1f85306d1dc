"""`python -m benchmarks run`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.helpers.tables import not_run_lines, ratio_lines
from benchmarks.runner.registry import QUICK_RESULTS, RESULTS, ROOT, chosen, registered
from benchmarks.runner.running import Ending, Origin, Outcome, Revision, Runner, machine

_INTERRUPTED = 130  # as a shell reports SIGINT


def main(argv: Sequence[str]) -> int:
    """Returns 1 if a benchmark failed, 2 for a command line that cannot be honoured. A bar that is
    missed is printed, and no failure.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="these; default: all")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="directory of results; default: benchmarks/results, or runs/benchmarks with --quick",
    )
    arguments = parser.parse_args(argv)
    here = machine()
    can_run_all = arguments.quick or here["accelerator"] is not None
    try:
        benchmarks = chosen(registered(), arguments.names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    left_out = [one.name for one in benchmarks if one.needs_accelerator and not can_run_all]
    if left_out:
        print(f"{', '.join(left_out)}: not run, needs an accelerator", file=sys.stderr)
        if arguments.names:
            return 2
        benchmarks = [one for one in benchmarks if one.name not in left_out]

    mode = "quick" if arguments.quick else "full"
    output = arguments.output or (QUICK_RESULTS if arguments.quick else RESULTS)
    runner = Runner(
        Origin(mode, Revision.of(ROOT), here),
        output.resolve(),
        QUICK_RESULTS / "logs",
        tell=lambda line: print(line, flush=True),
    )
    # Like Ctrl-C, an end that is asked for ends the benchmark, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    outcomes: list[Outcome] = []
    start = time.monotonic()
    is_whole = True
    try:
        for outcome in runner.run(benchmarks):
            outcomes.append(outcome)
    except KeyboardInterrupt:
        is_whole = False
    print("\n".join(summary(outcomes, time.monotonic() - start)))
    if arguments.quick:
        print("Bars are for the full run; with --quick they are not meaningful.")
    if not is_whole:
        print(f"Interrupted; {len(benchmarks) - len(outcomes)} benchmarks did not run to the end.")
        return _INTERRUPTED
    return int(any(outcome.ending is Ending.FAILED for outcome in outcomes))


def summary(outcomes: Sequence[Outcome], seconds: float) -> Iterator[str]:
    """All ratios with their bars, then how many were met and missed."""
    ratios = [
        (f"{outcome.benchmark.name}: {ratio.name}", ratio)
        for outcome in outcomes
        if outcome.result
        for ratio in outcome.result.ratios
    ]
    yield ""
    yield from ratio_lines(ratios)
    for outcome in outcomes:
        for line in not_run_lines(outcome.result) if outcome.result else ():
            yield f"{outcome.benchmark.name}: {line}"
        if outcome.ending is not Ending.DONE:
            reason = outcome.detail.splitlines()[0]
            yield f"{outcome.benchmark.name} {outcome.ending.value}: {reason}"

    num_met, num_missed = (sum(ratio.is_met is met for _, ratio in ratios) for met in (True, False))
    endings = [outcome.ending for outcome in outcomes]
    yield (
        f"{endings.count(Ending.DONE)} benchmarks done, {endings.count(Ending.FAILED)} failed; "
        f"{num_met} bars met, {num_missed} missed; {seconds / 60:.1f} minutes"
    )
