"""Runs benchmarks one after the other, each as a process, and stores their results. One that fails
leaves no file, and the others still run.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.processes import started
from benchmarks.helpers.report import RESULT_FILE
from benchmarks.helpers.result import Result
from benchmarks.peers.environments import interpreter
from benchmarks.reporting.stored import SCHEMA
from benchmarks.runner.registry import ROOT
from megatron.core.device import Device, kind_of
from megatron.core.files import published
from megatron.core.local_ranks import lines_of, num_usable_cores

_TAIL_LINES = 12


def machine() -> dict[str, Any]:
    """Its processor with the instructions that PyTorch uses, as many cores and as much memory as it
    has for us, and its accelerator.
    """
    models = (line for line in lines_of(Path("/proc/cpuinfo")) if line.startswith("model name"))
    model = next(models, "").partition(":")[2].strip()
    device = Device(kind_of())
    return {
        "cpu": f"{model or platform.processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": num_usable_cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "platform": platform.platform(terse=True),
        "accelerator": device.description if device.is_accelerator else None,
    }


@dataclass(frozen=True)
class Revision:
    """The commit, and whether files differ from it; None for both where there is no git."""

    commit: str | None
    is_dirty: bool | None

    @classmethod
    def of(cls, root: Path) -> Revision:
        commit = _git(root, "rev-parse", "HEAD")
        # Results of earlier runs do not describe the code.
        changes = _git(root, "status", "--porcelain", "--", ".", ":!benchmarks/results")
        return cls(commit, None if commit is None or changes is None else bool(changes))


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git, or no repository."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


class Origin(NamedTuple):
    """Where all results of one run of the runner come from."""

    mode: str  # "full" or "quick"
    revision: Revision
    machine: Mapping[str, Any]


def write_result(
    folder: Path,
    benchmark: Benchmark,
    origin: Origin,
    handed_over: Mapping[str, Any],
    *,
    command: str,
    seconds: float,
) -> Path:
    """Replaces the result file of a benchmark, whole or not at all."""
    content = {
        "schema": SCHEMA,
        "benchmark": benchmark.name,
        "mode": origin.mode,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": origin.revision.commit,
        "is_dirty": origin.revision.is_dirty,
        "command": command,
        "machine": dict(origin.machine),
        **handed_over,
        "seconds": round(seconds, 1),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark.name}.json"
    with published(path) as stream:
        stream.write((json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
    return path


class Command(NamedTuple):
    """A command line with its environment."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    shown: str  # as one types it, without paths of this machine

    @classmethod
    def of(
        cls, benchmark: Benchmark, arguments: Sequence[str], package: str, root: Path
    ) -> Command:
        module = f"{package}.{benchmark.name}"
        # Without the peer's environment, the benchmark reports that the peer's side was not run.
        made = interpreter(benchmark.environment, root) if benchmark.environment else None
        python = str(made or sys.executable)
        paths = (str(root), os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        launcher: tuple[str, ...] = ()
        if benchmark.ranks > 1:
            environment["OMP_NUM_THREADS"] = "1"  # ranks that share cores slow each other down
            launcher = ("--standalone", "--nproc-per-node", str(benchmark.ranks))
        shown = ("torchrun", *launcher) if launcher else ("python",)
        words = (python, *(("-m", "torch.distributed.run", *launcher) if launcher else ()))
        rest = ("-m", module, *arguments)
        return cls((*words, *rest), environment, shlex.join((*shown, *rest)))


class Ending(Enum):
    """How a benchmark ended."""

    DONE = "done"
    FAILED = "FAILED"


class Outcome(NamedTuple):
    """The outcome of one benchmark.

    Attributes:
        detail: The path of the result, or the reason why the benchmark has no result.
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
            output: The directory of results.
            logs: The directory of the benchmarks' logs.
            package: Whose modules the benchmarks are.
            root: The working directory of the benchmarks.
            tell: Called with a line when a benchmark starts and when it ends.
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
