"""A small net for `HybridDeviceOptimizer`, with functions that shard, train and compare it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import (
    FsdpContext,
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam

Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
FORWARD = {"overlap_step_with_forward": True}
ALL = {**FORWARD, "fetch_during_backward": True}
IN_ORDER = {"overlap_cpu_optimizer_d2h_h2d": False}
# By which others than the host's pass update buckets in host memory, with `ALL`.
EXECUTORS = {
    "streamed": {"update_on_device": 1.0},
    "half streamed": {"update_on_device": 0.5},
    "early": {"early_update_bytes": 1 << 24},
}
OVERLAPS = [IN_ORDER, {}, ALL]
FRACTIONS = [0.0, 0.3, 1.0]
BF16 = torch.bfloat16


class Net(nn.Module):
    """Layers whose rows two ranks cannot share evenly; of the last layer's, one rank has none."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.Linear(rows, columns) for rows, columns in ((6, 5), (5, 7), (7, 3))
        )
        self.head = nn.Linear(3, 1)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Uneven(nn.Module):
    """Groups whose buffers are padded to sizes that are not multiples of a cache line."""

    def __init__(self, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 7)])
        self.head = nn.Linear(7, 3)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def plain(model: Net) -> None:
    """Leaves a model as it is."""


def torch_fsdp2(model: Net) -> None:
    for module in (*model.layers, model):
        fsdp2.fully_shard(module)


def fsdp(model: Net, strategy: str = "optim_grads_params", **policy: Any) -> FsdpContext:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with fully_shard_context("cpu") as context:
        for module in (*model.layers, model):
            fully_shard(
                module, mesh, Placements.for_strategy(strategy), MixedPrecisionPolicy(**policy)
            )
    return context


Shard = Callable[[Net], Any]
SHARDINGS = {"plain": plain, "fsdp2": torch_fsdp2, "groups": fsdp}


def batch(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank)).to(dtype)


def backward(model: nn.Module, number: int = 0, dtype: torch.dtype = torch.float32) -> None:
    (model(batch(number, dtype)).float() - 1).square().mean().backward()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int] = range(4),
    *,
    between: Callable[[nn.Module, int], object] = lambda *_: None,
    after: Callable[[int], object] = lambda _: None,
    dtype: torch.dtype = torch.float32,
) -> None:
    for number in steps:
        backward(model, number, dtype)
        between(model, number)
        optimizer.step()
        after(number)
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[torch.Tensor]:
    """This rank's rows, once they are up to date: a state dict waits for pending updates."""
    return [local_tensor(value).detach().clone() for value in model.state_dict().values()]


def states(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    every = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [
        {
            name: local_tensor(value).clone()
            for name, value in own.items()
            if isinstance(value, torch.Tensor)
        }
        for own in every
    ]


def same(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(*pair) for pair in zip(first, second, strict=True)
    )


def same_states(
    first: Sequence[dict[str, torch.Tensor]], second: Sequence[dict[str, torch.Tensor]]
) -> bool:
    return all(
        one.keys() == other.keys() and same(list(one.values()), [other[name] for name in one])
        for one, other in zip(first, second, strict=True)
    )


CLASSES = {
    "AdamW": (AdamW, {"lr": 0.02, "weight_decay": 0.1}),
    "Adam": (Adam, {"lr": 0.02, "weight_decay": 0.1}),
    "amsgrad": (AdamW, {"lr": 0.02, "weight_decay": 0.1, "amsgrad": True}),
    "SGD": (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}


def reference(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The class itself; FusedAdam for AdamW, which torch rounds otherwise at the ends of odd
    shards.
    """
    cls, options = CLASSES[name]
    if name == "AdamW":
        return FusedAdam(model.parameters(), **options)
    optimizer = cls(model.parameters(), **options)
    if any(group_of(parameter) for parameter in model.parameters()):
        fully_shard_optimizer(optimizer)
    return optimizer


def trains_as_reference(
    script: Callable[[Net, torch.optim.Optimizer], object],
    sharding: str = "plain",
    name: str = "AdamW",
    settings: Sequence[dict[str, bool]] = (ALL,),
) -> torch.optim.Optimizer:
    """Checks that after `script(model, optimizer)` weights and states have the bits of the
    reference, whatever the fraction and the settings. Returns the reference.
    """
    cls, options = CLASSES[name]
    expected = Net()
    SHARDINGS[sharding](expected)
    own = reference(name, expected)
    script(expected, own)

    for fraction, overlaps in itertools.product(FRACTIONS, settings):
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = HybridDeviceOptimizer(
            model.parameters(), fraction, cls, cls, **options, **overlaps
        )
        sides = {group.is_on_host for group in optimizer.plan.groups}
        assert sides == ({fraction > 0} if fraction in (0, 1) else {True, False})
        script(model, optimizer)
        assert same(weights(model), weights(expected))
        assert same_states(states(optimizer), states(own))
    return own
