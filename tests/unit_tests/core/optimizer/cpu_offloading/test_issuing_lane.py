"""Copies to pageable memory block the thread that issues them, which must not be the backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megatron.core.device import Device
from megatron.core.lanes import Event, InlineLane, IssuingLane, ThreadEvent
from megatron.core.optimizer.cpu_offloading.bucket import FsdpBucket
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    Net,
    backward,
    fsdp,
    same,
    weights,
)

CPU = Device("cpu")
PATIENCE = 60.0  # seconds


class IssuedAtOnce:
    """A lane as an accelerator's, of copies that block: work is done by the thread that
    queues it.
    """

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.is_closed = False

    def enqueue(self, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        for earlier in after:
            earlier.synchronize()
        self.threads.append(threading.current_thread().name)
        work()
        return ThreadEvent.done()

    def close(self) -> None:
        self.is_closed = True


def test_work_is_issued_in_order_by_another_thread_while_the_caller_continues():
    device_lane, gate, seen = IssuedAtOnce(), threading.Event(), []
    lane = IssuingLane(CPU.host_lane("issue"), device_lane)
    first = lane.enqueue(lambda: seen.append(gate.wait(PATIENCE)))
    second = lane.enqueue(lambda: seen.append(2), after=[first])
    assert not first.is_done()
    assert not second.is_done()
    gate.set()
    second.synchronize()
    assert seen == [True, 2]
    assert device_lane.threads == ["issue", "issue"]
    lane.close()
    assert device_lane.is_closed


def test_an_error_is_raised_where_an_event_is_awaited_and_fails_what_comes_after():
    lane = IssuingLane(CPU.host_lane("issue"), IssuedAtOnce())

    def fail() -> None:
        raise OSError("no room")

    failed, later = lane.enqueue(fail), lane.enqueue(lambda: None)
    for event in (failed, later):
        with pytest.raises(OSError, match="no room"):
            event.wait()
    lane.close()


def _steps(
    pins_grads: bool, gate: threading.Event | None = None, seen: list[str] | None = None
) -> list[torch.Tensor]:
    """Weights after steps; gradients come down only while `gate` is open, which it is after each
    backward.
    """
    original = FsdpBucket.fetch_early

    def fetch_early(self: FsdpBucket, *args: Any) -> None:
        if seen is not None:
            seen.append(threading.current_thread().name)
        if gate is not None:
            assert gate.wait(PATIENCE), "the backward waits for this copy"
        original(self, *args)

    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), 1.0, pin_cpu_grads=pins_grads, lr=0.1, fetch_during_backward=True
    )
    FsdpBucket.fetch_early = fetch_early
    try:
        for number in range(3):
            if gate is not None:
                gate.clear()
            backward(model, number)
            if gate is not None:
                gate.set()
            if number == 1:
                # Written to after the copy was asked for: it comes down again.
                for parameter in model.layers[0].parameters():
                    parameter.grad.mul_(2)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        FsdpBucket.fetch_early = original
    return weights(model)


@on_ranks(2)
def test_gradients_that_are_not_pinned_come_down_without_the_backward_waiting() -> None:
    expected = _steps(pins_grads=True)

    host, lane = Device.pins_host_memory, Device.lane
    Device.pins_host_memory = property(lambda _: True)
    Device.lane = lambda self, name, **options: (
        IssuedAtOnce() if name == "optimizer d2h" else lane(self, name, **options)
    )
    Device.pin, Device.unpin, pin, unpin = (
        lambda *_: None,
        lambda *_: None,
        Device.pin,
        Device.unpin,
    )
    try:
        seen: list[str] = []
        found = _steps(pins_grads=False, gate=threading.Event(), seen=seen)
    finally:
        Device.pins_host_memory, Device.lane, Device.pin, Device.unpin = host, lane, pin, unpin

    assert set(seen) == {"optimizer d2h issue"}
    assert len(seen) == 3 * 4
    assert same(found, expected)


def test_without_lanes_everything_stays_in_the_order_of_the_program():
    optimizer = HybridDeviceOptimizer(
        Net().parameters(), 1.0, pin_cpu_grads=False, overlap_cpu_optimizer_d2h_h2d=False
    )
    assert isinstance(optimizer._sides.host_side.lanes.d2h, InlineLane)
