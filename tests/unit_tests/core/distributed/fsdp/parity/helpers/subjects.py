"""Small models of any shape, trained sharded and, on one rank, unsharded: losses, gradients and
weights are compared.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.fsdp import (
    DBuffer,
    FsdpContext,
    FsdpModule,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.lanes import delays
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.distributed.fsdp.parity.helpers.shardings import (
    SEED,
    assert_at_rest,
    assert_cut_as_placed,
    groups_of,
    mesh_and_placements,
    whole,
)

WIDTH = 6
NUM_ROWS = 3  # of a rank's batch


class Layer(nn.Module):
    """Rows of WIDTH numbers in and out; counts how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.linear(x).tanh()


def layers(number: int) -> list[Layer]:
    return [Layer() for _ in range(number)]


class Stack(nn.Module):
    """Layers, and a scale of its own that makes it worth a group."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) * self.scale

    def run(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = module(x)
        return x


def num_ranks_of(module: nn.Module) -> int:
    """How many ranks' batches a module sees in this process."""
    return 1 if isinstance(module, FsdpModule) else dist.get_world_size()


def square_mean(x: Tensor) -> Tensor:
    return x.square().mean()


@dataclass
class Subject:
    """A model to train.

    Attributes:
        units: the modules to shard, inner ones first.
        loss: of a batch.
        calls: how often layers run in forward and backward, all counted; None: as many as they are.
        options: of `fully_shard`.
        keeps_weights: whether forward leaves all full weights; None: it may leave some.
    """

    units: Sequence[nn.Module]
    loss: Callable[[Tensor], Tensor]
    calls: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    keeps_weights: bool | None = False

    def parameters(self) -> dict[str, nn.Parameter]:
        """By names that do not change when units are sharded, each once."""
        found = {}
        for number, unit in enumerate(self.units):
            for name, parameter in unit.named_parameters():
                if all(parameter is not other for other in found.values()):
                    found[f"{number}.{name}"] = parameter
        return found

    def layers(self) -> set[Layer]:
        return {
            module for unit in self.units for module in unit.modules() if isinstance(module, Layer)
        }

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters().values(), lr=0.1, momentum=0.9)


Build = Callable[[], Subject]


@dataclass(frozen=True)
class Setting:
    """On how many ranks a subject is trained, and how."""

    world_size: int
    shardings: Sequence[str]
    delay_seed: int | None = None


def built(build: Build) -> Subject:
    torch.manual_seed(SEED)
    return build()


def shard(subject: Subject, sharding: str) -> FsdpContext:
    mesh, placements = mesh_and_placements(sharding)
    with fully_shard_context("cpu") as context:
        for unit in subject.units:
            fully_shard(unit, mesh, placements, **subject.options)
    assert_cut_as_placed(subject.units)
    return context


def batches(step: int, number: int) -> Tensor:
    """The batches of all ranks."""
    generator = torch.Generator().manual_seed(10 * step + number)
    return torch.randn(dist.get_world_size(), NUM_ROWS, WIDTH, generator=generator)


def whole_gradients(subject: Subject) -> dict[str, Tensor | None]:
    """The reduced gradients of a sharded subject; None where a parameter shows none."""
    found = buffers_of(subject, lambda group: group.main_grad)
    return {
        name: None if parameter.grad is None else found[parameter]
        for name, parameter in subject.parameters().items()
    }


def whole_weights(subject: Subject) -> dict[str, Tensor]:
    found = buffers_of(subject, lambda group: group.main_weight)
    return {name: found[parameter] for name, parameter in subject.parameters().items()}


def buffers_of(
    subject: Subject, choose: Callable[[FsdpParameterGroup], DBuffer | None]
) -> dict[nn.Parameter, Tensor]:
    """The whole tensors that stand behind sharded parameters in one of the buffers."""
    found = {}
    for group in {id(group): group for group in groups_of(subject.units)}.values():
        buffer = choose(group)
        if buffer is not None:
            tensors = whole(buffer)
            for index, parameter in enumerate(group.fsdp_parameters):
                found[parameter.sharded] = tensors.get_local_tensor(index)
    return found


