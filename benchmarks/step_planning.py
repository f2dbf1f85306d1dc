#!/usr/bin/env python3
"""How long Python takes between reading the gradients' norm and handing over the first work of the
optimizer's step.

    python -m benchmarks.step_planning --layers 24 --hidden 64

A device is idle for that long. One rank, our engine, AdamW on the device and offloaded; each
with the step planned before the norm is read, as the training loop does, and planned after it.
Interleaved, in an order drawn anew each round. The same Python runs whatever the device is; the
first work is the first item for the kernel's threads or a lane. Prints medians and writes
benchmarks/results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.models import OFFLOADED, SEED, shard
from benchmarks.helpers.result import Measurement, Ratio, Result
from benchmarks.helpers.steps import add_model_arguments, batch_of, model_on_meta
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.lanes import ThreadLane
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.kernels.host_adam import HostAdam

BENCHMARK = Benchmark(
    name="step_planning",
    question="Python between the gradients' norm and the optimizer's first work, "
    "planned before the norm against planned after it",
    ranks=1,
    full=(
        "--layers=24",
        "--hidden=64",
        "--vocabulary=256",
        "--micro-batch=1",
        "--sequence=16",
        "--rounds=31",
    ),
    quick=(
        "--layers=8",
        "--hidden=64",
        "--vocabulary=256",
        "--micro-batch=1",
        "--sequence=16",
        "--rounds=7",
    ),
)

BEFORE, AFTER = "planned before", "planned after"
CONFIGS = {"device": OptimizerConfig(), "offloaded": OFFLOADED}


class FirstLaunch:
    """When work was first handed over since `reset`."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        for owner, name in ((HostAdam, "submit"), (ThreadLane, "enqueue")):
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
    model = model_on_meta(arguments)
    optimizer = shard(
        model,
        build_mesh("cpu", 1),
        Device("cpu"),
        config,
        num_local_ranks=1,
        data_parallel=DataParallelConfig(main_grads_dtype="bf16"),
    )
    assert optimizer is not None, "it was asked for"
    return model, optimizer


def milliseconds_until_first_work(
    model: nn.Module,
    optimizer: DistributedOptimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    launch: FirstLaunch,
    when: str,
) -> float:
    """One step, planned before or after the norm is read."""
    model(*batch).mean().backward()
    norm = optimizer.grad_norm()
    planned = optimizer.plan_step() if when == BEFORE else None
    grad_norm = float(norm)

    launch.reset()
    start = time.perf_counter()
    optimizer.step(grad_norm, planned)
    assert launch.seconds is not None, "every step hands work over"
    elapsed = launch.seconds - start

    optimizer.zero_grad()
    optimizer.synchronize()
    return elapsed * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    parser = report.parser_of(__doc__)
    add_model_arguments(parser)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    built = {name: build(arguments, config) for name, config in CONFIGS.items()}
    batch = batch_of(arguments, 0, Device("cpu"))
    launch = FirstLaunch()
    works = {
        (name, when): partial(milliseconds_until_first_work, *both, batch, launch, when)
        for name, both in built.items()
        for when in (BEFORE, AFTER)
    }
    times = report.interleaved(works, arguments.rounds, warm_up=2, seed=SEED)
    dist.destroy_process_group()

    medians = report.medians(times)
    result = Result(
        tuple(
            Measurement(name, when, "ms", tuple(values)) for (name, when), values in times.items()
        ),
        tuple(
            Ratio(
                f"{name}: {AFTER} / {BEFORE}",
                medians[name, AFTER] / medians[name, BEFORE],
                at_least=2.0,
            )
            for name in built
        ),
        settings=report.settings_of(arguments),
        facts={"tensors": sum(1 for _ in built["device"][0].parameters())},
    )
    report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
