"""Sharded models inside of common wrappers: weight averages and adapters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron.core.distributed.fsdp import Placements, fully_shard
from megatron.core.mesh import build_mesh
from tests.helpers.ranks import on_ranks

STRATEGIES = ["no_shard", "optim_grads_params"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def shard(model: nn.Sequential, strategy: str) -> None:
    mesh, placements = build_mesh("cpu", 2), Placements.for_strategy(strategy)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh, placements)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def average(model: nn.Module, averaged: AveragedModel, strategy: str | None) -> list[torch.Tensor]:
    """Trains three steps and updates the average after each. Returns the average's outputs."""
    if strategy is not None:
        shard(model, strategy)
        shard(averaged.module, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(3):
        model(torch.ones(2, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        outputs.append(averaged(torch.ones(2, 6)).detach())
    return outputs


@pytest.mark.parametrize("is_exponential", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_an_averaged_model_sharded_like_the_model_matches_unsharded_averaging(
    strategy: str, is_exponential: bool
) -> None:
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if is_exponential else {}
    results = []
    for own in (None, strategy):
        model = net()
        results.append(average(model, AveragedModel(model, **options), own))
    for own, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(own, expected)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter. Only the adapter is trained and saved."""

    def __init__(self, layer: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(seed: int) -> nn.Sequential:
    model = net()
    torch.manual_seed(seed)
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])
    return model


def adapters(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state_dict.items() if ".base." not in name}


@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_unsharded_adapters_load_into_a_sharded_model_and_are_returned_unchanged(
    strategy: str, is_replicated: bool
) -> None:
    """Loads plain tensors, and replicated DTensors."""
    source = adapted(seed=1)
    saved: dict[str, Any] = copy.deepcopy(adapters(source.state_dict()))
    if is_replicated:
        mesh = build_mesh("cpu", 2)
        saved = {
            name: DTensor.from_local(value, mesh, [Replicate()]) for name, value in saved.items()
        }
    model: Any = adapted(seed=2)
    shard(model, strategy)

    batch = torch.ones(2, 6)
    model(batch)
    result = model.load_state_dict(saved, strict=False)
    assert not result.unexpected_keys
    assert all(".base." in name for name in result.missing_keys)
    torch.testing.assert_close(model(batch), source(batch))
    found = adapters(model.state_dict())
    assert found.keys() == saved.keys()
    assert all(torch.equal(whole(value), whole(saved[name])) for name, value in found.items())

    for each in (model, source):
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.1)
        each(batch).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(model(batch), source(batch))
    # Loads all weights, including the frozen ones.
    model.load_state_dict(copy.deepcopy(adapted(seed=3).state_dict()))
    torch.testing.assert_close(model(batch), adapted(seed=3)(batch))
