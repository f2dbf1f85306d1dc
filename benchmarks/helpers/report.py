"""How a benchmark reads its command line, runs its sides in rounds, and hands its result over."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.helpers.result import Measurement, Ratio, Result
from benchmarks.helpers.tables import measurement_lines, not_run_lines, ratio_lines
from benchmarks.helpers.versions import versions

# The runner's environment variable: the file in which it expects the result.
RESULT_FILE = "BENCHMARK_RESULT_FILE"

_Name = TypeVar("_Name")
_T = TypeVar("_T")


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks have: the module's docstring as help, and `--output`."""
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write the result, if anywhere"
    )
    return parser


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments as a result's settings: without where the result goes."""
    return {name: value for name, value in vars(arguments).items() if name != "output"}


def schedule(names: Sequence[_Name], num_rounds: int, seed: int = 0) -> Iterator[_Name]:
    """Every name once a round, in another order each round, the same on every rank."""
    generator = random.Random(seed)
    for _ in range(num_rounds):
        yield from generator.sample(list(names), len(names))


def interleaved(
    sides: Mapping[_Name, Callable[[], _T]], num_rounds: int, *, warm_up: int = 0, seed: int = 0
) -> dict[_Name, list[_T]]:
    """The results of each side in each round, with the sides in a new random order each round.

    Args:
        warm_up: Rounds before these, which are not kept.
    """
    found: dict[_Name, list[_T]] = {name: [] for name in sides}
    order = schedule(list(sides), warm_up + num_rounds, seed)
    for number, name in enumerate(order):
        figure = sides[name]()
        if number >= warm_up * len(sides):
            found[name].append(figure)
    return found


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def medians(times: Mapping[_Name, Sequence[float]]) -> dict[_Name, float]:
    """The median of each list."""
    return {name: statistics.median(values) for name, values in times.items()}


def hand_over_all(
    found: Sequence[tuple[Sequence[Measurement], Sequence[Ratio]]], arguments: argparse.Namespace
) -> None:
    """Hands over several comparisons with the arguments of one benchmark, in order."""
    result = Result(
        tuple(one for measurements, _ in found for one in measurements),
        tuple(ratio for _, ratios in found for ratio in ratios),
        settings=settings_of(arguments),
    )
    hand_over(result, arguments.output)


def hand_over(result: Result, output: Path | None = None) -> None:
    """Prints the result, and writes it where the runner expects it or else to `output`.

    In a process group only one rank may call this.
    """
    ratios = ratio_lines([(ratio.name, ratio) for ratio in result.ratios])
    lines = [*measurement_lines(result), *ratios, *not_run_lines(result)]
    print("\n".join(lines), flush=True)

    expected = os.environ.get(RESULT_FILE)
    path = Path(expected) if expected else output
    if path is None:
        return

    content = {"versions": versions(), **result.to_json()}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
