"""`HybridDeviceOptimizer` as a `torch.optim.Optimizer`: for plain modules, PyTorch's FSDP2 and FSDP
groups alike.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.distributed.fsdp import (
    FsdpContext,
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor
from megatron.core.dtensors import local_tensor
from megatron.core.host_memory import HostLimits, HostMemoryError, HostSlab
from megatron.core.lanes import delays
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.kernels.host_adam import HostAdam
from tests.helpers.ranks import on_ranks, run_ranks

Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
FORWARD = {"overlap_step_with_forward": True}
ALL = {**FORWARD, "fetch_during_backward": True}
IN_ORDER = {"overlap_cpu_optimizer_d2h_h2d": False}
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
    """This rank's rows, once they are up to date: a state dict waits for updates under way."""
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


def snapshot(value: Any) -> Any:
    """A state dict whose tensors are copies."""
    if isinstance(value, dict):
        return {name: snapshot(item) for name, item in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def num_on_host(optimizer: HybridDeviceOptimizer) -> int:
    return sum(group.is_on_host for group in optimizer.plan.groups)


# Any optimizer class on either side

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


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
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


@on_ranks(1)
def test_a_race_between_the_update_and_the_next_forward_is_not_taken_for_a_write_of_the_user() -> (
    None
):
    """The host lane writes main weights between a group's forward and its backward, which look
    whether somebody has.
    """
    may_write = threading.Event()

    class Slow(SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread() is not threading.main_thread():
                assert may_write.wait(60)
            return super().step(closure)

    original = FsdpParameterGroup.wait_unsharded

    def looked(group: FsdpParameterGroup) -> None:
        may_write.set()
        original(group)

    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, Slow, Slow, lr=0.1, **ALL)
    FsdpParameterGroup.wait_unsharded = looked
    try:
        for number in range(3):
            backward(model, number)
            may_write.clear()
            optimizer.step()
            optimizer.zero_grad()
        assert not may_write.is_set(), "the forward is what lets the update go on"
        may_write.set()
        result = weights(model)
    finally:
        may_write.set()
        FsdpParameterGroup.wait_unsharded = original
    expected = Net()
    fsdp(expected)
    other = SGD(expected.parameters(), lr=0.1)
    fully_shard_optimizer(other)
    train(expected, other, range(3))
    assert same(result, weights(expected))


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


def test_fp32_main_weights_of_bf16_parameters_are_saved_and_loaded():
    model = Net(dtype=BF16)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, param_update_in_fp32=True, lr=1e-3)
    train(model, optimizer, range(5), dtype=BF16)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(5, 20), dtype=BF16)
    for loads_model_first, fraction in itertools.product((True, False), (1.0, 0.5)):
        other = Net(seed=1, dtype=BF16)
        fresh = HybridDeviceOptimizer(
            other.parameters(), fraction, param_update_in_fp32=True, lr=1e-3
        )
        if loads_model_first:
            other.load_state_dict(saved[0])
        fresh.load_state_dict(saved[1])
        if not loads_model_first:
            other.load_state_dict(saved[0])
        train(other, fresh, range(5, 20), dtype=BF16)
        assert same(weights(other), weights(model))


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


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_options_of_a_group_that_neither_side_would_honour_are_refused_before_anything_is_stepped(
    fraction,
):
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, AdamW, AdamW, lr=0.1)
    backward(model)
    before = weights(model)
    group = optimizer.param_groups[0]
    for name, value in (("maximize", True), ("amsgrad", True), ("betas", (1.0, 0.9))):
        was_there, own = name in group, group.get(name)
        group[name] = value
        with pytest.raises(ValueError, match="Expected"):
            optimizer.step()
        group[name] = own
        if not was_there:
            del group[name]
        assert same(weights(model), before)
        assert all(float(state["step"]) == 0 for state in optimizer.state.values())
    optimizer.step()
    assert not same(weights(model), before)


def test_bad_options_of_the_last_parameter_leave_the_first_ones_counter_alone():
    model = Net()
    *first, last = model.parameters()
    optimizer = HybridDeviceOptimizer([{"params": first}, {"params": [last]}], 1.0)
    optimizer.param_groups[1]["betas"] = (1.0, 0.9)
    backward(model)
    with pytest.raises(ValueError, match=r"Expected beta1 in \[0, 1\), got 1\.0"):
        optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
    optimizer.param_groups[1]["betas"] = (0.9, 0.9)
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


# Gradients that come and go


