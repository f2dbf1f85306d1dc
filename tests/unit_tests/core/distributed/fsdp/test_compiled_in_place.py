"""Sharded modules that a program compiles itself, as it would with FSDP2."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from megatron.core.distributed.fsdp import fully_shard
from tests.helpers.ranks import on_ranks

NUM_LAYERS = 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


# torch.compile inlines the forwards of torch's own classes, with the hooks around them.
class Model(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


class Encoder(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer.encode(x)
        return x


class Graphs:
    """A backend that counts the graphs that it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.number += 1
        return graph.forward


Shard = Callable[..., Any]  # `fully_shard`, ours or FSDP2's
Backend = Graphs | str
Habit = Callable[[nn.Sequential, Shard, Backend], nn.Module]


def shard(model: nn.Sequential, fully_shard: Shard, **options: Any) -> nn.Sequential:
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def compile_after(model: nn.Sequential, fully_shard: Shard, backend: Backend) -> nn.Module:
    shard(model, fully_shard)
    for layer in model:
        layer.compile(backend=backend)
    return model


def compile_before(model: nn.Sequential, fully_shard: Shard, backend: Backend) -> nn.Module:
    for layer in model:
        layer.compile(backend=backend, fullgraph=True)
    return shard(model, fully_shard)


def compile_in_bf16(model: nn.Sequential, fully_shard: Shard, backend: Backend) -> nn.Module:
    for layer in model:
        layer.compile(backend=backend, fullgraph=True)
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    return shard(model, fully_shard, mp_policy=policy)


def compile_checkpointed(model: nn.Sequential, fully_shard: Shard, backend: Backend) -> nn.Module:
    for index, layer in enumerate(model):
        model[index] = checkpoint_wrapper(layer, preserve_rng_state=False)
        model[index].compile(backend=backend, fullgraph=True)
    return shard(model, fully_shard, reshard_after_forward=False)


def compile_all(model: nn.Sequential, fully_shard: Shard, backend: Backend) -> nn.Module:
    return torch.compile(shard(model, fully_shard), backend=backend)  # type: ignore[return-value]


def compile_methods(model: nn.Sequential, fully_shard: Shard, backend: Backend) -> nn.Module:
    encoder = shard(Encoder(*model), fully_shard)
    for layer in encoder:
        fsdp2.register_fsdp_forward_method(layer, "encode")
    return torch.compile(encoder, backend=backend)  # type: ignore[return-value]


def losses_of(
    habit: Habit, fully_shard: Shard, backend: Backend, *, in_step: bool = False
) -> tuple[list[float], list[int]]:
    """The losses of three steps of two microbatches, and the graphs that there were after each.

    Args:
        in_step: compile the whole step with its backward and optimizer.
    """
    torch._dynamo.reset()
    # Dynamo iterates over FSDP2's weak dictionary of modules: a collection meanwhile, of a module
    # of an earlier call, would change its size and fail the trace.
    gc.collect()
    torch.manual_seed(0)
    model = Model(*(Layer() for _ in range(NUM_LAYERS)))
    called = habit(model, fully_shard, backend)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for batch in (x, y):
            loss = called(batch).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = torch.compile(step, backend=backend) if in_step else step
    losses, counts = [], []
    for _ in range(3):
        x, y = torch.randn(2, 4, 8, generator=generator)
        losses.append(run(x, y).item())
        counts.append(backend.number if isinstance(backend, Graphs) else 0)
    return losses, counts


def uncompiled_losses(habit: Habit) -> list[float]:
    with torch.compiler.set_stance("force_eager"):
        return losses_of(habit, fully_shard, Graphs())[0]


@pytest.mark.parametrize(
    "habit",
    [compile_after, compile_in_bf16, compile_checkpointed, compile_all, compile_methods],
)
@on_ranks(2)
def test_compiled_modules_train_as_others_and_are_compiled_once(habit: Habit) -> None:
    losses, counts = losses_of(habit, fully_shard, Graphs())
    torch.testing.assert_close(losses, uncompiled_losses(habit), rtol=1e-5, atol=0)
    assert counts[0] > 0
    assert counts[1:] == counts[:-1], counts

    theirs, their_counts = losses_of(habit, fsdp2.fully_shard, Graphs())
    torch.testing.assert_close(losses, theirs, rtol=1e-5, atol=0)
    assert counts == their_counts


@on_ranks(2)
def test_a_compiled_training_step_trains_as_others() -> None:
    losses, counts = losses_of(compile_after, fully_shard, Graphs(), in_step=True)
    torch.testing.assert_close(losses, uncompiled_losses(compile_after), rtol=1e-5, atol=0)
    assert counts[1:] == counts[:-1], counts


@on_ranks(2)
def test_a_compiled_function_of_sharded_parameters_sees_their_rows() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    fully_shard(model)
    gathered = torch.compile(lambda parameter: parameter.full_tensor() * 2, backend="aot_eager")
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(gathered(parameter), expected * 2)


@on_ranks(2)
def test_a_backward_under_compiled_autograd_raises() -> None:
    # Imported here: the rank cannot be sent a module of settings.
    from torch._dynamo import config

    compiled = config.patch(compiled_autograd=True)
    with compiled, pytest.raises(RuntimeError, match="compiled_autograd"):
        losses_of(compile_after, fully_shard, Graphs(), in_step=True)


@pytest.mark.wide
@pytest.mark.parametrize("habit", [compile_before, compile_after])
@on_ranks(2, timeout=600)
def test_layers_compiled_by_inductor_train_as_others(habit: Habit) -> None:
    losses, _ = losses_of(habit, fully_shard, "inductor")
    torch.testing.assert_close(losses, uncompiled_losses(habit), rtol=1e-5, atol=0)
