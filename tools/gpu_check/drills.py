"""Watchdog drills: of two ranks on one GPU, one dies, hangs or is slow, and is to be blamed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron.training.health.events import EventKind, read_events
from megatron.training.health.exits import ExitCode
from tools.gpu_check.accelerator import open_accelerator
from tools.gpu_check.drill_rank import SIMULATE
from tools.gpu_check.findings import Findings, SkippedError
from tools.gpu_check.ranks import shared_gpu_environment
from tools.gpu_check.two_ranks import shared_backend

ROOT = Path(__file__).resolve().parents[2]
_HANG_SECONDS = 6.0
_SIMULATED_HANG_SECONDS = 12.0
_CORES_A_DRILL = 4

_FLAGS = [
    *(
        "--num-layers",
        "2",
        "--hidden-size",
        "128",
        "--num-attention-heads",
        "4",
        "--seq-length",
        "16",
        "--mock-data",
    ),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "1023", "--num-workers", "0", "--bf16"),
    *(
        "--micro-batch-size",
        "2",
        "--global-batch-size",
        "8",
        "--log-interval",
        "1",
        "--train-iters",
        "6",
    ),
    *("--normalization", "RMSNorm", "--attention-dropout", "0", "--hidden-dropout", "0"),
    *("--eval-interval", "3", "--eval-iters", "2", "--lr", "1e-2", "--lr-decay-style", "constant"),
]
_OFFLOADED = [
    "--optimizer-cpu-offload",
    "--overlap-cpu-optimizer-d2h-h2d",
    "--overlap-optimizer-with-forward",
]


class Drill(NamedTuple):
    """What happens to the second rank, and what must come of it."""

    name: str
    fault: str
    statuses: tuple[int, int]
    event: EventKind | None  # that is written, naming rank 1
    flags: Sequence[str] = ()


_HANGS = (int(ExitCode.HANG), int(ExitCode.HANG))
DRILLS = [
    Drill(
        "killed",
        "kill:rank=1,step=3,at=backward",
        (int(ExitCode.LOST_RANK), -signal.SIGKILL),
        EventKind.LOST,
    ),
    Drill("hangs in forward", "hang:rank=1,step=4,at=forward", _HANGS, EventKind.HANG),
    Drill("hangs in evaluation", "hang:rank=1,step=3,at=evaluate", _HANGS, EventKind.HANG),
    Drill(
        "hangs in step, offloaded", "hang:rank=1,step=4,at=step", _HANGS, EventKind.HANG, _OFFLOADED
    ),
    # Nobody is to blame for having waited less than the timeout.
    Drill("is slow", "slow:rank=1,step=4,at=forward,seconds=3,times=1", (0, 0), None),
]


class Ended(NamedTuple):
    """A drill that is over."""

    statuses: tuple[int, ...]
    seconds: float
    folder: Path


def drills(findings: Findings) -> None:
    """All of them, side by side where there are cores for it."""
    accelerator = open_accelerator(findings)
    backend = shared_backend(findings, accelerator)
    if backend != accelerator.backend:
        raise SkippedError(
            f"needs {accelerator.backend} between two ranks on one GPU, and only {backend} works"
        )
    num_side_by_side = max(1, len(os.sched_getaffinity(0)) // _CORES_A_DRILL)
    with ThreadPoolExecutor(num_side_by_side) as pool:
        ends = pool.map(lambda drill: _run(findings, accelerator.kind, drill), DRILLS)
        for drill, ended in zip(DRILLS, ends, strict=True):
            _check(findings, drill, ended)
    findings.figure("drills", len(DRILLS), is_telling=True)


def _run(findings: Findings, kind: str, drill: Drill) -> Ended:
    """Starts the ranks as two machines of one rank each, so that both use the first GPU."""
    folder = findings.scratch / drill.name.replace(" ", "_").replace(",", "")
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hang_seconds = _SIMULATED_HANG_SECONDS if findings.simulate else _HANG_SECONDS
    command = [
        *(
            sys.executable,
            "-m",
            "tools.gpu_check.drill_rank",
            "--device",
            kind,
            *_FLAGS,
            *drill.flags,
        ),
        *(
            "--hang-timeout-seconds",
            str(hang_seconds),
            "--events-dir",
            str(folder),
            "--inject",
            drill.fault,
        ),
    ]
    start = time.monotonic()
    processes = [_start(findings, command, rank, port, folder) for rank in range(2)]
    deadline = time.monotonic() + (findings.seconds_left - 4 if findings.simulate else 75.0)
    statuses = []
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, min(deadline - time.monotonic(), findings.seconds_left - 4)))
        if process.poll() is None:
            process.kill()
        statuses.append(process.wait())
    return Ended(tuple(statuses), time.monotonic() - start, folder)


def _start(
    findings: Findings, command: list[str], rank: int, port: int, folder: Path
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **shared_gpu_environment(rank),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        SIMULATE: "1" if findings.simulate else "",
    }
    with (folder / f"{rank}.txt").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _check(findings: Findings, drill: Drill, ended: Ended) -> None:
    """Exit statuses, and what the event log says."""
    findings.figure(f"{drill.name}: from start to end", ended.seconds, "s")
    is_ok = findings.expect(
        f"{drill.name}: exit statuses", list(ended.statuses), list(drill.statuses)
    )
    events = list(read_events(ended.folder))
    blamed = [
        (event["event"], event["ranks"])
        for event in events
        if event["event"] in (EventKind.LOST, EventKind.HANG)
    ]
    expected = [(drill.event.value, [1])] if drill.event else []
    is_ok &= findings.expect(f"{drill.name}: who is blamed", blamed, expected)
    struck = sum(event["event"] == EventKind.INJECT for event in events)
    is_ok &= findings.expect(f"{drill.name}: faults that were injected", struck, 1)
    # Where the runner looks for what a stage that failed has printed.
    for rank in range(2) if not is_ok else ():
        (ended.folder / f"{rank}.txt").rename(
            findings.scratch / f"log.{ended.folder.name}.{rank}.txt"
        )
