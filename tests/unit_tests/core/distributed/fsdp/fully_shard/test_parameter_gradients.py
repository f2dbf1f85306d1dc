"""Gradients of sharded parameters: missing, frozen, views of one buffer, or saved by autograd."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import (
    FsdpModule,
    MixedPrecisionPolicy,
    microbatch,
)
from megatron.core.distributed.fsdp.context import is_backward_running
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.distributed.fsdp.fully_shard.helpers.stacks import (
    DIM,
    DTYPES,
    STRATEGIES,
    Stack,
    assert_gradients,
    assert_resting,
    clear_gradients,
    expected_gradients,
    groups_of,
    loss_of,
    outcome_of,
    own_batch,
    settle,
    shard,
)


class Pair(nn.Module):
    """Two parameters, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(DIM, DIM))
        self.second = nn.Parameter(torch.randn(DIM))
        self.uses_second = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.first
        return x * self.second if self.uses_second else x


# Gradients that are not there


def _sum_of_gradients(plain: Pair, uses: Iterable[bool]) -> dict[str, torch.Tensor]:
    total = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
    for number, uses_second in enumerate(uses):
        plain.uses_second = uses_second
        for name, gradient in expected_gradients(plain, number).items():
            total[name] += 0 if gradient is None else gradient
    return total


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_an_unused_parameter_has_no_gradient_until_it_is_used_in_some_microbatch(
    strategy: str,
) -> None:
    plain = Pair()
    model = copy.deepcopy(plain)
    context = shard(model, strategy=strategy)
    plain.uses_second = model.uses_second = False
    loss_of(model(own_batch())).backward()
    assert model.second.grad is None
    assert_gradients(model, expected_gradients(plain))
    plain.uses_second = model.uses_second = True
    clear_gradients(model)
    loss_of(model(own_batch())).backward()
    assert_gradients(model, expected_gradients(plain))
    for uses in ((True, False, False), (False, True, False), (False, False, True)):
        for is_scoped in (True, False):
            clear_gradients(model)
            for number, uses_second in enumerate(uses):
                model.uses_second = uses_second
                with microbatch(context, is_last=not is_scoped or number == 2):
                    loss_of(model(own_batch(number))).backward()
            assert_gradients(model, _sum_of_gradients(plain, uses))


# Gradients to which no other rank adds


