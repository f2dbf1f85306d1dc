"""Writes to the parameters of a `HybridDeviceOptimizer` count, however they are made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp import (
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.lanes import delays
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    ALL,
    OVERLAPS,
    SGD,
    SHARDINGS,
    Net,
    backward,
    batch,
    fsdp,
    same,
    train,
    weights,
)


@on_ranks(1)
def test_a_race_between_the_update_and_the_next_forward_is_not_taken_for_a_write_of_the_user() -> (
    None
):
    """The host lane writes main weights between a group's forward and its backward, which look
    whether somebody has.
    """
    may_write = threading.Event()

    class Slow(SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread() is not threading.main_thread():
                assert may_write.wait(60)
            return super().step(closure)

    original = FsdpParameterGroup.wait_unsharded

    def looked(group: FsdpParameterGroup) -> None:
        may_write.set()
        original(group)

    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, Slow, Slow, lr=0.1, **ALL)
    FsdpParameterGroup.wait_unsharded = looked
    try:
        for number in range(3):
            backward(model, number)
            may_write.clear()
            optimizer.step()
            optimizer.zero_grad()
        assert not may_write.is_set(), "the forward is what lets the update go on"
        may_write.set()
        result = weights(model)
    finally:
        may_write.set()
        FsdpParameterGroup.wait_unsharded = original
    expected = Net()
    fsdp(expected)
    other = SGD(expected.parameters(), lr=0.1)
    fully_shard_optimizer(other)
    train(expected, other, range(3))
    assert same(result, weights(expected))


def _external_writes(sharding: str) -> None:
    def write(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.synchronize()
        with torch.no_grad():
            for parameter in list(model.parameters())[number % 2 :: 2]:
                parameter.mul_(0.5)

    def run(
        make: Callable[[Any], torch.optim.Optimizer], writes: bool = True
    ) -> list[torch.Tensor]:
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = make(model.parameters())
        write(model, optimizer, 0)
        for number in range(4):
            train(model, optimizer, [number])
            if writes:
                write(model, optimizer, number)
        return weights(model)

    expected = run(lambda parameters: FusedAdam(parameters, lr=0.02))
    assert not same(expected, run(lambda parameters: FusedAdam(parameters, lr=0.02), writes=False))
    for fraction in (0.5, 1.0):
        for settings in OVERLAPS:
            make = partial(HybridDeviceOptimizer, offload_fraction=fraction, lr=0.02, **settings)
            assert same(run(make), expected)


def test_writing_to_plain_parameters_between_steps_counts():
    _external_writes("plain")


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
def test_writing_to_sharded_parameters_between_steps_counts(sharding):
    run_ranks(2, _external_writes, sharding)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
@on_ranks(2)
def test_what_no_counter_shows_is_taken_over_on_demand(sharding: str, fraction: float) -> None:
    """Foreach operations on DTensors, and writes to `.data`, are seen when somebody says so."""
    results = []
    for make in (
        FusedAdam,
        lambda parameters, **options: HybridDeviceOptimizer(parameters, fraction, **options, **ALL),
    ):
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = make(model.parameters(), lr=0.1)
        train(model, optimizer, range(2))
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.synchronize()
        for parameter in model.parameters():
            with torch.no_grad():
                if isinstance(optimizer, HybridDeviceOptimizer):
                    torch._foreach_mul_([parameter], 0.5)
                else:
                    parameter.mul_(0.5)
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.reload_parameters()
        loss = (model(batch(9)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        results.append((loss.item(), weights(model)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
@on_ranks(2)
def test_weights_that_a_module_loads_count(sharding: str) -> None:
    source = Net(seed=1)
    SHARDINGS[sharding](source)
    results = []
    for make in (
        FusedAdam,
        lambda parameters, **options: HybridDeviceOptimizer(parameters, 1.0, **options, **ALL),
    ):
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = make(model.parameters(), lr=0.1)
        with delays(3):
            train(model, optimizer, range(2))
            model.load_state_dict(source.state_dict())
            train(model, optimizer, range(2, 4))
            results.append(weights(model))
    assert same(*results)
