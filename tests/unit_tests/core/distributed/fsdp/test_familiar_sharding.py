"""`fully_shard` as users of Megatron-FSDP's experimental interface and PyTorch FSDP2 call it: it
works, or raises an error of one line with the replacement.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from megatron.core.distributed.fsdp import (
    DBuffer,
    Flat,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.optimizer import FusedAdam
from tests.helpers.ranks import on_ranks


class Net(nn.Module):
    """Layers that record the dtypes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            self.seen.append(x.dtype)
            x = layer(x).tanh()
        return self.head(x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    found = []
    for step in range(steps):
        torch.manual_seed(step * 10 + dist.get_rank())
        loss = model(torch.randn(4, 6)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


# Megatron-FSDP's experimental interface


def sharded_by_v2_code(model: Net, **placements: Any) -> Net:
    """As that interface's examples do it: `Shard(0)`, inside of a context."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    chosen = Placements(**{"dp_axes": [-1], **{key: [Shard(0)] for key in KINDS}, **placements})
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32)
    with fully_shard_context(torch.device("cpu"), use_symmetric_memory=False):
        for layer in model.layers:
            fully_shard(layer, mesh, chosen, policy)
        fully_shard(model, mesh, chosen, policy, grad_divisor=1)
    return model


KINDS = ("parameter", "gradient", "optimizer")


@on_ranks(2)
def test_shards_and_negative_axes_mean_what_flat_and_numbers_mean() -> None:
    usual = net()
    for module in (*usual.layers, usual):
        fully_shard(module)
    expected = train(usual, torch.optim.SGD(usual.parameters(), lr=0.1))
    model = sharded_by_v2_code(net())
    assert model.parameter_groups[0].placements.parameter == (Flat(),)
    assert train(model, torch.optim.SGD(model.parameters(), lr=0.1)) == expected


@on_ranks(4)
def test_negative_axes_count_from_the_end() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "dp"))
    shards = [[Shard(0)]] * 3
    layer = fully_shard(nn.Linear(4, 4), mesh, Placements([-1], *shards))
    assert layer.parameter_groups[0].mesh.mesh_dim_names == ("dp",)
    outer = fully_shard(nn.Linear(4, 4), mesh, Placements([-2], *shards))
    assert outer.parameter_groups[0].mesh.mesh_dim_names == ("outer",)
    both = [[Shard(0)] * 2] * 3
    assert fully_shard(nn.Linear(4, 4), mesh, Placements([-2, "dp"], *both)).parameter_groups


@on_ranks(2)
def test_symmetric_memory_is_rejected_by_name() -> None:
    with (
        pytest.raises(NotImplementedError, match="Expected use_symmetric_memory=False"),
        fully_shard_context("cpu", use_symmetric_memory=True),
    ):
        pass
    # The refusal leaves no context open.
    with fully_shard_context("cpu"):
        fully_shard(nn.Linear(2, 2))


@on_ranks(2)
def test_assignment_by_load_state_dict_is_a_runtime_error() -> None:
    model = sharded_by_v2_code(net())
    with pytest.raises(RuntimeError, match=r"Load before fully_shard\(\), or in place with assign"):
        model.load_state_dict(model.state_dict(), assign=True)


def bf16_gradients(precision_aware: bool, kind: type[torch.optim.Optimizer]) -> Net:
    """A model with fp32 main weights and bf16 gradients, after a step."""
    model = sharded_by_v2_code(net().bfloat16())
    optimizer = kind(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer, precision_aware=precision_aware)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(parameter.grad.dtype for parameter in model.parameters())
    )
    optimizer.step()
    assert set(seen) == {torch.bfloat16 if precision_aware else torch.float32}
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
    return model


@on_ranks(2)
def test_a_precision_aware_optimizer_gets_gradients_as_they_are() -> None:
    aware, cast = (bf16_gradients(flag, FusedAdam) for flag in (True, False))
    for own, other in zip(aware.parameters(), cast.parameters(), strict=True):
        assert torch.equal(own.full_tensor(), other.full_tensor())

    with pytest.raises(RuntimeError, match=r"Expected gradients in torch\.float32"):
        bf16_gradients(True, torch.optim.AdamW)


@on_ranks(2)
def test_a_precision_aware_optimizer_takes_no_partial_sums() -> None:
    model = sharded_by_v2_code(net(), parameter=[Replicate()], gradient=[Partial("avg")])
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer, precision_aware=True)
    with microbatch(model.context, is_last=False):
        model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="got partial sums"):
        optimizer.step()


@on_ranks(4)
def test_ranks_outside_of_a_mesh_build_empty_buffers() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    is_inside = dist.get_rank() < 2
    tensors = [torch.arange(12.0).view(6, 2), torch.arange(4.0)]
    buffer = DBuffer.distribute_tensors(tensors, mesh, [Flat()])
    assert (buffer.local_buffer.numel() > 0) == is_inside

    # The same calls on every rank: ranks outside join no collective and get no rows.
    whole = buffer.redistribute([Replicate()])
    partial = DBuffer.from_local(whole.local_buffer, mesh, [Partial("avg")], whole.layout)
    for found in (
        whole,
        partial.allreduce(0),
        partial.reduce_scatter(0, Flat()).allgather(0),
        whole.scatter(0, Flat()).allgather(0),
        whole.view([Flat()]).cast(torch.float64).cast(torch.float32).allgather(0),
    ):
        for index, tensor in enumerate(tensors):
            local = found.get_local_tensor(index)
            assert torch.equal(local, tensor if is_inside else tensor[:0])
    buffer.release_storage()
    buffer.reallocate_storage()
    assert buffer.get_dtensor(0).shape == (6, 2)
    assert buffer.get_dtensor(0).to_local().shape[1:] == (2,)

    if not is_inside:
        with pytest.raises(RuntimeError, match=r"Expected a rank of .*, got one outside"):
            fully_shard(nn.Linear(2, 2), mesh, Placements([0], *[[Flat()]] * 3))


# PyTorch's FSDP2


def sharded_by_fsdp2_code(fully: Any, model: Net, mesh: Any, **options: Any) -> Net:
    """The lines that most programs have, with either project's `fully_shard`."""
    for layer in model.layers:
        fully(layer, mesh=mesh, **options)
    fully(model, mesh=mesh, **options)
    return model


@on_ranks(2)
def test_a_policy_of_fsdp2_means_the_same() -> None:
    """Dtypes of weights, gradients, inputs and outputs, and the losses."""
    mesh = init_device_mesh("cpu", (2,))
    inner = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    outer = dataclasses.replace(inner, output_dtype=torch.float32)
    models = []
    for fully in (fully_shard, fsdp2.fully_shard):
        models.append(net())
        for layer in models[-1].layers:
            fully(layer, mesh=mesh, mp_policy=inner)
        fully(models[-1], mesh=mesh, mp_policy=outer)

    for model in models:
        out = model(torch.ones(2, 6))
        assert out.dtype == torch.float32
        assert set(model.seen) == {torch.bfloat16}
        out.sum().backward()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        model.zero_grad()
    # No call of fully_shard_optimizer: gradients have the weights' dtype.
    losses = [train(model, torch.optim.AdamW(model.parameters(), lr=0.01)) for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert models[0].seen == models[1].seen


@on_ranks(2)
def test_inputs_are_cast_as_asked_and_ours_casts_nothing() -> None:
    mesh = init_device_mesh("cpu", (2,))
    kept = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    for options in (
        {"mp_policy": kept},
        {"mixed_precision_policy": kept},
        {"mixed_precision_policy": MixedPrecisionPolicy(compute_dtype=torch.bfloat16)},
    ):
        model = sharded_by_fsdp2_code(fully_shard, net(), mesh, **options)
        with pytest.raises(RuntimeError, match="dtype"):
            model(torch.ones(2, 6))
        model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
        assert set(model.seen) >= {torch.bfloat16}

    with pytest.raises(ValueError, match="Expected mixed_precision_policy or mp_policy, got both"):
        fully_shard(nn.Linear(2, 2), mixed_precision_policy=kept, mp_policy=kept)
    with pytest.raises(TypeError, match="Expected a MixedPrecisionPolicy, got dtype"):
        fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16)


@on_ranks(2)
def test_gradients_come_back_through_cast_inputs_and_checkpoints() -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded_by_fsdp2_code(fully_shard, net(), None, mp_policy=policy)
    x = torch.ones(2, 6, requires_grad=True)
    model(x).float().sum().backward()
    expected, x.grad = x.grad, None
    gradients = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
    model.zero_grad()
    for use_reentrant in (True, False):
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=use_reentrant)
        out.float().sum().backward()
        assert x.grad.dtype == torch.float32
        assert torch.equal(x.grad, expected)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad.full_tensor(), gradient)
        x.grad = None
        model.zero_grad()