def _steps_what_has_a_gradient(sharding: str, name: str) -> None:
    def drops(model: nn.Module, number: int) -> None:
        """In every step another parameter, and in one all of the first layer's."""
        parameters = list(model.parameters())
        parameters[number % len(parameters)].grad = None
        if number == 2:
            for parameter in model.layers[0].parameters():
                parameter.grad = None

    expected = Net()
    SHARDINGS[sharding](expected)
    own = reference(name, expected)
    train(expected, own, range(10), between=drops)
    cls, options = CLASSES[name]
    for fraction in FRACTIONS:
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, cls, cls, **options, **ALL)
        train(model, optimizer, range(10), between=drops)
        assert same(weights(model), weights(expected))
        assert same_states(states(optimizer), states(own))
    if name != "SGD":
        assert {float(state["step"]) for state in states(own)} == {7.0, 9.0}


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_parameters_without_a_gradient_neither_step_nor_count(name):
    _steps_what_has_a_gradient("plain", name)


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
def test_sharded_parameters_without_a_gradient_neither_step_nor_count(sharding):
    run_ranks(2, _steps_what_has_a_gradient, sharding, "AdamW")


@pytest.mark.parametrize("fraction", [0.3, 1.0])
@on_ranks(2)
def test_a_module_that_a_forward_leaves_out_is_not_stepped(fraction: float) -> None:
    def without(model: Net, number: int) -> torch.Tensor:
        x = torch.tanh(model.layers[0](batch(number)))
        if number != 1:
            x = torch.tanh(model.layers[1](x))
            return model.layers[2](x)
        return x

    results = []
    for make in (
        lambda p: FusedAdam(p, lr=0.1),
        lambda p: HybridDeviceOptimizer(p, fraction, lr=0.1, **ALL),
    ):
        model = Net()
        fsdp(model)
        optimizer = make(model.parameters())
        for number in range(4):
            without(model, number).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((weights(model), states(optimizer)))
    assert same(results[0][0], results[1][0])
    assert same_states(results[0][1], results[1][1])
    assert [float(state["step"]) for state in results[1][1]] == [4, 4, 3, 3, 3, 3, 0, 0]


# Gradients that somebody writes to, between backward and step


def _halve(model: nn.Module, _: int) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def _clip(model: nn.Module, _: int) -> None:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert float(norm.full_tensor() if isinstance(norm, DTensor) else norm) > 0.01


def _write_locally(model: nn.Module, _: int) -> None:
    for parameter in model.parameters():
        parameter.grad.to_local().add_(0.1)


def _replace(model: nn.Module, number: int) -> None:
    """Some of them, so that others stay the group's own."""
    for parameter in list(model.parameters())[number % 2 :: 2]:
        parameter.grad = parameter.grad * 3 + 0.01


def _zero_some(model: nn.Module, number: int) -> None:
    torch._foreach_zero_(
        [parameter.grad for parameter in list(model.parameters())[number % 2 :: 2]]
    )


def _replace_and_write(model: nn.Module, number: int) -> None:
    _replace(model, number)
    _halve(model, number)


ANY_WRITES = [_halve, _clip, _write_locally, _replace, _zero_some, _replace_and_write]


def _counts_what_is_written(
    write: Callable[[nn.Module, int], None], dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    def run(
        make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
        seed: int | None,
        between: Any,
    ) -> Any:
        model = Net(dtype=dtype)
        fsdp(model)
        optimizer = make(model.parameters())
        with nullcontext() if seed is None else delays(seed):
            train(model, optimizer, range(3), between=between, dtype=dtype)
            return weights(model)

    def fused(parameters: Any) -> torch.optim.Optimizer:
        return FusedAdam(parameters, lr=0.1, eps=0.1)

    def hybrid(parameters: Any) -> torch.optim.Optimizer:
        return HybridDeviceOptimizer(parameters, 1.0, lr=0.1, eps=0.1, **settings)

    expected = run(fused, None, write)
    assert not same(expected, run(fused, None, lambda *_: None)), "what is written matters"
    for seed in (None, *range(4)):
        assert same(run(hybrid, seed, write), expected)


@pytest.mark.parametrize("write", ANY_WRITES)
def test_gradients_that_are_written_to_between_backward_and_step_count_as_written(write):
    run_ranks(2, _counts_what_is_written, write, torch.float32, FORWARD)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("write", ANY_WRITES)
def test_gradients_that_are_written_to_after_they_were_fetched_count_as_written(write, dtype):
    run_ranks(2, _counts_what_is_written, write, dtype, ALL)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_gradients_add_up_over_backwards_and_over_steps_as_on_the_device(strategy: str) -> None:
    def steps(model: nn.Module, context: FsdpContext, optimizer: torch.optim.Optimizer) -> None:
        for number in range(3):
            for part in range(3):
                backward(model, 3 * number + part)
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 1)
            with microbatch(context, is_last=False):
                backward(model, 50 + number)
            with microbatch(context, is_last=True):
                backward(model, 60 + number)
            optimizer.step()
            backward(model, 70 + number)  # added to gradients that have been stepped with
            optimizer.step()
            optimizer.step()  # and once more with the same
            optimizer.zero_grad()

    results = []
    for seed in (None, 1, 2, 3):
        model = Net()
        context = fsdp(model, strategy)
        optimizer: torch.optim.Optimizer
        if seed is None:
            optimizer = FusedAdam(model.parameters(), lr=0.01)
            steps(model, context, optimizer)
        else:
            optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.01, **ALL)
            with delays(seed):
                steps(model, context, optimizer)
        results.append((weights(model), states(optimizer)))
        assert same(results[-1][0], results[0][0])
        assert same_states(results[-1][1], results[0][1])


