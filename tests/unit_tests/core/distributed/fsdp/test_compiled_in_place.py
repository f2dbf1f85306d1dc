"""Sharded modules that a program compiles itself, as it would with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import fully_shard
from tests.helpers.ranks import on_ranks

NUM_LAYERS = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Graphs:
    """A backend that counts the graphs that it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.number += 1
        return graph.forward


def compile_after(model: nn.Sequential, backend: Graphs) -> nn.Module:
    shard(model)
    for layer in model:
        layer.compile(backend=backend)
    return model


def compile_before(model: nn.Sequential, backend: Graphs) -> nn.Module:
    for layer in model:
        layer.compile(backend=backend)
    shard(model)
    return model


def compile_before_in_full(model: nn.Sequential, backend: Graphs) -> nn.Module:
    for layer in model:
        layer.compile(backend=backend, fullgraph=True)
    shard(model)
    return model


def compile_all(model: nn.Sequential, backend: Graphs) -> nn.Module:
    shard(model)
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def shard(model: nn.Sequential) -> None:
    for layer in model:
        fully_shard(layer)
    fully_shard(model)


def losses_of(
    prepare: Callable[[nn.Sequential], nn.Module], count: Callable[[], int]
) -> tuple[list[float], list[int]]:
    """The losses of four steps, and the graphs that there were after each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
    called = prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, counts = [], []
    for _ in range(4):
        loss = called(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        counts.append(count())
    return losses, counts


def _just_shard(model: nn.Sequential) -> nn.Module:
    shard(model)
    return model


@pytest.mark.parametrize(
    "habit", [compile_after, compile_before, compile_before_in_full, compile_all]
)
@on_ranks(2)
def test_compiled_modules_train_as_others_and_are_compiled_once(
    habit: Callable[[nn.Sequential, Graphs], nn.Module],
) -> None:
    torch._dynamo.reset()
    expected, _ = losses_of(_just_shard, lambda: 0)
    backend = Graphs()
    losses, counts = losses_of(lambda model: habit(model, backend), lambda: backend.number)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert counts[0] > 0
    assert counts[1:] == counts[:-1], counts
