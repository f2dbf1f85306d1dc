#!/usr/bin/env python3
"""Our all-gather and reduce-scatter against torch.distributed's, on flat CPU tensors over gloo.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/collectives.py

Both sides run interleaved in one process group, in an order drawn anew each round. Prints medians
and ratios and writes them to benchmarks/results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.helpers import report
from megatron.core.distributed.fsdp import collectives

MIB = 2**20


def variants(num_bytes: int) -> dict[str, Callable[[], None]]:
    """What is compared, by name: the whole tensor has `num_bytes` in fp32, half of that in bf16."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    whole = torch.randn(num_bytes // 4 // size * size)
    gathered, part = torch.empty_like(whole), torch.empty(whole.numel() // size)
    half = whole.bfloat16()
    mean = collectives.Reduction(is_average=True)
    own = gathered.chunk(size)[rank]

    def widen_then_reduce_with_torch() -> None:
        dist.reduce_scatter_tensor(part, half.float(), op=dist.ReduceOp.AVG)

    return {
        "all_gather fp32, ours": lambda: collectives.all_gather(gathered, own, group),
        "all_gather fp32, torch": lambda: dist.all_gather_into_tensor(gathered, part),
        "reduce_scatter fp32, ours": lambda: collectives.reduce_scatter(part, whole, group, mean),
        "reduce_scatter fp32, torch": lambda: dist.reduce_scatter_tensor(
            part, whole, op=dist.ReduceOp.AVG
        ),
        "reduce_scatter bf16 in fp32, ours": lambda: collectives.reduce_scatter(
            part, half, group, mean
        ),
        "reduce_scatter bf16 in fp32, torch": widen_then_reduce_with_torch,
    }


def measure(num_bytes: int, num_rounds: int) -> dict[str, float]:
    """Median milliseconds of each variant. The first three rounds warm up and are not counted."""
    work = variants(num_bytes)
    times: dict[str, list[float]] = {name: [] for name in work}
    for number, name in enumerate(report.schedule(list(work), num_rounds + 3)):
        dist.barrier()
        elapsed = report.seconds(work[name])
        if number >= 3 * len(work):
            times[name].append(elapsed * 1e3)
    return report.medians(times)


def main() -> None:
    """Measures several sizes; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    results = {f"{mib} MiB": measure(mib * MIB, arguments.rounds) for mib in arguments.mib}
    if dist.get_rank() == 0:
        for size, medians in results.items():
            for name in (name for name in medians if name.endswith("ours")):
                ours, theirs = medians[name], medians[name.replace("ours", "torch")]
                operation = name.removesuffix(", ours")
                print(
                    f"{size:>7} {operation:28} ours {ours:7.2f} ms, torch {theirs:7.2f} ms, "
                    f"{theirs / ours:.2f}x"
                )
        print(report.write("collectives", {"ranks": dist.get_world_size(), "median_ms": results}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
