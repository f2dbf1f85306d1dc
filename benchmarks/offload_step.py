#!/usr/bin/env python3
"""Training steps with the optimizer in host memory, without it, and with what others offer, on the
same GPT.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 benchmarks/offload_step.py

bf16 compute, fp32 main weights, bf16 gradients, ZeRO-3, AdamW. All sides run interleaved in one
process group, in an order drawn anew each round:

    device              FusedAdam, states on the device
    in order            all states on the host, nothing overlaps
    overlapped          gradients go down during backward; updates run beside each other and the
                        next forward
    FSDP2 offloaded     PyTorch's FSDP2 with CPUOffloadPolicy and its fused AdamW
    no optimizer        forward and backward of our engine alone

Prints medians, the floor below which no offloaded step can be, the larger of the host's pass and
the transfers, and how much of what offloading adds is hidden. Writes benchmarks/results.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

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
from megatron.core.distributed import megatron_fsdp
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.units import sharding_units
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.fsdp_bucket import FsdpBucket
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import (
    build_optimizer,
    offloaded_modules,
    plan_offload,
)
from megatron.core.optimizer.kernels.host_adam import HostAdam
from megatron.training.launch import Launch

IN_ORDER = OptimizerConfig(optimizer_cpu_offload=True)
OVERLAPPED = OptimizerConfig(
    optimizer_cpu_offload=True,
    overlap_cpu_optimizer_d2h_h2d=True,
    overlap_optimizer_with_forward=True,
)


def build_ours(
    arguments: argparse.Namespace,
    device: Device,
    mesh: DeviceMesh,
    config: OptimizerConfig | None,
    num_local_ranks: int,
) -> Side:
    """Our engine, with the optimizer of `config` or none."""
    model = model_on_meta(arguments)
    plan = plan_offload(model, config or OptimizerConfig())
    megatron_fsdp.shard_model(
        model,
        mesh,
        device,
        DataParallelConfig(megatron_fsdp_main_grads_dtype="auto"),
        compute_dtype=torch.bfloat16,
        reset_parameters=seeded_reset(model, device.torch_device, SEED),
        offloaded=offloaded_modules(model, plan),
    )
    if config is None:
        return Side(model, None)
    return Side(model, build_optimizer(model, config, 1e-4, num_local_ranks, plan=plan).optimizer)


def build_fsdp2(arguments: argparse.Namespace, device: Device, mesh: DeviceMesh) -> Side:
    """PyTorch's: parameters, gradients and states at rest in host memory."""
    model = model_on_meta(arguments)
    policy: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": TorchMixedPrecisionPolicy(
            param_dtype=torch.bfloat16, cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.pins_host_memory),
    }
    for unit in sharding_units(model):
        torch_fully_shard(unit, **policy)
    torch_fully_shard(model, reshard_after_forward=False, **policy)
    materialize(model, torch.device("cpu"), SEED)
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.kind == "cuda"))


def break_down(
    side: Side, batch: tuple[torch.Tensor, torch.Tensor], num_steps: int
) -> dict[str, float]:
    """Mean milliseconds a step of the host's pass and of the two transfers, each alone: for the
    side `in order`.
    """
    watch = Stopwatch()
    wrapped = [
        watch.wrap(HostAdam, "run", "host pass"),
        watch.wrap(FsdpBucket, "fetch", "gradients down"),
        watch.wrap(FsdpBucket, "send", "weights up"),
    ]
    dist.barrier()
    for _ in range(num_steps):
        side.step(*batch)
    for undo in wrapped:
        undo()
    return {name: total / num_steps for name, total in watch.totals.items()}


def main() -> None:
    """Measures; rank 0 reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    arguments = parser.parse_args()
    launch = Launch.from_environment()
    device = Device.for_rank(DeviceConfig().kind, launch.local_rank, launch.local_world_size)
    dist.init_process_group(device.collective_backend)
    mesh = build_mesh(device.kind, launch.world_size)
    ours = {
        "no optimizer": None,
        "device": OptimizerConfig(),
        "in order": IN_ORDER,
        "overlapped": OVERLAPPED,
    }
    sides = {
        name: build_ours(arguments, device, mesh, config, launch.local_world_size)
        for name, config in ours.items()
    }
    sides["FSDP2 offloaded"] = build_fsdp2(arguments, device, mesh)
    batch = batch_of(arguments, launch.rank, device)
    times, losses = measure(sides, batch, arguments.rounds)
    parts = break_down(sides["in order"], batch, num_steps=5)
    if launch.rank == 0:
        report_all(arguments, launch, device, sides, report.medians(times), parts, losses)
    dist.destroy_process_group()


def report_all(
    arguments: argparse.Namespace,
    launch: Launch,
    device: Device,
    sides: dict[str, Side],
    medians: dict[str, float],
    parts: dict[str, float],
    losses: dict[str, list[float]],
) -> None:
    """Prints, and writes the result."""
    floor = max(parts["host pass"], parts["gradients down"], parts["weights up"])
    added = medians["in order"] - medians["no optimizer"]
    hidden = (medians["in order"] - medians["overlapped"]) / added
    optimizer = sides["overlapped"].optimizer
    assert isinstance(optimizer, HybridDeviceOptimizer), "as it was built"
    for name, milliseconds in medians.items():
        print(f"{name:>16} {milliseconds:8.1f} ms a step")
    print(
        ", ".join(f"{name} {value:.1f} ms" for name, value in parts.items())
        + f"; the floor is {floor:.1f} ms"
    )
    print(
        f"offloading in order adds {added:.1f} ms to forward and backward, of which {hidden:.0%} "
        "are hidden"
    )
    print(
        "FSDP2 offloaded over ours overlapped: "
        f"{medians['FSDP2 offloaded'] / medians['overlapped']:.2f}x"
    )
    print(f"overlapped over device: {medians['overlapped'] / medians['device']:.2f}x")
    print(
        "last losses: " + ", ".join(f"{name} {values[-1]:.6f}" for name, values in losses.items())
    )
    content = {
        "device": device.description,
        "ranks": launch.world_size,
        "parameters": optimizer.plan.total_numel,
        "host_bytes_per_rank": optimizer.host_bytes,
        "settings": vars(arguments),
        "median_ms": medians,
        "parts_ms": parts,
        "floor_ms": floor,
        "hidden_share": hidden,
        "ratio_to_fsdp2_offloaded": medians["FSDP2 offloaded"] / medians["overlapped"],
        "ratio_to_device": medians["overlapped"] / medians["device"],
        "last_losses": {name: values[-1] for name, values in losses.items()},
    }
    print(report.write("offload_step", content))


if __name__ == "__main__":
    main()
