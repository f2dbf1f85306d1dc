"""`HybridDeviceOptimizer` when a program changes the parameters in its groups: replaces them as it
shards or casts the model, removes some, adds others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.distributed.fsdp import fully_shard
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.timeline import Timeline
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    ALL,
    BF16,
    SGD,
    SHARDINGS,
    Net,
    backward,
    same,
    states,
    train,
    weights,
)

FRACTIONS = [0.0, 0.5, 1.0]
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}
Make = Callable[..., torch.optim.Optimizer]


def prepare(
    model: Net, optimizer: torch.optim.Optimizer, shard: Callable[[Net], Any]
) -> torch.optim.lr_scheduler.LRScheduler:
    """What accelerate does to an optimizer that was built over a model that is not sharded yet."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))
    optimizer.load_state_dict(optimizer.state_dict())
    old = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {}
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            placeholder = torch.empty(1, dtype=parameter.dtype)
            placeholder.data_ptr = parameter.data_ptr
            names[id(placeholder)] = old[id(parameter)]
            group["params"][index] = placeholder
    optimizer.zero_grad()
    shard(model)
    new = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [new[names[id(placeholder)]] for placeholder in group["params"]]
    return schedule


@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_an_optimizer_built_before_sharding_trains_as_fused_adam(sharding: str) -> None:
    def run(make: Make) -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        optimizer = make(model.parameters(), **SETTINGS)
        schedule = prepare(model, optimizer, SHARDINGS[sharding])
        train(model, optimizer, after=lambda _: schedule.step())
        return model, optimizer

    expected, _ = run(FusedAdam)
    untrained = Net()
    SHARDINGS[sharding](untrained)
    assert not same(weights(expected), weights(untrained))
    for fraction in FRACTIONS:
        model, optimizer = run(
            lambda own, f=fraction, **options: HybridDeviceOptimizer(own, f, **options, **ALL)
        )
        assert same(weights(model), weights(expected))
        on_host = sum(map(optimizer.holds, model.parameters()))
        assert (on_host > 0, on_host < 8) == (fraction > 0, fraction < 1)

        saved = optimizer.state_dict()
        assert len(saved["state"]) == 8
        optimizer.load_state_dict(saved)


