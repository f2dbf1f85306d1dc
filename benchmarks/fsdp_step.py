#!/usr/bin/env python3
"""Training steps of this project's engine and of PyTorch FSDP2, on the same GPT, from the same
weights.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.fsdp_step

bf16 compute, fp32 main weights, gradients reduced in fp32, ZeRO-3, fused AdamW. All sides run
interleaved in one process group, in a new random order each round; `compute alone` is forward and
backward of the unsharded model. The parts of this project's step are measured afterwards.

Then forward and backward of 24 small units, of two fp32 parameters each, on both engines: the time
of such a step is the engine's overhead per unit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.models import SEED, shard
from benchmarks.helpers.ranks import launched
from benchmarks.helpers.result import Ratio, Result, measured
from benchmarks.helpers.steps import (
    Side,
    Steps,
    add_model_arguments,
    batch_of,
    mean_parts,
    measure,
    model_on_meta,
)
from megatron.core.device import Device
from megatron.core.distributed import torch_fsdp2
from megatron.core.distributed.fsdp import (
    FsdpModule,
    collectives,
    fully_shard,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.gradients import GroupGradients
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.materialize import materialize
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.torch_optimizer import build_torch_optimizer

BENCHMARK = Benchmark(
    name="fsdp_step",
    question="A ZeRO-3 training step of this project's engine against PyTorch FSDP2's",
    ranks=2,
    full=("--rounds=14",),
    quick=("--layers=4", "--hidden=256", "--rounds=5"),
)

OURS, FSDP2, COMPUTE = "ours", "FSDP2", "compute alone"
SMALL_OURS, SMALL_FSDP2 = "many small units, ours", "many small units, FSDP2"

_NUM_UNITS, _UNIT_CHANNELS, _UNIT_ROWS = 24, 64, 16
_SMALL_ROUNDS = 10  # rounds of small units per round of the model


def build_sides(arguments: argparse.Namespace, device: Device) -> dict[str, Side]:
    """Returns all sides, with the same initial weights."""
    mesh = build_mesh(device.kind, dist.get_world_size())
    target = device.torch_device

    ours, theirs, bare = (model_on_meta(arguments) for _ in range(3))
    shard(ours, mesh, device, None, num_local_ranks=dist.get_world_size())
    torch_fsdp2.shard_model(theirs, mesh, compute_dtype=torch.bfloat16, reshard_after_forward=True)
    materialize(theirs, target, SEED)
    materialize(bare, target, SEED)
    optimizers = [build_torch_optimizer(model, OptimizerConfig(), 1e-4) for model in (ours, theirs)]
    fully_shard_optimizer(optimizers[0])

    return {
        OURS: Side(ours, optimizers[0]),
        FSDP2: Side(theirs, optimizers[1]),
        COMPUTE: Side(bare.to(torch.bfloat16), None),
    }


class _SmallUnits(nn.Sequential):
    """Linear layers, each of which becomes a unit."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        super().__init__(*(nn.Linear(_UNIT_CHANNELS, _UNIT_CHANNELS) for _ in range(_NUM_UNITS)))

    def forward(self, rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Returns the squared differences from `expected`."""
        return (super().forward(rows) - expected).square()


def measure_small_units(rank: int, device: Device, num_rounds: int) -> Steps:
    """Returns forward and backward of many small units on both sides, without optimizers."""
    mesh = build_mesh(device.kind, dist.get_world_size())
    sides = {}
    for name, shard_unit in ((SMALL_OURS, fully_shard), (SMALL_FSDP2, fsdp2.fully_shard)):
        model = _SmallUnits().to(device.torch_device)
        for unit in model:
            shard_unit(unit, mesh=mesh)
        shard_unit(model, mesh=mesh)
        sides[name] = Side(model, None)

    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(2, _UNIT_ROWS, _UNIT_CHANNELS, generator=generator)
    rows, expected = rows.to(device.torch_device)
    return measure(sides, (rows, expected), num_rounds * _SMALL_ROUNDS)


def break_down(side: Side, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Returns the mean milliseconds of the parts of this project's step.

    gather and reduce run on a lane, concurrently with the computation; wait is the time that the
    computation was blocked on them.
    """
    assert isinstance(side.model, FsdpModule), "as it was built"
    parts = [
        (collectives, "all_gather", "gather"),
        (collectives, "reduce_scatter", "reduce"),
        (GroupGradients, "collect", "copies"),
        (side.optimizer, "step", "optimizer"),
        (type(side.model.context), "_finish_oldest", "wait"),
        (FsdpParameterGroup, "wait_unsharded", "wait"),
    ]
    return mean_parts(side, batch, 5, parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; rank 0 reports."""
    parser = report.parser_of(__doc__)
    add_model_arguments(parser)
    arguments = parser.parse_args(argv)

    with launched() as (launch, device):
        sides = build_sides(arguments, device)
        batch = batch_of(arguments, launch.rank, device)
        steps = measure(sides, batch, arguments.rounds)
        parts = break_down(sides[OURS], batch)
        small = measure_small_units(launch.rank, device, arguments.rounds)
    if launch.rank == 0:
        milliseconds = steps.milliseconds | small.milliseconds
        medians = report.medians(milliseconds)
        num_tokens = arguments.micro_batch * arguments.sequence * launch.world_size
        result = Result(
            measured(milliseconds, "ms"),
            (
                Ratio("tokens/s, ours / FSDP2", medians[FSDP2] / medians[OURS], at_least=1.0),
                Ratio("tokens/s, ours / compute alone", medians[COMPUTE] / medians[OURS]),
                Ratio(
                    "steps/s of many small units, ours / FSDP2",
                    medians[SMALL_FSDP2] / medians[SMALL_OURS],
                    at_least=1.0,
                ),
            ),
            settings=report.settings_of(arguments),
            facts={
                "device": device.description,
                "parameters": sum(one.numel() for one in sides[OURS].model.parameters()),
                "tokens_of_a_step": num_tokens,
                "parts_of_our_step_ms": parts,
                "last_losses": {
                    name: own[-1] for name, own in (steps.losses | small.losses).items()
                },
            },
        )
        report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
