"""Jobs of `pretrain_gpt.py` that are started as a user starts them, disturbed, and looked at from
outside.

A job has a directory: `saved` (its checkpoints and event log), `metrics.jsonl`, and `log.txt` with
all that it printed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron.training.health.events import read_events
from tests.functional_tests.helpers.runs import ROOT, environment
from tests.helpers.ranks import run_ranks

TIMEOUT = 1800.0  # seconds

# A model of 3.7 million parameters: updates and saves take tens of milliseconds, so that a fault
# can strike in them.
MODEL = [
    *(
        "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 16 --mock-data"
    ).split(),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "8191", "--num-workers", "0"),
    *"--micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --log-interval 1".split(),
    *("--lr", "1e-2", "--lr-decay-style", "cosine"),
]
OFFLOADED = ["--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"]
NO_DROPOUT = ["--attention-dropout", "0", "--hidden-dropout", "0"]


def torchrun(*flags: str, num_ranks: int = 2) -> list[str]:
    """The launcher of a job on one machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    return [*launcher, *(flags if "--nnodes" in flags else ("--standalone", *flags))]


@dataclass(frozen=True)
class Job:
    """The output of a job in its directory, during and after the run."""

    folder: Path

    @property
    def saved(self) -> Path:
        return self.folder / "saved"

    @property
    def flags(self) -> list[str]:
        """What makes a run this job's."""
        return ["--save", str(self.saved), "--metrics-jsonl", str(self.folder / "metrics.jsonl")]

    @property
    def log(self) -> str:
        return "".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("log*.txt"))
        )

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds, or all, in the order in which they were written."""
        return [event for event in read_events(self.saved) if not kinds or event["event"] in kinds]

    def losses(self) -> list[tuple[int, float]]:
        """Every (iteration, loss) that was written, an iteration that was made twice twice; a torn
        line is none.
        """
        path, found = self.folder / "metrics.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["kind"] == "train":
                found.append((record["iteration"], record["loss"]))
        return found


@contextmanager
def started(
    job: Job, launcher: Sequence[str], *flags: str, log: str = "log.txt", **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A run of a job in the background; nothing of it is left when the context ends."""
    job.folder.mkdir(parents=True, exist_ok=True)
    command = [*launcher, "pretrain_gpt.py", *job.flags, *flags]
    env = environment(LOGLEVEL="INFO", **variables)  # for the times in torchrun's log
    with (job.folder / log).open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT
        )
        workers: list[int] = []
        try:
            yield process
            workers = children(process.pid)
        finally:
            for pid in [*children(process.pid), *workers]:
                kill_process(pid)
            process.kill()
            process.wait()


def run(
    job: Job, launcher: Sequence[str], *flags: str, timeout: float = TIMEOUT, **variables: str
) -> int:
    """Runs a job to its end. Returns the exit code."""
    with started(job, launcher, *flags, **variables) as process:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"expected the end of the job within {timeout} s, got this so far:\n{job.log}"
            ) from None


def run_undisturbed(job: Job, *flags: str, num_ranks: int = 2) -> None:
    """The same without a launcher, on ranks that are there already."""
    job.folder.mkdir(parents=True, exist_ok=True)
    run_ranks(num_ranks, _run, [*job.flags, *flags])


def _run(argv: list[str]) -> None:
    pretrain_gpt.run(argv)


def until(condition: Callable[[], Any], what: str, timeout: float = TIMEOUT) -> Any:
    """What `condition` answers, as soon as that is true. AssertionError if it is not in time."""
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"expected {what} within {timeout} s"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """The processes that a process has started, in order; none if it has ended."""
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_process(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Recovery:
    """How long a job took from a rank's death to the first step that was made again.

    Attributes:
        phase: in which the rank died.
        seconds: of each part, by the names of `RECOVERY_PARTS`.
    """

    phase: str
    seconds: tuple[float, ...]

    def __str__(self) -> str:
        return _row(self.phase, *(f"{part:.2f}" for part in (*self.seconds, sum(self.seconds))))


RECOVERY_PARTS = (
    "noticed",  # the launcher has seen that the rank is gone
    "restart",  # the other ranks have ended, and the launcher starts new ones
    "group",  # imports, and the process group of the new ranks
    "loaded",  # model, optimizer, checkpoint
    "stepped",  # data, and the first step
)


def recoveries(job: Job) -> list[Recovery]:
    """Of each death by injection after which the next start has come to a step."""
    noticed = _agent_times(job.log, r"attempts left; will restart worker group")
    restarted = _agent_times(job.log, r"Starting worker group")
    found = []
    for death in job.events("inject"):
        times = [
            death["time"],
            *(next(t for t in log if t > death["time"]) for log in (noticed, restarted)),
        ]
        for kind in ("start", "resume", "step"):
            times += [e["time"] for e in job.events(kind) if e["restart"] == death["restart"] + 1]
        if len(times) == len(RECOVERY_PARTS) + 1:
            found.append(
                Recovery(death["phase"], tuple(after - before for before, after in pairwise(times)))
            )
    return found


def table(found: Sequence[Recovery]) -> str:
    """The parts of recoveries, in seconds, a line for each."""
    return "\n".join([_row("killed in", *RECOVERY_PARTS, "in all"), *map(str, found)])


def _row(name: str, *cells: str) -> str:
    return f"{name:<10}" + "".join(f"{cell:>10}" for cell in cells)


def _agent_times(log: str, text: str) -> list[float]:
    """When torchrun's agent has logged a line with this text, in seconds since 1970."""
    lines = re.findall(rf"^[IWE](\d{{4}} [\d:.]+) .*{text}", log, re.MULTILINE)
    year = datetime.now().year
    return [datetime.strptime(f"{year}{line}", "%Y%m%d %H:%M:%S.%f").timestamp() for line in lines]
