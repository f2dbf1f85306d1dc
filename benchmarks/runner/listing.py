"""`python -m benchmarks list`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.helpers.benchmark import Benchmark
from benchmarks.runner.places import QUICK_RESULTS, RESULTS
from benchmarks.runner.registry import registered
from benchmarks.runner.result_files import newest


def main(argv: Sequence[str]) -> int:
    """Prints all benchmarks."""
    argparse.ArgumentParser(prog="python -m benchmarks list", description=__doc__).parse_args(argv)
    print("\n".join(lines(registered().values(), newest(RESULTS, QUICK_RESULTS))))
    return 0


def lines(
    benchmarks: Iterable[Benchmark], results: Mapping[tuple[str, str], Mapping[str, Any]]
) -> Iterator[str]:
    """Each with its question below it. Seconds are those of the newest result of either mode."""
    yield f"{'name':<18} {'ranks':>5} {'full':>7} {'quick':>7}  environment"
    for benchmark in benchmarks:
        full, quick = (_seconds(results.get((benchmark.name, mode))) for mode in ("full", "quick"))
        yield (
            f"{benchmark.name:<18} {benchmark.ranks:>5} {full:>7} {quick:>7}  "
            f"{benchmark.environment or 'this one'}"
        )
        yield from textwrap.wrap(
            benchmark.question, 96, initial_indent="    ", subsequent_indent="    "
        )


def _seconds(result: Mapping[str, Any] | None) -> str:
    return "-" if result is None else f"{result['seconds']:.0f} s"