@on_ranks(2)
def test_an_evaluation_after_a_step_waits_for_its_weights() -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        seen = []
        for number in range(3):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                seen.append(model(batch(99)).sum().item())
            model.train()
        return seen

    runs = []
    for seed in (None, 1, 2, 3):
        model = Net()
        fsdp(model)
        make = FusedAdam if seed is None else HybridDeviceOptimizer
        optimizer = make(
            model.parameters(), lr=0.1, **({} if seed is None else {"offload_fraction": 1.0, **ALL})
        )
        with nullcontext() if seed is None else delays(seed):
            runs.append(steps(model, optimizer))
    assert len(set(runs[0])) == 3
    assert all(run == runs[0] for run in runs)


# Reading while updates are under way


@on_ranks(2)
def test_reading_weights_and_states_right_after_a_step_waits_for_it() -> None:
    expected = Net()
    fsdp(expected)
    train(expected, own := FusedAdam(expected.parameters(), lr=0.1), range(1))
    before = Net()
    fsdp(before)
    assert not same(weights(expected), weights(before))
    for seed in range(4):
        for read in ("weights", "state", "state_dict", "synchronize", "dcp"):
            model = Net()
            fsdp(model)
            optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **ALL)
            with delays(seed):
                backward(model)
                optimizer.step()
                if read == "weights":
                    assert same(weights(model), weights(expected))
                elif read == "state":
                    assert same_states(states(optimizer), states(own))
                elif read == "state_dict":
                    saved = [
                        optimizer.state_dict()["state"][number]["exp_avg"].to_local()
                        for number in range(8)
                    ]
                    assert same(saved, [state["exp_avg"] for state in states(own)])
                elif read == "dcp":
                    state = DCPState(model, optimizer).state_dict()
                    assert same(
                        [local_tensor(value) for value in state["model"].values()],
                        weights(expected),
                    )
                else:
                    optimizer.synchronize()
                    parameters = [
                        local_tensor(parameter).detach() for parameter in model.parameters()
                    ]
                    assert same(parameters, weights(expected))


@contextmanager
def held_host_updates() -> Iterator[threading.Event]:
    """AdamW's passes on the host begin when the event is set."""
    original, may_go = HostAdam.run, threading.Event()

    def run(kernel: HostAdam, pieces: Any) -> None:
        may_go.wait(60)
        original(kernel, pieces)

    HostAdam.run = run
    try:
        yield may_go
    finally:
        may_go.set()
        HostAdam.run = original


@on_ranks(1)
def test_step_returns_before_the_update_with_overlapping_forward() -> None:
    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **ALL)
    before = [local_tensor(parameter).detach().clone() for parameter in model.parameters()]
    with held_host_updates() as may_go:
        backward(model)
        optimizer.step()
        assert same([local_tensor(parameter).detach() for parameter in model.parameters()], before)
        may_go.set()
        assert not same(weights(model), before)


@on_ranks(1)
def test_a_new_optimizer_takes_over_what_the_old_one_is_still_writing_and_the_old_one_refuses() -> (
    None
):
    runs = []
    for is_held in (False, True):
        model = Net()
        fsdp(model)
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **ALL)
        with held_host_updates() as may_go:
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            if is_held:
                threading.Timer(0.5, may_go.set).start()
            else:
                may_go.set()
                optimizer.synchronize()
            newer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **ALL)
            assert may_go.is_set(), "it has waited"
        train(model, newer, range(1, 4))
        runs.append(weights(model))
        backward(model)
        with pytest.raises(RuntimeError, match="Expected"):
            optimizer.step()
    assert same(*runs)