@on_ranks(2)
def test_wrappers_that_forward_attributes_are_sharded_around_sharded_modules() -> None:
    """As accelerate does it with layers whose activations are checkpointed."""
    plain, wrapped = net(), net()
    for number, layer in enumerate([*wrapped.layers]):
        wrapped.layers[number] = checkpoint_wrapper(fully_shard(layer))
        fully_shard(wrapped.layers[number])
    for model in (plain, wrapped):
        fully_shard(model)
    expected = train(plain, torch.optim.AdamW(plain.parameters()))
    assert train(wrapped, torch.optim.AdamW(wrapped.parameters())) == expected


@on_ranks(2)
def test_none_keeps_the_outermost_modules_weights_alone() -> None:
    model = sharded_by_fsdp2_code(fully_shard, net(), None, reshard_after_forward=None)
    out = model(torch.ones(2, 6))
    assert [module.reshard_after_forward for module in (model, *model.layers)] == [
        False,
        True,
        True,
    ]
    assert [m.parameter_groups[0].is_unsharded for m in (model, *model.layers)] == [
        True,
        False,
        False,
    ]
    out.sum().backward()
    model.set_reshard_after_forward(True)
    model(torch.ones(2, 6))
    assert not model.parameter_groups[0].is_unsharded
    model.set_reshard_after_forward(False, recurse=False)
    assert [m.reshard_after_forward for m in (model, *model.layers)] == [False, True, True]


