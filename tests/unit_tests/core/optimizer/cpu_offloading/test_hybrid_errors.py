"""Inputs that `HybridDeviceOptimizer` rejects, and how failures of its lanes are raised."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.host_memory import HostLimits, HostMemoryError
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.kernels.host_adam import HostAdam, Ticket
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    ALL,
    BF16,
    FORWARD,
    IN_ORDER,
    OVERLAPS,
    SGD,
    AdamW,
    Net,
    backward,
    batch,
    fsdp,
    same,
    train,
    weights,
)

# Options


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_unsupported_options_of_a_group_are_rejected_before_either_side_steps(
    fraction,
):
    model = Net()
    *first, last = model.parameters()
    groups = [{"params": first}, {"params": [last]}]
    optimizer = HybridDeviceOptimizer(groups, fraction, AdamW, AdamW, lr=0.1)
    optimizer.init_state()
    backward(model)
    before = weights(model)
    group = optimizer.param_groups[1]
    for name, value in (("maximize", True), ("amsgrad", True), ("betas", (1.0, 0.9))):
        was_there, own = name in group, group.get(name)
        group[name] = value
        with pytest.raises(ValueError, match="Expected"):
            optimizer.step()
        group[name] = own
        if not was_there:
            del group[name]
        assert same(weights(model), before)
        assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
    optimizer.step()
    assert not same(weights(model), before)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


# Failures of lanes, and rejected arguments


class _BrokenError(Exception):
    pass


@contextmanager
def failing_once(owner: type = HostAdam, name: str = "submit") -> Iterator[None]:
    """The next pass on the host fails: as it is started, or as it is awaited."""
    original = getattr(owner, name)

    def run_that_fails(*_: Any) -> None:
        setattr(owner, name, original)
        raise _BrokenError("the host lane broke")

    setattr(owner, name, run_that_fails)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _errors_surface(
    settings: dict[str, Any], read: str, owner: type = HostAdam, name: str = "submit"
) -> None:
    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **settings)
    with failing_once(owner, name):
        backward(model)
        if settings is ALL:
            optimizer.step()
        else:
            with pytest.raises(_BrokenError, match="the host lane broke"):
                optimizer.step()
        calls = {
            "step": optimizer.step,
            "synchronize": optimizer.synchronize,
            "state": lambda: optimizer.state,
            "state_dict": optimizer.state_dict,
            "load_state_dict": lambda: optimizer.load_state_dict(
                {"state": {}, "param_groups": [{"params": range(8)}]}
            ),
            "forward": lambda: model(batch(0)),
            "weights": model.state_dict,
        }
        for _ in range(6):  # more often than there are groups
            with pytest.raises(_BrokenError, match="the host lane broke") as raised:
                calls[read]()
            assert "run_that_fails" in "".join(traceback.format_tb(raised.value.__traceback__))


@pytest.mark.parametrize(
    "read", ["step", "synchronize", "state", "state_dict", "load_state_dict", "forward", "weights"]
)
def test_an_error_in_a_lane_is_raised_by_dependents_with_its_traceback(read):
    run_ranks(1, _errors_surface, ALL, read)


def test_an_update_that_fails_while_it_is_awaited_fails_later_calls_too():
    run_ranks(1, _errors_surface, ALL, "forward", Ticket, "wait")


@pytest.mark.parametrize("settings", [IN_ORDER, {}])
def test_an_error_in_a_lane_is_raised_by_the_waiting_step_and_by_the_next(settings):
    run_ranks(1, _errors_surface, settings, "step")


@pytest.mark.parametrize("settings", OVERLAPS)
def test_an_error_for_plain_parameters_is_raised_by_the_step(settings):
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, **settings)
    backward(model)
    with failing_once(), pytest.raises(_BrokenError):
        optimizer.step()


def test_parameters_on_several_devices_and_on_meta_are_rejected():
    mixed = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))]
    with pytest.raises(
        ValueError, match=r"Expected parameters on one device, got some on \['cpu', 'meta'\]"
    ):
        HybridDeviceOptimizer(mixed, 0.5)
    for fraction in (0.0, 1.0):
        with pytest.raises(
            ValueError, match="Expected parameters that have memory, got some on meta"
        ):
            HybridDeviceOptimizer(mixed[1:], fraction)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (IN_ORDER | FORWARD, ValueError, "overlap_cpu_optimizer_d2h_h2d"),
        (IN_ORDER | {"fetch_during_backward": True}, ValueError, "overlap_cpu_optimizer_d2h_h2d"),
        ({"amsgrad": True}, ValueError, "amsgrad"),
        ({"maximize": True}, ValueError, "maximize"),
        ({"momentum": 0.0}, TypeError, "momentum"),
        (
            {"cpu_optimizer_cls": SGD, "gpu_optimizer_cls": SGD, "momentun": 0.9},
            TypeError,
            "momentun",
        ),
        ({"num_host_threads": 0}, ValueError, "at least one thread"),
        ({"exp_avg_dtype": BF16}, ValueError, "all states"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_rejected(options, error, message):
    with pytest.raises(error, match=message):
        HybridDeviceOptimizer(Net().parameters(), 1.0, **options)


def test_parameters_in_fp64_are_rejected():
    with pytest.raises(ValueError, match="float64"):
        HybridDeviceOptimizer(Net(dtype=torch.float64).parameters(), 1.0)


def _too_large(poor_rank: int) -> None:
    """One rank's machine has too little memory; its own limits are looked at by each."""
    original = HostLimits.read
    limits = HostLimits(100, None) if dist.get_rank() == poor_rank else HostLimits(1 << 40, None)
    HostLimits.read = classmethod(lambda *_: limits)
    try:
        model = Net()
        fsdp(model)
        words = (
            "got available: MemAvailable 100 B"
            if dist.get_rank() == poor_rank
            else "Expected host memory on every rank's machine, got one that needs"
        )
        with pytest.raises(HostMemoryError, match=words):
            HybridDeviceOptimizer(model.parameters(), 1.0)
        assert not any(group_of(parameter).is_on_host for parameter in model.parameters())
        optimizer = HybridDeviceOptimizer(model.parameters(), 0.0)
        train(model, optimizer, range(1))
    finally:
        HostLimits.read = original


def test_a_plan_larger_than_one_ranks_memory_is_rejected_by_all_of_them():
    run_ranks(2, _too_large, 1)


@on_ranks(1)
def test_an_error_of_the_device_side_does_not_change_the_host_side() -> None:
    model = Net()
    fsdp(model)
    before = weights(model)
    with pytest.raises(ValueError, match="float64"):
        HybridDeviceOptimizer([nn.Parameter(torch.zeros(3).double()), *model.parameters()], 0.5)
    assert not any(group_of(parameter).is_on_host for parameter in model.parameters())
    assert same(weights(model), before)


def test_copies_and_assigned_states_are_rejected():
    optimizer = HybridDeviceOptimizer(Net().parameters(), 0.5)
    for copying in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"Expected state_dict\(\) to be used"):
            copying(optimizer)
    with pytest.raises(RuntimeError, match=r"states .* cannot be assigned"):
        optimizer.state = {}
