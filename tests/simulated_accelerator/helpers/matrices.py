"""Layers with a matrix and a vector each, whose gradients are small integers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.core.device import send
from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
)
from megatron.core.optimizer.planning_optimizer import PlanningOptimizer
from tests.helpers.ranks import rank_device

FP32 = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)


class Layer(nn.Module):
    """A matrix and a vector, whose gradients are small integers."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_rows, 32) * 0.1)
        self.bias = nn.Parameter(torch.randn(num_rows))

    def forward(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        shape = (len(self.bias), 33)
        own = torch.randint(-8, 9, shape, generator=generator).to(self.weight.dtype)
        # The host does not wait: a lane may be held.
        own = send(own, self.weight.device)
        return (self.weight * own[:, :32]).sum() + (self.bias * own[:, 32]).sum()


def layers_of(strategy: str, dtype: torch.dtype) -> nn.ModuleList:
    """Sharded layers on this rank's device, the same values for any number of ranks."""
    device = rank_device()
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(num_rows) for num_rows in (9, 64, 31, 48)).to(dtype)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with fully_shard_context(device):
        for layer in layers:
            fully_shard(layer, mesh, Placements.for_strategy(strategy), FP32)
    return layers


def groups_of(layers: nn.ModuleList) -> list[dict[str, Any]]:
    """The param groups of Muon."""
    return [
        {"params": [layer.weight for layer in layers]},
        {"params": [layer.bias for layer in layers], "use_muon": False},
    ]


def step(layers: nn.ModuleList, optimizer: PlanningOptimizer, number: int) -> None:
    """A backward and a step, whose gradients depend on `number`."""
    for layer in layers:
        layer(number).backward()
    optimizer.step(planned=optimizer.plan_step(), grad_scale=0.5)
    optimizer.zero_grad()


def values_of(layers: nn.ModuleList, optimizer: PlanningOptimizer) -> list[Tensor]:
    """Whole weights and states, on the CPU."""
    optimizer.synchronize()
    found = []
    for parameter in layers.parameters():
        for tensor in (parameter, *optimizer.state[parameter].values()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.append(whole.detach().cpu().clone())
    return found
