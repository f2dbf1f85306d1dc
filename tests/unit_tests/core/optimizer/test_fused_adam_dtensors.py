"""FusedAdam on DTensors and on the parameters of `fully_shard`: states are sharded as they are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron.core.dist_checkpointing.state.dcp_state import DCPState
from megatron.core.distributed.fsdp import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.rules import UpdateRule
from megatron.core.optimizer.state_tensors import like
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.optimizer.helpers.adam_runs import (
    BF16,
    F8,
    F16,
    F32,
    generator,
    gradient,
    plain,
    snapshot,
)

DIM = 6


@on_ranks(1)
def test_copying_an_optimizer_over_sharded_parameters_raises() -> None:
    model, _ = sharded()
    optimizer = FusedAdam(model.parameters())
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"Expected state_dict\(\) to be used, got an attempt to copy or pickle"
        ):
            copying(optimizer)


# DTensors


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def dtensor_parameters(kind: str) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Parameters, and their whole values. With 2 ranks, 5 rows are uneven, and of 1 row the last
    rank has none.
    """
    torch.manual_seed(0)
    whole = [torch.randn(8, 4), torch.randn(5, 4), torch.randn(1, 4), torch.randn(4, 6).t()]
    if kind == "FSDP2":
        module = nn.Module()
        for index, value in enumerate(whole):
            module.register_parameter(f"p{index}", nn.Parameter(value.contiguous().clone()))
        torch_fully_shard(module, mesh=line())
        return list(module.parameters()), whole
    placement = {"Shard": Shard(0), "Shard(1)": Shard(1), "Replicate": Replicate()}[kind]
    return [nn.Parameter(distribute_tensor(value, line(), [placement])) for value in whole], whole


def assert_states_are_distributed_as_parameters(
    optimizer: FusedAdam, states: dict[Any, Any] | None = None
) -> None:
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert owned
    for index, parameter in enumerate(owned):
        state = optimizer.state[parameter] if states is None else states[index]
        assert {"step", "exp_avg", "exp_avg_sq"} <= set(state)
        for name, tensor in state.items():
            if name == "step":
                assert not isinstance(tensor, DTensor)
                continue
            assert isinstance(tensor, DTensor), name
            assert tensor.device_mesh == parameter.device_mesh
            assert tensor.placements == parameter.placements
            assert tensor.shape == parameter.shape
            assert tensor.stride() == parameter.stride()
            assert local_tensor(tensor).shape == local_tensor(parameter).shape
            assert tensor.dtype == local_tensor(tensor).dtype


@pytest.mark.parametrize("options", [{}, {"exp_avg_dtype": F8, "exp_avg_sq_dtype": BF16}], ids=str)
@pytest.mark.parametrize("kind", ["Shard", "Shard(1)", "Replicate", "FSDP2"])
@on_ranks(2)
def test_states_of_dtensors_are_dtensors_like_them_at_every_moment(
    kind: str, options: dict[str, Any]
) -> None:
    owned, whole = dtensor_parameters(kind)
    assert kind != "Shard" or local_tensor(owned[2]).numel() == 4 * (dist.get_rank() == 0)
    references = [nn.Parameter(value.clone()) for value in whole]
    optimizer = FusedAdam(owned, lr=0.1, **options)
    reference = FusedAdam(references, lr=0.1)
    optimizer.init_state()
    assert_states_are_distributed_as_parameters(optimizer)
    for number in range(3):
        for index, (parameter, plain_one) in enumerate(zip(owned, references, strict=True)):
            plain_one.grad = gradient(index, number, plain_one)
            parameter.grad = distribute_tensor(
                plain_one.grad, parameter.device_mesh, parameter.placements
            )
        optimizer.step()
        reference.step()
        assert_states_are_distributed_as_parameters(optimizer)
        # An empty shard, too, has taken the step.
        assert {state["step"].item() for state in optimizer.state.values()} == {number + 1}
    if not options:
        for parameter, plain_one in zip(owned, references, strict=True):
            own_part = distribute_tensor(
                plain_one.detach(), parameter.device_mesh, parameter.placements
            )
            assert torch.equal(local_tensor(parameter), local_tensor(own_part))
    saved = optimizer.state_dict()
    assert_states_are_distributed_as_parameters(optimizer, saved["state"])
    fresh = FusedAdam(dtensor_parameters(kind)[0], **options)
    fresh.load_state_dict(saved)
    assert_states_are_distributed_as_parameters(fresh)
    assert_states_are_distributed_as_parameters(fresh, fresh.state_dict()["state"])
    assert plain(fresh.state_dict()) == plain(saved)