@on_ranks(2)
def test_gradient_sync_of_fsdp2_gives_the_same_gradients() -> None:
    """Deferred where gradients are partial, summed up where they are not."""
    mesh = init_device_mesh("cpu", (2,))
    gradients = []
    for fully, placements in (
        (fsdp2.fully_shard, {}),
        (fully_shard, {}),
        (fully_shard, {"placements": Placements.for_strategy("optim")}),
    ):
        model = sharded_by_fsdp2_code(fully, net(), mesh, **placements)
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            torch.manual_seed(10 * number + dist.get_rank())
            model(torch.randn(4, 6)).sum().backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


@on_ranks(2)
def test_what_is_not_offered_of_fsdp2_is_one_line_that_says_what_to_write() -> None:
    layer = nn.Linear(2, 2)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"offload_policy": fsdp2.CPUOffloadPolicy()},
            NotImplementedError,
            r"Expected OffloadPolicy\(main_weights_on_host=True\) .* HybridDeviceOptimizer\(",
        ),
        ({"offload_policy": "cpu"}, TypeError, "Expected an OffloadPolicy, got str"),
        (
            {"reshard_after_forward": 2},
            NotImplementedError,
            "Expected reshard_after_forward to be True, False or None, got 2",
        ),
        (
            {"ignored_params": {layer.bias}},
            NotImplementedError,
            "Expected fully_shard without ignored_params, got a set.*in a module outside",
        ),
        (
            {"shard_placement_fn": lambda _: Shard(1)},
            NotImplementedError,
            "Expected fully_shard without shard_placement_fn",
        ),
        ({"ignore_params": {layer.bias}}, TypeError, "unexpected keyword argument 'ignore_params'"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message) as caught:
            fully_shard(layer, **options)
        assert "\n" not in str(caught.value)

    # The errors have left the layer unchanged, and arguments without effect are accepted.
    sharded = fully_shard(layer, offload_policy=fsdp2.OffloadPolicy(), ignored_params=None)
    assert not sharded.parameter_groups[0].is_on_host
    on_host = fully_shard(nn.Linear(2, 2), offload_policy=OffloadPolicy(main_weights_on_host=True))
    assert on_host.parameter_groups[0].is_on_host
