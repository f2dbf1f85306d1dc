"""Reading the weights and states of a `HybridDeviceOptimizer` waits for pending updates; deleting
it frees its memory and ends its threads.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron.core.device import Device
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.distributed.fsdp import OffloadPolicy, fully_shard
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.dtensors import local_tensor
from megatron.core.host_memory import HostSlab
from megatron.core.lanes import delays
from megatron.core.optimizer import rules
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.kernels.host_adam import HostAdam, Ticket
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    ALL,
    IN_ORDER,
    OVERLAPS,
    SGD,
    Net,
    backward,
    batch,
    fsdp,
    same,
    same_states,
    states,
    train,
    weights,
)


@on_ranks(2)
def test_reading_weights_and_states_right_after_a_step_waits_for_it() -> None:
    expected = Net()
    fsdp(expected)
    train(expected, own := FusedAdam(expected.parameters(), lr=0.1), range(1))
    before = Net()
    fsdp(before)
    assert not same(weights(expected), weights(before))
    for seed in range(2):
        for read in ("weights", "state", "state_dict", "synchronize", "dcp"):
            model = Net()
            fsdp(model)
            optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **ALL)
            with delays(seed):
                backward(model)
                optimizer.step()
                if read == "weights":
                    assert same(weights(model), weights(expected))
                elif read == "state":
                    assert same_states(states(optimizer), states(own))
                elif read == "state_dict":
                    saved = [
                        optimizer.state_dict()["state"][number]["exp_avg"].to_local()
                        for number in range(8)
                    ]
                    assert same(saved, [state["exp_avg"] for state in states(own)])
                elif read == "dcp":
                    state = DCPState(model, optimizer).state_dict()
                    assert same(
                        [local_tensor(value) for value in state["model"].values()],
                        weights(expected),
                    )
                else:
                    optimizer.synchronize()
                    parameters = [
                        local_tensor(parameter).detach() for parameter in model.parameters()
                    ]
                    assert same(parameters, weights(expected))


@contextmanager
def held_host_updates() -> Iterator[threading.Event]:
    """AdamW's passes on the host start when the event is set."""
    original, may_go = HostAdam.submit, threading.Event()

    def submit(kernel: HostAdam, pieces: Any, grad_scale: float) -> Ticket:
        may_go.wait(600)
        return original(kernel, pieces, grad_scale)

    HostAdam.submit = submit
    try:
        yield may_go
    finally:
        may_go.set()
        HostAdam.submit = original


@on_ranks(1)
def test_step_returns_before_the_update_with_overlapping_forward() -> None:
    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **ALL)
    before = [local_tensor(parameter).detach().clone() for parameter in model.parameters()]
    with held_host_updates() as may_go:
        backward(model)
        optimizer.step()
        assert same([local_tensor(parameter).detach() for parameter in model.parameters()], before)
        may_go.set()
        assert not same(weights(model), before)


@on_ranks(1)
def test_a_step_has_the_rate_of_its_call_though_a_schedule_writes_to_the_tensor_meanwhile() -> None:
    may_go = threading.Event()

    class Held(SGD):
        def step(self, closure: Any = None) -> Any:
            may_go.wait(600)
            return super().step(closure)

    expected, model = Net(), Net()
    fsdp(expected)
    fsdp(model)
    train(expected, SGD(expected.parameters(), lr=0.1), range(1))
    rate = torch.tensor(0.1)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, Held, Held, lr=rate, **ALL)
    backward(model)
    optimizer.step()
    rate.fill_(0.0)
    may_go.set()
    assert same(weights(model), weights(expected))


@on_ranks(1)
def test_a_new_optimizer_takes_over_what_the_old_one_is_still_writing_and_the_old_one_refuses() -> (
    None
):
    runs = []
    for is_held in (False, True):
        model = Net()
        fsdp(model)
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **ALL)
        with held_host_updates() as may_go:
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            if is_held:
                threading.Timer(0.5, may_go.set).start()
            else:
                may_go.set()
                optimizer.synchronize()
            newer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **ALL)
            assert may_go.is_set(), "it has waited"
        train(model, newer, range(1, 4))
        runs.append(weights(model))
        backward(model)
        with pytest.raises(RuntimeError, match="Expected"):
            optimizer.step()
    assert same(*runs)


