"""`torch.distributed.pipelining` over stages that this engine shards, against FSDP2's stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import fully_shard
from tests.helpers.ranks import on_ranks

NUM_MICROBATCHES = 4
Step = tuple[list[float], list[torch.Tensor]]


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.out = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.out(x)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def whole(gradient: Any, shards: dist.ProcessGroup) -> torch.Tensor:
    """Not by `full_tensor`: DTensor remembers equal meshes of earlier tests, with their groups."""
    parts: list[Any] = [None] * shards.size()
    dist.all_gather_object(parts, gradient.to_local(), group=shards)
    return torch.cat(parts)


def train(
    fully: Callable[..., Any], schedule: str, mesh: DeviceMesh, num_stages: int, **options: Any
) -> Step:
    """Losses of two steps, and the gradients of the second."""
    torch.manual_seed(0)
    pipeline = [Stage() for _ in range(num_stages)]
    place, data = mesh.get_local_rank("stages"), mesh[mesh.mesh_dim_names[1:]]
    own = pipeline[place :: mesh["stages"].size()]
    for stage in own:
        for module in (*stage.layers, stage):
            fully(module, mesh=data, **options)
    parameters = [parameter for stage in own for parameter in stage.parameters()]

    group = mesh.get_group("stages")
    stages = [
        PipelineStage(stage, pipeline.index(stage), num_stages, torch.device("cpu"), group=group)
        for stage in own
    ]
    kind = get_schedule_class(schedule)
    given = stages[0] if num_stages == mesh["stages"].size() else stages
    runner = kind(given, NUM_MICROBATCHES, loss_fn=mean_square)

    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), list[torch.Tensor]()
    for step in range(2):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank() % data.size())
        x, target = torch.randn(8, 6), torch.randn(8, 6)
        inputs = (x,) if stages[0].is_first else ()
        if stages[-1].is_last:
            runner.step(*inputs, target=target, losses=losses)
        else:
            runner.step(*inputs)
        if step == 0:
            optimizer.step()
    assert all(isinstance(p, DTensor) for stage in own for p in stage.parameters())
    gradients = [whole(parameter.grad, data.get_group(data.ndim - 1)) for parameter in parameters]
    return list(map(float, losses)), gradients


def assert_as_fsdp2(mesh: DeviceMesh, schedules: tuple[tuple[str, int], ...]) -> None:
    for schedule, num_stages in schedules:
        for options in ({}, {"reshard_after_forward": False}):
            case = schedule, num_stages, options
            theirs, ours = (
                train(fully, schedule, mesh, num_stages, **options)
                for fully in (fsdp2.fully_shard, fully_shard)
            )
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5), case
            for own, other in zip(ours[1], theirs[1], strict=True):
                torch.testing.assert_close(own, other, msg=lambda text: f"{case}: {text}")  # noqa: B023


@on_ranks(2)
def test_stages_on_one_rank_each_train_as_with_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "shards"))
    assert_as_fsdp2(mesh, (("GPipe", 2), ("1F1B", 2), ("Interleaved1F1B", 4)))


@on_ranks(4)
def test_stages_sharded_over_two_ranks_train_as_with_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    assert_as_fsdp2(mesh, (("1F1B", 2), ("GPipe", 2)))


@on_ranks(4)
def test_replicas_are_reduced_after_the_last_microbatch() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stages", "replicas", "shards"))
    assert_as_fsdp2(mesh, (("1F1B", 2),))


@on_ranks(1)
def test_a_backward_that_leaves_out_the_weights_is_an_error_inside_a_step() -> None:
    """Zero-bubble schedules run one backward for the inputs, another for the weights."""
    stage: Any = Stage()
    for module in (*stage.layers, stage):
        fully_shard(module)
    x = torch.ones(2, 6, requires_grad=True)
    torch.autograd.grad(stage(x).sum(), x)  # outside of a pipeline it is a program's own affair

    stage.set_is_last_backward(False)
    with pytest.raises(NotImplementedError, match=r"Stage was split in two.*1F1B"):
        torch.autograd.grad(stage(x).sum(), x)
    stage(x).sum().backward()
    assert all(parameter.grad is not None for parameter in stage.parameters())