@on_ranks(1)
def test_of_two_optimizers_over_one_group_the_first_refuses_to_step() -> None:
    model = Net()
    fsdp(model)
    parameters = list(model.parameters())
    first = HybridDeviceOptimizer(parameters[::2], 1.0, lr=0.1)
    second = HybridDeviceOptimizer(parameters[1::2], 1.0, lr=0.1)
    before = weights(model)
    backward(model)
    with pytest.raises(RuntimeError, match="Expected"):
        first.step()
    assert same(weights(model), before)
    second.step()
    changed = [not torch.equal(*pair) for pair in zip(before, weights(model), strict=True)]
    assert changed == [False, True] * 4


@on_ranks(1)
def test_allocating_states_waits_for_a_step_under_way() -> None:
    inside, may_go = threading.Event(), threading.Event()

    class Slow(SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                may_go.wait(60)
            else:
                assert may_go.is_set(), "while the lane is in it too"
            return super().step(closure)

    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), 1.0, Slow, Slow, lr=0.1, momentum=0.9, **ALL
    )
    backward(model)
    optimizer.step()
    assert inside.wait(60)
    threading.Timer(0.1, may_go.set).start()
    optimizer.init_state()
    assert may_go.is_set()


# State dicts


def _round_trips(sharding: str, name: str) -> None:
    cls, options = CLASSES[name]

    def make(fraction: float, seed: int) -> tuple[Net, HybridDeviceOptimizer]:
        model = Net(seed)
        SHARDINGS[sharding](model)
        return model, HybridDeviceOptimizer(
            model.parameters(), fraction, cls, cls, **options, **ALL
        )

    for saving in (1.0, 0.5, 0.0):
        model, optimizer = make(saving, 0)
        train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.007
        saved = snapshot(optimizer.state_dict())
        saved_weights = snapshot(model.state_dict())
        train(model, optimizer, range(4, 8))
        for loading in (1.0, 0.5, 0.0):
            other, fresh = make(loading, 1)
            train(other, fresh, range(20, 22))
            addresses = [
                local_tensor(v).data_ptr() for s in fresh.state.values() for v in s.values()
            ]
            other.load_state_dict(saved_weights)
            fresh.load_state_dict(saved)
            assert [
                local_tensor(v).data_ptr() for s in fresh.state.values() for v in s.values()
            ] == addresses
            assert fresh.param_groups[0]["lr"] == 0.007
            loaded = states(fresh)
            train(other, fresh, range(4, 8))
            assert same(weights(other), weights(model))
            assert same_states(states(fresh), states(optimizer))
            assert not same_states(states(fresh), loaded)
            parts = [
                (local_tensor(v), local_tensor(fresh.state[p][n]))
                for p, v, n in _numbered(fresh, saved)
            ]
            assert all(not torch.equal(*pair) for pair in parts if pair[0].numel()), (
                "nothing is shared"
            )


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
@on_ranks(2)
def test_state_dicts_of_sharded_modules_can_be_copied(sharding: str) -> None:
    for fraction in FRACTIONS:
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction)
        train(model, optimizer, range(2))
        copied = copy.deepcopy(optimizer.state_dict())
        before = states(optimizer)
        train(model, optimizer, range(2, 4))
        optimizer.load_state_dict(copied)
        assert same_states(states(optimizer), before)


def _numbered(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any]
) -> Iterator[tuple[Any, torch.Tensor, str]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in saved["state"].items():
        for name, value in state.items():
            yield parameters[number], value, name


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_what_is_saved_at_one_fraction_goes_on_bit_for_bit_at_any(name):
    _round_trips("plain", name)


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
def test_what_is_saved_of_a_sharded_module_goes_on_bit_for_bit_at_any_fraction(sharding):
    run_ranks(2, _round_trips, sharding, "AdamW")


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_run_that_has_not_stepped_is_loaded_as_one(name, fraction):
    cls, options = CLASSES[name]
    model, fresh = Net(), Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, cls, cls, **options)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer)
    model.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    train(model, optimizer, range(2))
    train(
        fresh,
        other := HybridDeviceOptimizer(fresh.parameters(), fraction, cls, cls, **options),
        range(2),
    )
    assert same(weights(model), weights(fresh))
    assert same_states(states(optimizer), states(other))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_states_of_all_are_loaded_where_some_had_none(fraction):
    first, second = Net(), Net(seed=1)
    one = HybridDeviceOptimizer(first.parameters(), fraction, SGD, SGD, lr=0.1, momentum=0.9)
    other = HybridDeviceOptimizer(second.parameters(), fraction, SGD, SGD, lr=0.1, momentum=0.9)
    train(first, one)
    for parameter in (second.layers[0].weight, second.head.weight):
        parameter.grad = torch.ones_like(parameter)
    other.step()
    other.zero_grad()
    other.load_state_dict(one.state_dict())
    assert same_states(states(other), states(one))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("number", [0, 7])