def test_a_timeline_shows_the_steps_of_parameters_that_replaced_others() -> None:
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, records_timings=True, **SETTINGS)
    timeline = Timeline(Device("cpu"))
    optimizer.record_to(timeline)
    model.to(BF16)
    timeline.begin_iteration(1)
    train(model, optimizer, range(1), dtype=BF16)
    timeline.end_iteration()
    timeline.synchronize()
    rows = {each.row for each in timeline.slices(0.0, is_final=True)}
    assert {"d2h", "host", "h2d"} <= rows


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_model_is_cast_before_the_first_step(fraction: float) -> None:
    model, expected = Net(), Net().to(BF16)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), fraction, param_update_in_fp32=True, **SETTINGS
    )
    model.to(BF16)
    train(model, optimizer, dtype=BF16)
    train(expected, FusedAdam(expected.parameters(), master_weights=True, **SETTINGS), dtype=BF16)
    assert same(weights(model), weights(expected))

    model.float()
    with pytest.raises(RuntimeError, match=r"^8 parameters of this optimizer"):
        optimizer.step()


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("cls", [FusedAdam, SGD], ids=lambda cls: cls.__name__)
def test_parameters_leave_come_back_and_change_their_groups(
    cls: type[torch.optim.Optimizer], fraction: float
) -> None:
    options = {"momentum": 0.9} if cls is SGD else {}

    def run(make: Make) -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        first, second = list(model.layers.parameters()), list(model.head.parameters())
        optimizer = make([{"params": first}, {"params": second, "lr": 0.01}], lr=0.02, **options)
        train(model, optimizer, range(2))
        optimizer.param_groups.reverse()
        optimizer.param_groups[1]["params"] = first[:0:-1]
        train(model, optimizer, range(2, 4))
        before = weights(model)[0]
        train(model, optimizer, range(4, 5))
        assert torch.equal(weights(model)[0], before)
        if isinstance(optimizer, HybridDeviceOptimizer):
            assert len(optimizer.state_dict()["state"]) == 7
            optimizer.load_state_dict(optimizer.state_dict())
            assert first[0] not in optimizer.state
        optimizer.param_groups[1]["params"].insert(0, first[0])
        train(model, optimizer, range(5, 7))
        return model, optimizer

    expected, own = run(cls)
    model, optimizer = run(
        lambda groups, **given: HybridDeviceOptimizer(groups, fraction, cls, cls, **given)
    )
    assert same(weights(model), weights(expected))
    for one, other in zip(states(optimizer), states(own), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("is_split", [False, True])
def test_parameters_keep_their_order_and_change_their_groups(
    is_split: bool, fraction: float
) -> None:
    """Layers move one after another to a group with a different rate."""

    def run(make: Make) -> list[torch.Tensor]:
        model = Net()
        own = list(model.parameters())
        optimizer = make([{"params": own[:6]}, {"params": own[6:], "lr": 0.001}], lr=0.05)
        train(model, optimizer, range(1))
        first, second = optimizer.param_groups
        first["params"] = own[:2]
        if is_split:
            optimizer.param_groups.insert(1, {**second, "params": own[2:6]})
        else:
            second["params"] = own[2:]
        train(model, optimizer, range(1, 3))
        return weights(model)

    found = run(lambda groups, **options: HybridDeviceOptimizer(groups, fraction, **options))
    assert same(found, run(FusedAdam))


@pytest.mark.parametrize(
    ("sharding", "fraction"), [("plain", 0.0), ("plain", 1.0), ("fsdp2", 0.5), ("groups", 0.5)]
)
@on_ranks(2)
def test_parameters_replaced_after_a_step_are_an_error(sharding: str, fraction: float) -> None:
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **SETTINGS)
    train(model, optimizer, range(1))
    saved = optimizer.state_dict()
    for parameter in model.parameters():  # each rank has trained a plain model by itself
        dist.broadcast(parameter.data, 0)
    if sharding == "plain":
        model = Net(seed=1)
    SHARDINGS[sharding](model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    before = weights(model)
    backward(model)
    for call in (
        optimizer.step,
        optimizer.plan_step,
        optimizer.state_dict,
        optimizer.state_units,
        optimizer.init_state,
        lambda: optimizer.load_state_dict(saved),
    ):
        with pytest.raises(RuntimeError, match=r"^8 parameters of this optimizer"):
            call()
    assert same(weights(model), before)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_groups_are_added_at_any_time(sharding: str, steps: int) -> None:
    """A layer that is trained from some step on, as in fine-tuning."""

    def run(make: Make) -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = make(model.layers.parameters(), **SETTINGS)
        train(model, optimizer, range(steps))
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.01})
        train(model, optimizer, range(steps, steps + 3))
        return model, optimizer

    expected, own = run(FusedAdam)
    for fraction in FRACTIONS:
        model, optimizer = run(
            lambda own, f=fraction, **options: HybridDeviceOptimizer(own, f, **options, **ALL)
        )
        assert same(weights(model), weights(expected))
        steps_of = [
            {number: float(state["step"]) for number, state in each.state_dict()["state"].items()}
            for each in (optimizer, own)
        ]
        assert steps_of[0] == steps_of[1]
        assert sum(group.numel for group in optimizer.plan.groups) == sum(
            parameter.numel() for parameter in model.parameters()
        )


