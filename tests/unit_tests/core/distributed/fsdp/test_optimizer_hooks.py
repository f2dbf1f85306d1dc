"""The hooks that torch runs around every optimizer's step: one pair for all contexts."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from megatron.core.distributed.fsdp import FsdpContext, fully_shard, fully_shard_context
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from tests.ranks import run_ranks


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


def _one_pair() -> None:
    gc.collect()
    before, (pre, post) = num_hooks(), num_hooks()
    models = [shard() for _ in range(3)]
    assert num_hooks() == (pre + 1, post + 1)

    mark, marked = FsdpParameterGroup.mark_updated, []
    FsdpParameterGroup.mark_updated = lambda group: (marked.append(group), mark(group))[1]
    try:
        model = models[1][0]
        with torch.no_grad():
            whole = model(torch.ones(2, 4))
        step(model)
        assert marked == model.parameter_groups, "an optimizer's step is followed once"
        with torch.no_grad():
            assert not torch.equal(model(torch.ones(2, 4)), whole)
    finally:
        FsdpParameterGroup.mark_updated = mark

    del model, models[:2]
    marked.clear()
    gc.collect()
    assert num_hooks() == (pre + 1, post + 1), "one context lives"
    step(models[0][0])
    models.clear()
    gc.collect()
    assert num_hooks() == before

    models.append(shard())
    assert num_hooks() == (pre + 1, post + 1), "they come back with the next context"
    models.clear()
    gc.collect()
    assert num_hooks() == before


def test_contexts_share_one_pair_of_optimizer_hooks_and_dead_ones_leave_nothing_behind():
    run_ranks(2, _one_pair)