class Reentrant(Stack):
    """Runs its only layer twice, which the backward computes again in two nested backwards."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(1, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layers[0], x, use_reentrant=True)
        return x


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("make", [Stack, Reentrant])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1)
def test_alone_a_rank_adds_up_the_gradients_of_autograd_as_they_are(
    strategy: str, dtype: torch.dtype, make: type[Stack]
) -> None:
    plain = make(dtype=dtype)
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    units = model.layers if make is Stack else [model]
    context = shard(*units, strategy=strategy, policy=policy)
    sums = [torch.zeros_like(each, dtype=torch.float32) for each in plain.parameters()]

    for number in range(3):
        for own in (plain, model):
            with microbatch(context, is_last=number == 2):
                x = own_batch(number, dtype).requires_grad_()
                loss_of(own(x)).backward()
        for total, parameter in zip(sums, plain.parameters(), strict=True):
            total += parameter.grad
        clear_gradients(plain)
        # Nested backwards add their parts one by one.
        close = {"rtol": 0.0, "atol": 0.0} if make is Stack else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(gradients_of(model), sums, **close)
        # As a program that scales its sums by hand.
        torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 0.75)
        torch._foreach_mul_(sums, 0.75)


@pytest.mark.parametrize("way", ["zero", "none", "replace"])
@on_ranks(1)
def test_alone_a_cleared_or_replaced_gradient_starts_the_next_sum(way: str) -> None:
    plain = Pair()
    model = copy.deepcopy(plain)
    shard(model, strategy="optim")
    for own in (plain, model):
        loss_of(own(own_batch())).backward()
        for parameter in own.parameters():
            if way == "replace":
                parameter.grad = torch.ones_like(parameter)
        if way != "replace":
            own.zero_grad(set_to_none=way == "none")
        own.uses_second = way != "none"
        for number in (1, 2):
            loss_of(own(own_batch(number))).backward()
    assert [own.grad is None for own in model.parameters()] == [False, way == "none"]
    for found, own in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is None or torch.equal(found.grad.to_local(), own.grad)
    (group,) = groups_of(model)
    # The optimizer may read all of it.
    assert group.main_grad.local_buffer.isfinite().all()
    assert way != "none" or not group.main_grad.get_local_tensor(1).any()


@on_ranks(1)
def test_alone_a_unit_whose_backward_failed_keeps_the_sums_before_it() -> None:
    model = Stack()
    context = shard(model, strategy="optim")
    loss_of(model(own_batch())).backward()
    before = gradients_of(model)

    def fail(_: nn.Module) -> None:
        if is_backward_running():
            raise ArithmeticError("no way")

    model.layers[0].look = fail
    with pytest.raises(ArithmeticError, match="no way"):
        loss_of(model(own_batch(1))).backward()
    with torch.no_grad():
        model(own_batch())  # drops what the failed backward has left
    settle(context)
    assert all(map(torch.equal, gradients_of(model), before))


# Gradients as autograd and optimizers see them


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_are_views_of_main_grad(strategy: str) -> None:
    model = Stack(dtype=torch.bfloat16)
    shard(
        *model.layers,
        strategy=strategy,
        policy=MixedPrecisionPolicy(main_grads_dtype=torch.float32),
    )
    for _ in range(2):
        loss_of(model(own_batch(dtype=torch.bfloat16))).backward()
        for parameter in model.parameters():
            gradient, buffer = parameter.grad.to_local(), group_of(parameter).main_grad.local_buffer
            assert parameter.grad.placements == parameter.placements
            assert gradient.dtype == torch.float32
            begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
            assert gradient.numel() == 0 or begin <= gradient.data_ptr() <= end - gradient.nbytes
    assert sum(parameter.grad.to_local().numel() for parameter in model.parameters()) > 0


@pytest.mark.parametrize("is_cleared_before_forward", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_gradient_that_a_program_keeps_keeps_its_values(
    strategy: str, is_cleared_before_forward: bool
) -> None:
    model = Stack()
    shard(*model.layers, strategy=strategy)
    expected = expected_gradients(Stack(), 1)
    loss_of(model(own_batch())).backward()
    kept = [parameter.grad for parameter in model.parameters()]
    before = [each.to_local().clone() for each in kept]
    if is_cleared_before_forward:
        clear_gradients(model)
    loss = loss_of(model(own_batch(1)))
    clear_gradients(model)
    loss.backward()
    assert all(map(torch.equal, [each.to_local() for each in kept], before))
    assert_gradients(model, expected)


class Read:
    """An event after a read of a group's gradients; remembers whether they were there."""

    def __init__(self, group: FsdpParameterGroup) -> None:
        self._group = group
        self.seen: list[bool] = []

    def wait(self) -> None:
        self.seen.append(self._group.main_grad is not None)


@on_ranks(1)
def test_gradients_are_freed_in_the_forward_after_they_have_been_read_and_cleared() -> None:
    model = Stack()
    shard(*model.layers)
    loss_of(model(own_batch())).backward()
    reads = []
    for group in groups_of(model):
        reads.append(Read(group))
        group.hold_main_grad(reads[-1])
    memory = [
        StorageWeakRef(group.main_grad.local_buffer.untyped_storage()) for group in groups_of(model)
    ]
    model(own_batch(1))
    next(model.parameters()).grad = None
    model(own_batch(1))
    assert not any(read.seen for read in reads), "some of them are still to be used"
    clear_gradients(model)
    model(own_batch(1))
    assert [read.seen for read in reads] == [[True]] * 3
    assert [group.main_grad for group in groups_of(model)] == [None] * 3
    assert all(each.expired() for each in memory)


