#!/usr/bin/env python3
"""The accuracy of a plan: the predicted step time and peak memory against real training.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.plan_accuracy

Two sizes of a Llama-shaped model in bf16, each with the optimizer on the device and with half and
all of it in host memory. A round measures this machine's rates as `--measure` does and then
steps of each run, size by size in an order drawn anew, so that a busy machine affects all of them.
Peaks are of torch's allocations in a step, over the allocations at rest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.memory import peak_bytes
from benchmarks.helpers.ranks import launched
from benchmarks.helpers.result import Measurement, Ratio, Result
from megatron.core.device import Device
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.engines import ModuleEngine, build_engine
from megatron.training.step import Batch
from megatron.training.step_memory import rows_of
from megatron_hybrid.plan.measure import MeasuredRates, job_of, machine_of, rates_of_rank
from megatron_hybrid.plan.planned_run import OFFLOADING, PlannedRun
from megatron_hybrid.plan.step_time import step_time
from megatron_hybrid.plan.workload import work_of
from megatron_hybrid.pretrain_gpt import forward_step_of

BENCHMARK = Benchmark(
    name="plan_accuracy",
    question="The planner's step time and peak memory against measured ones",
    ranks=2,
    full=("--rounds=3",),
    quick=("--hidden", "128", "192", "--layers=3", "--rounds=3"),
)

FRACTIONS = (0.0, 0.5, 1.0)
NEAREST, FARTHEST = 0.75, 1.25  # predicted / measured
PREDICTED, TRAINED = "predicted", "trained"


class Run(NamedTuple):
    """A run that is planned and trained."""

    plan: PlannedRun
    fraction: float
    engine: ModuleEngine
    batches: list[Batch]

    def step(self) -> float:
        """Trains a step; returns its seconds."""
        dist.barrier()
        start = time.perf_counter()
        self.engine.train_batch(self.batches, forward_step_of(self.plan.spec))
        # Updates that overlap with the next forward count in the next step.
        return time.perf_counter() - start


def flags_of(arguments: argparse.Namespace, hidden: int, fraction: float) -> list[str]:
    """The flags of a run."""
    flags = f"""--num-layers {arguments.layers} --hidden-size {hidden}
        --num-attention-heads {hidden // 64} --ffn-hidden-size {hidden * 11 // 4}
        --swiglu --normalization RMSNorm --disable-bias-linear
        --attention-dropout 0 --hidden-dropout 0
        --tokenizer-type NullTokenizer --vocab-size {arguments.vocabulary - 1}
        --make-vocab-size-divisible-by 1 --mock-data --seq-length {arguments.sequence}
        --micro-batch-size {arguments.micro_batch} --bf16 --train-iters 1000000 --lr 1e-4
        --global-batch-size {arguments.micro_batch * arguments.microbatches * 2}
        --optimizer-offload-fraction {fraction}"""
    return [*flags.split(), *OFFLOADING]


def build(arguments: argparse.Namespace, device: Device, hidden: int, fraction: float) -> Run:
    """A run with its engine, on all ranks."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    plan = PlannedRun(flags_of(arguments, hidden, fraction), world_size, device.kind)
    mesh = build_mesh(device.kind, world_size)
    engine = build_engine(plan.config.engine(), device, mesh, num_local_ranks=world_size)
    engine.initialize(lambda: GPTModel(plan.config.model, plan.model.vocab_size))

    generator = torch.Generator().manual_seed(rank)
    shape = (arguments.micro_batch, arguments.sequence + 1)
    batches = []
    for _ in range(arguments.microbatches):
        text = torch.randint(arguments.vocabulary, shape, generator=generator)
        batches.append({"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()})
    return Run(plan, fraction, engine, batches)


def rates_of_all(plan: PlannedRun, device: Device) -> list[MeasuredRates]:
    """The rates that every rank measures now."""
    found: list[MeasuredRates] = [MeasuredRates(0, 0, 0, 0, 0, 0)] * dist.get_world_size()
    dist.all_gather_object(found, rates_of_rank(job_of(plan), device))
    return found


def measure_times(runs: dict[str, Run], device: Device, num_rounds: int) -> list[Measurement]:
    """Seconds of steps, predicted and trained."""
    sizes: dict[int, list[str]] = {}
    for name, run in runs.items():
        sizes.setdefault(run.plan.numel, []).append(name)

    def once(names: list[str]) -> dict[str, tuple[float, float]]:
        # The rates do not depend on the fraction.
        machine = machine_of(rates_of_all(runs[names[0]].plan, device), device.kind)
        found = {}
        for name in names:
            run = runs[name]
            predicted = step_time(work_of(run.plan, run.fraction), machine).seconds
            # The first step finds the caches of the previous measurement.
            found[name] = (predicted, statistics.median(run.step() for _ in range(3)))
        return found

    works = {size: partial(once, names) for size, names in sizes.items()}
    rounds = report.interleaved(works, num_rounds, warm_up=1)
    measurements = []
    for size, names in sizes.items():
        for name in names:
            predicted, trained = zip(*(found[name] for found in rounds[size]), strict=True)
            for side, values in ((PREDICTED, predicted), (TRAINED, trained)):
                in_ms = tuple(seconds * 1e3 for seconds in values)
                measurements.append(Measurement(f"step, {name}", side, "ms", in_ms))
    return measurements


def measure_peaks(runs: dict[str, Run]) -> list[Measurement]:
    """Bytes of the device at the peak of a step."""
    measurements = []
    for name, run in runs.items():
        memory = run.plan.memory(run.fraction)
        at_rest = run.engine.state.optimizer.state_memory(run.engine.model)
        peak = sum(row.device for row in at_rest.values()) + peak_bytes(run.step)
        sides = ((PREDICTED, memory.device_nbytes), (TRAINED, peak))
        assert sum(row.device for row in rows_of(memory).values()) == memory.device_nbytes
        measurements += [
            Measurement(f"peak, {name}", side, "MiB", (nbytes / 2**20,)) for side, nbytes in sides
        ]
    return measurements


def ratios_of(measurements: Sequence[Measurement]) -> tuple[Ratio, ...]:
    """Predicted over trained, of each group."""
    medians = {(one.group, one.side): statistics.median(one.values) for one in measurements}
    groups = dict.fromkeys(one.group for one in measurements)
    return tuple(
        Ratio(
            f"{group}: {PREDICTED} over {TRAINED}",
            medians[group, PREDICTED] / medians[group, TRAINED],
            at_least=NEAREST,
            at_most=FARTHEST,
        )
        for group in groups
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures; rank 0 reports."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[384, 768])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)

    with launched() as (launch, device):
        runs = {}
        for hidden in arguments.hidden:
            for fraction in FRACTIONS:
                run = build(arguments, device, hidden, fraction)
                millions = run.plan.numel / 1e6
                runs[f"{millions:.0f}M, fraction {fraction:g}"] = run
        measurements = measure_times(runs, device, arguments.rounds) + measure_peaks(runs)
        if launch.rank == 0:
            result = Result(
                tuple(measurements),
                ratios_of(measurements),
                settings=report.settings_of(arguments),
            )
            report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
