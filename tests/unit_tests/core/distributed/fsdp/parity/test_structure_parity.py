"""Nested, tied, frozen, without a common root: however sharded modules and parameters lie in a
model, it trains as it does unsharded on one rank. In fp32.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_context,
)
from megatron.core.materialize import materialize, seeded_reset
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.distributed.fsdp.parity.helpers.shardings import (
    SEED,
    mesh_and_placements,
)
from tests.unit_tests.core.distributed.fsdp.parity.helpers.subjects import (
    WIDTH,
    Layer,
    Stack,
    Subject,
    layers,
    num_ranks_of,
    square_mean,
    trains_as_on_one_rank,
    whole_weights,
)


@trains_as_on_one_rank
def test_layers_in_a_stack_with_a_parameter_of_its_own() -> Subject:
    stack = Stack(*layers(3))
    return Subject([*stack.inner, stack], lambda x: square_mean(stack(x)))


@trains_as_on_one_rank
def test_one_parameter_under_two_names_gets_the_gradients_of_both_uses() -> Subject:
    first, second, third = layers(3)
    third.linear.weight = first.linear.weight
    model = nn.Sequential(first, second, third)
    assert len(list(model.parameters())) == 5
    return Subject([second, model], lambda x: square_mean(model(x)))


@trains_as_on_one_rank
def test_frozen_parameters_beside_others_stay_as_they_are() -> Subject:
    stack = Stack(*layers(3))
    stack.inner[0].linear.weight.requires_grad_(False)
    stack.inner[2].linear.bias.requires_grad_(False)
    return Subject([*stack.inner, stack], lambda x: square_mean(stack(x)))


@pytest.mark.parametrize("number", [0, 1, 2])
@trains_as_on_one_rank
def test_a_module_that_is_frozen_whole_stays_as_it_is(number) -> Subject:
    stack = Stack(*layers(3))
    stack.inner[number].requires_grad_(False)
    return Subject([*stack.inner, stack], lambda x: square_mean(stack(x)))


@trains_as_on_one_rank
def test_a_parameter_that_is_frozen_for_some_calls_gets_no_gradient_in_them() -> Subject:
    stack = Stack(*layers(2))
    num_calls = itertools.count()

    def loss(x: Tensor) -> Tensor:
        is_second = next(num_calls) // num_ranks_of(stack) == 1
        stack.inner[0].linear.weight.requires_grad_(not is_second)
        return square_mean(stack(x))

    return Subject([*stack.inner, stack], loss)


@trains_as_on_one_rank
def test_sharded_modules_three_levels_deep() -> Subject:
    inner, middle = [Stack(*layers(2)) for _ in range(2)], []
    middle = [Stack(stack, Layer()) for stack in inner]
    outer = Stack(*middle)
    leaves = [layer for stack in inner for layer in stack.inner]
    return Subject([*leaves, *inner, *middle, outer], lambda x: square_mean(outer(x)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@trains_as_on_one_rank
def test_roots_without_a_common_parent_in_whichever_order_they_are_sharded(order) -> Subject:
    roots = [nn.Sequential(layer) for layer in layers(3)]
    units = [unit for number in order for unit in (roots[number][0], roots[number])]

    def loss(x: Tensor) -> Tensor:
        return square_mean(roots[2](roots[1](roots[0](x)) + x))

    return Subject(units[::2], loss, keeps_weights=False if order == (0, 1, 2) else None)


@trains_as_on_one_rank
def test_weights_that_are_kept_between_forward_and_backward() -> Subject:
    stack = Stack(*layers(3))
    return Subject(
        [*stack.inner, stack],
        lambda x: square_mean(stack(x)),
        options={"reshard_after_forward": False},
        keeps_weights=True,
    )


@trains_as_on_one_rank
def test_parameters_of_two_dtypes_in_one_module() -> Subject:
    class Mixed(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * self.scale).float()

    stack = Stack(Mixed(), Mixed())
    options = {"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None)}
    return Subject([*stack.inner, stack], lambda x: square_mean(stack(x)), options=options)


@on_ranks(2)
def test_a_tied_weight_drawn_from_meta_is_that_of_the_first_module_that_has_it() -> None:
    def build() -> nn.Sequential:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        model[2].weight = model[0].weight
        return model

    alone, sharded = build(), build()
    materialize(alone, "cpu", SEED)
    mesh, placements = mesh_and_placements("optim_grads_params")
    with fully_shard_context("cpu", reset_parameters=seeded_reset(sharded, "cpu", SEED)):
        fully_shard(sharded[1], mesh, placements)
        fully_shard(sharded, mesh, placements)
    assert sharded[2].weight is sharded[0].weight
    weights = whole_weights(Subject([sharded], square_mean))
    for name, parameter in alone.named_parameters():
        assert torch.equal(weights[f"0.{name}"], parameter), name
