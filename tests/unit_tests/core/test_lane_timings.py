"""Timings of the offloaded optimizer's lanes, which do not change results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.device import Device
from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
)
from megatron.core.dtensors import local_tensor
from megatron.core.lane_timings import (
    D2H,
    H2D,
    HOST,
    LaneTimings,
    TimingRecorder,
)
from megatron.core.lanes import InlineLane, RelayedEvent, delays, relay
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.helpers.clock import Clock

CPU = Device("cpu")
BF16 = torch.bfloat16
ALL = {"overlap_step_with_forward": True, "fetch_during_backward": True}
OVERLAPS: dict[str, dict[str, Any]] = {
    "in order": {"overlap_cpu_optimizer_d2h_h2d": False},
    "lanes": {},
    "all": ALL,
}


def done(work: Callable[[], object]) -> RelayedEvent:
    lane = InlineLane(CPU)
    return relay(lane, lambda: lane.enqueue(work))


def test_a_recorder_is_freed_without_the_garbage_collector():
    gc.disable()
    try:
        recorder = TimingRecorder(CPU, has_lanes=True, clock=Clock())
        recorder.begin()
        reference = weakref.ref(recorder)
        del recorder
        assert reference() is None
    finally:
        gc.enable()


def test_times_are_means_over_steps_and_the_rate_is_bytes_over_the_hosts_time():
    clock = Clock()
    recorder = TimingRecorder(CPU, has_lanes=True, clock=clock)
    for host in (3.0, 5.0):
        early = recorder.coming.timed(D2H, clock.taking(1.0))
        early()
        step = recorder.begin()
        step.timed(D2H, clock.taking(0.5))()
        for part in (1.0, host - 1.0):
            step.timed(HOST, clock.taking(part), nbytes=20)()
        step.timed(H2D, clock.taking(0.25))()
        with step.waiting(D2H):
            clock.now += 0.75
        with step.waiting(HOST):
            clock.now += 2.0
        step.wait(done(lambda: None))
        recorder.end()
    got = recorder.collect()
    assert got == LaneTimings(
        num_steps=2,
        d2h=1.5,
        host=4.0,
        h2d=0.25,
        waited_d2h=0.75,
        waited_host=2.0,
        waited_h2d=0.0,
        host_bytes=40.0,
    )
    assert got.host_bytes_per_second == 10.0
    assert recorder.collect() is None, "each step counts once"


def test_a_step_is_collected_once_all_of_its_work_is_done():
    clock = Clock()
    recorder = TimingRecorder(CPU, has_lanes=True, clock=clock)
    first = recorder.begin()
    work = first.timed(HOST, clock.taking(1.0))
    assert recorder.collect() is None
    work()
    assert recorder.collect() is None, "the forward may still wait for it"
    second = recorder.begin()
    late = second.timed(HOST, clock.taking(3.0))
    assert recorder.collect().host == 1.0
    recorder.begin()
    assert recorder.collect() is None
    late()
    got = recorder.collect()
    assert (got.num_steps, got.host) == (1, 3.0)


def test_without_lanes_all_work_counts_as_waiting():
    clock = Clock()
    recorder = TimingRecorder(CPU, has_lanes=False, clock=clock)
    step = recorder.begin()
    for lane, seconds in ((D2H, 1.0), (HOST, 2.0), (H2D, 4.0)):
        step.timed(lane, clock.taking(seconds))()
    recorder.end()
    got = recorder.collect()
    assert (
        (got.waited_d2h, got.waited_host, got.waited_h2d)
        == (got.d2h, got.host, got.h2d)
        == (1.0, 2.0, 4.0)
    )
    assert got.host_bytes_per_second is None, "the number of bytes is unknown"


def test_waits_of_other_lanes_do_not_count_as_waits_of_the_computation():
    clock = Clock()
    recorder = TimingRecorder(CPU, has_lanes=True, clock=clock)

    class Slow(RelayedEvent):
        def __init__(self) -> None:
            """Of nothing."""

        first = SimpleNamespace(synchronize=clock.taking(2.0))
        wait = staticmethod(clock.taking(4.0))
        synchronize = staticmethod(clock.taking(8.0))

    event = recorder.begin().awaited(Slow())
    event.synchronize()
    event.wait()
    assert clock.now == 114.0
    recorder.end()
    got = recorder.collect()
    assert (got.waited_d2h, got.waited_host, got.waited_h2d) == (0.0, 2.0, 0.0)


# The optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Linear(rows, columns) for rows, columns in ((6, 5), (5, 7), (7, 6))
        )
        self.to(BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make(fraction: float = 1.0, **settings: Any) -> tuple[Net, HybridDeviceOptimizer]:
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(main_grads_dtype=BF16)
    with fully_shard_context("cpu"):
        for module in (*model.layers, model):
            fully_shard(module, mesh, Placements.for_strategy("optim_grads_params"), policy)
    return model, HybridDeviceOptimizer(model.parameters(), fraction, lr=0.05, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 4) -> None:
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        (
            model(torch.randn(4, 6, generator=generator).to(BF16)).float() - 1
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [local_tensor(value).detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(one, id=name, marks=() if name == "all" else pytest.mark.wide)
        for name, one in OVERLAPS.items()
    ],
)
@on_ranks(2)
def test_recording_is_bit_equal_at_any_fraction_with_delays(settings: dict[str, Any]) -> None:
    initial = weights(make()[0])
    for fraction in (0.5, 1.0):
        results = []
        for records, seed in ((False, None), (True, None), (True, 1)):
            model, optimizer = make(fraction, records_timings=records, **settings)
            with nullcontext() if seed is None else delays(seed):
                train(model, optimizer)
                results.append(weights(model))
                optimizer.synchronize()
            timings = optimizer.timings()
            assert (timings is not None) == records
            if timings is not None:
                assert timings.num_steps == (3 if settings == ALL else 4)
                assert timings.host > 0
        for other in results[1:]:
            assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))
        assert not any(
            torch.equal(*pair) for pair in zip(results[0], initial, strict=True) if pair[0].numel()
        )


@on_ranks(2)
def test_an_update_with_bf16_gradients_moves_28_bytes_per_element() -> None:
    model, optimizer = make(records_timings=True)
    train(model, optimizer, 3)
    timings = optimizer.timings()
    numel = sum(local_tensor(parameter).numel() for parameter in model.parameters())
    # Per element: a bf16 gradient is read and a bf16 weight written; the fp32 main weight and both
    # moments are read and written.
    assert timings.host_bytes == 28 * numel
    assert timings.host_bytes_per_second == timings.host_bytes / timings.host
    sgd = torch.optim.SGD
    model, optimizer = make(records_timings=True, cpu_optimizer_cls=sgd, gpu_optimizer_cls=sgd)
    train(model, optimizer, 1)
    timings = optimizer.timings()
    assert timings.host > 0
    assert timings.host_bytes_per_second is None, "the traffic of other optimizers is unknown"


@on_ranks(1)
def test_the_recorder_does_not_keep_buckets_and_events_alive() -> None:
    model, optimizer = make(records_timings=True, **ALL)
    train(model, optimizer, 2)
    optimizer.synchronize()
    recorder = optimizer._sides.host_side.timings
    references = [
        weakref.ref(each)
        for updating in optimizer._sides.host_side.executors
        for each in (updating, updating.bucket, updating.bucket.pending.sent)
    ]
    assert all(reference() is not None for reference in references)
    del model, optimizer
    gc.collect()
    assert not any(reference() is not None for reference in references)
    assert recorder.collect().num_steps == 1
