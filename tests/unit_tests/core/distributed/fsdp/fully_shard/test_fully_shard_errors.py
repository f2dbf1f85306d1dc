"""What `fully_shard` says of mistakes with contexts, modules, meshes, optimizers, and in use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron.core.distributed.fsdp import (
    Flat,
    FsdpModule,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.distributed.fsdp.fully_shard.helpers.stacks import (
    DIM,
    ZERO_3,
    Stack,
    assert_resting,
    compute_weights,
    line,
    loss_of,
    own_batch,
    settle,
    shard,
)


def _raises(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(DIM, DIM, **options)


@on_ranks(2)
def test_mistakes_with_contexts_have_their_own_messages() -> None:
    mesh, placements = line(), Placements.for_strategy(ZERO_3)
    child = linear()
    fully_shard(child, mesh, placements)
    child(own_batch())
    _raises(
        RuntimeError,
        r"Expected every fully_shard before the first forward, got one of Sequential after 1 has "
        r"run\.",
        lambda: fully_shard(nn.Sequential(linear(), child), mesh, placements),
    )
    child = linear()
    with fully_shard_context("cpu"):
        fully_shard(child, mesh, placements)
        _raises(
            RuntimeError,
            r"Expected one fully_shard_context at a time, got one in another; it does not support "
            r"nesting\.",
            lambda: fully_shard_context("cpu").__enter__(),
        )
        _raises(
            RuntimeError,
            r"Expected forward after the last fully_shard\. Exit fully_shard_context first\.",
            lambda: child(own_batch()),
        )
        assert child.phase is FsdpModule.Phase.RESTING
    child(own_batch())
    with fully_shard_context("cpu"):
        _raises(
            ValueError,
            r"Expected inner modules of the same context, got 1 of another fully_shard_context\.",
            lambda: fully_shard(nn.Sequential(linear(), child), mesh, placements),
        )
    with pytest.raises(ArithmeticError, match="mine"), fully_shard_context("cpu"):
        raise ArithmeticError("mine")
    shard(linear())


class Clashing(nn.Linear):
    phase = "of the moon"


class Holder(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.own = parameter


def with_meta_buffer() -> nn.Module:
    module = linear()
    module.register_buffer("counts", torch.zeros(2, device="meta"))
    return module


@on_ranks(2)
def test_mistakes_with_modules_have_their_own_messages() -> None:
    mesh, placements = line(), Placements.for_strategy(ZERO_3)
    owned_twice = (
        "Expected every parameter in one sharded module, got {}weight of {}, "
        "which another owns already"
    )
    with fully_shard_context("cpu") as context:
        sharded = fully_shard(linear(), mesh, placements)
        tied = nn.ModuleList([linear(), linear()])
        tied[1].weight = tied[0].weight
        fully_shard(tied[0], mesh, placements)
        inside = nn.Sequential(nn.Sequential(linear()))
        fully_shard(inside, mesh, placements)
        dtensor = nn.Parameter(DTensor.from_local(torch.ones(1, DIM), mesh, [Shard(0)]))
        integers = nn.Parameter(torch.ones(DIM, dtype=torch.int64), requires_grad=False)
        for error, message, module in (
            (TypeError, "Expected a module, got Tensor", torch.ones(1)),
            (ValueError, "Expected a module that is not sharded yet, got a FsdpLinear", sharded),
            (ValueError, owned_twice.format("1.", "ModuleList"), tied),
            (ValueError, owned_twice.format("", "Linear"), tied[1]),
            (ValueError, owned_twice.format("0.", "Sequential"), inside[0]),
            (
                ValueError,
                r"without attributes that FsdpModule has, got \['phase'\]",
                Clashing(DIM, DIM),
            ),
            (
                TypeError,
                "Expected plain parameters, got the DTensor own with .*Shard",
                Holder(dtensor),
            ),
            (
                ValueError,
                r"with rows and elements, got own of \(\)",
                Holder(nn.Parameter(torch.tensor(1.0))),
            ),
            (
                ValueError,
                r"with rows and elements, got own of \(0, 2\)",
                Holder(nn.Parameter(torch.ones(0, 2))),
            ),
            (
                TypeError,
                "Expected parameters whose shapes are known, got weight, which is lazy",
                nn.LazyLinear(2),
            ),
            (
                TypeError,
                "Expected parameters of one of the dtypes .*, got torch.int64",
                Holder(integers),
            ),
            (
                RuntimeError,
                "Expected a reset_parameters in Holder",
                Holder(nn.Parameter(torch.ones(1, device="meta"))),
            ),
            (RuntimeError, "Expected buffers with storage, .*counts.* on meta", with_meta_buffer()),
        ):
            _raises(error, message, partial(fully_shard, module, mesh, placements))
    # None of them has left anything behind.
    assert context.forward_order == [sharded, tied[0], inside]
    loss_of(inside(own_batch())).backward()
    assert_resting(inside)


@on_ranks(2)
def test_mistakes_with_meshes_placements_and_divisors_have_their_own_messages() -> None:
    mesh, zero_3 = line(), Placements.for_strategy(ZERO_3)
    unnamed = init_device_mesh("cpu", (2, 1))
    named = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    hsdp = ((Replicate(), Flat()), (Partial("avg"), Flat()), (Replicate(), Flat()))
    in_order = "Expected the axes of a mesh in their order, by name if they are not all of it, got "
    with fully_shard_context("cpu"):
        for message, own_mesh, placements in (
            (
                r"Expected axes of the mesh, 0 to 0 or one of \(\), got 'dp'",
                mesh,
                Placements.for_strategy(ZERO_3, "dp"),
            ),
            (
                r"Expected axes of the mesh, 0 to 0 or one of \(\), got 1\.",
                mesh,
                Placements((0, 1), *hsdp),
            ),
            (
                r"Expected axes of the mesh, 0 to 1 or one of \('outer', 'inner'\), got 'dp'",
                named,
                Placements.for_strategy(ZERO_3, "dp"),
            ),
            (in_order + r"\(0,\) of 2", unnamed, zero_3),
            (in_order + r"\(1, 0\) of 2", unnamed, Placements((1, 0), *hsdp)),
            (in_order + r"\('inner', 'outer'\) of ", named, Placements(("inner", "outer"), *hsdp)),
        ):
            _raises(ValueError, message, partial(fully_shard, linear(), own_mesh, placements))
        for divisor in (-1, 0, float("nan")):
            message = rf"Expected a positive grad_divisor, got {divisor}\."
            _raises(
                ValueError, message, partial(fully_shard, linear(), mesh, zero_3, None, divisor)
            )
        by_name = fully_shard(linear(), named, Placements.for_strategy(ZERO_3, "outer"))
        by_number = fully_shard(linear(), named, Placements.for_strategy(ZERO_3, 0))
    for module in (by_name, by_number):
        assert module.weight.device_mesh.mesh_dim_names == ("outer",)
        loss_of(module(own_batch())).backward()
    assert torch.equal(by_name.weight.grad.to_local() != 0, by_number.weight.grad.to_local() != 0)
    kinds = (Flat(),), (Flat(),), (Flat(),)
    for message, arguments in (
        (r"Expected 2 parameter placements for \(0, 1\), got 1", ((0, 1), *kinds)),
        (
            r"Expected 1 gradient placements for \(0,\), got 2",
            ((0,), (Flat(),), (Flat(), Flat()), (Flat(),)),
        ),
        (r"Expected 1 optimizer placements for \(0,\), got 0", ((0,), (Flat(),), (Flat(),), ())),
        (r"Expected every mesh axis once, got \(0, 0\)", ((0, 0), *hsdp)),
        (
            r"Expected parameter buffers that are replicated or sharded",
            ((0,), (Partial(),), (Flat(),), (Flat(),)),
        ),
        (
            r"Expected gradient placements that are cut wherever parameter",
            ((0,), (Flat(),), (Partial(),), (Flat(),)),
        ),
        (
            r"Expected optimizer placements that are cut wherever gradient",
            ((0,), *kinds[:2], (Replicate(),)),
        ),
    ):
        _raises(ValueError, message, partial(Placements, *arguments))
    _raises(
        ValueError,
        "Expected one of .*'optim_grads_params'.*, got 'zero'",
        lambda: Placements.for_strategy("zero"),
    )


@on_ranks(2)
def test_mistakes_with_optimizers_have_their_own_messages_and_change_no_weight() -> None:
    model = Stack(dtype=torch.bfloat16)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    context = shard(*model.layers, strategy="optim")
    for error, message, argument in (
        (TypeError, r"Expected a torch\.optim\.Optimizer, got Stack\.", model),
        (
            ValueError,
            r"Expected an optimizer built after fully_shard, got 6 parameters from before\.",
            before,
        ),
        (
            ValueError,
            r"Expected an optimizer over sharded parameters, got none among its parameters\.",
            torch.optim.SGD(linear().parameters(), lr=0.1),
        ),
    ):
        _raises(error, message, partial(fully_shard_optimizer, argument))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    weights = compute_weights(model)
    with microbatch(context, is_last=False):
        loss_of(model(own_batch(dtype=torch.bfloat16))).backward()
    assert all(parameter.grad.placements == (Partial("avg"),) for parameter in model.parameters())
    _raises(
        RuntimeError,
        r"Expected the gradients of a whole step, got partial sums: the last mic",
        optimizer.step,
    )
    with pytest.raises(ArithmeticError, match="mine"), microbatch(context, is_last=False):
        raise ArithmeticError("mine")
    assert context.is_last_microbatch
    loss_of(model(own_batch(1, torch.bfloat16))).backward()
    message = (
        r"Expected step without a closure, whose torch\.bfloat16 gradients nothing would cast to "
        r"torch\.float32"
    )
    _raises(NotImplementedError, message, lambda: optimizer.step(lambda: 0.0))
    _raises(NotImplementedError, message, lambda: optimizer.step(closure=lambda: 0.0))
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(
        torch.equal(old, new) for old, new in zip(weights, compute_weights(model), strict=True)
    )
    optimizer.step(None)
    assert not any(
        torch.equal(old, new) for old, new in zip(weights, compute_weights(model), strict=True)
    )


class Whatever(nn.Linear):
    """Does in its forward what it is told to."""

    act: Callable[[Whatever, torch.Tensor], Any] = nn.Linear.forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(x)


def _looks_up(module: Whatever, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(x.long().abs() % DIM, module.weight, sparse=True)


@on_ranks(2)
def test_mistakes_in_use_have_their_own_messages() -> None:
    model = Stack(1)
    shard(*model.layers)
    settled = (
        "Expected dtype and device to be settled before fully_shard, "
        "got a change from torch.float32 on cpu to "
    )
    _raises(RuntimeError, settled + "torch.bfloat16 on cpu", model.bfloat16)
    _raises(RuntimeError, settled + "torch.float32 on meta", lambda: model.to("meta"))
    _raises(
        NotImplementedError,
        "Expected a copy to be made before fully_shard",
        lambda: copy.deepcopy(model),
    )
    assert model.to(torch.float32) is model
    for error, message, act in (
        (
            RuntimeError,
            "got one of its weights or a view of one, which is whole only",
            lambda own, _: own.weight,
        ),
        (
            RuntimeError,
            "got one of its weights or a view of one, which is whole only",
            lambda own, _: [own.weight[1:]],
        ),
        (
            RuntimeError,
            "from another phase, got forward; a sharded module cannot run inside itself",
            Whatever.__call__,
        ),
        (
            NotImplementedError,
            "Expected a dense gradient for weight, got torch.sparse_coo",
            _looks_up,
        ),
    ):
        module = Whatever(DIM, DIM)
        context = shard(module)
        module.act = partial(act, module)
        _raises(error, message, lambda module=module: loss_of(module(own_batch())).backward())
        settle(context)
    module, other = linear(), linear()
    shard(module)
    shard(other)
    torch.utils.swap_tensors(module.bias, other.bias)
    message = "Expected bias to be the view of its buffer that fully_shard made, got another tensor"
    _raises(RuntimeError, message, lambda: module(own_batch()))
    replaced = linear()
    shard(replaced)
    replaced.weight = nn.Parameter(torch.zeros(DIM, DIM))
    _raises(
        RuntimeError, "Expected weight to be the view of its buffer", lambda: replaced(own_batch())
    )
    hooked = linear()
    hooked.weight.register_hook(lambda gradient: gradient)
    _raises(
        ValueError,
        "Expected parameters without hooks, which would be lost, got some on weight",
        lambda: shard(hooked),
    )
    torch.manual_seed(dist.get_rank())
    different = linear()
    _raises(
        ValueError,
        "the same weights on every rank, got diff",
        lambda: shard(different, strategy="no_shard"),
    )
