"""Losses outside of a model that use its weights, as trainers with chunked losses and penalties do:
their gradients are the mean over the ranks, or an error says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.functional import linear

from megatron.core.distributed.fsdp import Placements, fully_shard
from tests.helpers.ranks import on_ranks

Gradients = list[torch.Tensor | None]
Kept = {"reshard_after_forward": False}
Default = {"reshard_after_forward": None}  # of FSDP2: as Kept for the outermost module
Freed = {"reshard_after_forward": True}


class Net(nn.Module):
    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 12, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.norm(x)


def sharded(fully: Callable[..., Any], is_tied: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net(is_tied)
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for module in (*model.layers, model):
        fully(module, **options)
    # As an optimizer has them.
    model.own = list(model.parameters())
    return model


def tokens(rank: int, number: int = 0) -> torch.Tensor:
    return torch.randint(12, (2, 4), generator=torch.Generator().manual_seed(10 * number + rank))


def head(model: Any) -> torch.Tensor:
    return model.head.weight


def inner(model: Any) -> torch.Tensor:
    return model.layers[1].weight


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def own(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


# What programs do with a weight in a loss. On a plain model all of them mean the same as here.


def plain(model: Any, of: Any, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model(tokens)
    return linear(hidden, of(model)).logsumexp(-1).mean()


def gathered(model: Any, of: Any, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model(tokens)
    return linear(hidden, whole(of(model))).logsumexp(-1).mean()


def gathered_before(model: Any, of: Any, tokens: torch.Tensor) -> torch.Tensor:
    penalty = whole(of(model)).square().sum()
    return model(tokens).logsumexp(-1).mean() + 0.1 * penalty


def gathered_penalty(model: Any, of: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).logsumexp(-1).mean() + 0.1 * whole(of(model)).square().sum()


def local_before(model: Any, of: Any, tokens: torch.Tensor) -> torch.Tensor:
    penalty = own(of(model)).square().sum()
    return model(tokens).logsumexp(-1).mean() + 0.1 * penalty


def local_penalty(model: Any, of: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).logsumexp(-1).mean() + 0.1 * own(of(model)).square().sum()


def norm_penalty(model: Any, of: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).logsumexp(-1).mean() + 0.1 * whole(of(model).norm())


def without_the_model(model: Any, of: Any, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model(tokens).detach()
    return linear(hidden, whole(of(model))).logsumexp(-1).mean()


USES = (
    gathered,
    gathered_before,
    gathered_penalty,
    local_before,
    local_penalty,
    norm_penalty,
    without_the_model,
)


def microbatches(model: Any, use: Any, of: Any, rank: int, count: int) -> None:
    for number in range(count):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(number == count - 1)
        use(model, of, tokens(rank, number)).backward()


def two_forwards(model: Any, of: Any, rank: int) -> None:
    """As preference losses compute them: both graphs are there before the first backward."""
    losses = [gathered(model, of, tokens(rank, number)) for number in range(2)]
    for loss in losses:
        loss.backward()


def mean_gradients(run: Callable[[Any, int], None], is_tied: bool = False) -> Gradients:
    """The mean over the gradients that plain models have of each rank's data."""
    means: Gradients = []
    for rank in range(dist.get_world_size()):
        torch.manual_seed(0)
        model = Net(is_tied)
        run(model, rank)
        found = [
            p.grad / dist.get_world_size() if p.grad is not None else None
            for p in model.parameters()
        ]
        means = [
            one if mean is None else mean if one is None else mean + one
            for mean, one in zip(means or [None] * len(found), found, strict=True)
        ]
    return means


def assert_gradients(model: Any, expected: Gradients, case: Any) -> None:
    for parameter, gradient in zip(model.own, expected, strict=True):
        found = parameter.grad
        assert (found is None) == (gradient is None), case
        if found is not None:
            torch.testing.assert_close(found.full_tensor(), gradient, msg=lambda m: f"{case}: {m}")


@on_ranks(2)
def test_a_weight_in_a_loss_has_the_mean_of_all_ranks_gradients() -> None:
    for use in USES:
        for of, is_tied in ((head, False), (head, True), (inner, False)):
            expected = mean_gradients(
                lambda model, rank: use(model, of, tokens(rank)).backward(),  # noqa: B023
                is_tied,
            )
            for options in (Default, Freed, Kept):
                model = sharded(fully_shard, is_tied, **options)
                use(model, of, tokens(dist.get_rank())).backward()
                assert_gradients(model, expected, (use, of, is_tied, options))


