#!/usr/bin/env python3
"""Training steps of three billion parameters on one accelerator: the optimizer on the device, in
host memory, and PyTorch FSDP2 with CPU offload.

    python -m benchmarks.gpu_step

A Llama-like GPT, 12 microbatches of 4096 tokens, bf16 compute and main gradients, fp32 main
weights and moments, gradients clipped. The sides run one after the other, each with the memory of
the whole machine. A step includes the work that the previous step has left to its forward.

    device                  everything on the device
    offloaded 0.8, 1        that share of the optimizer in host memory, with every overlap
    0.4 streamed            that share of it is updated on the device
    FSDP2 offloaded         PyTorch's FSDP2 with CPUOffloadPolicy and its fused AdamW

For all sides but FSDP2, the result also has the step and the peak memory that the planner predicts.
The benchmark first measures the machine's rates for that, as `plan --measure` does. On a host with
less memory, the model has fewer layers.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.models import shard_by_fsdp2_offloaded
from benchmarks.helpers.result import Measurement, NotRun, Ratio, Result
from megatron.core.device import Device, kind_of
from megatron.core.dtensors import local_tensor
from megatron.core.host_memory import HostLimits, HostMemoryError
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.engines import build_engine
from megatron.training.model_loss import mean_of_all
from megatron.training.step import Batch
from megatron_hybrid.plan.measure import job_of, machine_of, rates_of_rank
from megatron_hybrid.plan.planned_run import OFFLOADING, PlannedRun
from megatron_hybrid.plan.quantities import shown_rate
from megatron_hybrid.plan.step_time import Machine, step_time
from megatron_hybrid.plan.workload import flops_of_microbatch, work_of

BENCHMARK = Benchmark(
    name="gpu_step",
    question="A step of 3 billion parameters on one accelerator: the optimizer on the device, in "
    "host memory, and FSDP2 with CPUOffloadPolicy",
    ranks=1,
    full=("--rounds=4",),
    quick=(
        "--layers=2",
        "--hidden=128",
        "--ffn=256",
        "--vocabulary=128",
        "--sequence=16",
        "--microbatches=2",
        "--rounds=2",
    ),
    needs_accelerator=True,
)

DEVICE, FSDP2 = "device", "FSDP2 offloaded"
JUDGED, STREAMED = "offloaded 0.8", "offloaded 0.8, 0.4 streamed"  # the first has bars
# The share in host memory, and the share of it that the device updates.
OURS = {DEVICE: (0.0, 0.0), JUDGED: (0.8, 0.0), STREAMED: (0.8, 0.4), "offloaded 1": (1.0, 0.0)}
SIDES = (DEVICE, JUDGED, STREAMED, FSDP2, "offloaded 1")  # in the order of measurement
_HEAD_DIM = 128
# Bytes an element: FSDP2 needs the most, weights, gradients and moments in fp32, and pinned copies.
_HOST_BYTES, _HOST_SHARE = 18, 0.85

Step = Callable[[list[Batch]], float]


class Planned(NamedTuple):
    """The planner's prediction for a side."""

    seconds: float
    peak_bytes: int


class Trained(NamedTuple):
    """The measurements of one side.

    Attributes:
        seconds: Seconds of each measured step.
        peak_bytes: Peak memory of the device.
        losses: Losses of all steps, warm-up included.
        planned: The planner's prediction; None for FSDP2.
        lanes: Seconds a step of transfers, updates and waits; empty without offloading.
    """

    seconds: list[float]
    peak_bytes: int
    losses: list[float]
    planned: Planned | None = None
    lanes: dict[str, float] = {}  # noqa: RUF012  only read


def measure(device: Device, arguments: argparse.Namespace) -> Result:
    """Measures every side, in a process group of one rank."""
    deadline = time.monotonic() + arguments.seconds
    arguments.layers = fitting_layers(arguments)
    plan = planned_run(arguments, DEVICE, device.kind)
    machine = machine_of([rates_of_rank(job_of(plan), device)], device.kind)
    trained, not_run = train_all(device, arguments, machine, deadline)
    medians = report.medians({side: own.seconds for side, own in trained.items()})
    flops = flops_of_microbatch(plan) * plan.num_microbatches
    return Result(
        tuple(measurements_of(trained)),
        tuple(ratios_of(trained, medians)),
        tuple(not_run),
        report.settings_of(arguments),
        {
            "device": device.description,
            "parameters": plan.numel,
            "tokens_of_a_step": plan.tokens_per_step,
            "tflops_per_second": {side: flops / one / 1e12 for side, one in medians.items()},
            "losses": {side: own.losses for side, own in trained.items()},
            "lanes_seconds_a_step": {side: own.lanes for side, own in trained.items()},
            "planner_flags": {
                "--flops": shown_rate(machine.flops, "FLOP/s"),
                "--gpu-bandwidth": shown_rate(machine.device_bytes),
                "--link": shown_rate(machine.link_bytes),
                "--host-bandwidth": shown_rate(machine.host_bytes),
            },
        },
    )


