#!/usr/bin/env python3
"""Rates of an accelerator and its host, for the planner: copies between the two, and the
optimizer's pass on each side.

    python -m benchmarks.lanes

Copies run on separate lanes, from and to pinned and pageable memory, one way and both at once.
The pass of AdamW over host memory runs with several numbers of threads. All sides of a group run
interleaved, in an order drawn anew each round. The facts name the planner's flags.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import Ratio, Result, measured
from megatron.core.device import Device, kind_of
from megatron.core.host_memory import HostSlab
from megatron.core.local_ranks import num_usable_cores
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam
from megatron.core.optimizer.kernels.piece import Piece
from megatron_hybrid.plan.measure import host_array
from megatron_hybrid.plan.quantities import shown_rate

BENCHMARK = Benchmark(
    name="lanes",
    question="Copies between host and accelerator, one way and both, and the optimizer's pass on "
    "each side",
    ranks=1,
    full=("--rounds=7",),
    quick=("--copy-mib=1", "--elements=65536", "--rounds=3"),
    needs_accelerator=True,
)

UP, DOWN = "h2d", "d2h"
BOTH = "both ways at once, sum"
ON_DEVICE = "device"
# Bytes of an element in a pass: fp32 states with a bf16 gradient and weight, or an fp32 gradient.
_PASS_BYTES = 28
_THREADS = (1, 2, 4, 8, 12)

Sides = dict[str, tuple[Callable[[], object], int]]  # work, and the bytes it moves


def measure(device: Device, arguments: argparse.Namespace) -> Result:
    """All rates of one device and its host."""
    copies, pin_seconds = copy_sides(device, arguments.copy_mib << 20)
    links = rates(copies, device, arguments.rounds)
    passes = rates(pass_sides(device, arguments.elements), device, arguments.rounds)
    medians = report.medians(links | passes)
    on_host = {name: rate for name, rate in medians.items() if name.startswith("host")}
    best = max(on_host, key=lambda name: on_host[name])
    pinned = [medians[f"{way}, pinned"] for way in (UP, DOWN)]
    return Result(
        (
            *measured(links, "GB/s", "copies"),
            *measured(passes, "GB/s", "a pass of AdamW"),
        ),
        (Ratio("both ways at once / the slower way alone", medians[BOTH] / min(pinned)),),
        settings=report.settings_of(arguments),
        facts={
            "device": device.description,
            "host_kernel": HostAdam(1).body,
            "pin_seconds_per_gib": pin_seconds,
            "best_on_host": best,
            "planner_flags": {
                "--link": shown_rate(min(pinned) * 1e9),
                "--host-bandwidth": shown_rate(on_host[best] * 1e9),
                "--gpu-bandwidth": shown_rate(medians[ON_DEVICE] * 1e9),
            },
        },
    )


def rates(sides: Sides, device: Device, num_rounds: int) -> dict[str, list[float]]:
    """GB/s of each side in each round, after one round that warms up."""

    def rate(work: Callable[[], object], nbytes: int) -> float:
        start = time.perf_counter()
        work()
        device.event().synchronize()
        return nbytes / (time.perf_counter() - start) / 1e9

    works = {name: partial(rate, *side) for name, side in sides.items()}
    return report.interleaved(works, num_rounds, warm_up=1)


def copy_sides(device: Device, nbytes: int) -> tuple[Sides, float]:
    """Copies of `nbytes` bytes, and the seconds that pinning a GiB of host memory takes."""
    start = time.perf_counter()
    slab = HostSlab(2 * nbytes, device, is_pinned=True, purpose="copies")
    pin_seconds = (time.perf_counter() - start) / (2 * nbytes / 2**30)
    up, down = device.lane(UP), device.lane(DOWN)
    pinned = [slab.tensor(number * nbytes, nbytes, torch.uint8) for number in range(2)]
    # Written, since untouched pages all map to one page of zeros.
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    there = [torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2)]
    device.event().synchronize()

    def send(source: torch.Tensor) -> None:
        up.enqueue(lambda: there[0].copy_(source, non_blocking=True)).synchronize()

    def fetch(target: torch.Tensor) -> None:
        down.enqueue(lambda: target.copy_(there[1], non_blocking=True)).synchronize()

    def both() -> None:
        events = [
            up.enqueue(lambda: there[0].copy_(pinned[0], non_blocking=True)),
            down.enqueue(lambda: pinned[1].copy_(there[1], non_blocking=True)),
        ]
        for event in events:
            event.synchronize()

    sides: Sides = {
        f"{UP}, pinned": (partial(send, pinned[0]), nbytes),
        f"{DOWN}, pinned": (partial(fetch, pinned[1]), nbytes),
        f"{UP}, pageable": (partial(send, pageable), nbytes),
        f"{DOWN}, pageable": (partial(fetch, pageable), nbytes),
        BOTH: (both, 2 * nbytes),
    }
    return sides, pin_seconds


def pass_sides(device: Device, numel: int) -> Sides:
    """A step of AdamW over `numel` elements, on the device and on the host."""
    parameter = nn.Parameter(torch.ones(numel, device=device.torch_device))
    parameter.grad = torch.full_like(parameter, 1e-2)
    nbytes = numel * _PASS_BYTES
    sides: Sides = {ON_DEVICE: (FusedAdam([parameter], lr=1e-4).step, nbytes)}

    piece, cores = host_piece(numel), num_usable_cores()
    counts = {*_THREADS, max(1, cores - 2), cores}
    for count in sorted(one for one in counts if one <= cores):
        kernel = HostAdam(count)
        sides[f"host, threads: {count}"] = (partial(kernel.run, [piece]), nbytes)
    return sides


def host_piece(numel: int) -> Piece:
    """Arrays as an offloaded bucket has them: bf16 gradient and weight, fp32 states."""

    def array(dtype: torch.dtype, value: float) -> torch.Tensor:
        return host_array(numel, dtype, Device("cpu")).fill_(value)

    fp32, bf16 = torch.float32, torch.bfloat16
    return Piece(
        AdamStep(10, lr=1e-4, weight_decay=0.01),
        grad=array(bf16, 1e-2),
        weight=array(fp32, 1.0),
        states={"exp_avg": array(fp32, 1e-4), "exp_avg_sq": array(fp32, 1e-4)},
        out=array(bf16, 0.0),
    )


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--copy-mib", type=int, default=1024, help="size of each copy")
    parser.add_argument("--elements", type=int, default=256 << 20, help="that a pass goes over")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    arguments = parsed(argv)
    device = Device(kind_of())
    device.make_current()
    report.hand_over(measure(device, arguments), arguments.output)


if __name__ == "__main__":
    main()
