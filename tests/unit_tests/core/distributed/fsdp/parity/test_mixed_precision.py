"""The dtypes of main weights, of gradients and of their reduction, and the divisor of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed.fsdp import (
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.distributed.fsdp.parity.helpers.shardings import BF16, FP32, groups_of
from tests.unit_tests.core.distributed.fsdp.parity.helpers.stacks import backward, sharded_stack
from tests.unit_tests.core.distributed.fsdp.parity.helpers.subjects import (
    whole_gradients,
    whole_weights,
)


def gradients_under(
    sharding: str, dtype: torch.dtype, numbers: Sequence[int], **options: Any
) -> dict[str, Tensor]:
    subject, context = sharded_stack(sharding, dtype, **options)
    backward(subject, context, numbers)
    return whole_gradients(subject)


every_sharding = pytest.mark.parametrize("sharding", SHARDING_STRATEGIES)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("main_params_dtype", [None, torch.float64, FP32, BF16])
@every_sharding
@on_ranks(2)
def test_main_weights_have_the_dtype_they_are_given_and_so_has_what_the_optimizer_updates(
    sharding: str, dtype: torch.dtype, main_params_dtype: torch.dtype | None
) -> None:
    subject, _ = sharded_stack(sharding, dtype, main_params_dtype=main_params_dtype)
    expected = main_params_dtype or dtype
    assert {group.main_weight.dtype for group in groups_of(subject.units)} == {expected}
    assert {group.model_weight.dtype for group in groups_of(subject.units)} == {dtype}
    assert {parameter.dtype for parameter in subject.parameters().values()} == {expected}


@every_sharding
@on_ranks(2)
def test_an_update_too_small_for_bf16_reaches_fp32_main_weights_alone(sharding: str) -> None:
    for main_dtype, can_learn in ((BF16, False), (FP32, True)):
        subject, context = sharded_stack(sharding, BF16, main_params_dtype=main_dtype)
        optimizer = torch.optim.SGD(subject.parameters().values(), lr=1e-5)
        fully_shard_optimizer(optimizer)
        before = whole_weights(subject)["1.scale"].clone()
        backward(subject, context, [0])
        optimizer.step()
        assert torch.equal(whole_weights(subject)["1.scale"], before) != can_learn


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("main_grads_dtype", [None, FP32, BF16])
@every_sharding
@on_ranks(2)
def test_main_gradients_have_the_dtype_they_are_given(
    sharding: str, dtype: torch.dtype, main_grads_dtype: torch.dtype | None
) -> None:
    subject, context = sharded_stack(sharding, dtype, main_grads_dtype=main_grads_dtype)
    expected = main_grads_dtype or dtype
    backward(subject, context, [0, 1])
    assert {group.main_grad.dtype for group in groups_of(subject.units)} == {expected}
    assert {parameter.grad.dtype for parameter in subject.parameters().values()} == {expected}


@every_sharding
@on_ranks(2)
def test_fp32_main_gradients_keep_of_bf16_microbatches_what_bf16_ones_round_away(
    sharding: str,
) -> None:
    numbers = range(4)
    fine = gradients_under(sharding, BF16, numbers, main_grads_dtype=FP32)
    coarse = gradients_under(sharding, BF16, numbers, main_grads_dtype=BF16)
    assert any(not torch.equal(gradient, gradient.to(BF16).to(FP32)) for gradient in fine.values())
    for name, gradient in coarse.items():
        assert not torch.equal(gradient.to(FP32), fine[name]), name
        torch.testing.assert_close(
            gradient.to(FP32), fine[name], rtol=0.05, atol=0.02 * fine[name].abs().max()
        )


class Recording(torch.optim.Optimizer):
    """Gradient descent that remembers the gradients it was given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:
        parameters = self.param_groups[0]["params"]
        self.seen = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=0.1)


@every_sharding
@on_ranks(2)
def test_the_optimizer_gets_bf16_gradients_as_fp32_and_afterwards_they_are_back(
    sharding: str,
) -> None:
    subject, context = sharded_stack(sharding, FP32, main_grads_dtype=BF16)
    optimizer = Recording(subject.parameters().values())
    fully_shard_optimizer(optimizer)
    before = {name: weight.clone() for name, weight in whole_weights(subject).items()}
    backward(subject, context, [0, 1])
    gradients = [parameter.grad for parameter in subject.parameters().values()]
    optimizer.step()
    for parameter, gradient, seen in zip(
        subject.parameters().values(), gradients, optimizer.seen, strict=True
    ):
        assert parameter.grad is gradient
        assert (gradient.dtype, seen.dtype) == (BF16, FP32)
        assert torch.equal(seen.to_local(), gradient.to_local().to(FP32))
    rounded = whole_gradients(subject)
    for name, weight in whole_weights(subject).items():
        torch.testing.assert_close(weight, before[name] - 0.1 * rounded[name].to(FP32))
        assert not torch.equal(weight, before[name])


@every_sharding
@on_ranks(2)
def test_an_optimizer_whose_step_calls_that_of_its_base_leaves_bf16_gradients_as_they_were(
    sharding: str,
) -> None:
    class Inheriting(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            super().step(closure)

    torch.optim.SGD(
        [nn.Parameter(torch.zeros(1))]
    )  # the first one lets hooks run around SGD's own step
    subject, context = sharded_stack(sharding, FP32, main_grads_dtype=BF16)
    optimizer = Inheriting(subject.parameters().values(), lr=0.1)
    fully_shard_optimizer(optimizer)
    backward(subject, context, [0])
    gradients = [parameter.grad for parameter in subject.parameters().values()]
    optimizer.step()
    for parameter, gradient in zip(subject.parameters().values(), gradients, strict=True):
        assert parameter.grad is gradient


@every_sharding
@on_ranks(2)
def test_gradients_reduced_in_bf16_differ_from_those_in_fp32_by_rounding_alone(
    sharding: str,
) -> None:
    fine = gradients_under(sharding, FP32, [0, 1])
    coarse = gradients_under(sharding, FP32, [0, 1], grad_comm_dtype=BF16)
    for name, gradient in coarse.items():
        assert gradient.dtype == FP32
        assert not torch.equal(gradient, fine[name]), name
        # Half a unit in the last place of eight bits, of every rank's part.
        torch.testing.assert_close(
            gradient, fine[name], rtol=0, atol=2**-8 * fine[name].abs().max() * 2
        )


@pytest.mark.parametrize(("divisor", "numbers"), [(3.0, [0]), (4.0, [0, 1, 2])])
@every_sharding
@on_ranks(2)
def test_grad_divisor_divides_gradients_exactly(
    sharding: str, divisor: float, numbers: list[int]
) -> None:
    """Sums of more than one microbatch are divided part by part, which is exact for a power
    of two.
    """

    undivided = gradients_under(sharding, FP32, numbers)
    divided = gradients_under(sharding, FP32, numbers, grad_divisor=divisor)
    for name, gradient in undivided.items():
        assert gradient.any()
        assert torch.equal(divided[name], gradient / divisor), name
