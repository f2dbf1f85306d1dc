"""`HybridDeviceOptimizer` as a `torch.optim.Optimizer`: plain modules, PyTorch's FSDP2 and FSDP
groups train as with the optimizer class itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import (
    fully_shard_optimizer,
)
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
    reference,
    same,
    same_states,
    states,
    train,
    weights,
)


def num_on_host(optimizer: HybridDeviceOptimizer) -> int:
    return sum(group.is_on_host for group in optimizer.plan.groups)


# Any optimizer class on either side


def _trains_as_the_class_itself(sharding: str, name: str, fractions: Sequence[float]) -> None:
    cls, options = CLASSES[name]
    expected = Net()
    SHARDINGS[sharding](expected)
    before = weights(expected)
    train(expected, own := reference(name, expected))
    assert not any(
        torch.equal(*pair)
        for pair in zip(before, weights(expected), strict=True)
        if pair[0].numel()
    )
    for fraction in fractions:
        for settings in OVERLAPS:
            model = Net()
            SHARDINGS[sharding](model)
            optimizer = HybridDeviceOptimizer(
                model.parameters(), fraction, cls, cls, **options, **settings
            )
            on_host = num_on_host(optimizer)
            assert (on_host > 0, on_host < len(optimizer.plan.groups)) == (
                fraction > 0,
                fraction < 1,
            )
            train(model, optimizer)
            assert same(weights(model), weights(expected))
            assert same_states(states(optimizer), states(own))
            if sharding != "plain":
                values = [value for state in optimizer.state.values() for value in state.values()]
                assert all(isinstance(value, DTensor) for value in values if value.dim())


@pytest.mark.parametrize("name", CLASSES)
def test_a_plain_module_trains_as_with_the_class_itself(name):
    _trains_as_the_class_itself("plain", name, FRACTIONS)


@pytest.mark.parametrize(
    ("sharding", "name"),
    [
        *((sharding, "AdamW") for sharding in ("groups", "fsdp2")),
        ("groups", "SGD"),
        *(
            pytest.param(sharding, name, marks=pytest.mark.wide)
            for sharding in ("groups", "fsdp2")
            for name in CLASSES
            if name != "AdamW" and (sharding, name) != ("groups", "SGD")
        ),
    ],
)
def test_a_sharded_module_trains_as_with_the_class_itself(sharding, name):
    run_ranks(2, _trains_as_the_class_itself, sharding, name, FRACTIONS)


class Wide(nn.Module):
    """Shards of whole vectors, whose elements torch's fused kernel treats all alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3))
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x] * 5 + [x[:, :2]], dim=1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def _trains_as_torch_fused(sharding: str) -> None:
    options = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1}
    expected = Wide()
    SHARDINGS[sharding](expected)
    own = AdamW(expected.parameters(), fused=True, **options)
    if sharding == "groups":
        fully_shard_optimizer(own)
    train(expected, own, range(10))
    for fraction in FRACTIONS:
        model = Wide()
        SHARDINGS[sharding](model)
        optimizer = HybridDeviceOptimizer(
            model.parameters(), fraction, AdamW, AdamW, fused=True, **options
        )
        train(model, optimizer, range(10))
        assert same(weights(model), weights(expected))
        assert same_states(states(optimizer), states(own))


def test_adamw_of_a_plain_module_has_the_bits_of_torch_fused():
    _trains_as_torch_fused("plain")


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
def test_adamw_of_a_sharded_module_has_the_bits_of_torch_fused(sharding):
    run_ranks(2, _trains_as_torch_fused, sharding)


def test_adamw_is_close_to_torch_fused_in_odd_shapes_too():
    expected, model = Net(), Net()
    train(expected, AdamW(expected.parameters(), lr=0.02, fused=True), range(10))
    train(model, HybridDeviceOptimizer(model.parameters(), 0.5, AdamW, AdamW, lr=0.02), range(10))
    for own, other in zip(weights(model), weights(expected), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


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


# 16-bit parameters of their own


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_bf16_parameters_without_fp32_main_weights_train_as_with_fused_adam(fraction):
    expected, model = Net(dtype=BF16), Net(dtype=BF16)
    train(expected, FusedAdam(expected.parameters(), lr=0.01), dtype=BF16)
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, lr=0.01)
    train(model, optimizer, dtype=BF16)
    assert same(weights(model), weights(expected))


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


def _follows_its_options(sharding: str) -> None:
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


def test_options_may_be_changed_at_any_time_by_schedulers_and_others():
    _follows_its_options("plain")


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
def test_options_may_be_changed_at_any_time_of_sharded_modules_too(sharding):
    run_ranks(2, _follows_its_options, sharding)


# What any optimizer does


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned(fraction):
    expected, model = Net(), Net()
    train(expected, FusedAdam(expected.parameters(), lr=0.1), range(1))
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        backward(model)
        return 3.5

    assert optimizer.step(closure) == 3.5
    assert same(weights(model), weights(expected))


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
