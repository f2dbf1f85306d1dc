"""Whatever sharded modules take and return, a model trains as it does unsharded on one rank. In
fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit_tests.core.distributed.fsdp.parity.helpers.subjects import (
    NUM_ROWS,
    WIDTH,
    Layer,
    Subject,
    layers,
    square_mean,
    trains_as_on_one_rank,
)


@dataclass
class Named:
    """What a module may take and give, of a kind that torch does not look into."""

    x: Tensor
    note: str = ""


class Wrapped(Layer):
    """Takes and gives its rows inside of something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs["x"]
        return self.wrap(super().forward(self.unwrap(first)))

    def call(self, x: Tensor) -> Tensor:
        return self.unwrap(self(x=self.wrap(x)) if self.kind == "keyword" else self(self.wrap(x)))

    def wrap(self, x: Tensor) -> Any:
        kinds = {"tuple": (None, (x, 2)), "dict": {"a": [x], "b": "c"}, "dataclass": Named(x, "n")}
        return kinds.get(self.kind, x)

    def unwrap(self, x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x
        return {"tuple": lambda: x[1][0], "dict": lambda: x["a"][0], "dataclass": lambda: x.x}[
            self.kind
        ]()


@pytest.mark.parametrize("kind", ["keyword", "tuple", "dict", "dataclass"])
@trains_as_on_one_rank
def test_inputs_and_outputs_inside_of_something(kind) -> Subject:
    stem, *inner = Layer(), Wrapped(kind), Wrapped(kind)

    def loss(x: Tensor) -> Tensor:
        return square_mean(inner[1].call(inner[0].call(stem(x))))

    return Subject([stem, *inner], loss)


class Opaque:
    """Hides a tensor from everybody who does not know the class."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@trains_as_on_one_rank
def test_an_output_that_nobody_can_look_into() -> Subject:
    class Hiding(Layer):
        def forward(self, x: Tensor) -> Opaque:
            return Opaque(super().forward(x))

    first, hiding, last = Layer(), Hiding(), Layer()
    return Subject(
        [first, hiding, last],
        lambda x: square_mean(last(hiding(first(x)).x)),
        keeps_weights=None,
    )


@trains_as_on_one_rank
def test_a_skip_connection_whose_tensor_has_later_uses() -> Subject:
    first, second, third = layers(3)

    def loss(x: Tensor) -> Tensor:
        x = first(x)
        y = second(x) + x
        return square_mean(third(y) * x + y) + x.mean()

    return Subject([first, second, third], loss)


# Of three-dimensional inputs a linear layer's output is a view, whose history an in-place change
# rewrites.
two_and_three_dimensional = pytest.mark.parametrize(
    "shape", [(NUM_ROWS, WIDTH), (1, NUM_ROWS, WIDTH)], ids=["2d", "3d"]
)


@two_and_three_dimensional
@trains_as_on_one_rank
def test_an_in_place_relu_after_a_sharded_module(shape) -> Subject:
    linears = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = nn.Sequential(
        *(module for linear in linears for module in (linear, nn.ReLU(inplace=True)))
    )
    return Subject(linears, lambda x: square_mean(model(x.view(shape)) - 1))


@two_and_three_dimensional
@trains_as_on_one_rank
def test_an_in_place_relu_of_what_a_sharded_module_gets(shape) -> Subject:
    blocks = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
    return Subject([model[0], *blocks], lambda x: square_mean(model(x.view(shape)) - 1))


@trains_as_on_one_rank
def test_an_output_that_the_loss_does_not_use() -> Subject:
    first, second, unused = layers(3)

    def loss(x: Tensor) -> Tensor:
        x = second(first(x))
        unused(x)
        return square_mean(x)

    return Subject([first, second, unused], loss)


@trains_as_on_one_rank
def test_one_of_two_outputs_that_the_loss_does_not_use() -> Subject:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = layers(2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(x), self.unused(x)

    first, second = Two(), Two()
    return Subject([first, second], lambda x: square_mean(second(first(x)[0])[0]))


@trains_as_on_one_rank
def test_outputs_that_are_inputs_or_depend_on_parameters_alone() -> Subject:
    class Branching(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return super().forward(x), x, self.scale.square()

    first, second = Branching(), Branching()

    def loss(x: Tensor) -> Tensor:
        x, _, early = first(x)
        y, x, late = second(x)
        return square_mean(y * x * late) + square_mean(early)

    return Subject([first, second], loss)