def train_all(
    device: Device, arguments: argparse.Namespace, machine: Machine, deadline: float
) -> tuple[dict[str, Trained], list[NotRun]]:
    """Trains every side that fits into memory and starts before the deadline."""
    trained: dict[str, Trained] = {}
    not_run: list[NotRun] = []
    for side in SIDES:
        # Memory of the previous side must be free.
        gc.collect()
        if time.monotonic() > deadline:
            not_run.append(NotRun(side, f"it would have started after {arguments.seconds} s"))
            continue
        try:
            if side == FSDP2:
                trained[side] = train_fsdp2(device, arguments)
            else:
                trained[side] = train_ours(side, device, arguments, machine)
        except (torch.OutOfMemoryError, HostMemoryError) as error:
            not_run.append(NotRun(side, " ".join(str(error).split())[:200]))
    return trained, not_run


def measurements_of(trained: dict[str, Trained]) -> Iterator[Measurement]:
    """Milliseconds and peaks of each side, measured and planned."""
    for side, own in trained.items():
        yield Measurement("step", side, "ms", tuple(1e3 * one for one in own.seconds))
        if own.planned is not None:
            yield Measurement("step", f"{side}, planned", "ms", (1e3 * own.planned.seconds,))
    for side, own in trained.items():
        yield Measurement("peak memory", side, "MiB", (own.peak_bytes / 2**20,))
        if own.planned is not None:
            mib = own.planned.peak_bytes / 2**20
            yield Measurement("peak memory", f"{side}, planned", "MiB", (mib,))


def ratios_of(trained: dict[str, Trained], medians: dict[str, float]) -> Iterator[Ratio]:
    """The costs and savings of offloading, FSDP2 over this project, and planned over measured."""
    for side in (side for side in OURS if side != DEVICE and {side, DEVICE} <= trained.keys()):
        has_bar = side == JUDGED
        yield Ratio(
            f"step, {side} / {DEVICE}",
            medians[side] / medians[DEVICE],
            at_most=1.15 if has_bar else None,
        )
        yield Ratio(
            f"peak memory, {side} / {DEVICE}",
            trained[side].peak_bytes / max(1, trained[DEVICE].peak_bytes),
            at_most=0.55 if has_bar else None,
        )
    for side, own in trained.items():
        if own.planned is not None:
            value = own.planned.seconds / medians[side]
            yield Ratio(f"step, {side}: planned / measured", value, at_least=0.75, at_most=1.25)
    if {FSDP2, JUDGED} <= trained.keys():
        yield Ratio(f"step, {FSDP2} / {JUDGED}", medians[FSDP2] / medians[JUDGED], at_least=1.2)


def planned_run(arguments: argparse.Namespace, side: str, kind: str) -> PlannedRun:
    """The run of a side of this project, from its flags."""
    flags = f"""--num-layers {arguments.layers} --hidden-size {arguments.hidden}
        --ffn-hidden-size {arguments.ffn}
        --num-attention-heads {max(1, arguments.hidden // _HEAD_DIM)}
        --swiglu --normalization RMSNorm --disable-bias-linear
        --attention-dropout 0 --hidden-dropout 0
        --tokenizer-type NullTokenizer --vocab-size {arguments.vocabulary - 1}
        --make-vocab-size-divisible-by 1 --mock-data --seq-length {arguments.sequence}
        --micro-batch-size 1 --global-batch-size {arguments.microbatches}
        --bf16 --main-grads-dtype bf16 --train-iters 1000000 --lr 3e-4 --lr-decay-style constant
        --timing-log-level 1""".split()
    fraction, streamed = OURS[side]
    if fraction:
        flags += [*OFFLOADING, "--optimizer-offload-fraction", str(fraction)]
        flags += ["--optimizer-update-on-device", str(streamed)]
    return PlannedRun(flags, 1, kind)


