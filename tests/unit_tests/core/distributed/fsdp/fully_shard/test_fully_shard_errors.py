"""What `fully_shard` refuses: contexts, modules, meshes, placements and divisors that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron.core.distributed.fsdp import (
    Flat,
    FsdpModule,
    Placements,
    fully_shard,
    fully_shard_context,
)
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.distributed.fsdp.fully_shard.helpers.stacks import (
    DIM,
    ZERO_3,
    assert_resting,
    line,
    linear,
    loss_of,
    own_batch,
    shard,
)

# Contexts


@on_ranks(2)
def test_mistakes_with_contexts_have_their_own_messages() -> None:
    mesh, placements = line(), Placements.for_strategy(ZERO_3)
    child = linear()
    fully_shard(child, mesh, placements)
    child(own_batch())
    with pytest.raises(RuntimeError, match="before the first forward, got one of Sequential"):
        fully_shard(nn.Sequential(linear(), child), mesh, placements)

    child = linear()
    with fully_shard_context("cpu"):
        fully_shard(child, mesh, placements)
        with pytest.raises(RuntimeError, match="nesting"):
            fully_shard_context("cpu").__enter__()
        with pytest.raises(RuntimeError, match="Exit fully_shard_context first"):
            child(own_batch())
        assert child.activity is FsdpModule.Activity.RESTING
    child(own_batch())
    with (
        fully_shard_context("cpu"),
        pytest.raises(ValueError, match="got 1 of another fully_shard_context"),
    ):
        fully_shard(nn.Sequential(linear(), child), mesh, placements)

    with pytest.raises(ArithmeticError, match="mine"), fully_shard_context("cpu"):
        raise ArithmeticError("mine")
    shard(linear())


# Modules


class Clashing(nn.Linear):
    activity = "of the moon"


class Holder(nn.Module):
    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.own = parameter


def holder_of(make: Callable[[], torch.Tensor], **options: Any) -> Callable[[Any], nn.Module]:
    return lambda _: Holder(nn.Parameter(make(), **options))


def tied(shards: Callable[[nn.Module], nn.Module]) -> nn.ModuleList:
    """Two modules with one weight, of which the first is sharded."""
    pair = nn.ModuleList([linear(), linear()])
    pair[1].weight = pair[0].weight
    shards(pair[0])
    return pair


def inside_of_sharded(shards: Callable[[nn.Module], nn.Module]) -> nn.Module:
    outer = nn.Sequential(nn.Sequential(linear()))
    shards(outer)
    return outer[0]


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "tensor": (TypeError, "got a Tensor", lambda _: torch.ones(1)),
    "sharded already": (ValueError, "got a FsdpLinear", lambda shards: shards(linear())),
    "around a tied one": (ValueError, "1.weight of ModuleList, which another owns", tied),
    "tied": (ValueError, "weight of Linear, which another", lambda shards: tied(shards)[1]),
    "inside of another": (ValueError, "0.weight of Sequential, which another", inside_of_sharded),
    "attribute": (ValueError, r"got \['activity'\]", lambda _: Clashing(DIM, DIM)),
    "DTensor": (
        TypeError,
        "got the DTensor own with .*Shard",
        holder_of(lambda: DTensor.from_local(torch.ones(1, DIM), line(), [Shard(0)])),
    ),
    "scalar": (ValueError, r"got own of \(\)", holder_of(lambda: torch.tensor(1.0))),
    "no rows": (ValueError, r"got own of \(0, 2\)", holder_of(lambda: torch.ones(0, 2))),
    "lazy": (TypeError, "got weight, which is lazy", lambda _: nn.LazyLinear(2)),
    "integers": (
        TypeError,
        "got torch.int64",
        holder_of(lambda: torch.ones(DIM, dtype=torch.int64), requires_grad=False),
    ),
}


@pytest.mark.parametrize(("error", "message", "make"), REFUSED.values(), ids=REFUSED)
@on_ranks(2)
def test_a_module_that_cannot_be_sharded_is_rejected_and_leaves_nothing_behind(
    error: type[Exception], message: str, make: Callable[[Any], Any]
) -> None:
    mesh, placements = line(), Placements.for_strategy(ZERO_3)
    sharded: list[nn.Module] = []  # keeps them alive

    def shards(module: nn.Module) -> nn.Module:
        sharded.append(fully_shard(module, mesh, placements))
        return sharded[-1]

    with fully_shard_context("cpu") as context:
        shards(linear())
        module = make(shards)
        with pytest.raises(error, match=message):
            shards(module)
    assert context.forward_order == sharded
    for good in sharded:
        loss_of(good(own_batch())).backward()
        assert_resting(good)


# Meshes, placements and divisors


HSDP = ((Replicate(), Flat()), (Partial("avg"), Flat()), (Replicate(), Flat()))
NAMES = ("outer", "inner")


@pytest.mark.parametrize(
    ("message", "shape", "names", "placements"),
    [
        (r"-1 to 0 or one of \(\), got 'dp'", (2,), None, Placements.for_strategy(ZERO_3, "dp")),
        (r"-1 to 0 or one of \(\), got 1 ", (2,), None, Placements((0, 1), *HSDP)),
        (
            r"-2 to 1 or one of \('outer', 'inner'\), got 'dp'",
            (2, 1),
            NAMES,
            Placements.for_strategy(ZERO_3, "dp"),
        ),
        (r"-2 to 1 or one of .*, got -3", (2, 1), NAMES, Placements((-3, 1), *HSDP)),
        (
            r"distinct .* got dp_axes=\('outer', -2\)",
            (2, 1),
            NAMES,
            Placements(("outer", -2), *HSDP),
        ),
        (r"mesh_dim_names, got \(0,\) of 2", (2, 1), None, Placements.for_strategy(ZERO_3)),
        (r"order, got dp_axes=\(1, 0\)", (2, 1), None, Placements((1, 0), *HSDP)),
        (
            r"order, got dp_axes=\('inner', 'outer'\)",
            (2, 1),
            NAMES,
            Placements(("inner", "outer"), *HSDP),
        ),
    ],
)
@on_ranks(2)
def test_placements_that_do_not_fit_the_mesh_are_rejected(
    message: str, shape: tuple[int, ...], names: tuple[str, ...] | None, placements: Placements
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    with fully_shard_context("cpu"), pytest.raises(ValueError, match=message):
        fully_shard(linear(), mesh, placements)


@pytest.mark.parametrize("divisor", [-1, 0, float("nan")])
@on_ranks(2)
def test_a_divisor_that_is_not_positive_is_rejected(divisor: float) -> None:
    placements = Placements.for_strategy(ZERO_3)
    with fully_shard_context("cpu"), pytest.raises(ValueError, match=f"got {divisor}"):
        fully_shard(linear(), line(), placements, grad_divisor=divisor)


@on_ranks(2)
def test_an_axis_may_be_named_or_numbered() -> None:
    named = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    with fully_shard_context("cpu"):
        by_name = fully_shard(linear(), named, Placements.for_strategy(ZERO_3, "outer"))
        by_number = fully_shard(linear(), named, Placements.for_strategy(ZERO_3, 0))
    for module in (by_name, by_number):
        assert module.weight.device_mesh.mesh_dim_names == ("outer",)
        loss_of(module(own_batch())).backward()
    assert torch.equal(by_name.weight.grad.to_local() != 0, by_number.weight.grad.to_local() != 0)


# Hooks and weights


@on_ranks(2)
def test_parameters_with_hooks_are_rejected() -> None:
    hooked = linear()
    hooked.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match="got some on weight"):
        shard(hooked)


@on_ranks(2)
def test_weights_that_differ_between_ranks_are_rejected() -> None:
    torch.manual_seed(dist.get_rank())
    different = linear()
    with pytest.raises(ValueError, match="the same weights on every rank, got diff"):
        shard(different, strategy="no_shard")


def scaled_by_rank(factor: float) -> nn.Module:
    """A model whose second layer is another on each rank, unless the factor is 0."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 40))
    with torch.no_grad():
        model[1].weight.mul_(1 + factor * dist.get_rank())
    return model