def test_states_that_do_not_fit_are_refused_and_nothing_is_changed(name, fraction, number):
    cls, options = CLASSES[name]
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), fraction, cls, cls, **options)
    train(model, optimizer)
    before, groups = states(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])

    def refuses(change: Callable[[dict[str, Any]], None]) -> None:
        bad = copy.deepcopy(optimizer.state_dict())
        for state in bad["state"].values():
            for value in state.values():
                value.fill_(7)
        bad["param_groups"][0]["lr"] = 123.0
        change(bad)
        with pytest.raises(ValueError, match="Expected"):
            optimizer.load_state_dict(bad)
        assert same_states(states(optimizer), before)
        shown = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        assert [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ] == shown

    exp_avg = optimizer.state_dict()["state"][number]["exp_avg"]
    refuses(lambda bad: bad["state"][number].update(exp_avg=torch.zeros(2, 2)))
    refuses(lambda bad: bad["state"][number].update(exp_avg=exp_avg.to(BF16)))
    refuses(lambda bad: bad["state"][number].update(exp_avg=exp_avg.double()))
    refuses(lambda bad: bad["state"][number].pop("exp_avg_sq"))
    refuses(lambda bad: bad["state"][number].update(more=exp_avg))
    refuses(lambda bad: bad["param_groups"][0]["params"].pop())
    refuses(lambda bad: bad["param_groups"].append({"params": [], "lr": 0.1}))
    refuses(lambda bad: bad["state"].update({99: {}}))


def _dcp_model(fraction: float, seed: int) -> tuple[Net, HybridDeviceOptimizer]:
    model = Net(seed)
    fsdp(model)
    return model, HybridDeviceOptimizer(model.parameters(), fraction, lr=0.05, **ALL)


def _train_alike(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]
) -> list[float]:
    """On one global batch, whatever the number of ranks."""
    losses = []
    for number in steps:
        loss = (
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(number)))
            .square()
            .mean()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _save_dcp(path: str, fraction: float) -> list[float]:
    model, optimizer = _dcp_model(fraction, 0)
    _train_alike(model, optimizer, range(3))
    dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    return _train_alike(model, optimizer, range(3, 7))


def _load_dcp(path: str, fraction: float, expected: list[float]) -> None:
    model, optimizer = _dcp_model(fraction, 1)
    assert _train_alike(*_dcp_model(fraction, 1), range(3, 7)) != expected
    dcp.load({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    got = _train_alike(model, optimizer, range(3, 7))
    assert got == pytest.approx(expected, rel=1e-6)
    assert {float(state["step"]) for state in optimizer.state.values()} == {7.0}


@pytest.mark.parametrize(
    ("saving", "loading"),
    [((2, 1.0), (1, 0.5)), ((1, 0.5), (2, 0.0)), ((2, 0.0), (2, 1.0)), ((2, 1.0), (2, 0.5))],
)
def test_dcp_saves_at_one_fraction_and_world_size_and_loads_at_another(tmp_path, saving, loading):
    path = str(tmp_path / "checkpoint")
    expected = run_ranks(saving[0], _save_dcp, path, saving[1])[0]
    run_ranks(loading[0], _load_dcp, path, loading[1], expected)


# Errors


class _BrokenError(Exception):
    pass


@contextmanager
def failing_once() -> Iterator[None]:
    """The next pass on the host fails."""
    original = HostAdam.run

    def run_that_fails(*_: Any) -> None:
        HostAdam.run = original
        raise _BrokenError("the host lane broke")

    HostAdam.run = run_that_fails
    try:
        yield
    finally:
        HostAdam.run = original


def _errors_surface(settings: dict[str, Any], read: str) -> None:
    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **settings)
    with failing_once():
        backward(model)
        if settings is ALL:
            optimizer.step()
        else:
            with pytest.raises(_BrokenError, match="the host lane broke"):
                optimizer.step()
        calls = {
            "step": optimizer.step,
            "synchronize": optimizer.synchronize,
            "state": lambda: optimizer.state,
            "state_dict": optimizer.state_dict,
            "load_state_dict": lambda: optimizer.load_state_dict(
                {"state": {}, "param_groups": [{"params": range(8)}]}
            ),
            "forward": lambda: model(batch(0)),
            "weights": model.state_dict,
        }
        for _ in range(6):  # more often than there are groups
            with pytest.raises(_BrokenError, match="the host lane broke") as raised:
                calls[read]()
            assert "run_that_fails" in "".join(traceback.format_tb(raised.value.__traceback__))


@pytest.mark.parametrize(
    "read", ["step", "synchronize", "state", "state_dict", "load_state_dict", "forward", "weights"]
)
def test_what_fails_in_a_lane_is_raised_by_whatever_depends_on_it_with_its_own_traceback(read):
    run_ranks(1, _errors_surface, ALL, read)


@pytest.mark.parametrize("settings", [IN_ORDER, {}])
def test_what_fails_in_a_lane_is_raised_by_a_step_that_waits_for_it_and_by_the_next(settings):
    run_ranks(1, _errors_surface, settings, "step")


@pytest.mark.parametrize("settings", OVERLAPS)
def test_what_fails_for_plain_parameters_is_raised_by_the_step_itself(settings):
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, **settings)
    backward(model)
    with failing_once(), pytest.raises(_BrokenError):
        optimizer.step()


