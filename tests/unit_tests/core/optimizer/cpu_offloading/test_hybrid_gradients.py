"""`HybridDeviceOptimizer` and gradients that are absent, written to, accumulated, or do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import (
    FsdpContext,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor
from megatron.core.dtensors import local_tensor
from megatron.core.lanes import delays
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    ALL,
    BF16,
    FORWARD,
    Net,
    backward,
    batch,
    fsdp,
    same,
    same_states,
    states,
    train,
    trains_as_reference,
    weights,
)

# Gradients that come and go


def _steps_what_has_a_gradient(sharding: str, name: str) -> None:
    def drops(model: nn.Module, number: int) -> None:
        """In every step another parameter, and in one all of the first layer's."""
        parameters = list(model.parameters())
        parameters[number % len(parameters)].grad = None
        if number == 2:
            for parameter in model.layers[0].parameters():
                parameter.grad = None

    own = trains_as_reference(
        lambda model, optimizer: train(model, optimizer, range(10), between=drops), sharding, name
    )
    if name != "SGD":
        assert {float(state["step"]) for state in states(own)} == {7.0, 9.0}


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_parameters_without_a_gradient_neither_step_nor_count(name):
    _steps_what_has_a_gradient("plain", name)


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
def test_sharded_parameters_without_a_gradient_neither_step_nor_count(sharding):
    run_ranks(2, _steps_what_has_a_gradient, sharding, "AdamW")


@on_ranks(2)
def test_a_module_that_a_forward_leaves_out_is_not_stepped() -> None:
    def script(model: Net, optimizer: torch.optim.Optimizer) -> None:
        for number in range(4):
            x = torch.tanh(model.layers[0](batch(number)))
            if number != 1:
                x = model.layers[2](torch.tanh(model.layers[1](x)))
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    own = trains_as_reference(script, "groups")
    assert [float(state["step"]) for state in states(own)] == [4, 4, 3, 3, 3, 3, 0, 0]


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


def _unscale(model: nn.Module, _: int) -> None:
    """The operator of GradScaler.unscale_, which takes a list of gradients."""
    gradients = [parameter.grad for parameter in model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(
        gradients, torch.zeros(1), torch.full((1,), 0.5)
    )


ANY_WRITES = [_halve, _clip, _write_locally, _replace, _zero_some, _replace_and_write, _unscale]


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
    assert not same(expected, run(fused, None, lambda *_: None)), "the writes matter"
    for seed in (None, 1):
        assert same(run(hybrid, seed, write), expected)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, ALL),
        pytest.param(torch.float32, FORWARD, marks=pytest.mark.wide),
        pytest.param(BF16, ALL, marks=pytest.mark.wide),
    ],
)
@pytest.mark.parametrize("write", ANY_WRITES)
def test_gradients_written_between_backward_and_step_count_as_written(write, dtype, settings):
    run_ranks(2, _counts_what_is_written, write, dtype, settings)


@pytest.mark.parametrize(
    "strategy", ["optim_grads_params", pytest.param("optim", marks=pytest.mark.wide)]
)
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
    for seed in (None, 1):
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


# Gradients that do not fit


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@on_ranks(2)
def test_gradients_that_do_not_fit_are_rejected_and_nothing_is_stepped(
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
        optimizer.init_state()
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
        # The optimizer is usable after the error.
        optimizer.zero_grad()
        backward(model, dtype=BF16)
        optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {0.0, 1.0}