@on_ranks(2)
def test_part_of_an_fsdp_module_cannot_be_added_later() -> None:
    model = Net()
    fully_shard(model)
    optimizer = HybridDeviceOptimizer(model.layers.parameters(), 1.0, **SETTINGS)
    with pytest.raises(RuntimeError, match=r"^the model got parameters after others"):
        optimizer.add_param_group({"params": list(model.head.parameters())})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_an_added_group_that_is_rejected_leaves_no_trace(fraction: float) -> None:
    model, expected = Net(), Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **SETTINGS)
    train(model, optimizer, range(1))
    with pytest.raises(ValueError, match="float64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3).double())]})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, range(1, 3))
    train(expected, FusedAdam(expected.parameters(), **SETTINGS), range(3))
    assert same(weights(model), weights(expected))


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_parameters_that_are_put_back_after_an_error_are_trained(fraction: float) -> None:
    model, expected = Net(), Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **SETTINGS)
    (group,) = optimizer.param_groups
    own, group["params"] = group["params"], list(Net().to("meta").parameters())
    with pytest.raises(ValueError, match="meta"):
        optimizer.init_state()
    group["params"] = own
    train(model, optimizer)
    train(expected, FusedAdam(expected.parameters(), **SETTINGS))
    assert same(weights(model), weights(expected))


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_parameters_may_be_replaced_after_a_load_that_was_rejected(fraction: float) -> None:
    model, other, expected = Net(), Net(), Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **SETTINGS)
    rejected = optimizer.state_dict() | {"state": {0: {"step": 1.0}}}
    with pytest.raises(ValueError, match="exp_avg"):
        optimizer.load_state_dict(rejected)
    assert len(optimizer.state) == 0
    optimizer.param_groups[0]["params"] = list(other.parameters())
    train(other, optimizer)
    train(expected, FusedAdam(expected.parameters(), **SETTINGS))
    assert same(weights(other), weights(expected))


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_a_parameter_that_got_another_shape_is_an_error_before_anything_is_stepped(
    fraction: float,
) -> None:
    """A vocabulary that is resized by assigning `.data`."""
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **SETTINGS)
    model.head.weight.data, model.head.bias.data = torch.zeros(2, 3), torch.zeros(2)
    before = weights(model)
    backward(model)
    with pytest.raises((ValueError, RuntimeError), match=r"shape \(2, 3\)|of 3 elements .* has 6"):
        optimizer.step()
    assert same(weights(model), before)


@on_ranks(2)
def test_what_goes_first_holds_for_sharded_parameters() -> None:
    model = Net()
    first = [model.layers[1].weight]
    optimizer = HybridDeviceOptimizer(model.parameters(), 0.1, offload_first=first, lr=0.1)
    prepare(model, optimizer, SHARDINGS["fsdp2"])
    train(model, optimizer)
    assert [optimizer.holds(parameter) for parameter in model.parameters()] == [
        index == 2 for index in range(8)
    ]


@pytest.mark.parametrize("make", [FusedAdam, HybridDeviceOptimizer])
@on_ranks(2)
def test_stepping_parameters_that_fully_shard_replaced_is_an_error(make: Make) -> None:
    model = Net()
    optimizer = make(model.parameters(), **SETTINGS)
    SHARDINGS["groups"](model)
    backward(model)
    with pytest.raises(RuntimeError, match=r"fully_shard replaced .*, so it will never"):
        optimizer.step()


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_there_are_no_states_before_the_first_step(fraction: float) -> None:
    """megatron-core's tests of this class look for that."""
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **SETTINGS)
    assert len(optimizer.state_dict()["state"]) == len(optimizer.state) == 0
    train(model, optimizer, range(1))
    assert len(optimizer.state_dict()["state"]) == len(optimizer.state) == 8


@pytest.mark.parametrize("is_root_sharded", [True, False])
@on_ranks(2)
def test_modules_sharded_call_by_call_are_on_both_sides_before_the_first_forward(
    is_root_sharded: bool,
) -> None:
    def sharded() -> Net:
        model = Net()
        for layer in (*model.layers, model.head):
            fully_shard(layer)
        if is_root_sharded:
            fully_shard(model)
        return model

    model, reference = sharded(), sharded()
    optimizer = HybridDeviceOptimizer(model.parameters(), 0.5, **SETTINGS)
    # 35, 42, 24 and 4 elements: the last three hold half of them.
    assert [group.numel for group in optimizer.plan.groups] == [35, 42, 24, 4]
    assert [optimizer.holds(parameter) for parameter in model.parameters()] == 2 * [False] + 6 * [
        True
    ]
    if is_root_sharded:
        names = [group.name for group in optimizer.plan.groups]
        assert names == ["layers.0", "layers.1", "layers.2", "head"]

    plan = optimizer.plan
    train(model, optimizer)
    train(reference, FusedAdam(reference.parameters(), **SETTINGS))
    assert same(weights(model), weights(reference))
    assert optimizer.plan == plan


@on_ranks(2)
def test_groups_of_one_unit_stay_together_before_the_first_forward() -> None:
    model = Net()
    model.layers[0].bfloat16()
    fully_shard(model)
    optimizer = HybridDeviceOptimizer(model.parameters(), 0.1, lr=0.1)
    assert [(group.name, group.numel) for group in optimizer.plan.groups] == [("the model", 105)]
