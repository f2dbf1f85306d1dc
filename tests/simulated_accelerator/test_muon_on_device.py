"""Muon over the rows of two ranks has the CPU's bits on an accelerator, where copies, exchanges and
kernels are asynchronous.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
)
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import Muon
from tests.helpers.ranks import random_delays, rank_device, run_ranks

pytestmark = pytest.mark.sim

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
        own = torch.randint(-8, 9, shape, generator=generator).to(self.weight)
        return (self.weight * own[:, :32]).sum() + (self.bias * own[:, 32]).sum()


def _trained(seed: int) -> list[Tensor]:
    device = rank_device()
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(num_rows) for num_rows in (9, 64, 31, 48))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with fully_shard_context(device):
        for layer in layers:
            fully_shard(layer, mesh, Placements.for_strategy("optim_grads_params"), FP32)
    groups = [
        {"params": [layer.weight for layer in layers]},
        {"params": [layer.bias for layer in layers], "use_muon": False},
    ]
    optimizer = RuleOptimizer(groups, Muon(), lr=0.02)
    with random_delays(seed):
        for number in range(4):
            for layer in layers:
                layer(number).backward()
            optimizer.step(planned=optimizer.plan_step(), grad_scale=0.5)
            optimizer.zero_grad()
        found = [parameter.full_tensor().cpu() for parameter in layers.parameters()]
    return [each.detach() for each in found]


@pytest.mark.parametrize("seed", [1, 2])
def test_an_accelerator_has_the_bits_of_the_cpu(seed: int) -> None:
    expected = run_ranks(2, _trained, seed)[0]
    for found in run_ranks(2, _trained, seed, device="sim"):
        assert all(map(torch.equal, found, expected))
