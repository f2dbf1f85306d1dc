"""`fully_shard(module, mesh)` as FSDP2 has it: no context, no placements; the first forward
completes the model.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from megatron.core.distributed.fsdp import (
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.uneven_rows import UnevenShard
from megatron.core.lanes import delays
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from tests.helpers.ranks import on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def losses(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        torch.manual_seed(step * 10 + dist.get_rank())
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def contexts_of(model: nn.Module) -> set[int]:
    return {id(module.context) for module in model.modules() if hasattr(module, "context")}


@on_ranks(2)
def test_modules_join_what_contains_them_and_train_as_in_a_context() -> None:
    mesh, placements = init_device_mesh("cpu", (2,)), Placements.for_strategy("optim_grads_params")
    told = net()
    with fully_shard_context("cpu"):
        for module in (*told.layers, told):
            fully_shard(module, mesh, placements)
    expected = losses(told)

    # In any order, as long as inner modules come first; with and without a mesh.
    for order in ((0, 1, 2), (2, 0, 1)):
        for options in ({"mesh": mesh}, {}):
            model = net()
            for number in order:
                fully_shard(model.layers[number], **options)
            assert len(contexts_of(model)) == 3
            assert fully_shard(model, **options) is model
            assert len(contexts_of(model)) == 1
            model(torch.zeros(1, 6))  # completes the context
            numbers = [
                group.number
                for module in model.context.forward_order
                for group in module.parameter_groups
            ]
            assert len(set(numbers)) == len(numbers) == 4
            assert losses(model) == expected
            assert model.is_root()
            assert [type(module).__name__ for module in model.context.forward_order] == [
                "FsdpNet"
            ] + ["FsdpLinear"] * 3


@on_ranks(2)
def test_models_that_are_built_side_by_side_stay_apart() -> None:
    one, other = net(0), net(1)
    alone = [net(0), net(1)]
    for first, second in zip(one.layers, other.layers, strict=True):
        fully_shard(first)
        fully_shard(second)
    fully_shard(other)
    fully_shard(one)
    assert contexts_of(one).isdisjoint(contexts_of(other))
    for model in alone:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    assert [losses(one), losses(other)] == [losses(model) for model in alone]


def net_in_context() -> nn.Module:
    model = net()
    mesh, placements = init_device_mesh("cpu", (2,)), Placements.for_strategy("optim_grads_params")
    with fully_shard_context("cpu"):
        fully_shard(model, mesh, placements)
    return model


@on_ranks(2)
def test_layers_without_a_sharded_root_are_roots_of_their_own() -> None:
    model = net()
    for layer in model.layers:
        fully_shard(layer)
    expected = losses(net_in_context())
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    for step in range(2):
        torch.manual_seed(step * 10 + dist.get_rank())
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.head.zero_grad()
        assert step or float(loss) == expected[0]
    assert all(layer.is_root() for layer in model.layers)


@on_ranks(4)
def test_the_mesh_says_what_is_usual() -> None:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cases: list[tuple[Any, list[type]]] = [
        (None, [UnevenShard]),
        (init_device_mesh("cpu", (4,)), [UnevenShard]),
        (hybrid, [Replicate, UnevenShard]),
    ]
    for mesh, expected in cases:
        layer = fully_shard(nn.Linear(6, 6), mesh)
        assert [type(placement) for placement in layer.weight.placements] == expected
    with pytest.raises(ValueError, match="Expected placements for a mesh of 3 axes, got none"):
        fully_shard(nn.Linear(6, 6), init_device_mesh("cpu", (2, 2, 1)))


@on_ranks(2)
def test_sharding_the_parent_of_a_module_that_has_run_is_rejected() -> None:
    model = net()
    fully_shard(model.layers[0])
    model.layers[0](torch.randn(2, 6))
    with pytest.raises(
        RuntimeError, match=r"Expected every fully_shard before the first forward, got one of Net"
    ):
        fully_shard(model)
    # The existing modules keep working.
    model.layers[0](torch.randn(2, 6)).sum().backward()
    assert model.layers[0].weight.grad is not None


@on_ranks(2)
def test_absorbed_contexts_and_deleted_models_are_freed() -> None:
    def build() -> tuple[nn.Module, weakref.ref[Any]]:
        model = net()
        for layer in model.layers:
            fully_shard(layer)
        absorbed = weakref.ref(model.layers[1].context)
        fully_shard(model)
        return model, absorbed

    model, absorbed = build()
    losses(model)
    gc.collect()
    assert absorbed() is None, "a context that has been absorbed is kept"
    buffers = [weakref.ref(group.main_weight) for group in model.layers[0].parameter_groups]
    context = weakref.ref(model.context)
    del model
    gc.collect()
    assert context() is None
    assert all(buffer() is None for buffer in buffers)


@on_ranks(2)
def test_calls_of_fsdp2_users_work_or_are_rejected_by_name() -> None:
    """Operations of FSDP2's users on a model work, or raise an error that names them."""
    model = net().bfloat16()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    with pytest.raises(RuntimeError, match="got one on a parameter of fully_shard"):
        model.head.weight.register_post_accumulate_grad_hook(print)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 6, dtype=torch.bfloat16)).sum().backward()
    message = (
        r"Expected gradients in torch\.float32, as the main weights, "
        r"got torch\.bfloat16: call fully_shard_optimizer"
    )
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    fully_shard_optimizer(optimizer)
    before = model.head.weight.full_tensor().detach().clone()
    optimizer.step()
    assert not torch.equal(model.head.weight.full_tensor(), before)


@on_ranks(2)
def test_a_backward_adds_to_gradients_that_are_distributed_evenly() -> None:
    """A gradient that somebody has distributed evenly, before a backward of the model adds to
    it.
    """
    model, plain = net(), net()
    fully_shard(model)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        other.grad = torch.ones_like(other)
        own.grad = distribute_tensor(torch.ones(own.shape), own.device_mesh, own.placements)
    model(x).square().mean().backward()
    plain(x).square().mean().backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), other.grad)


@on_ranks(2)
def test_what_was_taken_from_a_parameter_waits_for_its_updates() -> None:
    """Tensors taken from a parameter earlier are also read after pending updates."""
    model = net()
    fully_shard(model)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), 1.0, lr=0.1, overlap_step_with_forward=True
    )
    handles = [parameter.detach() for parameter in model.parameters()]
    views = [parameter.detach()[:, None] for parameter in model.parameters()]
    for seed in range(4):
        model(torch.randn(4, 6)).square().mean().backward()
        with delays(seed):
            optimizer.step()
            found = [handle.full_tensor() for handle in handles]
            viewed = [view.full_tensor() for view in views]
        optimizer.synchronize()
        for parameter, handle, view in zip(model.parameters(), found, viewed, strict=True):
            assert torch.equal(handle, parameter.full_tensor())
            assert torch.equal(view, parameter.full_tensor()[:, None])
        optimizer.zero_grad()


@on_ranks(3)
def test_ranks_that_hold_more_models_than_others_train_one_with_them() -> None:
    """The first two have a separate model, which the comparison of ranks must not count."""
    mesh = DeviceMesh("cpu", [0, 1])
    x = torch.ones(4, 6)
    if dist.get_rank() < 2:
        own = net()
        fully_shard(own, mesh)
        own(x).sum().backward()
    else:
        with pytest.raises(RuntimeError, match="one outside it"):
            fully_shard(net(), mesh)
    model, plain = net(), net()
    fully_shard(model)
    for each in (model, plain):
        each(x).sum().backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