@on_ranks(4)
def test_states_of_parameters_that_two_axes_cut_are_cut_by_both() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(DIM, 2 * DIM, bias=False)
    module.weight = nn.Parameter(
        distribute_tensor(torch.randn(2 * DIM, DIM), mesh["tp"], [Shard(0)])
    )
    torch_fully_shard(module, mesh=mesh["dp"])
    (own,) = module.parameters()
    assert [type(placement).__name__ for placement in own.placements] == ["_StridedShard", "Shard"]
    optimizer = FusedAdam([own], exp_avg_dtype=BF16)
    own.grad = like(own, torch.ones_like(local_tensor(own)))
    before = local_tensor(own).clone()
    optimizer.step()
    assert_states_are_distributed_as_parameters(optimizer)
    optimizer.load_state_dict(copy.copy(optimizer.state_dict()))
    assert_states_are_distributed_as_parameters(optimizer)
    assert not torch.equal(local_tensor(own), before)


@on_ranks(2)
def test_gradients_and_states_that_are_distributed_otherwise_are_rejected() -> None:
    owned, whole = dtensor_parameters("Shard")
    optimizer = FusedAdam(owned[:1], use_decoupled_grad=True)
    owned[0].decoupled_grad = torch.zeros(8, 4)
    with pytest.raises(
        ValueError,
        match=r"Expected gradient of parameter 0 .* with a DTensor as it has, got a plain",
    ):
        optimizer.step()
    owned[0].decoupled_grad = distribute_tensor(whole[0], line(), [Replicate()])
    with pytest.raises(
        ValueError, match=r"with placements \(Shard\(dim=0\),\) as it has, got \(Replicate\(\),\)"
    ):
        optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(8, 4)
    with pytest.raises(
        ValueError,
        match="Expected exp_avg of parameter 0 with a DTensor as its parameter has, got a",
    ):
        optimizer.load_state_dict(saved)


# Parameters of fully_shard


class Stack(nn.Module):
    """Uneven rows: on 2 and on 4 ranks, some ranks have no rows of a small parameter."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(DIM, 2 * DIM, dtype=dtype)
        self.second = nn.Linear(2 * DIM, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def sharded(
    strategy: str = "optim_grads_params", dtype: torch.dtype = F32, **policy: torch.dtype
) -> tuple[nn.Module, Any]:
    model = Stack(dtype)
    with fully_shard_context("cpu") as context:
        for module in (model.first, model):
            fully_shard(
                module, line(), Placements.for_strategy(strategy), MixedPrecisionPolicy(**policy)
            )
    return model, context


def batches(number: int) -> Iterator[torch.Tensor]:
    """Of every rank."""
    for rank in range(dist.get_world_size()):
        yield torch.randn(4, DIM, generator=generator(rank, number))


def backward(model: nn.Module, number: int, dtype: torch.dtype = F32) -> None:
    model(list(batches(number))[dist.get_rank()].to(dtype)).float().square().sum().backward()


def _fully_sharded(strategy: str, options: dict[str, Any]) -> None:
    model, _ = sharded(strategy)
    reference = Stack()
    optimizer = FusedAdam(model.parameters(), lr=0.1, weight_decay=0.1, **options)
    plain_optimizer = FusedAdam(reference.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.init_state()
    assert_states_are_distributed_as_parameters(optimizer)
    for number in range(3):
        backward(model, number)
        for x in batches(number):
            (reference(x).square().sum() / dist.get_world_size()).backward()
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        assert_states_are_distributed_as_parameters(optimizer)
    assert_states_are_distributed_as_parameters(optimizer, optimizer.state_dict()["state"])
    # The next forward has the new weights.
    x = next(batches(9))
    torch.testing.assert_close(
        model(x), reference(x), **({} if not options else {"rtol": 0.2, "atol": 0.2})
    )
    other, _ = sharded(strategy)
    fresh = FusedAdam(other.parameters(), **options)
    saved = optimizer.state_dict()
    fresh.load_state_dict(saved)
    assert_states_are_distributed_as_parameters(fresh)
    assert plain(fresh.state_dict()["state"]) == plain(saved["state"])


@pytest.mark.parametrize("options", [{}, {"exp_avg_dtype": F8, "exp_avg_sq_dtype": F16}], ids=str)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_states_of_fully_sharded_parameters_are_like_them_and_steps_match_one_rank(
    world_size, strategy, options
):
    run_ranks(world_size, _fully_sharded, strategy, options)


class Many(nn.Module):
    """Parameters of one shape, half of which are on either of 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, DIM)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(x @ weight.t() for weight in self.weights)