BAD_FRACTIONS = [1.5, -0.1, math.nan, math.inf, "half", None, True]


@pytest.mark.parametrize("fraction", BAD_FRACTIONS)
def test_what_is_no_fraction_is_refused(fraction):
    with pytest.raises(ValueError, match="Expected an offload fraction from 0 to 1, got "):
        HybridDeviceOptimizer(Net().parameters(), fraction)


def test_parameters_on_several_devices_and_on_meta_are_refused():
    mixed = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, device="meta"))]
    with pytest.raises(
        ValueError, match=r"Expected parameters on one device, got some on \['cpu', 'meta'\]"
    ):
        HybridDeviceOptimizer(mixed, 0.5)
    for fraction in (0.0, 1.0):
        with pytest.raises(
            ValueError, match="Expected parameters that have memory, got some on meta"
        ):
            HybridDeviceOptimizer(mixed[1:], fraction)


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="Expected overlap_cpu_optimizer_d2h_h2d, which"):
        HybridDeviceOptimizer(Net().parameters(), 1.0, **IN_ORDER, **FORWARD)
    with pytest.raises(ValueError, match="Expected overlap_cpu_optimizer_d2h_h2d, which"):
        HybridDeviceOptimizer(Net().parameters(), 1.0, **IN_ORDER, fetch_during_backward=True)
    with pytest.raises(ValueError, match="amsgrad"):
        HybridDeviceOptimizer(Net().parameters(), 1.0, amsgrad=True)
    with pytest.raises(TypeError, match="momentun"):
        HybridDeviceOptimizer(Net().parameters(), 1.0, SGD, SGD, momentun=0.9)
    with pytest.raises(ValueError, match="Expected at least one thread"):
        HybridDeviceOptimizer(Net().parameters(), 1.0, num_host_threads=0)
    with pytest.raises(ValueError, match="Expected both moments"):
        HybridDeviceOptimizer(Net().parameters(), 1.0, exp_avg_dtype=BF16)
    with pytest.raises(ValueError, match="float64"):
        HybridDeviceOptimizer(Net(dtype=torch.float64).parameters(), 1.0)


def _too_large(poor_rank: int) -> None:
    """One rank's machine has too little memory; its own limits are looked at by each."""
    original = HostLimits.read
    limits = HostLimits(100, None) if dist.get_rank() == poor_rank else HostLimits(1 << 40, None)
    HostLimits.read = classmethod(lambda *_: limits)
    try:
        model = Net()
        fsdp(model)
        words = (
            "got available: MemAvailable 100 B"
            if dist.get_rank() == poor_rank
            else "Expected host memory on every rank's machine, got one that needs"
        )
        with pytest.raises(HostMemoryError, match=words):
            HybridDeviceOptimizer(model.parameters(), 1.0)
        assert not any(group_of(parameter).is_on_host for parameter in model.parameters())
        optimizer = HybridDeviceOptimizer(model.parameters(), 0.0)
        train(model, optimizer, range(1))
    finally:
        HostLimits.read = original


