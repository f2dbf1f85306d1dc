"""`HybridDeviceOptimizer` as a `torch.optim.Optimizer`: plain modules, PyTorch's FSDP2 and FSDP
groups train as with the optimizer class itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron.core.lanes import delays
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    ALL,
    BF16,
    CLASSES,
    FRACTIONS,
    OVERLAPS,
    SGD,
    SHARDINGS,
    AdamW,
    Net,
    backward,
    fsdp,
    same,
    same_states,
    states,
    train,
    trains_as_reference,
    weights,
)

# Any optimizer class on either side


def _trains_as_the_class_itself(sharding: str, name: str) -> None:
    def script(model: Net, optimizer: torch.optim.Optimizer) -> None:
        before = weights(model)
        train(model, optimizer)
        pairs = zip(before, weights(model), strict=True)
        assert not any(torch.equal(*pair) for pair in pairs if pair[0].numel())
        if sharding != "plain" and isinstance(optimizer, HybridDeviceOptimizer):
            values = [value for state in optimizer.state.values() for value in state.values()]
            assert all(isinstance(value, DTensor) for value in values if value.dim())

    trains_as_reference(script, sharding, name, OVERLAPS)


@pytest.mark.parametrize("name", CLASSES)
def test_a_plain_module_trains_as_with_the_class_itself(name):
    _trains_as_the_class_itself("plain", name)


@pytest.mark.parametrize(
    ("sharding", "name"),
    [
        ("fsdp2", "AdamW"),
        ("groups", "SGD"),
        *(
            pytest.param(sharding, name, marks=pytest.mark.wide)
            for sharding in ("groups", "fsdp2")
            for name in CLASSES
            if (sharding, name) not in (("fsdp2", "AdamW"), ("groups", "SGD"))
        ),
    ],
)
def test_a_sharded_module_trains_as_with_the_class_itself(sharding, name):
    run_ranks(2, _trains_as_the_class_itself, sharding, name)


def test_either_side_may_have_a_class_of_its_own():
    expected, model = Net(), Net()
    optimizer = HybridDeviceOptimizer(
        model.parameters(), 0.3, SGD, AdamW, lr=0.05, momentum=0.9, weight_decay=0.1
    )
    count = sum(not group.is_on_host for group in optimizer.plan.groups)
    parameters = list(expected.parameters())
    assert 0 < count < len(parameters)
    on_device = FusedAdam(parameters[:count], lr=0.05, weight_decay=0.1)
    on_host = SGD(parameters[count:], lr=0.05, momentum=0.9, weight_decay=0.1)
    for number in range(4):
        backward(model, number)
        backward(expected, number)
        for each in (optimizer, on_device, on_host):
            each.step()
            each.zero_grad()
    assert same(weights(model), weights(expected))
    with pytest.raises(ValueError, match="Expected weight_decay to be given"):
        HybridDeviceOptimizer(Net().parameters(), 0.5, SGD, AdamW, lr=0.1)


# 16-bit parameters outside of FSDP groups


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_bf16_parameters_with_fp32_main_weights_train_as_with_master_weights(fraction):
    rounded, expected, model = Net(dtype=BF16), Net(dtype=BF16), Net(dtype=BF16)
    train(
        expected,
        other := FusedAdam(expected.parameters(), lr=1e-3, master_weights=True),
        range(20),
        dtype=BF16,
    )
    train(rounded, FusedAdam(rounded.parameters(), lr=1e-3), range(20), dtype=BF16)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), fraction, param_update_in_fp32=True, lr=1e-3
    )
    train(model, optimizer, range(20), dtype=BF16)
    assert same(weights(model), weights(expected)), "fp32 main weights"
    assert not same(weights(model), weights(rounded)), "and not the other"
    assert same_states(states(optimizer), states(other))


# Options that change


@pytest.mark.parametrize(
    "sharding", ["plain", "groups", pytest.param("fsdp2", marks=pytest.mark.wide)]
)
@on_ranks(2)
def test_options_may_be_changed_at_any_time_by_schedulers_and_others(sharding: str) -> None:
    def two_groups(model: Net) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"params": parameters[::2], "weight_decay": 0.2},
            {"params": parameters[1::2], "lr": 0.003},
        ]

    def changes(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
        factors = [lambda number: 0.9**number, lambda number: 1 / (1 + number)]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)

        def change(number: int) -> None:
            scheduler.step()
            optimizer.param_groups[0]["weight_decay"] = 0.1 * number
            optimizer.param_groups[1]["betas"] = (0.8, 0.9 + 0.01 * number)
            optimizer.param_groups[1]["eps"] = 1e-6 * number

        return change

    expected = Net()
    SHARDINGS[sharding](expected)
    own = FusedAdam(two_groups(expected), lr=0.02)
    train(expected, own, range(6), after=changes(own))
    steady = Net()
    SHARDINGS[sharding](steady)
    train(steady, FusedAdam(two_groups(steady), lr=0.02), range(6))
    assert not same(weights(steady), weights(expected)), "the changes matter"
    for fraction in FRACTIONS:
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = HybridDeviceOptimizer(two_groups(model), fraction, lr=0.02, **ALL)
        with delays(5):
            train(model, optimizer, range(6), after=changes(optimizer))
            assert same(weights(model), weights(expected))


# What any optimizer does


def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned():
    def script(model: Net, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            backward(model)
            return 3.5

        assert optimizer.step(closure) == 3.5

    trains_as_reference(script)


def test_hooks_run_once_around_a_step_and_around_loading():
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), 0.5, lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before load"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after load"))
    train(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before step", "after step", "before load", "after load"]


def test_the_plan_names_parameters_as_they_were_given():
    optimizer = HybridDeviceOptimizer(Net().named_parameters(), 0.3)
    assert [group.name for group in optimizer.plan.groups] == [
        name for name, _ in Net().named_parameters()
    ]
    assert "layers.1.weight" in str(optimizer.plan)


@on_ranks(2)
def test_frozen_groups_are_left_alone() -> None:
    def freeze(model: Net) -> None:
        model.layers[1].requires_grad_(False)
        fsdp(model)

    expected = Net()
    freeze(expected)
    train(expected, FusedAdam(expected.parameters(), lr=0.1))
    for fraction in FRACTIONS:
        model = Net()
        freeze(model)
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, lr=0.1, **ALL)
        train(model, optimizer)
        assert same(weights(model), weights(expected))
        assert len(optimizer.state_dict()["state"]) == 6
