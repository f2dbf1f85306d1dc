#!/usr/bin/env python3
"""Training steps of this project's engine and of PyTorch FSDP2, on the same GPT, from the same
weights.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/fsdp_step.py

bf16 compute, fp32 main weights, gradients reduced in fp32, ZeRO-3, fused AdamW. All sides run
interleaved in one process group, in an order drawn anew each round; `compute` is forward and
backward of the same model without any sharding. Prints medians and the ratio of tokens a second,
and writes them to benchmarks/results with a breakdown.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from benchmarks.helpers import report
from benchmarks.helpers.steps import (
    SEED,
    Side,
    Stopwatch,
    add_model_arguments,
    batch_of,
    measure,
    model_on_meta,
)
from megatron.core.device import Device, DeviceConfig
from megatron.core.distributed import megatron_fsdp, torch_fsdp2
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp import FsdpModule, collectives, fully_shard_optimizer
from megatron.core.distributed.fsdp.gradients import GroupGradients
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.torch_optimizer import build_torch_optimizer
from megatron.training.launch import Launch


def build_sides(arguments: argparse.Namespace, device: Device) -> dict[str, Side]:
    """Every side with the same initial weights."""
    mesh = build_mesh(device.kind, dist.get_world_size())
    target = device.torch_device

    ours, theirs, bare = (model_on_meta(arguments) for _ in range(3))
    megatron_fsdp.shard_model(
        ours,
        mesh,
        device,
        DataParallelConfig(),
        compute_dtype=torch.bfloat16,
        reset_parameters=seeded_reset(ours, target, SEED),
    )
    torch_fsdp2.shard_model(theirs, mesh, compute_dtype=torch.bfloat16, reshard_after_forward=True)
    materialize(theirs, target, SEED)
    materialize(bare, target, SEED)
    optimizers = [build_torch_optimizer(model, OptimizerConfig(), 1e-4) for model in (ours, theirs)]
    fully_shard_optimizer(optimizers[0])
    return {
        "ours": Side(ours, optimizers[0]),
        "FSDP2": Side(theirs, optimizers[1]),
        "compute": Side(bare.to(torch.bfloat16), None),
    }


def break_down(
    side: Side, batch: tuple[torch.Tensor, torch.Tensor], num_steps: int
) -> dict[str, float]:
    """Mean milliseconds of the parts of our step.

    gather and reduce run on a lane beside the computation; wait is how long the computation stood
    still for them.
    """
    watch = Stopwatch()
    context = side.model.context if isinstance(side.model, FsdpModule) else None
    wrapped = [
        watch.wrap(collectives, "all_gather", "gather"),
        watch.wrap(collectives, "reduce_scatter", "reduce"),
        watch.wrap(GroupGradients, "collect", "copies"),
        watch.wrap(side.optimizer, "step", "optimizer"),
        watch.wrap(type(context), "_finish_oldest", "wait"),
        watch.wrap(FsdpParameterGroup, "wait_unsharded", "wait"),
    ]
    dist.barrier()
    for _ in range(num_steps):
        with watch.timing("step"):
            side.step(*batch)
    for undo in wrapped:
        undo()
    return {name: total / num_steps for name, total in watch.totals.items()}


def main() -> None:
    """Measures; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser)
    arguments = parser.parse_args()
    launch = Launch.from_environment()
    device = Device.for_rank(DeviceConfig().kind, launch.local_rank, launch.local_world_size)
    dist.init_process_group(device.collective_backend)
    sides = build_sides(arguments, device)
    batch = batch_of(arguments, launch.rank, device)
    times, losses = measure(sides, batch, arguments.rounds)
    parts = break_down(sides["ours"], batch, num_steps=5)
    if launch.rank == 0:
        medians = report.medians(times)
        num_tokens = arguments.micro_batch * arguments.sequence * launch.world_size
        for name, milliseconds in medians.items():
            print(
                f"{name:>8} {milliseconds:8.1f} ms, {num_tokens / milliseconds * 1e3:8.0f} tokens/s"
            )
        ratio = medians["FSDP2"] / medians["ours"]
        print(f"tokens/s of ours over FSDP2's: {ratio:.3f}")
        print(
            "parts of our step, ms: "
            + ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
        )
        print(
            "last losses: "
            + ", ".join(f"{name} {values[-1]:.6f}" for name, values in losses.items())
        )
        content = {
            "device": device.description,
            "ranks": launch.world_size,
            "parameters": sum(parameter.numel() for parameter in sides["ours"].model.parameters()),
            "settings": vars(arguments),
            "median_ms": medians,
            "tokens_per_second": {
                name: num_tokens / value * 1e3 for name, value in medians.items()
            },
            "ratio_to_fsdp2": ratio,
            "breakdown_ms": parts,
            "last_losses": {name: values[-1] for name, values in losses.items()},
        }
        print(report.write("fsdp_step", content))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
