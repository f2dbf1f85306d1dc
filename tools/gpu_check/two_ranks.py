"""Two ranks that share one GPU: a backend that carries them, and every configuration."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from tools.gpu_check.accelerator import Accelerator, open_accelerator
from tools.gpu_check.findings import Findings, SkippedError
from tools.gpu_check.one_rank import train_all
from tools.gpu_check.ranks import join, run_ranks

_NUM_RANKS = 2
_PROBE_SECONDS = 40.0
# Those whose lanes have the most to do with each other run a second time, with pauses.
_DELAYED = ["zero3", "offload_forward_half", "offload_zero1", "offload_hsdp"]


def probe(findings: Findings) -> None:
    """Finds the first backend whose collectives two ranks can use on one device."""
    works, limit = None, findings.seconds_left if findings.simulate else _PROBE_SECONDS
    for backend in open_accelerator(findings).shared_backends:
        ranks = run_ranks(
            findings, f"{__name__}:probe_rank", _NUM_RANKS, limit_seconds=limit, backend=backend
        )
        if not any(ranks.statuses):
            works = backend
            break
        findings.note(
            f"two ranks on one device cannot use {backend}: exit statuses {ranks.statuses}"
        )
    findings.expect("a backend for two ranks on one device was found", works is not None, True)
    findings.figure("backend", works, is_telling=True)
    findings.share("backend", works)


def probe_rank(findings: Findings, rank: int, num_ranks: int, backend: str) -> None:
    """The three collectives of the engine, on a few values."""
    accelerator = open_accelerator(findings)
    join(findings, accelerator, rank, num_ranks, backend)
    device = accelerator.torch_device
    from megatron.core.distributed.fsdp import collectives

    group = dist.group.WORLD
    assert group is not None, "join made it"
    own = torch.full((4,), float(rank + 1), device=device)
    gathered = torch.empty(4 * num_ranks, device=device)
    collectives.all_gather(gathered, own, group)
    findings.expect("all-gather", gathered.tolist(), [1.0] * 4 + [2.0] * 4)

    mean = torch.empty(4, device=device)
    collectives.reduce_scatter(
        mean, gathered * (rank + 1), group, collectives.Reduction(is_average=True)
    )
    findings.expect("reduce-scatter of means", mean.tolist(), [1.5 * (rank + 1)] * 4)

    dist.all_reduce(own)
    findings.expect("all-reduce", own.tolist(), [3.0] * 4)


def shared_backend(findings: Findings, accelerator: Accelerator) -> str:
    """The backend that `probe` has found, or the first. SkippedError if it found none."""
    if (findings.shared / "backend.json").exists():
        backend = findings.shared_by("backend")
        if backend is None:
            raise SkippedError(
                "needs a backend for two ranks on one device, and the stage nccl has found none"
            )
        return str(backend)
    return accelerator.shared_backends[0]


def train(findings: Findings) -> None:
    """Every configuration; then that both ranks have seen the same losses."""
    backend = shared_backend(findings, open_accelerator(findings))
    findings.figure("backend", backend, is_telling=True)
    ranks = run_ranks(findings, f"{__name__}:train_rank", _NUM_RANKS, backend=backend)
    findings.expect("exit statuses of the ranks", ranks.statuses, [0] * _NUM_RANKS)
    files = [ranks.folder / f"bits.{rank}.json" for rank in range(_NUM_RANKS)]
    found: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files if file.exists()]
    if len(found) == _NUM_RANKS:
        steps = [{name: bits[:-1] for name, bits in runs.items()} for runs in found]
        findings.expect_at_least("configurations that both ranks ran", len(steps[0]), 1)
        different = [name for name in steps[0] if steps[0][name] != steps[1].get(name)]
        findings.expect("configurations in which the ranks saw different losses", different, [])


def train_rank(findings: Findings, rank: int, num_ranks: int, backend: str) -> None:
    """One rank's part: all configurations undisturbed, then some with pauses, to the same bits."""
    accelerator = open_accelerator(findings)
    join(findings, accelerator, rank, num_ranks, backend)
    bits = train_all(findings, accelerator, rank=rank, num_ranks=num_ranks)
    (findings.scratch / f"bits.{rank}.json").write_text(json.dumps(bits))
    again = train_all(
        findings, accelerator, rank=rank, num_ranks=num_ranks, pauses=True, names=_DELAYED
    )
    different = [name for name in again if again[name] != bits.get(name)]
    findings.expect("configurations whose bits are others with pauses", different, [])