def train_ours(
    side: str, device: Device, arguments: argparse.Namespace, machine: Machine
) -> Trained:
    """Trains a side of this project."""
    plan = planned_run(arguments, side, device.kind)
    engine = build_engine(plan.config.engine(), device, build_mesh(device.kind, 1))
    engine.initialize(lambda: GPTModel(plan.config.model, plan.model.vocab_size))
    optimizer = engine.state.optimizer

    def step(batches: list[Batch]) -> float:
        return engine.train_batch(batches, forward_step).loss

    trained = timed(step, device, arguments, warm_up=2, rounds=arguments.rounds)
    timings = optimizer.timings()
    optimizer.synchronize()
    return trained._replace(
        planned=Planned(
            step_time(work_of(plan, plan.fraction), machine).seconds,
            plan.memory(plan.fraction).device_nbytes,
        ),
        lanes={} if timings is None else timings._asdict(),
    )


def train_fsdp2(device: Device, arguments: argparse.Namespace) -> Trained:
    """Trains with FSDP2: parameters, gradients and states are in host memory between uses."""
    model = fsdp2_model(device, arguments)
    assert isinstance(model, FSDPModule), "fully_shard makes it one"
    sharded: FSDPModule = model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.kind == "cuda")

    def step(batches: list[Batch]) -> float:
        losses = []
        for number, batch in enumerate(batches):
            # Gradients stay whole on the device until the last microbatch, which saves FSDP2 most
            # of its transfers.
            sharded.set_requires_gradient_sync(number == len(batches) - 1)
            there = {name: one.to(device.torch_device) for name, one in batch.items()}
            loss = forward_step(model, there) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).sum())

    # A step of this side takes several times as long as the others.
    return timed(step, device, arguments, warm_up=1, rounds=max(1, arguments.rounds // 2))


def fsdp2_model(device: Device, arguments: argparse.Namespace) -> nn.Module:
    """The same model, sharded by PyTorch."""
    plan = planned_run(arguments, DEVICE, device.kind)
    with torch.device("meta"):
        model = GPTModel(plan.config.model, plan.model.vocab_size)
    shard_by_fsdp2_offloaded(model, build_mesh(device.kind, 1), device)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        # Drawn on the device: drawing three billion numbers on a CPU takes a minute.
        local = local_tensor(parameter.detach())
        drawn = torch.randn(local.shape, device=device.torch_device).mul_(0.02)
        local.copy_(torch.ones_like(drawn) if "norm" in name else drawn)
    return model


def forward_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean loss of a microbatch."""
    labels = batch["labels"]
    loss: torch.Tensor = model(batch["tokens"], labels, loss_weights=mean_of_all(labels)).loss
    return loss


def timed(
    step: Step, device: Device, arguments: argparse.Namespace, *, warm_up: int, rounds: int
) -> Trained:
    """Times consecutive steps, without waiting for offloaded updates in between."""
    batches = batches_of(device, arguments)
    if device.is_accelerator:
        torch.get_device_module(device.kind).reset_peak_memory_stats(device.index)
    losses, ends = [], []
    for _ in range(warm_up + rounds):
        losses.append(step(batches))
        ends.append(time.perf_counter())
    seconds = [later - earlier for earlier, later in pairwise(ends[warm_up - 1 :])]
    return Trained(seconds, device.peak_memory_bytes(), losses)


def batches_of(device: Device, arguments: argparse.Namespace) -> list[Batch]:
    """The same text for every step, so that the loss falls."""
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.microbatches, arguments.sequence + 1)
    text = torch.randint(arguments.vocabulary, shape, generator=generator)
    made = [
        {"tokens": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()}
        for row in text.split(1)
    ]
    if not device.pins_batches:
        return made
    return [{name: one.pin_memory() for name, one in batch.items()} for batch in made]


def fitting_layers(arguments: argparse.Namespace) -> int:
    """The layers asked for, or as many as the host has room for."""
    hidden, ffn = arguments.hidden, arguments.ffn
    layer = _HOST_BYTES * (4 * hidden**2 + 3 * hidden * ffn)
    rest = _HOST_BYTES * arguments.vocabulary * hidden
    available = HostLimits.read().available
    if available is None:
        return int(arguments.layers)
    return int(max(1, min(arguments.layers, (_HOST_SHARE * available - rest) // layer)))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--ffn", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--seconds", type=float, default=3600, help="no side starts after this time"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures."""
    arguments = parsed(argv)
    device = Device(kind_of())
    device.make_current()
    dist.init_process_group(device.collective_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        report.hand_over(measure(device, arguments), arguments.output)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