def test_a_plan_larger_than_one_ranks_memory_is_refused_by_all_of_them():
    run_ranks(2, _too_large, 1)


@on_ranks(1)
def test_what_the_device_side_refuses_leaves_the_host_side_where_it_is() -> None:
    model = Net()
    fsdp(model)
    before = weights(model)
    with pytest.raises(ValueError, match="float64"):
        HybridDeviceOptimizer([nn.Parameter(torch.zeros(3).double()), *model.parameters()], 0.5)
    assert not any(group_of(parameter).is_on_host for parameter in model.parameters())
    assert same(weights(model), before)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@on_ranks(2)
def test_gradients_that_do_not_fit_are_refused_and_nothing_is_stepped(
    fraction: float, order: int
) -> None:
    """Of a group's parameter, or of a plain one before or behind the groups: on either side, first
    or last.
    """

    def spoil(parameter: nn.Parameter, kind: str) -> tuple[type[Exception], str]:
        own = parameter.grad
        if kind == "sparse":
            parameter.grad = torch.eye(*parameter.shape).to_sparse()
            return ValueError, "Expected a gradient of a dense"
        if kind == "shape":
            local = torch.ones(1, 5)
            assert local.shape != local_tensor(own).shape
            parameter.grad = UnevenDTensor.over(
                local, own.device_mesh, own.placements, own.shape, own.stride()
            )
            return ValueError, "Expected a gradient of a local shape"
        assert kind == "dtype"
        parameter.grad = own.to(torch.float16)
        return ValueError, r"Expected a gradient of torch\.bfloat16"

    for kind in ("sparse", "shape", "dtype", "partial"):
        model = Net(dtype=BF16)
        context = fsdp(model, "optim")
        lone = nn.Parameter(torch.ones(6, 4))
        parameters = [lone, *model.parameters()] if order == 0 else [*model.parameters(), lone]
        optimizer = HybridDeviceOptimizer(parameters, fraction, lr=0.1)
        before = [local_tensor(parameter).detach().clone() for parameter in parameters]
        with microbatch(context, is_last=kind != "partial"):
            backward(model, dtype=BF16)
        lone.grad = torch.ones_like(lone)
        owner = lone if kind == "sparse" else model.layers[2 * order].weight
        if kind == "dtype" and not group_of(owner).is_on_host:
            continue  # there it is cast
        error, words = (RuntimeError, "partial sums") if kind == "partial" else spoil(owner, kind)
        with pytest.raises(error, match=words):
            optimizer.step()
        optimizer.synchronize()
        assert same([local_tensor(parameter).detach() for parameter in parameters], before)
        assert {float(state["step"]) for state in optimizer.state.values()} == {0.0}
        assert not any(state["exp_avg"].any() for state in states(optimizer))
        # And what was refused has left nothing behind.
        optimizer.zero_grad()
        backward(model, dtype=BF16)
        optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {0.0, 1.0}


# Writes to parameters


