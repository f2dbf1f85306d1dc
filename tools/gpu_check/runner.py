"""Runs stages, each in a process of its own, within a total budget of time. Standard library only.

Neither a stage that fails nor one that hangs, dies or floods its log keeps the others from running.
Those that measure time run alone; those between them run side by side, as many as the cores can
carry.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_check.folder import ResultFolder, tail
from tools.gpu_check.stage import MISSING
from tools.gpu_check.table import Stage

ROOT = Path(__file__).resolve().parents[2]

OK, STAGE_FAILED, SKIPPED = "ok", "failed", "skipped"
_POLL_SECONDS = 0.05
_RESERVE_SECONDS = 3.0  # of the budget, for the page
_SLACK_SECONDS = 1.0  # that ending a stage at its limit may take
_MOST_RECORD_BYTES = 512 << 10  # of one stage
_MOST_SCRATCH_BYTES = 32 << 20  # of one stage's output, which is a runaway loop's rather than a log
_CORES_A_STAGE = 4
_SIMULATED_LIMIT_FACTOR = 5  # a few busy cores do what a GPU does


@dataclass
class Outcome:
    """How a stage ended."""

    stage: str
    outcome: str  # ok, failed or skipped
    seconds: float = 0.0
    reason: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "kind": "outcome",
            "outcome": self.outcome,
            "seconds": round(self.seconds, 2),
            "reason": self.reason,
        }


class Runner:
    """One run of `make gpu-check`."""

    def __init__(
        self,
        folder: ResultFolder,
        scratch: Path,
        *,
        budget_seconds: float,
        simulate: bool = False,
        num_jobs: int | None = None,
        site: Path | None = None,
        tell: Callable[[Outcome], object] = lambda _: None,
    ) -> None:
        """
        Args:
            scratch: a folder for what is no result; large enough for a few small checkpoints.
            budget_seconds: for all stages together. What no longer fits is skipped.
            num_jobs: stages side by side, of those that do not run alone; default: by the number of
                cores.
            site: a folder of packages that are not installed.
            tell: is called with each outcome as it comes.
        """
        self._folder = folder
        self._scratch = scratch
        self._deadline = time.monotonic() + budget_seconds - _RESERVE_SECONDS
        self._simulate = simulate
        self._num_jobs = num_jobs or max(1, len(os.sched_getaffinity(0)) // _CORES_A_STAGE)
        self._site = site
        self._tell = tell
        self._lock = threading.Lock()
        self._kept_seconds = 0.0  # of the budget, for stages that must come to run
        self._shared = scratch / "shared"
        self._shared.mkdir(parents=True, exist_ok=True)

    def run(self, stages: Sequence[Stage]) -> list[Outcome]:
        """Runs them in their order. Their records are in the folder as soon as each has ended."""
        outcomes: list[Outcome] = []
        self._kept_seconds = sum(
            stage.least_seconds + _SLACK_SECONDS for stage in stages if stage.keeps_time
        )
        for runs_alone, group in itertools.groupby(stages, key=lambda stage: stage.runs_alone):
            with ThreadPoolExecutor(1 if runs_alone else self._num_jobs) as pool:
                outcomes += pool.map(self._run_and_tell, list(group))
        self._collect_files()
        return outcomes

    def _run_and_tell(self, stage: Stage) -> Outcome:
        outcome = self._run_stage(stage)
        with self._lock:
            for record in outcome.records:
                self._folder.append(record)
            self._folder.append(outcome.to_json())
            if outcome.outcome == STAGE_FAILED:
                for log in sorted((self._scratch / stage.name).glob("log*.txt")):
                    self._folder.append_log(f"{stage.name} {log.name}", log)
            self._tell(outcome)
        return outcome

    def _run_stage(self, stage: Stage) -> Outcome:
        left = self._deadline - time.monotonic()
        left -= 0.0 if stage.keeps_time else self._kept_seconds
        if left < stage.least_seconds:
            needed = f"it needs {stage.least_seconds:.0f}"
            reason = f"the budget: {max(0.0, left):.0f} s are left, and {needed}"
            return Outcome(stage.name, SKIPPED, reason=reason)
        scratch = self._scratch / stage.name
        scratch.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        limit = min(stage.limit_seconds * (_SIMULATED_LIMIT_FACTOR if self._simulate else 1), left)
        process = self._start(stage, scratch, start + limit)
        stopped = _watch(process, start + limit, scratch)
        seconds = time.monotonic() - start

        records, problem = _read_records(stage.name, scratch)
        if stopped:
            reason = f"killed after {seconds:.0f} s" if stopped == "limit" else stopped
            outcome, reason = STAGE_FAILED, f"{reason}; {_last_line(scratch)}"
        else:
            outcome, reason = _judge(process.returncode, records, scratch)
        if problem:
            outcome, reason = STAGE_FAILED, problem
        return Outcome(stage.name, outcome, seconds, reason, records)

    def _start(self, stage: Stage, scratch: Path, deadline: float) -> subprocess.Popen[bytes]:
        order = {
            "stage": stage.name,
            "function": stage.function,
            "records": str(scratch / "records.jsonl"),
            "scratch": str(scratch),
            "shared": str(self._shared),
            "simulate": self._simulate,
            "deadline": deadline,
        }
        path = [str(ROOT), *([str(self._site)] if self._site else [])]
        inherited = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            **stage.environment,
            "PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])]),
            "PYTHONUNBUFFERED": "1",
        }
        with (scratch / "log.txt").open("wb") as log:
            # A session of its own: its ranks are in the same process group, and are killed with it.
            return subprocess.Popen(
                [sys.executable, "-m", "tools.gpu_check.stage", json.dumps(order)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _collect_files(self) -> None:
        keep = self._shared / "keep"
        for file in sorted(keep.iterdir()) if keep.exists() else ():
            reason = self._folder.keep(file)
            if reason:
                self._folder.append({"stage": "", "kind": "note", "text": reason})


def _watch(process: subprocess.Popen[bytes], deadline: float, scratch: Path) -> str:
    """Waits for a process to end. Returns why it was killed, or nothing if it was not."""
    stopped = ""
    while process.poll() is None and not stopped:
        if time.monotonic() > deadline:
            stopped = "limit"
        elif sum(file.stat().st_size for file in _own_files(scratch)) > _MOST_SCRATCH_BYTES:
            stopped = (
                f"killed: it wrote more than {_MOST_SCRATCH_BYTES >> 20} MiB of records and logs"
            )
        else:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)

    # Also after an end of its own: a rank that it has started may be left.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return stopped


def _own_files(scratch: Path) -> Iterator[Path]:
    yield from scratch.glob("log*.txt")
    yield from scratch.glob("records*.jsonl")


def _judge(status: int, records: list[dict[str, Any]], scratch: Path) -> tuple[str, str]:
    """(outcome, reason) of a process that has ended by itself."""
    if status == 0:
        return OK, ""
    if status < 0:
        return STAGE_FAILED, f"ended by {signal.Signals(-status).name}; {_last_line(scratch)}"
    if status == MISSING:
        return SKIPPED, next(
            (record["reason"] for record in records if record["kind"] == "skip"), "a package"
        )
    for record in records:
        if record["kind"] == "check" and not record["ok"]:
            return (
                STAGE_FAILED,
                f"{record['what']}: expected {record['expected']}, got {record['got']}",
            )
        if record["kind"] == "error":
            return STAGE_FAILED, record["text"].strip().splitlines()[-1]
    return STAGE_FAILED, f"exit status {status}; {_last_line(scratch)}"


def _read_records(stage: str, scratch: Path) -> tuple[list[dict[str, Any]], str]:
    """(the records of a stage and of its ranks, what is wrong with them)."""
    records: list[dict[str, Any]] = []
    for path in sorted(scratch.glob("records*.jsonl")):
        size = path.stat().st_size
        with path.open(errors="replace") as file:
            # A line that the process's death has torn is none.
            for line in file.read(_MOST_RECORD_BYTES).splitlines():
                with suppress(ValueError):
                    records.append(json.loads(line))
        if size > _MOST_RECORD_BYTES:
            return (
                records,
                f"{path.name} of {stage} has {size} bytes, expected at most {_MOST_RECORD_BYTES}",
            )
    return records, ""


def _last_line(scratch: Path) -> str:
    """The last line that the stage printed."""
    lines = tail(scratch / "log.txt").splitlines()
    return f"it last printed: {lines[-1][:200]}" if lines else "it printed nothing"
