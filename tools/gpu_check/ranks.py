"""Ranks of a stage: processes that call one function of it, in a process group of their own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import collectives
from tools.gpu_check.accelerator import Accelerator
from tools.gpu_check.findings import Findings

_KILL_SECONDS = 8.0  # that ranks may go on for once another has failed
_REPORT_SECONDS = 4.0  # of a stage's time, for what its parent does after its ranks
_POLL_SECONDS = 0.05

# Ranks with different ids count as ranks of different hosts, so NCCL does not look whether they
# share a GPU. They talk by sockets then, which must find the loopback device on a machine without a
# network.
_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
_NCCL_ON_ONE_GPU = {**_LOOPBACK, "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}


class Ranks(NamedTuple):
    """Ranks that have ended.

    Attributes:
        statuses: their exit statuses. One that was killed for another's failure, or at the limit,
            has a negative one.
        folder: what was `findings.scratch` for them.
    """

    statuses: list[int]
    folder: Path


def shared_gpu_environment(rank: int) -> dict[str, str]:
    """Variables with which ranks of one GPU can talk by NCCL."""
    return {**_NCCL_ON_ONE_GPU, "NCCL_HOSTID": f"gpu-check-{rank}"}


def run_ranks(
    findings: Findings,
    function: str,
    num_ranks: int,
    *,
    limit_seconds: float | None = None,
    **arguments: Any,
) -> Ranks:
    """Calls `module:name` on so many ranks, with the findings of each, its rank and the number of
    ranks.

    Their records become the stage's, their `findings.scratch` is one folder.
    """
    name = f"{function.rpartition(':')[2]}.{time.monotonic_ns()}"
    folder = findings.scratch / name
    folder.mkdir()
    processes = [
        _start(findings, function, rank, num_ranks, name, limit_seconds, arguments)
        for rank in range(num_ranks)
    ]
    left = min(limit_seconds or math.inf, findings.seconds_left - _REPORT_SECONDS)
    return Ranks(_wait(processes, time.monotonic() + left), folder)


def join(
    findings: Findings,
    accelerator: Accelerator,
    rank: int,
    num_ranks: int,
    backend: str | None = None,
) -> None:
    """The default process group of a rank, and what goes with it.

    Args:
        backend: by default the project's own.
    """
    # As a launcher would say it: ranks share the cores.
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    os.environ.update(_LOOPBACK)
    store = dist.FileStore(str(findings.scratch / "store"), num_ranks)
    dist.init_process_group(
        backend or accelerator.backend, store=store, rank=rank, world_size=num_ranks
    )
    if backend is not None and f"{accelerator.kind}:gloo" in backend:
        use_gloo_on_device()
    make_deterministic()


def make_deterministic() -> None:
    """Without this, attention's backward adds up in any order, and no two runs agree."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling fresh memory would be one more kernel for each, and hide what reads it too early.
    torch.utils.deterministic.fill_uninitialized_memory = False


def use_gloo_on_device() -> None:
    """Builds the engine's collectives from gloo's for device tensors, which know no averages."""

    def all_gather(out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.clone(), group=group)
        out.copy_(torch.cat(parts))

    def reduce_scatter(
        out: torch.Tensor, whole: torch.Tensor, op: Any, group: dist.ProcessGroup
    ) -> None:
        total = whole.float()
        total = total.clone() if total is whole else total
        dist.all_reduce(total, group=group)
        num_ranks = dist.get_world_size(group)
        part = total.chunk(num_ranks)[dist.get_rank(group)]
        out.copy_(part / num_ranks if op == dist.ReduceOp.AVG else part)

    collectives._all_gather_on_device = all_gather
    collectives._reduce_scatter_on_device = reduce_scatter


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
    left = (
        findings.seconds_left
        if limit_seconds is None
        else min(findings.seconds_left, limit_seconds)
    )
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
