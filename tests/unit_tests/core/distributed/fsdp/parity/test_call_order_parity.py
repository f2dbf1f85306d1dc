"""However often and in whichever order sharded modules are called, a model trains as it does
unsharded on one rank. In fp32.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.unit_tests.core.distributed.fsdp.parity.helpers.subjects import (
    Stack,
    Subject,
    layers,
    num_ranks_of,
    square_mean,
    trains_as_on_one_rank,
)


@trains_as_on_one_rank
def test_a_sharded_module_that_is_called_twice_one_after_the_other() -> Subject:
    first, twice, last = layers(3)
    model = Stack(first, twice, twice, last, twice)
    return Subject(
        [first, twice, last, model],
        lambda x: square_mean(model(x)),
        calls=5,
        keeps_weights=None,
    )


@trains_as_on_one_rank
def test_a_sharded_module_that_is_called_twice_on_branches() -> Subject:
    stem, twice, other = layers(3)

    def loss(x: Tensor) -> Tensor:
        x = stem(x)
        return square_mean(twice(x) + other(x)) + twice(x.sin()).mean()

    return Subject([stem, twice, other], loss, calls=4, keeps_weights=None)


@trains_as_on_one_rank
def test_a_call_without_a_backward_beside_one_that_has_one() -> Subject:
    first, second = layers(2)

    def loss(x: Tensor) -> Tensor:
        target = second(first(x.detach() + 1)).detach()
        return square_mean(second(first(x)) - target)

    return Subject([first, second], loss, calls=4)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@trains_as_on_one_rank
def test_a_forward_without_gradients_between_forward_and_backward(
    guard, reshard_after_forward
) -> Subject:
    stack = Stack(*layers(3))

    def loss(x: Tensor) -> Tensor:
        with guard():
            stack(x - 1)
        result = square_mean(stack(x))
        with guard():
            stack(x + 1)
        return result

    options = {"reshard_after_forward": reshard_after_forward}
    kept = not reshard_after_forward
    return Subject([*stack.inner, stack], loss, calls=9, options=options, keeps_weights=kept)


@trains_as_on_one_rank
def test_a_layer_that_only_some_microbatches_use() -> Subject:
    first, sometimes, last = layers(3)
    num_calls = itertools.count()

    def loss(x: Tensor) -> Tensor:
        x = first(x)
        if next(num_calls) // num_ranks_of(first) in (0, 2):
            x = sometimes(x)
        else:
            sometimes(x)
        return square_mean(last(x))

    return Subject([first, sometimes, last], loss)


@trains_as_on_one_rank
def test_modules_that_run_in_another_order_than_they_are_registered() -> Subject:
    model = Stack(*layers(4))

    class Reordered(Stack):
        def run(self, x: Tensor) -> Tensor:
            # Not as a closure: fully_shard keeps the class, which would keep the layers.
            first, second, third, fourth = self.inner
            return second(first(third(fourth(x))))

    model.__class__ = Reordered
    return Subject([*model.inner, model], lambda x: square_mean(model(x)), keeps_weights=None)


@trains_as_on_one_rank
def test_two_forwards_before_their_backwards() -> Subject:
    stack = Stack(*layers(3))

    def loss(x: Tensor) -> Tensor:
        first, second = square_mean(stack(x)), square_mean(stack(x + 1))
        (first / num_ranks_of(stack)).backward()
        return second

    return Subject([*stack.inner, stack], loss, calls=6)


@trains_as_on_one_rank
def test_two_backwards_through_one_forward() -> Subject:
    stack = Stack(*layers(3))

    def loss(x: Tensor) -> Tensor:
        y = stack(x)
        (y.mean() / num_ranks_of(stack)).backward(retain_graph=True)
        return square_mean(y)

    return Subject([*stack.inner, stack], loss)
