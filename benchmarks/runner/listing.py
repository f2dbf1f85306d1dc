"""`python -m benchmarks list`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.helpers.benchmark import Benchmark
from benchmarks.runner.places import QUICK_RESULTS, RESULTS
from benchmarks.runner.registry import registered
from benchmarks.runner.result_files import seconds_of


def main(argv: Sequence[str]) -> int:
    """Prints all benchmarks."""
    argparse.ArgumentParser(prog="python -m benchmarks list", description=__doc__).parse_args(argv)
    print("\n".join(lines(registered().values(), *map(seconds_of, (RESULTS, QUICK_RESULTS)))))
    return 0


def lines(
    benchmarks: Iterable[Benchmark], full: Mapping[str, float], quick: Mapping[str, float]
) -> Iterator[str]:
    """Each with its question below it, and the seconds that full and quick results took."""
    yield f"{'name':<18} {'ranks':>5} {'full':>7} {'quick':>7}  environment"
    for benchmark in benchmarks:
        yield (
            f"{benchmark.name:<18} {benchmark.ranks:>5} {_seconds(full.get(benchmark.name)):>7} "
            f"{_seconds(quick.get(benchmark.name)):>7}  {benchmark.environment or 'this one'}"
        )
        yield from textwrap.wrap(
            benchmark.question, 96, initial_indent="    ", subsequent_indent="    "
        )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f} s"
