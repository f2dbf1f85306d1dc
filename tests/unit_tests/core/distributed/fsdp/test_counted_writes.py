"""Every operator that writes to a sharded or replicated DTensor moves its version counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.placement import Flat
from megatron.core.distributed.fsdp.replica import ReplicaDTensor
from megatron.core.distributed.fsdp.uneven_dtensor import UnevenDTensor
from megatron.core.dtensors import local_tensor
from tests.helpers.ranks import on_ranks

KINDS: dict[str, tuple[Any, type[DTensor]]] = {
    "sharded": (Flat(), UnevenDTensor),
    "replicated": (Replicate(), ReplicaDTensor),
}


def unscale(tensors: list[Any]) -> None:
    scale = torch.tensor([0.5])
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, torch.zeros(1), scale)


def fused(name: str, num_states: int, **options: Any) -> Callable[[list[Any]], None]:
    """A fused optimizer's kernel that steps the tensors, with other tensors as gradients."""

    def step(tensors: list[Any]) -> None:
        lists = [[torch.ones_like(tensor) for tensor in tensors] for _ in range(num_states + 1)]
        getattr(torch, name)(tensors, *lists, **options)

    return step


def adam(name: str) -> Callable[[list[Any]], None]:
    def step(tensors: list[Any]) -> None:
        options = {"beta1": 0.9, "beta2": 0.99, "lr": 0.1, "eps": 1e-8, "weight_decay": 0.1}
        steps = [torch.ones(()) for _ in tensors]
        fused(
            name, 2, max_exp_avg_sqs=[], state_steps=steps, amsgrad=False, maximize=False, **options
        )(tensors)

    return step


WRITES: dict[str, Callable[[list[Any]], object]] = {
    # One at a time
    "mul_": lambda t: [each.mul_(0.5) for each in t],
    "copy_": lambda t: [each.copy_(torch.full_like(each, 7)) for each in t],
    "copy_ of a whole tensor": lambda t: (
        [each.copy_(torch.full(each.shape, 7.0)) for each in t if isinstance(each, UnevenDTensor)]
        or [each.fill_(7) for each in t]
    ),
    "zero_": lambda t: [each.zero_() for each in t],
    "uniform_": lambda t: [each.uniform_(3, 4) for each in t],
    "masked_fill_": lambda t: [each.masked_fill_(each > 0, 9.0) for each in t],
    "cumsum_, which gathers": lambda t: [each.cumsum_(0).add_(1) for each in t],
    "out=": lambda t: [torch.add(each, 1, out=each) for each in t],
    "slices": lambda t: [each[:].mul_(0.5) for each in t],
    "views": lambda t: [each.view(len(each), -1).mul_(0.5) for each in t],
    "detach": lambda t: [each.detach().mul_(0.5) for each in t],
    "to_local": lambda t: [each.to_local().mul_(0.5) for each in t],
    # Lists
    "_foreach_mul_ by a number": lambda t: torch._foreach_mul_(t, 0.5),
    "_foreach_mul_ by numbers": lambda t: torch._foreach_mul_(t, [0.5] * len(t)),
    "_foreach_mul_ by a tensor": lambda t: torch._foreach_mul_(t, torch.tensor(0.5)),
    "_foreach_mul_ by tensors": lambda t: torch._foreach_mul_(t, [each * 3 for each in t]),
    "_foreach_add_": lambda t: torch._foreach_add_(t, 1.0),
    "_foreach_addcdiv_": lambda t: torch._foreach_addcdiv_(t, t, [each + 9 for each in t], 0.5),
    "_foreach_lerp_": lambda t: torch._foreach_lerp_(t, [each * 3 for each in t], 0.5),
    "_foreach_clamp_max_": lambda t: torch._foreach_clamp_max_(t, -5.0),
    "_foreach_copy_": lambda t: torch._foreach_copy_(t, [each * 3 for each in t]),
    "_foreach_zero_": lambda t: torch._foreach_zero_(t),
    "_foreach_neg_": lambda t: torch._foreach_neg_(t),
    "_foreach_mul_ on to_local": lambda t: torch._foreach_mul_([e.to_local() for e in t], 0.5),
    # Kernels of optimizers and scalers
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
    "_fused_adam_": adam("_fused_adam_"),
    "_fused_adamw_": adam("_fused_adamw_"),
    "_fused_sgd_": fused(
        "_fused_sgd_",
        1,
        weight_decay=0.0,
        momentum=0.9,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    ),
}


def tensors_of(kind: str) -> list[DTensor]:
    placement, cls = KINDS[kind]
    wholes = [torch.full((4, 3), 2.0), torch.full((6,), 3.0)]
    buffer = DBuffer.distribute_tensors(wholes, init_device_mesh("cpu", (1,)), [placement])
    tensors = [buffer.get_dtensor(index) for index in range(len(wholes))]
    assert all(isinstance(tensor, cls) for tensor in tensors)
    return tensors


def versions(tensors: list[DTensor]) -> list[int]:
    return [tensor._version + local_tensor(tensor)._version for tensor in tensors]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_every_write_counts(kind: str) -> None:
    missed = []
    for name, write in WRITES.items():
        for is_parameter in (False, True):
            tensors: list[Any] = tensors_of(kind)
            if is_parameter:
                tensors = [nn.Parameter(tensor) for tensor in tensors]
            before = versions(tensors), [local_tensor(tensor).clone() for tensor in tensors]
            try:
                with torch.no_grad():
                    write(tensors)
            except NotImplementedError:
                # PyTorch's operators, which replicas use, lack a few.
                assert kind == "replicated"
                continue
            for tensor, old in zip(tensors, before[1], strict=True):
                assert not torch.equal(local_tensor(tensor), old), f"{name} has written nothing"
            moved = [now > then for now, then in zip(versions(tensors), before[0], strict=True)]
            if not all(moved):
                missed.append((name, is_parameter))
    assert not missed


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1)
def test_reading_does_not_count(kind: str) -> None:
    tensors = tensors_of(kind)
    before = versions(tensors)
    torch._foreach_norm(tensors)
    torch._foreach_add(tensors, 1.0)
    nn.utils.get_total_norm(tensors)
    for tensor in tensors:
        tensor.full_tensor()
        torch.add(tensor, 1).mul_(2)
    assert versions(tensors) == before
