"""Who updates a group's main weights, and what becomes of that when something fails or is let go
of.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.device import Device
from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.distributed.fsdp import (
    OffloadPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
)
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.lanes import delays
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.kernels.host_adam import HostAdam
from tests.helpers.ranks import on_ranks, run_ranks

DIM = 16


def sharded(
    num_layers: int = 3, dtype: torch.dtype = torch.float32, on_host: bool = False
) -> nn.Sequential:
    """Layers that are a group each."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(DIM, DIM, bias=False, dtype=dtype) for _ in range(num_layers))
    )
    mesh = init_device_mesh("cpu", (1,))
    policy = OffloadPolicy(main_weights_on_host=on_host)
    with fully_shard_context("cpu"):
        for layer in model:
            fully_shard(
                layer, mesh, Placements.for_strategy("optim_grads_params"), offload_policy=policy
            )
    return model


def backward(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    model(x).float().square().mean().backward()


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.ones(1, DIM, dtype=next(model.parameters()).dtype))


@on_ranks(1)
def test_an_update_that_failed_is_told_to_everybody_who_asks_for_its_weights() -> None:
    model = sharded()
    optimizer = HybridDeviceOptimizer(
        model.parameters(), 1.0, lr=0.1, overlap_step_with_forward=True
    )
    backward(model)
    original, HostAdam.run = HostAdam.run, lambda *_: 1 / 0
    try:
        optimizer.step()
        for _ in range(2 * len(model)):
            with pytest.raises(ZeroDivisionError):
                model.state_dict()
            with pytest.raises(ZeroDivisionError):
                _ = optimizer.state
    finally:
        HostAdam.run = original


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_any_optimizer_trains_main_weights_that_are_on_the_host(options):
    def train() -> None:
        model = sharded(dtype=torch.float32, on_host=True)
        assert all(group_of(parameter).is_on_host for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        before = output(model)
        backward(model)
        optimizer.step()
        assert not torch.equal(output(model), before)

    run_ranks(1, train)


def test_another_optimizer_takes_over_after_the_first_is_gone():
    def train() -> None:
        model = sharded()
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        del optimizer
        before = output(model)
        other = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
        backward(model)
        other.step()
        assert not torch.equal(output(model), before)

    run_ranks(1, train)


def test_a_group_has_one_optimizer_and_the_later_one_is_it():
    def train() -> None:
        model = sharded()
        first = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1)
        second = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1)
        backward(model)
        before = output(model)
        with pytest.raises(
            RuntimeError, match=r"Expected to be the one optimizer of Linear.0., got another one"
        ):
            first.step()
        assert torch.equal(output(model), before)
        second.step()
        assert not torch.equal(output(model), before)

    run_ranks(1, train)


def test_an_optimizer_without_states_is_saved_without_a_step():
    def save() -> None:
        model = sharded(dtype=torch.bfloat16)
        optimizer = HybridDeviceOptimizer(
            model.parameters(), 1.0, torch.optim.SGD, torch.optim.SGD, lr=0.1
        )
        backward(model, torch.bfloat16)
        optimizer.step()
        before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
        state = DCPState(model, optimizer).state_dict()
        for name, value in state["model"].items():
            assert torch.equal(value.to_local(), before[name])

    run_ranks(1, save)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_loading_no_states_leaves_none(fraction):
    model = nn.Linear(DIM, DIM)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), fraction, torch.optim.SGD, torch.optim.SGD, lr=0.1, momentum=0.9
    )
    model(torch.ones(1, DIM)).sum().backward()
    optimizer.step()
    assert all(optimizer.state[parameter] for parameter in model.parameters())
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    assert not any(optimizer.state.get(parameter) for parameter in model.parameters())


@on_ranks(1)
def test_an_optimizer_that_ends_on_a_lane_leaves_its_updates_to_finish() -> None:
    expected, model = sharded(6), sharded(6)
    for each in (expected, model):
        optimizer = HybridDeviceOptimizer(
            each.parameters(), 1.0, lr=0.1, overlap_step_with_forward=True
        )
        backward(each)
        if each is expected:
            optimizer.step()
            continue
        box = [optimizer]
        with delays(3):
            optimizer.step()
            del optimizer
            # The last reference goes on another lane's thread, while updates are queued.
            Device("cpu").lane("somebody's").enqueue(box.clear).synchronize()
        gc.collect()
        assert not box
    assert torch.equal(output(model), output(expected))


def test_lanes_end_with_their_optimizer():
    # Lanes of an earlier test's optimizer may end at any moment: only the new ones are watched.
    before = set(threading.enumerate())
    model = nn.Linear(DIM, DIM)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1)
    model(torch.ones(1, DIM)).sum().backward()
    optimizer.step()
    lanes = [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("optimizer")
    ]
    assert len(lanes) == 3
    del optimizer
    gc.collect()
    for thread in lanes:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in lanes)