class SavesItsArguments(torch.autograd.Function):
    """x @ weight; complains in backward if either has changed since."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Viewing(nn.Linear):
    """Saves a view of its weight that is no leaf."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.weight.t()
        assert view._is_view()
        assert not view.is_leaf
        return SavesItsArguments.apply(x, view) + self.bias


def viewing(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Viewing(DIM, DIM, dtype=dtype) for _ in range(3)))


@on_ranks(2)
def test_a_view_of_a_weight_that_autograd_has_saved_survives_the_weights_release_and_return() -> (
    None
):
    plain = viewing()
    model = copy.deepcopy(plain)
    shard(*model)
    for _ in range(2):
        clear_gradients(model)
        loss = loss_of(model(own_batch()))
        assert_resting(model)
        loss.backward()
        assert_gradients(model, expected_gradients(plain))


MODIFIED = (
    "RuntimeError: one of the variables needed for gradient computation has been modified by an "
    "inplace"
)


def _stepped_between(strategy: str, dtype: torch.dtype) -> list[str]:
    outcomes = []
    for reshard_after_forward in (True, False):
        model = viewing(dtype)
        policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
        context = shard(
            *model, strategy=strategy, policy=policy, reshard_after_forward=reshard_after_forward
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        loss_of(model(own_batch(dtype=dtype))).backward()
        loss = loss_of(model(own_batch(dtype=dtype)))
        optimizer.step()
        outcomes.append(outcome_of(loss.backward))
        settle(context)
    return outcomes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stepping_between_forward_and_backward_is_an_error_as_in_plain_autograd(strategy, dtype):
    for outcomes in run_ranks(2, _stepped_between, strategy, dtype):
        assert all(outcome.startswith(MODIFIED) for outcome in outcomes)


# requires_grad


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_requires_grad_may_be_switched_off_and_on_again(strategy: str) -> None:
    plain = Stack()
    model = copy.deepcopy(plain)
    shard(*model.layers, strategy=strategy)
    for frozen in (
        ["layers.1.weight"],
        ["layers.1.weight", "layers.1.bias"],
        ["layers.0.bias"],
        [],
    ):
        for own in (plain, model):
            for name, parameter in own.named_parameters():
                parameter.requires_grad_(name not in frozen)
        clear_gradients(model)
        loss_of(model(own_batch())).backward()
        expected = expected_gradients(plain)
        assert [name for name, gradient in expected.items() if gradient is None] == frozen
        assert_gradients(model, expected)
        assert_resting(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_what_was_frozen_when_it_was_sharded_has_no_gradient_buffer_and_stays_frozen(
    strategy: str,
) -> None:
    plain = Stack()
    plain.layers[0].requires_grad_(False)
    plain.layers[1].bias.requires_grad_(False)
    model = copy.deepcopy(plain)
    shard(*model.layers, strategy=strategy)
    assert [[group.gradients is None for group in groups_of(layer)] for layer in model.layers] == [
        [True],
        [False, True],
        [False],
    ]
    loss_of(model(own_batch())).backward()
    assert_gradients(model, expected_gradients(plain))
    for number, name in ((1, "bias"), (0, "weight")):
        parameter = getattr(model.layers[number], name)
        parameter.requires_grad_(True)
        message = (
            rf"Expected {name} of .* to stay frozen, as it was when it was sharded and got no "
            r"gradient buffer"
        )
        with pytest.raises(RuntimeError, match=message):
            model(own_batch())
        parameter.requires_grad_(False)
        assert model.layers[number].activity is FsdpModule.Activity.RESTING
    clear_gradients(model)
    loss_of(model(own_batch())).backward()
    assert_gradients(model, expected_gradients(plain))
    assert_resting(model)