@pytest.mark.parametrize("overlaps", [{}, ALL], ids=["in order", "overlapping"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_optimizers_with_different_rules_share_groups(world_size, is_interleaved, overlaps):
    run_ranks(world_size, _share_groups, is_interleaved, overlaps)


def _share_groups(is_interleaved: bool, overlaps: dict[str, Any]) -> None:
    def runs() -> Iterator[list[torch.Tensor]]:
        for is_offloaded in (False, True):
            model = Net()
            fsdp(model)
            own = list(model.parameters())
            # Every group has parameters of both: matrices and vectors.
            halves = [own[::2], own[1::2]] if is_interleaved else [own[:3], own[3:]]
            optimizers = [
                HybridDeviceOptimizer(half, 1.0, rule=rule, lr=0.01, **overlaps)
                if is_offloaded
                else RuleOptimizer(half, rule, lr=0.01)
                for half, rule in zip(halves, (rules.Lion(), rules.SGD()), strict=True)
            ]
            before = weights(model)
            for number in range(4):
                backward(model, number)
                # The second steps before the first in every other iteration, and once not at all.
                order = optimizers[:: -1 if number % 2 else 1][: 1 if number == 2 else 2]
                for optimizer in order:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            states = [
                local_tensor(value).clone()
                for optimizer in optimizers
                for parameter in optimizer.param_groups[0]["params"]
                for value in optimizer.state[parameter].values()
            ]
            changed = weights(model)
            pairs = zip(before, changed, strict=True)
            assert not any(torch.equal(*pair) for pair in pairs if pair[0].numel())
            yield changed + states

    on_device, on_host = runs()
    assert same(on_device, on_host)


@on_ranks(1)
def test_an_optimizer_cannot_step_parameters_that_another_took_over() -> None:
    model = Net()
    fsdp(model)
    parameters = list(model.parameters())
    first = HybridDeviceOptimizer(parameters, 1.0, lr=0.1)
    second = HybridDeviceOptimizer(parameters[1::2], 1.0, lr=0.1)
    before = weights(model)
    backward(model)
    with pytest.raises(RuntimeError, match="another one"):
        first.step()
    assert same(weights(model), before)
    second.step()
    changed = [not torch.equal(*pair) for pair in zip(before, weights(model), strict=True)]
    assert changed == [False, True] * 4


@on_ranks(1)
def test_allocating_states_waits_for_a_step_under_way() -> None:
    inside, may_go = threading.Event(), threading.Event()

    class Slow(SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                may_go.wait(600)
            else:
                assert may_go.is_set(), "while the lane is in it too"
            return super().step(closure)

    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), 1.0, Slow, Slow, lr=0.1, momentum=0.9, **ALL
    )
    backward(model)
    optimizer.step()
    assert inside.wait(600)
    threading.Timer(0.1, may_go.set).start()
    optimizer.init_state()
    assert may_go.is_set()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
@on_ranks(1)
def test_any_optimizer_trains_main_weights_that_are_on_the_host(options: dict[str, Any]) -> None:
    model = Net()
    fully_shard(model, offload_policy=OffloadPolicy(main_weights_on_host=True))
    assert all(group_of(parameter).is_on_host for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    outputs = []
    for _ in range(2):
        with torch.no_grad():
            outputs.append(model(batch(9)))
        backward(model)
        optimizer.step()
    assert not torch.equal(*outputs)


@on_ranks(1)
def test_an_optimizer_without_states_is_saved_without_a_step() -> None:
    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, SGD, SGD, lr=0.1)
    backward(model)
    optimizer.step()
    before = weights(model)
    state = DCPState(model, optimizer).state_dict()
    assert same([local_tensor(value) for value in state["model"].values()], before)


# Deletion


@on_ranks(1)
def test_an_optimizer_that_is_deleted_by_a_lane_finishes_its_updates() -> None:
    results = []
    for is_deleted in (False, True):
        model = Net()
        fsdp(model)
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **ALL)
        backward(model)
        with delays(3):
            optimizer.step()
            if is_deleted:
                box = [optimizer]
                del optimizer
                Device("cpu").lane("another").enqueue(box.clear).synchronize()
        gc.collect()
        results.append(weights(model))
    assert same(*results)


def lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("optimizer ")]


def settled(is_so: Callable[[], bool]) -> bool:
    """Whether it becomes so: a thread ends a moment after it was told to."""
    for thread in threading.enumerate():
        if thread.name.startswith("optimizer "):
            thread.join(60 if not is_so() else 0)
    return is_so()


@contextmanager
def slabs_mapped() -> Iterator[list[weakref.ref[memoryview]]]:
    """The memory of all slabs that are made meanwhile, weakly."""
    original, mapped = HostSlab._map, []

    def mapping(slab: HostSlab, *args: Any) -> None:
        original(slab, *args)
        mapped.append(weakref.ref(slab._memory))

    HostSlab._map = mapping
    try:
        yield mapped
    finally:
        HostSlab._map = original


def _frees_everything(settings: dict[str, Any], deletes_in_flight: bool) -> None:
    gc.collect()
    before = len(lanes())
    model = Net()
    fsdp(model)
    with slabs_mapped() as views:
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **settings)
    assert len(lanes()) == before + (0 if settings is IN_ORDER else 4)
    train(model, optimizer, range(2))
    if not deletes_in_flight:
        optimizer.synchronize()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert settled(lambda: len(lanes()) == before)
    assert sum(view() is not None for view in views) == 1 < len(views), (
        "the main weights are the model's still"
    )
    expected = Net()
    fsdp(expected)
    train(expected, FusedAdam(expected.parameters(), lr=0.1), range(2))
    assert same(weights(model), weights(expected))
    for number in (7, 8):
        assert model(batch(number)).sum().item() == expected(batch(number)).sum().item()
    # A new optimizer starts without moments.
    train(expected, FusedAdam(expected.parameters(), lr=0.1), range(2, 4))
    with slabs_mapped() as more:
        newer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **settings)
    train(model, newer, range(2, 4))
    assert same(weights(model), weights(expected))
    assert more
    del newer, model
    gc.collect()
    assert settled(lambda: len(lanes()) == before)
    assert not any(view() is not None for view in (*views, *more))


@pytest.mark.parametrize("settings", OVERLAPS)
def test_who_lets_go_of_the_optimizer_and_the_model_frees_memory_and_threads(settings):
    run_ranks(1, _frees_everything, settings, False)


def test_an_optimizer_that_is_let_go_of_finishes_its_updates():
    run_ranks(1, _frees_everything, ALL, True)


def test_the_host_side_of_a_plain_module_is_freed_with_the_optimizer():
    with slabs_mapped() as views:
        optimizer = HybridDeviceOptimizer(Net().parameters(), 1.0)
    assert views
    assert all(view() is not None for view in views)
    del optimizer
    gc.collect()
    assert not any(view() is not None for view in views)


@pytest.mark.parametrize("settings", [IN_ORDER, {}])
def test_the_host_side_of_replaced_parameters_is_freed_before_that_of_the_new_ones(settings):
    before = len(lanes())
    model, other = Net(), Net(seed=1)
    with slabs_mapped() as views:
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **settings)
    old = [weakref.ref(parameter) for parameter in model.parameters()]
    num_bytes, num_lanes = optimizer.host_bytes, len(lanes())
    optimizer.param_groups[0]["params"] = list(other.parameters())
    backward(other)
    original = HostSlab._map

    def mapping(slab: HostSlab, *args: Any) -> None:
        assert not any(view() is not None for view in views)
        original(slab, *args)

    HostSlab._map = mapping
    try:
        optimizer.step()
    finally:
        HostSlab._map = original
    assert optimizer.host_bytes == num_bytes
    assert settled(lambda: len(lanes()) == num_lanes), "the old ones have ended"
    del model
    gc.collect()
    assert not any(parameter() is not None for parameter in old)
    del optimizer
    gc.collect()
    assert settled(lambda: len(lanes()) == before)
