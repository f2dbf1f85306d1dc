from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from megatron.core.fp32_module import Fp32Module
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.torch_optimizer import (
    build_torch_optimizer,
    init_states,
    parameter_groups,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)


def test_matrices_decay_and_vectors_do_not_and_frozen_parameters_are_left_out():
    model = Model()
    decayed, kept = parameter_groups(model, OptimizerConfig(weight_decay=0.1))
    assert decayed["weight_decay"] == 0.1
    assert [p is model.linear.weight for p in decayed["params"]] == [True]
    assert kept["weight_decay"] == 0.0
    assert {id(p) for p in kept["params"]} == {
        id(p) for p in (model.linear.bias, model.norm.weight, model.norm.bias)
    }


def test_vectors_that_stay_fp32_do_not_decay_and_a_convolutions_kernel_does():
    class Mixer(Fp32Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.zeros(4))
            self.kernel = nn.Parameter(torch.zeros(4, 1, 3))

    mixer = Mixer()
    decayed, kept = parameter_groups(mixer, OptimizerConfig(weight_decay=0.1))
    assert [p is mixer.kernel for p in decayed["params"]] == [True]
    assert [p is mixer.rate for p in kept["params"]] == [True]


def test_a_group_that_would_be_empty_is_left_out():
    assert (
        len(parameter_groups(nn.Linear(2, 2, bias=False), OptimizerConfig(weight_decay=0.1))) == 1
    )


def test_the_constants_reach_the_optimizer():
    config = OptimizerConfig(adam_beta1=0.8, adam_beta2=0.7, adam_eps=1e-5, weight_decay=0.3)
    adam = build_torch_optimizer(Model(), config, lr=0.5)
    assert isinstance(adam, torch.optim.AdamW)
    group = adam.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        0.5,
        (0.8, 0.7),
        1e-5,
        0.3,
    )
    sgd = build_torch_optimizer(Model(), OptimizerConfig(optimizer="sgd", sgd_momentum=0.6), lr=0.5)
    assert isinstance(sgd, torch.optim.SGD)
    assert sgd.param_groups[0]["momentum"] == 0.6


CLASSES = {
    "ASGD": {},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {},
    "Adamax": {},
    "NAdam": {"decoupled_weight_decay": True},
    "RAdam": {"decoupled_weight_decay": True},
    "RMSprop": {},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))


def groups(model: nn.Module) -> list[dict[str, object]]:
    return [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.003}]


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for own, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_allocating_states_before_the_first_step_has_no_effect(name: str) -> None:
    cls, options = getattr(torch.optim, name), CLASSES[name]
    expected = net()
    step(expected, cls(groups(expected), **options), range(3))
    for fraction in (None, 0.0, 1.0):
        model = net()
        if fraction is None:
            optimizer = cls(groups(model), **options)
        else:
            optimizer = HybridDeviceOptimizer(groups(model), fraction, cls, cls, **options)
        init_states(optimizer)
        step(model, optimizer, range(3))
        assert_same(model, expected)


@pytest.mark.parametrize("name", ["NAdam", "RAdam"])
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_load_restores_the_decoupled_decay_of_classes_that_take_it_as_an_argument(
    name: str, fraction: float
) -> None:
    cls = getattr(torch.optim, name)
    model = net()
    optimizer = cls(groups(model), weight_decay=0.5, decoupled_weight_decay=True)
    step(model, optimizer, range(2))
    weights, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer, range(2, 4))

    other = net(1)
    loading = HybridDeviceOptimizer(groups(other), fraction, cls, cls)
    other.load_state_dict(weights)
    loading.load_state_dict(states)
    step(other, loading, range(2, 4))
    assert_same(other, model)