def _external_writes(sharding: str) -> None:
    def write(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.synchronize()
        with torch.no_grad():
            for parameter in list(model.parameters())[number % 2 :: 2]:
                parameter.mul_(0.5)

    def run(
        make: Callable[[Any], torch.optim.Optimizer], writes: bool = True
    ) -> list[torch.Tensor]:
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = make(model.parameters())
        write(model, optimizer, 0)
        for number in range(4):
            train(model, optimizer, [number])
            if writes:
                write(model, optimizer, number)
        return weights(model)

    expected = run(lambda parameters: FusedAdam(parameters, lr=0.02))
    assert not same(expected, run(lambda parameters: FusedAdam(parameters, lr=0.02), writes=False))
    for fraction in (0.5, 1.0):
        for settings in OVERLAPS:
            make = partial(HybridDeviceOptimizer, offload_fraction=fraction, lr=0.02, **settings)
            assert same(run(make), expected)


def test_writing_to_plain_parameters_between_steps_counts():
    _external_writes("plain")


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
def test_writing_to_sharded_parameters_between_steps_counts(sharding):
    run_ranks(2, _external_writes, sharding)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
@on_ranks(2)
def test_what_no_counter_shows_is_taken_over_on_demand(sharding: str, fraction: float) -> None:
    """Foreach operations on DTensors, and writes to `.data`, are seen when somebody says so."""
    results = []
    for make in (
        FusedAdam,
        lambda parameters, **options: HybridDeviceOptimizer(parameters, fraction, **options, **ALL),
    ):
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = make(model.parameters(), lr=0.1)
        train(model, optimizer, range(2))
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.synchronize()
        for parameter in model.parameters():
            with torch.no_grad():
                if isinstance(optimizer, HybridDeviceOptimizer):
                    torch._foreach_mul_([parameter], 0.5)
                else:
                    parameter.mul_(0.5)
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.reload_parameters()
        loss = (model(batch(9)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        results.append((loss.item(), weights(model)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
@on_ranks(2)
def test_weights_that_a_module_loads_count(sharding: str) -> None:
    source = Net(seed=1)
    SHARDINGS[sharding](source)
    results = []
    for make in (
        FusedAdam,
        lambda parameters, **options: HybridDeviceOptimizer(parameters, 1.0, **options, **ALL),
    ):
        model = Net()
        SHARDINGS[sharding](model)
        optimizer = make(model.parameters(), lr=0.1)
        with delays(3):
            train(model, optimizer, range(2))
            model.load_state_dict(source.state_dict())
            train(model, optimizer, range(2, 4))
            results.append(weights(model))
    assert same(*results)


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


def test_copies_and_further_groups_are_refused():
    optimizer = HybridDeviceOptimizer(Net().parameters(), 0.5)
    for copying in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"Expected state_dict\(\) to be used"):
            copying(optimizer)
    with pytest.raises(
        NotImplementedError, match="Expected all parameters when the optimizer is made"
    ):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RuntimeError, match="Expected states to come by load_state_dict"):
        optimizer.state = {}


def test_the_plan_names_parameters_as_they_were_given():
    optimizer = HybridDeviceOptimizer(Net().named_parameters(), 0.3)
    assert [group.name for group in optimizer.plan.groups] == [
        name for name, _ in Net().named_parameters()
    ]
    assert "layers.1.weight" in str(optimizer.plan)


def lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("optimizer ")]


def settled(is_so: Callable[[], bool]) -> bool:
    """Whether it becomes so: a thread ends a moment after it was told to."""
    for thread in threading.enumerate():
        if thread.name.startswith("optimizer "):
            thread.join(10 if not is_so() else 0)
    return is_so()


@contextmanager
def slabs_mapped() -> Iterator[list[weakref.ref[memoryview]]]:
    """The memory of all slabs that are made meanwhile, weakly."""
    original, mapped = HostSlab._map, []

    def mapping(slab: HostSlab, device: Any) -> None:
        original(slab, device)
        mapped.append(weakref.ref(slab._memory))

    HostSlab._map = mapping
    try:
        yield mapped
    finally:
        HostSlab._map = original


def _frees_everything(settings: dict[str, Any], deletes_in_flight: bool) -> None:
    gc.collect()
    before = len(lanes())
    model = Net()
    fsdp(model)
    with slabs_mapped() as views:
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **settings)
    assert len(lanes()) == before + (0 if settings is IN_ORDER else 3)
    train(model, optimizer, range(2))
    if not deletes_in_flight:
        optimizer.synchronize()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert settled(lambda: len(lanes()) == before)
    assert sum(view() is not None for view in views) == 1 < len(views), (
        "the main weights are the model's still"
    )
    expected = Net()
    fsdp(expected)
    train(expected, FusedAdam(expected.parameters(), lr=0.1), range(2))
    assert same(weights(model), weights(expected))
    for number in (7, 8):
        assert model(batch(number)).sum().item() == expected(batch(number)).sum().item()
    # A new one begins without moments, as a new one does.
    train(expected, FusedAdam(expected.parameters(), lr=0.1), range(2, 4))
    with slabs_mapped() as more:
        newer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1, **settings)
    train(model, newer, range(2, 4))
    assert same(weights(model), weights(expected))
    assert more
    del newer, model
    gc.collect()
    assert settled(lambda: len(lanes()) == before)
    assert not any(view() is not None for view in (*views, *more))


@pytest.mark.parametrize("settings", OVERLAPS)
def test_who_lets_go_of_the_optimizer_and_the_model_frees_memory_and_threads(settings):
    run_ranks(1, _frees_everything, settings, False)


def test_an_optimizer_that_is_let_go_of_finishes_its_updates():
    run_ranks(1, _frees_everything, ALL, True)


def test_the_host_side_of_a_plain_module_is_freed_with_the_optimizer():
    with slabs_mapped() as views:
        optimizer = HybridDeviceOptimizer(Net().parameters(), 1.0)
    assert views
    assert all(view() is not None for view in views)
    del optimizer
    gc.collect()
    assert not any(view() is not None for view in views)


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
