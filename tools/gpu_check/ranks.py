"""Ranks of a stage: processes that call one function of it, in a process group of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tools.gpu_check.accelerator import Accelerator
from tools.gpu_check.findings import Findings

_KILL_SECONDS = 8.0  # that ranks may go on for once another has failed
_POLL_SECONDS = 0.05

# Ranks with different ids count as ranks of different hosts, so NCCL does not look whether they share a GPU. They talk
# by sockets then, which must find the loopback device on a machine without a network.
_NCCL_ON_ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}


def shared_gpu_environment(rank: int) -> dict[str, str]:
    """Variables with which ranks of one GPU can talk by NCCL."""
    return {**_NCCL_ON_ONE_GPU, "NCCL_HOSTID": f"gpu-check-{rank}"}


def run_ranks(
    findings: Findings, function: str, num_ranks: int, *, limit_seconds: float | None = None, **arguments: Any
) -> list[int]:
    """Calls `module:name` on so many ranks, with the findings of each, its rank and the number of ranks.

    Their records become the stage's. Returns the exit status of each; a rank that was killed for another's failure, or
    at the limit, has a negative one.
    """
    name = f"{function.rpartition(':')[2]}.{num_ranks}.{time.monotonic_ns()}"
    (findings.scratch / name).mkdir()
    processes = [
        _start(findings, function, rank, num_ranks, name, limit_seconds, arguments) for rank in range(num_ranks)
    ]
    return _wait(processes, time.monotonic() + min(limit_seconds or 1e9, findings.seconds_left - 2))


def join(findings: Findings, accelerator: Accelerator, rank: int, num_ranks: int, store: str, backend: str) -> None:
    """The default process group of a rank. `store` is a file that all ranks see."""
    # As a launcher would say it: ranks share the cores.
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    dist.init_process_group(
        backend or accelerator.backend, store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks
    )
    if rank == 0:
        findings.note(f"{num_ranks} rank(s) by {dist.get_backend_config()}")


def _start(
    findings: Findings,
    function: str,
    rank: int,
    num_ranks: int,
    name: str,
    limit_seconds: float | None,
    arguments: dict[str, Any],
) -> subprocess.Popen[bytes]:
    folder = findings.scratch
    left = findings.seconds_left if limit_seconds is None else min(findings.seconds_left, limit_seconds)
    order = {
        "stage": findings.stage,
        "function": function,
        "records": str(folder / f"records.{name}.{rank}.jsonl"),
        "scratch": str(folder / name),
        "shared": str(findings.shared),
        "simulate": findings.simulate,
        "deadline": time.monotonic() + left,
        "arguments": {"rank": rank, "num_ranks": num_ranks, **arguments},
    }
    environment = {**os.environ, **(shared_gpu_environment(rank) if num_ranks > 1 else {})}
    with (folder / f"log.{name}.{rank}.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tools.gpu_check.stage", json.dumps(order)],
            cwd=Path(__file__).resolve().parents[2],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    has_failed = False
    while any(process.poll() is None for process in processes):
        if not has_failed and any(process.poll() for process in processes):
            has_failed = True
            deadline = min(deadline, time.monotonic() + _KILL_SECONDS)
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            processes[0].wait(_POLL_SECONDS)
        time.sleep(_POLL_SECONDS)
    return [process.wait() for process in processes]