@on_ranks(3)
def test_shards_cut_from_different_initial_weights_are_rejected_at_the_first_forward() -> None:
    model = scaled_by_rank(0.5)
    for module in (model[0], model[1], model):
        fully_shard(module)
    with pytest.raises(ValueError, match="same weights on every rank, got different ones for 1"):
        model(torch.ones(1, 4))


@on_ranks(3)
def test_different_initial_weights_do_not_matter_once_others_have_been_loaded() -> None:
    same = scaled_by_rank(0).state_dict()
    for load in ("load_state_dict", "set_model_state_dict", "data"):
        model = fully_shard(scaled_by_rank(0.5))
        if load == "load_state_dict":
            model.load_state_dict(same)
        elif load == "set_model_state_dict":
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, same if dist.get_rank() == 0 else {}, options=options)
        else:
            for parameter in model.parameters():  # which moves no version counter
                parameter.data.copy_(torch.full_like(parameter, 0.25))
        model(torch.ones(1, 4)).sum().backward()


def resized_vocabulary() -> nn.Module:
    """Of which each rank has drawn the last rows for itself."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(1030, 4), nn.Linear(4, 1, bias=False))
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        model[0].weight[1024:].normal_()
        model[1].weight.normal_()
    return model


@on_ranks(4)
def test_rank_0_may_give_its_own_weights_to_all() -> None:
    """Which writes to no weight of its own, and of a head of one row to none of most ranks."""
    whole = resized_vocabulary()
    weights = {name: weight.clone() for name, weight in whole.state_dict().items()}
    for module in (*whole, whole):
        fully_shard(module)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(whole, weights if dist.get_rank() == 0 else {}, options=options)
    whole(torch.tensor([[1, 1029]])).sum().backward()


@on_ranks(4)
def test_one_rank_of_a_replica_that_starts_with_other_weights_is_seen_by_all() -> None:
    torch.manual_seed(7 if dist.get_rank() == 3 else 5)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = nn.Linear(8, 16)
    with pytest.raises(ValueError, match="the same weights on every rank, got different ones"):
        fully_shard(model, mesh)(torch.ones(1, 8))
