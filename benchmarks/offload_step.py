#!/usr/bin/env python3
"""Training steps of one GPT with the optimizer in host memory, on the device, and offloaded by
other projects.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.offload_step

bf16 compute, fp32 main weights, bf16 gradients, ZeRO-3, AdamW. All sides run interleaved in one
process group, in an order drawn anew each round:

    device              FusedAdam, states on the device
    in order            all states on the host, without overlap
    overlapped          gradients go down during backward; updates overlap with each other and the
                        next forward
    half streamed       the same, and the device updates every second group in passing; on a CPU,
                        which is its own device, this only costs
    early               as overlapped, and groups are updated during the backward, without clipping
    FSDP2 offloaded     PyTorch's FSDP2 with CPUOffloadPolicy and its fused AdamW
    no optimizer        forward and backward of our engine alone

Its facts have the floor below which no offloaded step can be: the larger of the host's pass and the
transfers, each measured alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.models import OFFLOADED, SEED, shard, shard_by_fsdp2_offloaded
from benchmarks.helpers.ranks import launched
from benchmarks.helpers.result import Ratio, Result, measured
from benchmarks.helpers.steps import (
    Side,
    add_model_arguments,
    batch_of,
    mean_parts,
    measure,
    model_on_meta,
)
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.materialize import materialize
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.bucket import FsdpBucket
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.kernels.host_adam import Ticket
from megatron.core.optimizer.state_memory import state_memory

BENCHMARK = Benchmark(
    name="offload_step",
    question="A step with the optimizer in host memory against FSDP2 with CPUOffloadPolicy, "
    "and against everything on the device",
    ranks=2,
    full=("--micro-batch=1", "--sequence=64", "--rounds=20"),
    quick=("--layers=4", "--hidden=256", "--micro-batch=1", "--sequence=64", "--rounds=5"),
)

NO_OPTIMIZER, DEVICE, IN_ORDER, OVERLAPPED = "no optimizer", "device", "in order", "overlapped"
STREAMED, EARLY, FSDP2 = "half streamed", "early", "FSDP2 offloaded"
OUR_OPTIMIZERS = {
    NO_OPTIMIZER: None,
    DEVICE: OptimizerConfig(),
    IN_ORDER: OptimizerConfig(optimizer_cpu_offload=True),
    OVERLAPPED: OFFLOADED,
    STREAMED: replace(OFFLOADED, optimizer_update_on_device=0.5),
    EARLY: replace(OFFLOADED, optimizer_early_update_gib=8.0),
}


def build_ours(
    arguments: argparse.Namespace,
    device: Device,
    mesh: DeviceMesh,
    config: OptimizerConfig | None,
    num_local_ranks: int,
) -> Side:
    """Our engine, with the optimizer of `config` or none."""
    model = model_on_meta(arguments)
    optimizer = shard(
        model,
        mesh,
        device,
        config,
        num_local_ranks=num_local_ranks,
        data_parallel=DataParallelConfig(main_grads_dtype="bf16"),
    )
    return Side(model, None if optimizer is None else optimizer.optimizer)


def build_fsdp2(arguments: argparse.Namespace, device: Device, mesh: DeviceMesh) -> Side:
    """PyTorch's: parameters, gradients and states at rest in host memory."""
    model = model_on_meta(arguments)
    shard_by_fsdp2_offloaded(model, mesh, device)
    materialize(model, torch.device("cpu"), SEED)
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.kind == "cuda"))


def break_down(side: Side, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Mean milliseconds a step of the host's pass and of the two transfers, each alone: for the
    side `in order`.
    """
    parts = [
        (Ticket, "wait", "host pass"),
        (FsdpBucket, "fetch", "gradients down"),
        (FsdpBucket, "send", "weights up"),
    ]
    return mean_parts(side, batch, 5, parts)


def memory_by_kind(side: Side) -> dict[str, dict[str, int]]:
    """Bytes on this rank's device and in its host memory between two steps, by kind."""
    assert side.optimizer is not None, "of a side that trains"
    table = state_memory(side.model, side.optimizer)
    return {kind: row._asdict() for kind, row in table.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measures; rank 0 reports."""
    parser = report.parser_of(__doc__)
    add_model_arguments(parser)
    arguments = parser.parse_args(argv)

    with launched() as (launch, device):
        mesh = build_mesh(device.kind, launch.world_size)
        sides = {
            name: build_ours(arguments, device, mesh, config, launch.local_world_size)
            for name, config in OUR_OPTIMIZERS.items()
        }
        sides[FSDP2] = build_fsdp2(arguments, device, mesh)
        batch = batch_of(arguments, launch.rank, device)
        steps = measure(sides, batch, arguments.rounds)
        parts = break_down(sides[IN_ORDER], batch)
        memory = {
            "everything on the device": memory_by_kind(sides[DEVICE]),
            "optimizer offloaded": memory_by_kind(sides[OVERLAPPED]),
        }
    if launch.rank == 0:
        optimizer = sides[OVERLAPPED].optimizer
        assert isinstance(optimizer, HybridDeviceOptimizer), "as it was built"
        result = Result(
            measured(steps.milliseconds, "ms"),
            ratios(report.medians(steps.milliseconds)),
            settings=report.settings_of(arguments),
            facts={
                "device": device.description,
                "parameters": optimizer.plan.total_numel,
                "host_bytes_per_rank": optimizer.host_bytes,
                "parts_in_order_ms": parts,
                "floor_ms": max(parts["host pass"], parts["gradients down"], parts["weights up"]),
                "memory_by_kind": memory,
                "last_losses": {name: own[-1] for name, own in steps.losses.items()},
            },
        )
        report.hand_over(result, arguments.output)


def ratios(medians: dict[str, float]) -> tuple[Ratio, ...]:
    """What offloading costs, and how much of that is hidden."""
    added = medians[IN_ORDER] - medians[NO_OPTIMIZER]
    hidden = medians[IN_ORDER] - medians[OVERLAPPED]
    return (
        Ratio(f"{FSDP2} / {OVERLAPPED}", medians[FSDP2] / medians[OVERLAPPED], at_least=1.2),
        Ratio(f"{OVERLAPPED} / {DEVICE}", medians[OVERLAPPED] / medians[DEVICE], at_most=1.1),
        Ratio("share of what offloading adds that is hidden", hidden / added, at_least=0.8),
    )


if __name__ == "__main__":
    main()
