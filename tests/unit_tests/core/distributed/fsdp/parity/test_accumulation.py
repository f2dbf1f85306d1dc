"""Gradients of several microbatches and steps add up as on one rank, until they are cleared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    Replicate,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.distributed.fsdp.parity.helpers.shardings import FP32, groups_of
from tests.unit_tests.core.distributed.fsdp.parity.helpers.stacks import (
    backward,
    sharded_stack,
    stack_subject,
)
from tests.unit_tests.core.distributed.fsdp.parity.helpers.subjects import (
    assert_same_tensors,
    batches,
    built,
    run_alone,
    whole_gradients,
)


def gradients_of_microbatches(numbers: Sequence[int]) -> list[dict[str, Tensor]]:
    """Of each microbatch alone, averaged over ranks."""
    found = []
    for number in numbers:
        subject = built(stack_subject)
        run_alone(subject, batches(0, number))
        found.append({name: parameter.grad for name, parameter in subject.parameters().items()})
    return found


class Accumulating:
    """A sharded stack, and its expected gradients."""

    def __init__(self, sharding: str) -> None:
        self.subject, self.context = sharded_stack(sharding, FP32)
        self.of_microbatches = gradients_of_microbatches(range(4))
        largest = [
            max(gradient.abs().max() for gradient in gradients.values())
            for gradients in self.of_microbatches
        ]
        assert min(largest) > 1e-2

    def run(self, *numbers: int, is_whole: bool = True) -> None:
        backward(self.subject, self.context, numbers, is_whole=is_whole)

    def run_unscoped(self, *numbers: int) -> None:
        for number in numbers:
            self.subject.loss(batches(0, number)[dist.get_rank()]).backward()

    def clear(self, *, to_none: bool) -> None:
        torch.optim.SGD(self.subject.parameters().values()).zero_grad(set_to_none=to_none)

    def double(self) -> None:
        for parameter in self.subject.parameters().values():
            parameter.grad = parameter.grad * 2

    def check(self, *factors: float, other: dict[str, Sequence[float]] | None = None) -> None:
        """Asserts that gradients are the microbatches' gradients times `factors`, or `other` for a
        parameter.
        """
        expected = {}
        for name in self.subject.parameters():
            own = (other or {}).get(name, factors)
            expected[name] = sum(
                factor * self.of_microbatches[number][name] for number, factor in enumerate(own)
            )
        assert_same_tensors(whole_gradients(self.subject), expected)
        # The optimizer gets the buffer's gradients.
        for group in groups_of(self.subject.units):
            rows = group.main_grad.view(group.placements.optimizer)
            for index, parameter in enumerate(group.fsdp_parameters):
                assert torch.equal(parameter.sharded.grad.to_local(), rows.get_local_tensor(index))


ACCUMULATION = [
    pytest.param(2, SHARDING_STRATEGIES, id="strategies"),
    pytest.param(4, ("hsdp", "hfsdp"), id="hybrid"),
    pytest.param(4, (*SHARDING_STRATEGIES, "full"), id="4", marks=pytest.mark.wide),
]


def on_shardings(scenario: Callable[[Accumulating], None]) -> Callable[[int, Sequence[str]], None]:
    """Makes a test of a scenario."""

    @pytest.mark.parametrize(("world_size", "shardings"), ACCUMULATION)
    def test(world_size: int, shardings: Sequence[str]) -> None:
        def body() -> None:
            for sharding in shardings:
                try:
                    scenario(Accumulating(sharding))
                except Exception as error:
                    raise AssertionError(f"{sharding}: {error}") from error

        run_ranks(world_size, body)

    return test


@on_shardings
def test_backwards_of_one_step_and_of_several_add_up_until_gradients_are_cleared(
    model: Accumulating,
) -> None:
    model.run(0, 1, 2)
    model.check(1, 1, 1)
    model.run(3)
    model.check(1, 1, 1, 1)
    model.run(0, 2)
    model.check(2, 1, 2, 1)
    for to_none in (False, True):
        model.clear(to_none=to_none)
        model.run(3, 1)
        model.check(0, 1, 0, 1)
        model.clear(to_none=not to_none)
        model.run(2)
        model.check(0, 0, 1, 0)


@on_shardings
def test_backwards_outside_of_microbatch_add_up_each_averaged_over_ranks(
    model: Accumulating,
) -> None:
    model.run_unscoped(0)
    model.check(1)
    model.run_unscoped(1, 1, 2)
    model.check(1, 2, 1)
    model.run(3, 0)
    model.check(2, 2, 1, 1)
    model.run_unscoped(3)
    model.check(2, 2, 1, 2)
    for to_none in (True, False):
        model.clear(to_none=to_none)
        model.run_unscoped(3)
        model.check(0, 0, 0, 1)


@on_shardings
def test_gradients_cleared_between_microbatches_restart_from_zero(model: Accumulating) -> None:
    for to_none in (True, False):
        model.run(0, 1, is_whole=False)
        model.clear(to_none=to_none)
        model.run(2, 3)
        model.check(0, 0, 1, 1)
        model.run(1, is_whole=False)
        model.clear(to_none=to_none)
        model.run(0)
        model.check(1)


@on_shardings
def test_accumulation_continues_from_gradients_that_the_user_replaced(
    model: Accumulating,
) -> None:
    model.run(0, 1)
    model.double()
    model.run(2, 3)
    model.check(2, 2, 1, 1)
    model.double()
    model.double()
    model.run(0)
    model.check(9, 8, 4, 4)
    model.double()
    model.run_unscoped(1)
    model.check(18, 17, 8, 8)


@on_shardings
def test_accumulation_continues_from_partial_gradients_that_the_user_replaced(
    model: Accumulating,
) -> None:
    model.run(0, is_whole=False)
    model.double()
    model.run(1, is_whole=False)
    model.double()
    model.run(2)
    model.check(4, 2, 1)


@on_shardings
def test_only_cleared_gradients_restart_from_zero(
    model: Accumulating,
) -> None:
    parameters = model.subject.parameters()
    names = [name for name in parameters if name.endswith("weight")]

    for to_none in (True, False):
        cleared = torch.optim.SGD([parameters[name] for name in names])
        model.run(0, 1)
        cleared.zero_grad(to_none)
        model.run(2, 3)
        model.check(1, 1, 1, 1, other=dict.fromkeys(names, (0, 0, 1, 1)))
        model.run(0, is_whole=False)
        cleared.zero_grad(to_none)
        model.run(1, is_whole=False)
        model.run(2)
        model.check(2, 2, 2, 1, other=dict.fromkeys(names, (0, 1, 1, 0)))
        model.clear(to_none=to_none)


@on_shardings
def test_accumulation_continues_from_gradients_changed_in_place(
    model: Accumulating,
) -> None:
    model.run(0, 1)
    for parameter in model.subject.parameters().values():
        parameter.grad.mul_(0.5)
    model.run(2, 3)
    model.check(0.5, 0.5, 1, 1)


def _error_of_sums(strategy: str) -> float:
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = nn.Linear(16, 16, bias=False).bfloat16()
    model = copy.deepcopy(alone)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32)
    with fully_shard_context("cpu") as context:
        fully_shard(
            model, init_device_mesh("cpu", (size,)), Placements.for_strategy(strategy), policy
        )
    inputs = torch.randn(8, size, 4, 16).bfloat16()
    exact = torch.zeros(16, 16, dtype=torch.float64)
    for number, batch in enumerate(inputs):
        for own in batch:
            alone(own).float().square().mean().backward()
            exact += alone.weight.grad.double() / size
            alone.weight.grad = None
        with microbatch(context, is_last=number == len(inputs) - 1):
            model(batch[rank]).float().square().mean().backward()
    summed = model.parameter_groups[0].main_grad.redistribute([Replicate()]).get_local_tensor(0)
    return ((summed - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_fp32_sums_of_bf16_microbatches_are_not_rounded_before_they_are_reduced(strategy):
    assert max(run_ranks(2, _error_of_sums, strategy)) < 1e-6