@on_ranks(2)
def test_the_states_of_a_group_are_one_buffer_and_its_step_is_one_pass() -> None:
    model = Many()
    with fully_shard_context("cpu"):
        fully_shard(model, line(), Placements.for_strategy("optim_grads_params"))
    optimizer = FusedAdam(model.parameters())
    backward(model, 0)
    optimizer.init_state()
    for name in ("exp_avg", "exp_avg_sq"):
        storages = {
            local_tensor(state[name]).untyped_storage().data_ptr()
            for state in optimizer.state.values()
        }
        assert len(storages) == 1
    seen: list[int] = []
    run = optimizer._run

    def counted(rule: UpdateRule, pieces: Any, grad_scale: float) -> None:
        seen.append(len(pieces))
        run(rule, pieces, grad_scale)

    optimizer._run = counted
    assert sum(step.gradient.numel() > 0 for step in optimizer.plan_step().parameters) == 4
    optimizer.step()
    assert [number for number in seen if number] == [1]


@on_ranks(2)
def test_bf16_gradients_of_fp32_main_weights_are_read_as_they_are() -> None:
    model, _ = sharded(dtype=BF16, main_grads_dtype=BF16)
    optimizer = FusedAdam(model.parameters(), lr=0.1, master_weights=True)
    before = [local_tensor(parameter).clone() for parameter in model.parameters()]
    backward(model, 0, BF16)
    grads = [parameter.grad for parameter in model.parameters()]
    assert {grad.dtype for grad in grads} == {BF16}
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.dtype == F32
        assert list(optimizer.state[parameter]) == ["step", "exp_avg", "exp_avg_sq"]
        twin = nn.Parameter(old)
        twin.grad = local_tensor(parameter.grad).float()
        FusedAdam([twin], lr=0.1).step()
        assert torch.equal(local_tensor(parameter), twin)


@on_ranks(2)
def test_compute_weights_follow_main_weights_on_the_host_that_are_stepped_there() -> None:
    model, reference = Stack(), Stack()
    with fully_shard_context("cpu"):
        fully_shard(
            model,
            line(),
            Placements.for_strategy("optim_grads_params"),
            offload_policy=OffloadPolicy(main_weights_on_host=True),
        )
    with fully_shard_context("cpu"):
        fully_shard(reference, line(), Placements.for_strategy("optim_grads_params"))
    for each in (model, reference):
        optimizer = FusedAdam(each.parameters(), lr=0.1)
        for number in range(3):
            backward(each, number)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model(next(batches(9))), reference(next(batches(9))))


@on_ranks(2)
def test_partial_gradients_are_rejected() -> None:
    model, context = sharded("optim")
    optimizer = FusedAdam(model.parameters())
    with microbatch(context, is_last=False):
        backward(model, 0)
    before = snapshot(optimizer)[0]
    with pytest.raises(
        RuntimeError, match="Expected the gradients of a whole step, got partial sums"
    ):
        optimizer.step()
    assert [weights for weights, _ in snapshot(optimizer)[0]] == [weights for weights, _ in before]
    backward(model, 1)
    optimizer.step()


# Checkpoints


@on_ranks(2)
def test_a_checkpoint_from_before_the_first_step_has_no_step_in_it(tmp_path: Path) -> None:
    """States are allocated for the save, and gradients stay as they are."""
    model, _ = sharded()
    optimizer = FusedAdam(model.parameters())
    backward(model, 0)
    grads = [parameter.grad for parameter in model.parameters()]
    saved = DCPState(model, optimizer).state_dict()["optim"]["state"]
    assert saved.keys() == dict(model.named_parameters()).keys()
    assert {tuple(state) for state in saved.values()} == {("step", "exp_avg", "exp_avg_sq")}
    assert {state["step"].item() for state in saved.values()} == {0}
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))

    dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=str(tmp_path))
    optimizer.zero_grad()
    other, _ = sharded()
    fresh = FusedAdam(other.parameters())
    dcp.load({"app": DCPState(other, fresh)}, checkpoint_id=str(tmp_path))
    for each, its in ((model, optimizer), (other, fresh)):
        for number in range(2):
            backward(each, number)
            its.step()
            its.zero_grad()
    assert snapshot(optimizer) == snapshot(fresh)
    assert {state["step"].item() for state in fresh.state.values()} == {2}


@on_ranks(2)
def test_the_state_dict_helpers_of_torch_work() -> None:
    options = {"exp_avg_dtype": F8, "exp_avg_sq_dtype": BF16}
    model, _ = sharded()
    optimizer = FusedAdam(model.parameters(), **options)
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    other, _ = sharded()
    fresh = FusedAdam(other.parameters(), lr=0.7, **options)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states)
    assert plain(get_state_dict(other, fresh)[1]["state"]) == plain(states["state"])
    assert fresh.param_groups[0]["lr"] == 1e-3
    assert_states_are_distributed_as_parameters(fresh)
