"""Errors of sharded modules and of optimizers over their parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from megatron.core.distributed.fsdp import (
    fully_shard_optimizer,
    microbatch,
)
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.distributed.fsdp.fully_shard.helpers.stacks import (
    DIM,
    Stack,
    compute_weights,
    linear,
    loss_of,
    own_batch,
    settle,
    shard,
)

# Optimizers


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (TypeError, r"Expected a torch\.optim\.Optimizer, got Stack\.", lambda model, _: model),
        (
            ValueError,
            "fully_shard replaced 6 of the optimizer's 6 parameters",
            lambda _, parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
        (
            ValueError,
            r"Expected an optimizer over sharded parameters, got none among its parameters\.",
            lambda *_: torch.optim.SGD(linear().parameters(), lr=0.1),
        ),
    ],
    ids=["a model", "from before", "of others"],
)
@on_ranks(2)
def test_fully_shard_optimizer_rejects_other_objects_and_parameters(
    error: type[Exception], message: str, make: Callable[..., Any]
) -> None:
    model = Stack(dtype=torch.bfloat16)
    before = list(model.parameters())
    shard(*model.layers, strategy="optim")
    with pytest.raises(error, match=message):
        fully_shard_optimizer(make(model, before))


@on_ranks(2)
def test_a_rejected_step_does_not_change_weights_and_gradients() -> None:
    model = Stack(dtype=torch.bfloat16)
    context = shard(*model.layers, strategy="optim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    weights = compute_weights(model)
    with microbatch(context, is_last=False):
        loss_of(model(own_batch(dtype=torch.bfloat16))).backward()
    assert all(parameter.grad.placements == (Partial("avg"),) for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="got partial sums"):
        optimizer.step()
    with pytest.raises(ArithmeticError, match="mine"), microbatch(context, is_last=False):
        raise ArithmeticError("mine")
    assert context.is_last_microbatch
    loss_of(model(own_batch(1, torch.bfloat16))).backward()
    for step in (optimizer.step, lambda closure: optimizer.step(closure=closure)):
        with pytest.raises(NotImplementedError, match=r"closure.* torch\.bfloat16 .*\.float32"):
            step(lambda: 0.0)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(
        torch.equal(old, new) for old, new in zip(weights, compute_weights(model), strict=True)
    )
    optimizer.step(None)
    assert not any(
        torch.equal(old, new) for old, new in zip(weights, compute_weights(model), strict=True)
    )


# In use


class Whatever(nn.Linear):
    """A linear layer with a replaceable forward."""

    act: Callable[[Whatever, torch.Tensor], Any] = nn.Linear.forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(x)


def _looks_up(module: Whatever, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(x.long().abs() % DIM, module.weight, sparse=True)


@on_ranks(2)
def test_casting_moving_and_copying_a_sharded_module_raises() -> None:
    model = Stack(1)
    shard(*model.layers)
    with pytest.raises(RuntimeError, match=r"from torch.float32 on cpu to torch.bfloat16 on cpu"):
        model.bfloat16()
    with pytest.raises(RuntimeError, match=r"from torch.float32 on cpu to torch.float32 on meta"):
        model.to("meta")
    for copied in (copy.deepcopy, AveragedModel):
        with pytest.raises(NotImplementedError, match="Copy it before fully_shard"):
            copied(model.layers[0])
    for strategy in ("no_shard", "optim_grads_params"):
        replica = Stack(1)
        shard(*replica.layers, strategy=strategy)
        with pytest.raises(RuntimeError, match="DistributedDataParallel cannot wrap"):
            DistributedDataParallel(replica.layers[0])
    assert model.to(torch.float32) is model


@pytest.mark.parametrize(
    ("error", "message", "act"),
    [
        (RuntimeError, "got one of its weights or a view", lambda own, _: own.weight),
        (RuntimeError, "got one of its weights or a view", lambda own, _: [own.weight[1:]]),
        (RuntimeError, "cannot run inside itself", Whatever.__call__),
        (NotImplementedError, "for weight, got torch.sparse_coo", _looks_up),
    ],
    ids=["returns a weight", "returns a view of one", "calls itself", "sparse gradient"],
)
@on_ranks(2)
def test_unsupported_forwards_raise(
    error: type[Exception], message: str, act: Callable[..., Any]
) -> None:
    module = Whatever(DIM, DIM)
    context = shard(module)
    module.act = partial(act, module)
    with pytest.raises(error, match=message):
        loss_of(module(own_batch())).backward()
    settle(context)


def _swap_bias(module: nn.Linear) -> None:
    other = linear()
    shard(other)
    torch.utils.swap_tensors(module.bias, other.bias)


def _replace_weight(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.zeros(DIM, DIM))


@pytest.mark.parametrize(
    ("message", "change"), [("Expected bias", _swap_bias), ("Expected weight", _replace_weight)]
)
@on_ranks(2)
def test_a_forward_raises_if_a_parameter_was_replaced_after_sharding(
    message: str, change: Callable[[nn.Linear], None]
) -> None:
    module = linear()
    shard(module)
    change(module)
    with pytest.raises(RuntimeError, match=f"{message} to be the view of its buffer"):
        module(own_batch())
