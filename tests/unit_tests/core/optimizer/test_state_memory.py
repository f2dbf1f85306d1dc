"""The bytes of each state, on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
)
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.state_memory import StateBytes, state_memory
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import Uneven

BF16 = torch.bfloat16
SGD = torch.optim.SGD

# Buffers' elements on each of 2 ranks, by hand; see test_offload_memory: the rows of a tensor are
# not cut.
HALVES = [18, 25, 14]
NUMEL = 30 + 5 + 35 + 7 + 21 + 3


def grouped(dtype: torch.dtype = BF16, main_grads: torch.dtype = BF16) -> Uneven:
    model = Uneven(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(main_grads_dtype=main_grads)
    with fully_shard_context("cpu"):
        for module in (*model.layers, model.head, model):
            fully_shard(module, mesh, Placements.for_strategy("optim_grads_params"), policy)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = BF16) -> None:
    model(torch.ones(2, 6, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def host_bytes(table: dict[str, StateBytes]) -> int:
    return sum(row.host for row in table.values())


@pytest.mark.parametrize(
    ("settings", "main_grads"),
    [
        ({}, torch.float32),
        ({"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}, BF16),
    ],
)
@on_ranks(2)
def test_the_hosts_column_is_the_offloaded_optimizers_memory_to_the_byte(
    settings: dict[str, Any], main_grads: torch.dtype
) -> None:
    for fraction in (1.0, 0.4, 0.0):
        model = grouped(main_grads=main_grads)
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **settings)
        table = state_memory(model, optimizer)
        assert host_bytes(table) == optimizer.host_bytes
        assert (optimizer.host_bytes > 0) == (fraction > 0)
        num_on_host = sum(group.is_on_host for group in optimizer.plan.groups)
        on_device = sum(HALVES[: len(HALVES) - num_on_host])
        assert table["compute weights"].device == 2 * sum(HALVES)
        assert table["gradients"].device == main_grads.itemsize * sum(HALVES)
        moment = settings.get("exp_avg_dtype", torch.float32).itemsize
        assert table["main weights"].device == 4 * on_device
        assert table["exp_avg"].device == table["exp_avg_sq"].device == moment * on_device
        step(model, optimizer)
        assert state_memory(model, optimizer) == table, "all of it is there from the start"


@on_ranks(2)
def test_new_compute_weights_have_a_row_if_they_have_memory() -> None:
    model = grouped(main_grads=torch.float32)
    table = state_memory(model, HybridDeviceOptimizer(model.parameters(), 1.0))
    assert list(table) == [
        "compute weights",
        "main weights",
        "gradients",
        "exp_avg",
        "exp_avg_sq",
        "new compute weights",
    ]
    # fp32 arrays of 18, 25 and 14 elements, aligned to cache lines: bytes 0 to 72, 128 to 228, and
    # from 256.
    assert table["main weights"] == (0, 256 + 56)
    assert table["new compute weights"].host >= 2 * sum(HALVES)
    assert table["compute weights"] == (2 * sum(HALVES), 0)


@on_ranks(2)
def test_states_of_other_classes_count_beside_once_there_are_any() -> None:
    model = grouped()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, SGD, SGD, lr=0.1, momentum=0.9)
    before = state_memory(model, optimizer)
    assert host_bytes(before) == optimizer.host_bytes
    assert "momentum_buffer" not in before
    step(model, optimizer)
    after = state_memory(model, optimizer)
    added = {name: row for name, row in after.items() if name not in before}
    numel = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert added == {"momentum_buffer": StateBytes(0, 4 * numel)}
    assert host_bytes(after) == optimizer.host_bytes + 4 * numel


@on_ranks(2)
def test_groups_count_their_buffers_and_shared_memory_once() -> None:
    total = sum(HALVES)
    model = grouped()
    optimizer = FusedAdam(model.parameters())
    optimizer.init_state()
    assert state_memory(model, optimizer) == {
        "compute weights": (2 * total, 0),
        "main weights": (4 * total, 0),
        "gradients": (2 * total, 0),
        "exp_avg": (4 * total, 0),
        "exp_avg_sq": (4 * total, 0),
    }
    model = grouped(torch.float32, torch.float32)
    assert state_memory(model, SGD(model.parameters(), lr=0.1)) == {
        "compute weights": (4 * total, 0),
        "gradients": (4 * total, 0),
    }, "weights that are both count once"


def test_plain_parameters_count_their_gradients_before_there_are_any():
    model = Uneven()
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    assert state_memory(model, optimizer) == {
        "compute weights": (2 * NUMEL, 0),
        "gradients": (2 * NUMEL, 0),
    }
    step(model, optimizer)
    expected = {
        "compute weights": (2 * NUMEL, 0),
        "main weights": (4 * NUMEL, 0),
        "gradients": (2 * NUMEL, 0),
        "exp_avg": (4 * NUMEL, 0),
        "exp_avg_sq": (4 * NUMEL, 0),
    }
    assert state_memory(model, optimizer) == expected
    model(torch.ones(2, 6, dtype=BF16)).sum().backward()
    assert state_memory(model, optimizer) == expected


def test_plain_parameters_on_the_host_leave_compute_weights_behind():
    model = Uneven()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, param_update_in_fp32=True)
    table = state_memory(model, optimizer)
    # Every parameter takes whole cache lines of 64 elements.
    assert table["main weights"] == (0, 6 * 64 * 4)
    assert table["compute weights"] == (2 * NUMEL, 0)
    assert host_bytes(table) == optimizer.host_bytes


@on_ranks(2)
def test_shards_of_fsdp2_are_main_weights_unless_the_host_has_these() -> None:
    for fraction in (0.0, 1.0):
        model = Uneven(torch.float32)
        for module in (*model.layers, model.head, model):
            fsdp2.fully_shard(module)
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction)
        table = state_memory(model, optimizer)
        weights = "compute weights" if fraction else "main weights"
        storages = [parameter.to_local().untyped_storage() for parameter in model.parameters()]
        nbytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        assert nbytes > 0
        assert table[weights].device == nbytes
        assert host_bytes(table) == optimizer.host_bytes
