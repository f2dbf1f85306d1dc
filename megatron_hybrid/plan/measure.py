"""`plan --measure`: measures the rates of each rank of this machine.

    compute         forward and backward of one layer of each kind in the model, and of its output
                    projection with the loss, on fewer tokens if a microbatch takes too long
    device pass     our AdamW over states on the device
    host pass       our AdamW in host memory, with the threads of a run
    link            copies between device and host, each way, pinned as in a run
    interconnect    the engine's all-gather and reduce-scatter between the ranks

The ranks of a run share caches, memory, cores and links, so as many processes as ranks measure at
the same time, step by step.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import queue
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

from megatron.core.device import Device
from megatron.core.distributed.fsdp import collectives
from megatron.core.distributed.units import sharding_units
from megatron.core.dtypes import DTYPES, UNSCALED_STATE_DTYPES
from megatron.core.host_memory import HostNeed, HostSlab, check_host_memory
from megatron.core.models.gpt.flops import num_floating_point_operations
from megatron.core.models.gpt.gpt_model import TransformerBlock
from megatron.core.optimizer.kernels.host_threads import host_threads
from megatron.core.optimizer.kernels.piece import Piece
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import UpdateRule, rule_of
from megatron.core.transformer.linear_cross_entropy import weighted_cross_entropy
from megatron.core.transformer.spec import LayerSpec, ModelSpec
from megatron_hybrid.plan.planned_run import PlannedRun
from megatron_hybrid.plan.step_time import Machine

_SECONDS = 0.25  # for each measurement, with at least three repetitions
_LONG = 1.0  # seconds of a call for which a warm-up does not matter
_LEAST_TOKENS = 64
_PASS_NUMEL = 1 << 23  # elements: larger than caches
_COPY_NBYTES = 1 << 25
_TIMEOUT = timedelta(minutes=5)


class Job(NamedTuple):
    """The settings of the measuring processes."""

    spec: ModelSpec
    vocab_size: int
    size: int  # sequences of a microbatch
    seq_length: int
    compute_dtype: torch.dtype
    rule: UpdateRule
    recompute_granularity: str | None
    num_host_threads: int | None
    num_ranks: int
    device_kind: str


class MeasuredRates(NamedTuple):
    """Rates per second of one rank."""

    compute: float  # FLOP
    device_pass: float  # bytes, as the following ones
    host_pass: float
    link: float
    interconnect: float  # 0: one rank
    collectives: float  # number of tiny collectives; 0: one rank


def measure(run: PlannedRun) -> Machine:
    """Measures with as many processes as the run has ranks.

    Raises:
        HostMemoryError: this machine has too little memory for the measurement.
        RuntimeError: a process failed.
    """
    if run.device_kind == "cpu":
        need = HostNeed("a layer to measure", _layer_nbytes(run), is_pinned=False)
        check_host_memory([need], num_local_ranks=run.world_size)
    return machine_of(_on_processes(job_of(run)), run.device_kind)


def job_of(run: PlannedRun) -> Job:
    """Returns the settings for a run."""
    config = run.config
    optimizer, rule = config.optimizer, rule_of(config.optimizer)
    return Job(
        run.spec,
        run.model.vocab_size,
        config.training.micro_batch_size,
        config.data.seq_length,
        DTYPES[config.training.compute_dtype],
        # Of Muon the pass of AdamW: memory bounds all passes, and this takes any shape.
        rule.part_for({**rule.defaults, "use_muon": False}),
        config.model.recompute_granularity,
        optimizer.host_threads,
        run.world_size,
        run.device_kind,
    )


def machine_of(rates: Sequence[MeasuredRates], device_kind: str) -> Machine:
    """Returns the rates of the slowest rank, which a step waits for."""
    least = MeasuredRates(*(min(values) for values in zip(*rates, strict=True)))
    return Machine(
        flops=least.compute,
        device_bytes=least.device_pass,
        link_bytes=least.link,
        host_bytes=least.host_pass,
        interconnect_bytes=least.interconnect or None,
        collective_seconds=1 / least.collectives if least.collectives else 0.0,
        device_is_host=device_kind == "cpu",
    )


def _layer_nbytes(run: PlannedRun) -> int:
    """Returns the bytes of the largest layer or the head: in fp32 and in the compute dtype, with
    gradients and, for the head, their sum in fp32.
    """
    numels = [sum(p.numel() for p in unit.parameters()) for unit in sharding_units(run.model)]
    numels.append(run.model.vocab_size * run.spec.hidden_size)
    itemsize = run.microbatch.itemsize
    return max(numels) * (2 * torch.float32.itemsize + 2 * itemsize)


def rates_of_rank(job: Job, device: Device) -> MeasuredRates:
    """Measures on this rank. All ranks of the default process group must call it."""
    steps = [_compute, _device_pass, _host_pass, _link, _interconnect, _collectives]
    found = []
    for step in steps:
        # Frees the memory of the last measurement.
        gc.collect()
        dist.barrier()
        found.append(step(job, device))
    return MeasuredRates(*found)


def _on_processes(job: Job) -> list[MeasuredRates]:
    results: Any = mp.get_context("spawn").Queue()
    found: list[MeasuredRates] = []
    with tempfile.TemporaryDirectory(prefix="plan-measure-") as folder:
        context = start_processes(
            _serve,
            (job, str(Path(folder) / "store"), results),
            nprocs=job.num_ranks,
            join=False,
            start_method="spawn",
        )
        while len(found) < job.num_ranks:
            with suppress(queue.Empty):
                found.append(results.get(timeout=0.2))
            context.join(timeout=0)  # raises a process's error
        while not context.join():
            pass
    return found


def _serve(rank: int, job: Job, store: str, results: Any) -> None:
    # As under torchrun, each rank has one torch thread.
    if job.num_ranks > 1 and job.device_kind == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    device = Device.for_rank(job.device_kind, rank, job.num_ranks)
    device.make_current()
    dist.init_process_group(
        device.collective_backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=job.num_ranks,
        timeout=_TIMEOUT,
    )
    try:
        results.put(rates_of_rank(job, device))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _timed(work: Callable[[], object], device: Device) -> float:
    """Returns the median seconds of a call, after a warm-up."""
    seconds: list[float] = []
    begin = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        work()
        device.event().synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


# Computation


def _compute(job: Job, device: Device) -> float:
    """Returns FLOP per second over a microbatch of the whole model."""
    kinds = Counter(job.spec.layers)
    seconds = sum(
        count * _layer_seconds(job, layer, device) for layer, count in kinds.items()
    ) + _loss_seconds(job, device)
    repeated = 4 / 3 if job.recompute_granularity == "full" else 1.0
    flops = num_floating_point_operations(job.spec, job.vocab_size, job.seq_length, job.size)
    # A step's FLOP include the repeated forward.
    return flops * repeated / seconds


def _layer_seconds(job: Job, layer: LayerSpec, device: Device) -> float:
    """Returns the seconds of forward and backward of one layer over a microbatch."""
    spec = job.spec
    one = ModelSpec(
        **{name: getattr(spec, name) for name in vars(spec) if name != "layers"}, layers=(layer,)
    )
    with device.torch_device:
        block = TransformerBlock(one, job.recompute_granularity)
    block.to(job.compute_dtype)

    def work(num_sequences: int, length: int) -> Callable[[], object]:
        hidden = torch.randn(
            num_sequences,
            length,
            spec.hidden_size,
            dtype=job.compute_dtype,
            device=device.torch_device,
            requires_grad=True,
        )

        def run() -> None:
            output, _ = block(hidden)
            output.backward(output)
            hidden.grad = None
            for parameter in block.parameters():
                parameter.grad = None

        return run

    return _seconds_of_microbatch(job, device, work)


def _loss_seconds(job: Job, device: Device) -> float:
    """Returns the seconds of the output projection and the loss over a microbatch."""
    weight = nn.Parameter(
        torch.randn(
            job.vocab_size,
            job.spec.hidden_size,
            dtype=job.compute_dtype,
            device=device.torch_device,
        )
    )

    def work(num_sequences: int, length: int) -> Callable[[], object]:
        num_tokens = num_sequences * length
        hidden = torch.randn(
            num_tokens,
            job.spec.hidden_size,
            dtype=job.compute_dtype,
            device=device.torch_device,
            requires_grad=True,
        )
        labels = torch.randint(job.vocab_size, (num_tokens,), device=device.torch_device)
        weights = torch.full((num_tokens,), 1 / num_tokens, device=device.torch_device)

        def run() -> None:
            weighted_cross_entropy(hidden, weight, labels, weights).loss.backward()
            hidden.grad = weight.grad = None

        return run

    return _seconds_of_microbatch(job, device, work)


def _seconds_of_microbatch(
    job: Job, device: Device, work: Callable[[int, int], Callable[[], object]]
) -> float:
    """Returns the seconds of a whole microbatch, extrapolated from fewer tokens if it is slow.

    Prefers whole sequences, since attention's work grows with the square of their length.
    """
    few = min(_LEAST_TOKENS, job.seq_length)
    probe = work(1, few)
    seconds = _slowest(probe, device)
    if seconds < _LONG:
        # The first call loaded libraries and allocated memory.
        seconds = _slowest(probe, device)

    affordable = max(few, int(_SECONDS * few / seconds))
    length = min(job.seq_length, affordable)
    num_sequences = max(1, min(job.size, affordable // length))
    if affordable > few:
        seconds = _timed(work(num_sequences, length), device)
    return seconds * (job.size * job.seq_length) / (num_sequences * length)


def _slowest(work: Callable[[], object], device: Device) -> float:
    """Returns the seconds of one call on the slowest rank, so that all ranks choose alike."""
    start = time.perf_counter()
    work()
    device.event().synchronize()
    elapsed = time.perf_counter() - start
    slowest = torch.tensor(elapsed, dtype=torch.float64, device=device.torch_device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


# Memory


def _device_pass(job: Job, device: Device) -> float:
    """Returns the bytes per second of the optimizer on the device."""
    parameter = nn.Parameter(torch.zeros(_PASS_NUMEL, device=device.torch_device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = RuleOptimizer([parameter], job.rule)
    states = sum(dtype.itemsize for dtype in job.rule.state_dtypes.values())
    nbytes = _PASS_NUMEL * (4 + 2 * (4 + states))
    return nbytes / _timed(optimizer.step, device)


def _host_pass(job: Job, device: Device) -> float:
    """Returns the bytes per second of the optimizer in host memory."""

    def array(dtype: torch.dtype) -> torch.Tensor:
        return host_array(_PASS_NUMEL, dtype, device).zero_()

    # Scaled states and states of several dtypes are not offloaded; fp32 is measured instead.
    dtypes = {*job.rule.state_dtypes.values()}
    is_offloaded = len(dtypes) == 1 and dtypes <= {*UNSCALED_STATE_DTYPES}
    states = {
        name: array(dtype if is_offloaded else torch.float32)
        for name, dtype in job.rule.state_dtypes.items()
    }
    grad = array(job.compute_dtype)
    out = grad if job.compute_dtype != torch.float32 else None
    step = job.rule.scalars(job.rule.defaults, 10)
    piece = Piece(step, grad, array(torch.float32), states, out=out)
    threads = host_threads(device, job.num_ranks, job.num_host_threads)
    kernel = job.rule.host_kernel(threads.number, threads.cores)
    return piece.traffic / _timed(lambda: kernel([piece], 1.0), device)


def host_array(
    numel: int, dtype: torch.dtype, device: Device, *, is_pinned: bool = False
) -> torch.Tensor:
    """Allocates [numel] in host memory as the offloaded optimizer does."""
    slab = HostSlab(numel * dtype.itemsize, device, is_pinned=is_pinned, purpose="a measurement")
    return slab.tensor(0, numel, dtype)


def _link(job: Job, device: Device) -> float:
    """Returns the bytes per second between host and device, in the slower direction."""
    del job
    on_host = host_array(_PASS_NUMEL, torch.float32, device, is_pinned=True).zero_()
    on_device = torch.zeros_like(on_host, device=device.torch_device)
    down = _timed(lambda: on_host.copy_(on_device, non_blocking=True), device)
    up = _timed(lambda: on_device.copy_(on_host, non_blocking=True), device)
    return on_host.nbytes / max(down, up)


def _interconnect(job: Job, device: Device) -> float:
    """Returns the bytes per second that a rank sends or receives in collectives."""
    if job.num_ranks == 1:
        return 0.0
    numel = _COPY_NBYTES // job.compute_dtype.itemsize // job.num_ranks
    nbytes = 2 * numel * (job.num_ranks - 1) * job.compute_dtype.itemsize
    return nbytes / _exchange_seconds(job, device, numel, count=3)


def _collectives(job: Job, device: Device) -> float:
    """Returns the number of tiny all-gathers and reduce-scatters per second."""
    if job.num_ranks == 1:
        return 0.0
    return 2 / _exchange_seconds(job, device, 1, count=20)


def _exchange_seconds(job: Job, device: Device, numel: int, *, count: int) -> float:
    """Returns the seconds of an all-gather and a reduce-scatter of `numel` elements per rank."""
    group, dtype = dist.group.WORLD, job.compute_dtype
    assert group is not None, "of all ranks"
    own = torch.zeros(numel, dtype=dtype, device=device.torch_device)
    whole = torch.zeros(numel * job.num_ranks, dtype=dtype, device=device.torch_device)
    how = collectives.Reduction(is_average=True)

    def exchange() -> None:
        collectives.all_gather(whole, own, group)
        collectives.reduce_scatter(own, whole, group, how)

    # A fixed number, because all ranks must join every collective.
    exchange()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        exchange()
    device.event().synchronize()
    return (time.perf_counter() - start) / count
