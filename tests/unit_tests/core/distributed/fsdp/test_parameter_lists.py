"""PyTorch's helpers and optimizers on lists of sharded and replicated parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import megatron.core.distributed.fsdp.collectives as collectives
from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
)
from tests.helpers.ranks import on_ranks

NUM_LAYERS = 8
STRATEGIES = ["optim_grads_params", "no_shard", "mixed"]


class Layers(nn.Module):
    """Many small parameters, whose rows two ranks cannot share evenly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(NUM_LAYERS))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def with_gradients(strategy: str | None, dtype: torch.dtype) -> Layers:
    """A model after a backward on the same batch on every rank, sharded unless it is for None."""
    model = Layers(dtype)
    if strategy is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(main_params_dtype=dtype, main_grads_dtype=dtype)
        with fully_shard_context("cpu"):
            for number, layer in enumerate(model.layers):
                own = ["no_shard", "optim_grads_params"][number % 2]
                placements = Placements.for_strategy(own if strategy == "mixed" else strategy)
                fully_shard(layer, mesh, placements, policy)
    batch = torch.ones(2, 5, dtype=dtype)
    model(batch).float().square().mean().backward()
    return model


@contextmanager
def messages() -> Iterator[Callable[[], int]]:
    """Counts the collectives that are issued while it is open, by us or by DTensor."""
    issued = [0]

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            issued[0] += 1
            return original(*args, **kwargs)

        return count

    originals = dist.all_reduce, collectives.all_gather
    dist.all_reduce, collectives.all_gather = map(counted, originals)
    try:
        with CommDebugMode() as functional:
            yield lambda: issued[0] + functional.get_total_counts()
    finally:
        dist.all_reduce, collectives.all_gather = originals


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def clip(model: nn.Module, norm_type: float) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)


def clip_in_two_calls(model: nn.Module, norm_type: float) -> torch.Tensor:
    norm = nn.utils.get_total_norm(gradients(model), norm_type)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_clipping_sends_few_messages_and_agrees_with_one_process(
    strategy: str, dtype: torch.dtype
) -> None:
    ways: list[Callable[..., torch.Tensor]] = [clip, clip_in_two_calls]
    for norm_type in (2.0, float("inf")):
        for way in ways:
            plain, model = with_gradients(None, dtype), with_gradients(strategy, dtype)
            exact = torch.cat([grad.double().flatten() for grad in gradients(plain)])
            with messages() as sent:
                norm = way(model, norm_type)
            assert sent() <= 4
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(
                whole(norm).double(), exact.norm(norm_type), rtol=tolerance, atol=0
            )
            way(plain, norm_type)
            for own, other in zip(gradients(model), gradients(plain), strict=True):
                torch.testing.assert_close(whole(own), other, rtol=2 * tolerance, atol=1e-6)


@on_ranks(2)
def test_clipping_by_value_does_not_communicate() -> None:
    plain, model = with_gradients(None, torch.float32), with_gradients("mixed", torch.float32)
    with messages() as sent:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert sent() == 0
    nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    for own, other in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(whole(own), other)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@on_ranks(2)
def test_optimizers_step_lists_of_sharded_and_replicated_parameters_on_local_rows(
    options: dict[str, Any],
) -> None:
    plain, model = with_gradients(None, torch.float32), with_gradients("mixed", torch.float32)
    for own in (plain, model):
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.1, **options)
        with messages() as sent:
            for _ in range(3):
                optimizer.step()
        # A comparison before each step, which both ways of counting see.
        assert sent() == (2 * 3 if own is model else 0)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.detach()), other.detach())


@on_ranks(2)
def test_ranks_agree_on_infinite_gradients_also_where_the_first_one_is_replicated() -> None:
    model = with_gradients("mixed", torch.float32)
    if dist.get_rank() == 1:
        model.layers[1].weight.grad.to_local().fill_(float("inf"))
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients(model), found, torch.ones(1))
    assert found.item() == 1.0
