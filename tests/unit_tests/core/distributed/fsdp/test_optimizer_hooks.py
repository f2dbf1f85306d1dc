"""The hooks that torch runs around every optimizer's step: one pair for all contexts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import megatron.core.distributed.fsdp.optimizer_hooks as optimizer_hooks
from megatron.core.distributed.fsdp import FsdpContext, fully_shard, fully_shard_context
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from tests.helpers.ranks import on_ranks


def shard() -> tuple[nn.Linear, FsdpContext]:
    with fully_shard_context("cpu") as context:
        model = fully_shard(nn.Linear(4, 4))
    return model, context


def num_hooks() -> tuple[int, int]:
    return (
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
    )


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


@contextmanager
def no_other_contexts() -> Iterator[None]:
    """As in a process whose earlier tests have left no context behind."""
    tables = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    own, found = optimizer_hooks._hooks, [dict(table) for table in tables]
    optimizer_hooks._hooks = optimizer_hooks._OptimizerHooks()
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        optimizer_hooks._hooks = own
        for table, before in zip(tables, found, strict=True):
            table.update(before)


@on_ranks(2)
def test_contexts_share_one_pair_of_optimizer_hooks_and_dead_ones_leave_nothing_behind() -> None:
    with no_other_contexts():
        models = [shard() for _ in range(3)]
        assert num_hooks() == (1, 1)

        marked: list[FsdpParameterGroup] = []
        mark = FsdpParameterGroup.mark_updated
        FsdpParameterGroup.mark_updated = lambda group: (marked.append(group), mark(group))[1]
        try:
            model = models[1][0]
            with torch.no_grad():
                before = model(torch.ones(2, 4))
            step(model)
            assert tuple(marked) == model.parameter_groups, "an optimizer's step is followed once"
            with torch.no_grad():
                assert not torch.equal(model(torch.ones(2, 4)), before)
        finally:
            FsdpParameterGroup.mark_updated = mark

        del model, models[:2]
        marked.clear()
        gc.collect()
        assert num_hooks() == (1, 1), "one context lives"
        step(models[0][0])
        models.clear()
        gc.collect()
        assert num_hooks() == (0, 0)

        models.append(shard())
        assert num_hooks() == (1, 1), "they come back with the next context"
        models.clear()
        gc.collect()
        assert num_hooks() == (0, 0)


@pytest.mark.parametrize("kept", ["all", "one"])
@on_ranks(2)
def test_an_optimizer_from_before_sharding_is_rejected_at_its_first_step(kept: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    before = list(model.parameters())
    optimizer = torch.optim.AdamW(before, lr=0.5)
    fully_shard(model)
    if kept == "one":
        optimizer.param_groups[0]["params"] = [before[0], *list(model.parameters())[1:]]
    model(torch.ones(2, 4)).sum().backward()
    number = 4 if kept == "all" else 1
    with pytest.raises(RuntimeError, match=rf"(?s)replaced {number} .* after\s+sharding"):
        optimizer.step()


@on_ranks(2)
def test_an_optimizer_that_was_given_the_sharded_parameters_steps() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fully_shard(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    before = model.weight.full_tensor()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight.full_tensor())