@on_ranks(2)
def test_a_kept_weight_is_plain_between_forward_and_backward_as_in_fsdp2() -> None:
    for of, options in ((head, Default), (head, Kept), (inner, Kept)):
        expected = mean_gradients(lambda model, rank: plain(model, of, tokens(rank)).backward())  # noqa: B023
        for fully in (fsdp2.fully_shard, fully_shard):
            model = sharded(fully, **options)
            loss = plain(model, of, tokens(dist.get_rank()))
            assert type(of(model)) is nn.Parameter
            loss.backward()
            assert isinstance(of(model), DTensor)
            assert_gradients(model, expected, (of, options, fully))


@on_ranks(2)
def test_a_plain_tensor_and_a_sharded_weight_are_an_error_with_two_ways_out() -> None:
    model = sharded(fully_shard, **Freed)
    hidden = model(tokens(0))
    for use in (lambda: linear(hidden, head(model)), lambda: head(model) * torch.ones(12, 6)):
        with pytest.raises(RuntimeError, match=r"full_tensor\(\).*reshard_after_forward=False"):
            use()


@on_ranks(2)
def test_graphs_of_two_forwards_use_the_same_kept_weights() -> None:
    for of in (head, inner):
        expected = mean_gradients(lambda model, rank: two_forwards(model, of, rank))  # noqa: B023
        for options in (Default, Freed, Kept):
            model = sharded(fully_shard, **options)
            abandoned = model(tokens(0))  # a graph that lives on
            two_forwards(model, of, dist.get_rank())
            assert isinstance(of(model), DTensor)
            assert_gradients(model, expected, (of, options))
            assert abandoned.requires_grad


@on_ranks(4)
def test_penalties_join_sums_that_are_reduced_later() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for use in (gathered, gathered_before, local_penalty):
        expected = mean_gradients(lambda model, rank: microbatches(model, use, inner, rank, 3))  # noqa: B023
        model = sharded(fully_shard, mesh=mesh)
        microbatches(model, use, inner, dist.get_rank(), 3)
        assert_gradients(model, expected, use)

    model = sharded(fully_shard, placements=Placements.for_strategy("optim"))
    with pytest.raises(NotImplementedError, match=r"sharded layers\.1\.weight between micro"):
        microbatches(model, gathered, inner, dist.get_rank(), 2)


@on_ranks(2)
def test_sums_in_place_of_means_ask_what_a_gathered_weight_is_to_have() -> None:
    def run(model: Any, placement: Any, factor: float) -> DTensor:
        model.layers[1].set_gradient_divide_factor(factor)
        how = {"grad_placements": [placement]} if placement else {}
        (inner(model).full_tensor(**how) * (1 + dist.get_rank())).sum().backward()
        return inner(model).grad.full_tensor()

    model = sharded(fully_shard, **Freed)
    with pytest.raises(NotImplementedError, match=r"grad_placements=\[Partial\(\)\]"):
        run(model, None, 1.0)
    torch.testing.assert_close(run(model, Partial(), 1.0), torch.full((6, 6), 3.0))
    for placement in (None, Replicate()):
        model = sharded(fully_shard, **Freed)
        gradient = run(model, placement, 2.0 if placement is None else 1.0)
        torch.testing.assert_close(gradient[0], torch.full((6,), 1.0 if placement else 1.5))


@on_ranks(2)
def test_clearing_gradients_after_a_forward_clears_those_of_sharded_parameters() -> None:
    found = []
    for clears in (False, True):
        model = sharded(fully_shard, **Kept)
        if clears:
            plain(model, head, tokens(dist.get_rank(), 1)).backward()
        loss = plain(model, head, tokens(dist.get_rank()))
        if clears:
            model.zero_grad()
        assert type(head(model)) is nn.Parameter
        loss.backward()
        found.append([parameter.grad.full_tensor() for parameter in model.own])
    assert all(map(torch.equal, *found))


@on_ranks(2)
def test_an_optimizer_over_whole_weights_is_an_error() -> None:
    model = sharded(fully_shard, **Default)
    with torch.no_grad():
        model(tokens(0))
    assert type(head(model)) is nn.Parameter
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"4 whole weights.*before the first forward"):
        optimizer.step()
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
