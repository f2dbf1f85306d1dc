"""Reading an optimizer's state on another thread: what waits for the reader, and what does not."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.lanes import Lane
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.planning_optimizer import state_units
from megatron.core.optimizer.state_units import StateUnit

DEVICE = Device("cpu")
SECONDS = 20.0


class Reader:
    """A lane whose reading of a unit takes until it is let go."""

    def __init__(self) -> None:
        self.lane: Lane = DEVICE.host_lane("reader")
        self.may_end = threading.Event()

    def hold(self, unit: StateUnit) -> None:
        unit.hold(self.lane.enqueue(lambda: self.may_end.wait(SECONDS)))


def parameters(num: int, requires_grad: bool = True) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    # Of different dtypes, so that an offloading optimizer has a bucket for each.
    dtypes = [torch.float32, torch.bfloat16]
    made = [
        nn.Parameter(torch.randn(8, 4, generator=generator).to(dtypes[i % 2])) for i in range(num)
    ]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter) if requires_grad else None
    return made


def in_background(action) -> tuple[threading.Thread, threading.Event]:
    is_done = threading.Event()

    def run() -> None:
        action()
        is_done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, is_done


@pytest.mark.parametrize("cls", [FusedAdam, torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_that_updates_in_step_waits_in_step(cls):
    own = parameters(2)
    optimizer = cls(own, lr=0.1)
    optimizer.step()
    (unit,) = state_units(optimizer)
    assert unit.updated is None
    assert [id(parameter) for parameter in unit.parameters] == [id(parameter) for parameter in own]
    before = [parameter.detach().clone() for parameter in own]
    reader = Reader()
    reader.hold(unit)
    thread, has_stepped = in_background(optimizer.step)
    assert not has_stepped.wait(0.05)
    assert all(torch.equal(parameter, old) for parameter, old in zip(own, before, strict=True))
    reader.may_end.set()
    assert has_stepped.wait(SECONDS)
    thread.join()
    assert not any(torch.equal(parameter, old) for parameter, old in zip(own, before, strict=True))
    # The next step does not wait.
    optimizer.step()


def test_only_the_bucket_that_is_read_waits():
    own = parameters(2)
    optimizer = HybridDeviceOptimizer(own, 1.0, lr=0.1, param_update_in_fp32=True)
    first, second = state_units(optimizer)
    before = [parameter.detach().clone() for parameter in own]
    reader = Reader()
    reader.hold(second)
    # Stepping waits for all plain tensors at its end, so it must be watched from here.
    thread, has_stepped = in_background(optimizer.step)
    first_updated = threading.Event()

    def watch() -> None:
        while torch.equal(own[0], before[0]):
            threading.Event().wait(0.001)
        first_updated.set()

    threading.Thread(target=watch, daemon=True).start()
    assert first_updated.wait(SECONDS)
    assert not has_stepped.is_set()
    assert torch.equal(own[1], before[1])
    assert not second.states[0]["exp_avg"].any()
    assert first.states[0]["exp_avg"].all()
    reader.may_end.set()
    assert has_stepped.wait(SECONDS)
    thread.join()
    assert not torch.equal(own[1], before[1])


def test_a_unit_from_before_a_step_holds_the_next_one_back():
    own = parameters(1)
    optimizer = HybridDeviceOptimizer(own, 1.0, lr=0.1)
    (unit,) = state_units(optimizer)
    optimizer.step()
    before = own[0].detach().clone()
    reader = Reader()
    reader.hold(unit)
    thread, has_stepped = in_background(optimizer.step)
    assert not has_stepped.wait(0.05)
    assert torch.equal(own[0], before)
    reader.may_end.set()
    thread.join()
    assert not torch.equal(own[0], before)


def test_both_sides_of_an_offloading_optimizer_are_units():
    own = parameters(4)
    optimizer = HybridDeviceOptimizer(own, 0.5, lr=0.1)
    optimizer.init_state()
    units = state_units(optimizer)
    found = [id(parameter) for unit in units for parameter in unit.parameters]
    assert sorted(found) == sorted(map(id, own))
    on_device = [
        p for unit in units if unit.optimizer is optimizer.device_optimizer for p in unit.parameters
    ]
    assert on_device
    assert not any(optimizer.holds(parameter) for parameter in on_device)
    for unit in units:
        assert [set(states) >= {"step", "exp_avg", "exp_avg_sq"} for states in unit.states] == [
            True
        ] * len(unit.states)


@pytest.mark.parametrize("fraction", [None, 0.0, 1.0])
def test_loading_waits_for_readers(fraction):
    own = parameters(1)
    optimizer = (
        FusedAdam(own, lr=0.1) if fraction is None else HybridDeviceOptimizer(own, fraction, lr=0.1)
    )
    optimizer.step()
    saved = optimizer.state_dict()
    reader = Reader()
    reader.hold(state_units(optimizer)[0])
    thread, has_loaded = in_background(lambda: optimizer.load_state_dict(saved))
    assert not has_loaded.wait(0.05)
    reader.may_end.set()
    assert has_loaded.wait(SECONDS)
    thread.join()


def test_a_parameter_that_several_readers_read_waits_for_all_of_them():
    own = parameters(1)
    optimizer = FusedAdam(own, lr=0.1)
    optimizer.step()
    before = own[0].detach().clone()
    readers = [Reader(), Reader()]
    for reader in readers:
        reader.hold(state_units(optimizer)[0])
    thread, has_stepped = in_background(optimizer.step)
    for reader in reversed(readers):
        assert not has_stepped.wait(0.05)
        assert torch.equal(own[0], before)
        reader.may_end.set()
    assert has_stepped.wait(SECONDS)
    thread.join()
    assert not torch.equal(own[0], before)
