"""Where the optimizer's states live never changes a run by one bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.device import delays
from megatron.core.distributed.fsdp import (
    FsdpContext,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.ranks import run_ranks

DIM = 32  # so that every rank's part of every tensor is a multiple of 64 elements, on 1, 2 and 4 ranks
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 50


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, 2 * DIM, bias=False, dtype=dtype)
        self.second = nn.Linear(2 * DIM, DIM, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Model(nn.Module):
    """Three layers, and matrices before and behind them, which the root has."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(DIM, DIM, bias=False, dtype=dtype)
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(3))
        self.behind = nn.Linear(DIM, DIM, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return self.behind(x)


class Setting(NamedTuple):
    """A model's, without its optimizer."""

    strategy: str = "optim_grads_params"
    dtype: torch.dtype = torch.float32
    num_microbatches: int = 1
    steps: int = STEPS


class Run(NamedTuple):
    """What a run came to on one rank."""

    losses: list[float]
    weights: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]


def shard(model: nn.Module, setting: Setting, offloaded: tuple[nn.Module, ...] = ()) -> FsdpContext:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = Placements.for_strategy(setting.strategy)
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    with fully_shard_context("cpu") as context:
        for module in (*model.layers, model):
            offload = OffloadPolicy(main_weights_on_host=module in offloaded)
            fully_shard(module, mesh, placements, policy, offload_policy=offload)
    return context


def train(
    setting: Setting,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    seed: int | None = None,
    between: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> Run:
    """Trains on batches of its own on each rank; with a seed, under random delays on every lane."""
    model = Model(setting.dtype)
    context = shard(model, setting)
    optimizer = make(model)
    losses = []

    def steps() -> None:
        for step in range(setting.steps):
            total = 0.0
            for number in range(setting.num_microbatches):
                generator = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + number)
                x = torch.randn(4, DIM, generator=generator).to(setting.dtype)
                with microbatch(context, is_last=number == setting.num_microbatches - 1):
                    loss = (model(x).float() - 1).square().mean()
                    loss.backward()
                total += loss.item()
            between(model, step)
            for group in optimizer.param_groups:
                group["lr"] = OPTIONS["lr"] / (step + 1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)

    if seed is None:
        steps()
    else:
        with delays(seed):
            steps()
    state = model.state_dict()  # waits for what is under way
    names = [name for name, _ in model.named_parameters()]
    states = [
        {name: getattr(value, "_local_tensor", value).clone() for name, value in optimizer.state[parameter].items()}
        for parameter in model.parameters()
    ]
    return Run(losses, [state[name]._local_tensor.clone() for name in names], states)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return FusedAdam(model.parameters(), **OPTIONS)


def torch_fused(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    fully_shard_optimizer(optimizer)
    return optimizer


def hybrid(fraction: float, **settings: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **settings, **OPTIONS)
        wanted = {0.0: 0, 0.5: 2, 1.0: 4}[fraction]
        assert sum(group.is_on_host for group in optimizer.plan.groups) == wanted
        assert sum(group_of(layer.first.weight).is_delivered for layer in model.layers) == min(wanted, 3)
        return optimizer

    return make


def assert_same(run: Run, other: Run) -> None:
    assert run.losses == other.losses
    for own, theirs in zip(run.weights, other.weights, strict=True):
        assert torch.equal(own, theirs)
    for mine, others in zip(run.states, other.states, strict=True):
        assert mine.keys() == others.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(mine[name], others[name]) for name in mine)


OVERLAPS = {
    "in order": {"overlap_cpu_optimizer_d2h_h2d": False},
    "overlapping": {},
    "overlapping the forward": {"overlap_step_with_forward": True},
}


def _all_settings(setting: Setting) -> None:
    expected = train(setting, fused)
    assert expected.losses[-1] < expected.losses[0]
    assert_same(train(setting, torch_fused), expected)
    for fraction, settings in itertools.product((0.0, 0.5, 1.0), OVERLAPS.values()):
        assert_same(train(setting, hybrid(fraction, **settings)), expected)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_offloaded_steps_are_bit_equal_to_those_of_the_device_and_of_torch(world_size):
    run_ranks(world_size, _all_settings, Setting(), timeout=600)