def trains_as_on_one_rank(function: Callable[..., Subject]) -> Callable[..., None]:
    """Makes a test of a function that builds a subject: in every setting, the subject trains as on
    one rank.
    """

    def test(setting: Setting, **arguments: Any) -> None:
        @functools.wraps(function)  # whose module is sent to the ranks
        def build() -> Subject:
            return function(**arguments)

        run_ranks(setting.world_size, _train_alike, setting, build)

    signature = inspect.signature(test)
    (setting, _), own = signature.parameters.values(), inspect.signature(function).parameters
    functools.update_wrapper(test, function)
    test.__signature__ = signature.replace(parameters=[setting, *own.values()])
    return test


def _train_alike(setting: Setting, build: Build) -> None:
    for sharding in setting.shardings:
        try:
            with (
                nullcontext()
                if setting.delay_seed is None
                else delays(setting.delay_seed + dist.get_rank())
            ):
                train_alike(build, sharding)
        except Exception as error:
            raise AssertionError(f"{sharding}: {error}") from error


def train_alike(build: Build, sharding: str) -> None:
    """A step of two microbatches, with and without gradients of inputs, then one that begins with
    gradients of zero.
    """
    alone, sharded = built(build), built(build)
    before = {name: parameter.detach().clone() for name, parameter in alone.parameters().items()}
    context = shard(sharded, sharding)
    optimizers = [subject.make_optimizer() for subject in (alone, sharded)]
    fully_shard_optimizer(optimizers[1])
    learners: set[str] = set()
    for step, num_microbatches in enumerate((2, 1)):
        for number in range(num_microbatches):
            x = batches(step, number).requires_grad_(step + number == 1)
            expected = run_alone(alone, x)
            with microbatch(context, is_last=number == num_microbatches - 1):
                run_sharded(sharded, x, expected)
        assert_same_tensors(
            whole_gradients(sharded),
            {name: parameter.grad for name, parameter in alone.parameters().items()},
        )
        learners |= {
            name for name, parameter in alone.parameters().items() if parameter.grad is not None
        }
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    after = {name: parameter.detach() for name, parameter in alone.parameters().items()}
    assert_same_tensors(whole_weights(sharded), after)
    for name, weight in whole_weights(sharded).items():
        assert torch.equal(weight, before[name]) != (name in learners), name
    assert learners


def run_alone(subject: Subject, x: Tensor) -> list[float]:
    """The losses of all ranks' batches; their mean's gradients are added."""
    losses = []
    for batch in x:
        loss = subject.loss(batch)
        (loss / len(x)).backward()
        losses.append(loss.item())
    return losses


def run_sharded(subject: Subject, x: Tensor, expected: Sequence[float]) -> None:
    """Forward and backward of this rank's batch."""
    calls_before = sum(layer.num_calls for layer in subject.layers())
    batch = x[dist.get_rank()].detach().requires_grad_(x.requires_grad)
    loss = subject.loss(batch)
    if subject.keeps_weights:
        assert all(group.is_unsharded for group in groups_of(subject.units))
    elif subject.keeps_weights is False:
        assert_at_rest(subject.units)
    loss.backward()
    assert_at_rest(subject.units)
    assert loss.item() == pytest.approx(expected[dist.get_rank()], rel=1e-6, abs=1e-7)
    if x.requires_grad:
        # Each rank's own: of its loss, not of the mean.
        torch.testing.assert_close(
            batch.grad / len(x), x.grad[dist.get_rank()], rtol=1e-5, atol=1e-6
        )
    calls = sum(layer.num_calls for layer in subject.layers()) - calls_before
    assert calls == (len(subject.layers()) if subject.calls is None else subject.calls)


def assert_same_tensors(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name] is None) == (tensor is None), name
        if tensor is not None:
            torch.testing.assert_close(
                actual[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
