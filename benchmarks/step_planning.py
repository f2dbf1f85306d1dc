#!/usr/bin/env python3
"""How long Python takes between reading the gradients' norm and handing over the first work of the
optimizer's step.

    OMP_NUM_THREADS=1 python benchmarks/step_planning.py --layers 24 --hidden 128

A device stands still for that long. One rank, our engine, AdamW on the device and offloaded; each
with the step planned before the norm is read, as the training loop does, and planned after it.
Interleaved, in an order drawn anew each round. The same Python runs whatever the device is; the
first work is what goes to the kernel's threads or to a lane. Prints medians and writes
benchmarks/results.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.helpers import report
from benchmarks.helpers.steps import SEED, add_model_arguments, batch_of, model_on_meta
from megatron.core.device import Device
from megatron.core.distributed import megatron_fsdp
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.lanes import ThreadLane
from megatron.core.materialize import seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import (
    DistributedOptimizer,
    build_optimizer,
    offloaded_modules,
    plan_offload,
)
from megatron.core.optimizer.kernels.host_adam import HostAdam

CONFIGS = {
    "device": OptimizerConfig(),
    "offloaded": OptimizerConfig(
        optimizer_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        overlap_optimizer_with_forward=True,
    ),
}


class FirstLaunch:
    """When work was first handed over since `reset`."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        for owner, name in ((HostAdam, "run"), (ThreadLane, "enqueue")):
            self._wrap(owner, name)

    def reset(self) -> None:
        self.seconds = None

    def _wrap(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def launching(*args: Any, **kwargs: Any) -> Any:
            if self.seconds is None:
                self.seconds = time.perf_counter()
            return original(*args, **kwargs)

        setattr(owner, name, launching)


def build(
    arguments: argparse.Namespace, config: OptimizerConfig
) -> tuple[nn.Module, DistributedOptimizer]:
    """A sharded GPT on one rank, and its optimizer."""
    model, device = model_on_meta(arguments), Device("cpu")
    plan = plan_offload(model, config)
    megatron_fsdp.shard_model(
        model,
        build_mesh("cpu", 1),
        device,
        DataParallelConfig(megatron_fsdp_main_grads_dtype="auto"),
        compute_dtype=torch.bfloat16,
        reset_parameters=seeded_reset(model, device.torch_device, SEED),
        offloaded=offloaded_modules(model, plan),
    )
    return model, build_optimizer(model, config, 1e-4, 1, plan=plan)


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser)
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sides = {name: build(arguments, config) for name, config in CONFIGS.items()}
    batch = batch_of(arguments, 0, Device("cpu"))
    launch = FirstLaunch()
    names = [f"{side}, planned {when}" for side in sides for when in ("before", "after")]
    times: dict[str, list[float]] = {name: [] for name in names}

    for number, name in enumerate(report.schedule(names, arguments.rounds + 2, seed=SEED)):
        side, _, when = name.partition(", planned ")
        model, optimizer = sides[side]
        model(*batch).mean().backward()
        norm = optimizer.grad_norm()
        planned = optimizer.plan_step() if when == "before" else None
        grad_norm = float(norm)
        launch.reset()
        start = time.perf_counter()
        optimizer.step(grad_norm, planned)
        assert launch.seconds is not None, "every step hands work over"
        if number >= 2 * len(names):
            times[name].append((launch.seconds - start) * 1e3)
        optimizer.zero_grad()
        optimizer.synchronize()

    medians = report.medians(times)
    for name, milliseconds in medians.items():
        print(f"{name:>26} {milliseconds:8.3f} ms until the first work")
    ratios = {
        side: medians[f"{side}, planned after"] / medians[f"{side}, planned before"]
        for side in sides
    }
    print(", ".join(f"{side}: {ratio:.1f}x" for side, ratio in ratios.items()))
    count = sum(1 for _ in sides["device"][0].parameters())
    content = {
        "parameters": count,
        "settings": vars(arguments),
        "median_ms": medians,
        "after_over_before": ratios,
    }
    print(report.write("step_planning", content))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
