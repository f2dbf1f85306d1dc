"""Runs benchmarks one after the other. One that fails leaves no file, and the others still run."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.processes import started
from benchmarks.helpers.report import RESULT_FILE
from benchmarks.helpers.result import Result
from benchmarks.runner.commands import Command
from benchmarks.runner.places import ROOT
from benchmarks.runner.result_files import Origin, write_result

_TAIL_LINES = 12


class Ending(Enum):
    """How a benchmark ended."""

    DONE = "done"
    FAILED = "FAILED"


class Outcome(NamedTuple):
    """What came of one benchmark.

    Attributes:
        detail: The result's file, or why there is none.
        result: Only of one that is done.
    """

    benchmark: Benchmark
    ending: Ending
    seconds: float
    detail: str
    result: Result | None = None


class Runner:
    """One run of the runner."""

    def __init__(
        self,
        origin: Origin,
        output: Path,
        logs: Path,
        *,
        package: str = "benchmarks",
        root: Path = ROOT,
        tell: Callable[[str], object] = print,
    ) -> None:
        """
        Args:
            output: The folder of results.
            logs: The folder of what the benchmarks print.
            package: Whose modules the benchmarks are.
            root: The folder in which they run.
            tell: Is given a line when a benchmark begins and when it ends.
        """
        self._origin = origin
        self._output = output
        self._logs = logs
        self._package = package
        self._root = root
        self._tell = tell

    def run(self, benchmarks: Sequence[Benchmark]) -> Iterator[Outcome]:
        """Each outcome as soon as it is known."""
        for number, benchmark in enumerate(benchmarks, 1):
            self._tell(f"[{number}/{len(benchmarks)}] {benchmark.name} ...")
            outcome = self._run_one(benchmark)
            self._tell(
                f"[{number}/{len(benchmarks)}] {benchmark.name} {outcome.ending.value} after "
                f"{outcome.seconds:.1f} s: {outcome.detail}"
            )
            yield outcome

    def _run_one(self, benchmark: Benchmark) -> Outcome:
        arguments = benchmark.quick if self._origin.mode == "quick" else benchmark.full
        command = Command.of(benchmark, arguments, self._package, self._root)
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{benchmark.name}.log"
        with tempfile.TemporaryDirectory(prefix="benchmark-result-") as folder:
            handed_over = Path(folder) / "result.json"
            start = time.monotonic()
            returned = self._wait(command, handed_over, log)
            seconds = time.monotonic() - start
            content = _read(handed_over)

        if returned != 0 or content is None:
            why = _why(returned) + "".join(f"\n    {line}" for line in _tail(log))
            return Outcome(benchmark, Ending.FAILED, seconds, why)
        path = write_result(
            self._output, benchmark, self._origin, content, command=command.shown, seconds=seconds
        )
        result = Result.from_json(content)
        return Outcome(benchmark, Ending.DONE, seconds, _from_here(path), result)

    def _wait(self, command: Command, handed_over: Path, log: Path) -> int:
        """The process's return code."""
        environment = {**command.environment, RESULT_FILE: str(handed_over)}
        with (
            log.open("wb") as stream,
            started(command.words, self._root, environment, stream) as process,
        ):
            return process.wait()


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _why(returned: int) -> str:
    if returned == 0:
        return "it ended without handing a result over"
    if returned > 0:
        return f"exit code {returned}"
    try:
        return f"killed by {signal.Signals(-returned).name}"
    except ValueError:
        return f"killed by signal {-returned}"


def _tail(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [*lines[-_TAIL_LINES:], f"(all of it: {_from_here(log)})"]


def _from_here(path: Path) -> str:
    """As one would type it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
