"""`HybridDeviceOptimizer` over gradients that are not in `.grad`: read where it is told to, and
never passed over.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.state_tensors import like
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import Net, backward, fsdp, same

BF16 = torch.bfloat16
FRACTIONS = (0.0, 0.5, 1.0)
OVERLAPS = {"fetch_during_backward": True, "overlap_step_with_forward": True}


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in (30, 40, 50)]


def train(
    optimizer: torch.optim.Optimizer,
    owned: list[nn.Parameter],
    dtype: torch.dtype,
    attribute: str,
) -> list[torch.Tensor]:
    """Returns the weights after three steps with the same gradients."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in owned:
            values = torch.randn(local_tensor(parameter).shape, generator=generator).to(dtype)
            setattr(parameter, attribute, like(parameter, values))
        optimizer.step()
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize()
    return [local_tensor(parameter).detach().clone() for parameter in owned]


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("grad_dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, BF16])
def test_decoupled_gradients_of_any_dtype_give_the_bits_of_fused_adam(
    weight_dtype, grad_dtype, in_fp32
):
    options = {"lr": 0.01, "use_decoupled_grad": True}
    owned = parameters(weight_dtype)
    expected = train(
        FusedAdam(owned, master_weights=in_fp32, **options), owned, grad_dtype, "decoupled_grad"
    )
    assert not same(expected, [p.detach() for p in parameters(weight_dtype)])

    for fraction in FRACTIONS:
        owned = parameters(weight_dtype)
        hybrid = HybridDeviceOptimizer(owned, fraction, param_update_in_fp32=in_fp32, **options)
        for parameter in owned:
            parameter.grad = torch.full_like(parameter, 1e3)  # is not read
        assert same(train(hybrid, owned, grad_dtype, "decoupled_grad"), expected), fraction


@on_ranks(2)
def test_decoupled_gradients_of_fsdp_groups_are_read_and_the_engines_are_not() -> None:
    model = Net()
    fsdp(model)
    owned = list(model.parameters())
    expected = train(FusedAdam(owned, lr=0.01), owned, torch.float32, "grad")
    for fraction in FRACTIONS:
        model = Net()
        fsdp(model)
        owned = list(model.parameters())
        hybrid = HybridDeviceOptimizer(
            owned, fraction, lr=0.01, use_decoupled_grad=True, **OVERLAPS
        )
        # Gradients of the engine are in flight as well.
        backward(model)
        assert all(parameter.grad is not None for parameter in owned)
        assert same(train(hybrid, owned, torch.float32, "decoupled_grad"), expected), fraction

        owned[-1].decoupled_grad = like(owned[-1], local_tensor(owned[-1]).detach().to(BF16))
        if fraction:
            with pytest.raises(
                ValueError, match=r"Expected a gradient of torch\.float32 .* got torch\.bfloat16"
            ):
                hybrid.step()


MAKE = {"FusedAdam": FusedAdam, "half": partial(HybridDeviceOptimizer, offload_fraction=0.5)}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize(
    ("use_decoupled_grad", "attribute"),
    [(False, "decoupled_grad"), (False, "main_grad"), (True, "grad"), (True, "main_grad")],
)
def test_a_gradient_that_is_not_read_is_rejected_before_anything_is_stepped(
    make, use_decoupled_grad, attribute
):
    read = "decoupled_grad" if use_decoupled_grad else "grad"
    for other in range(3):
        owned = parameters()
        before = copy.deepcopy(owned)
        hybrid = make(owned, use_decoupled_grad=use_decoupled_grad)
        hybrid.init_state()
        for index, parameter in enumerate(owned):
            name = attribute if index == other else read
            setattr(parameter, name, torch.ones_like(parameter))
        with pytest.raises(ValueError, match=rf"in \.{read}, .* got one in \.{attribute} alone"):
            hybrid.step()
        assert same([p.detach() for p in owned], [p.detach() for p in before])
        assert {float(state["step"]) for state in hybrid.state.values()} == {0.0}

        # Without any gradient, it is left alone as ever.
        setattr(owned[other], attribute, None)
        hybrid.step()
        moved = [not torch.equal(*pair) for pair in zip(owned, before, strict=True)]
        assert moved == [index != other for index in range(3)]


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("use_decoupled_grad", [False, True])
def test_zero_grad_clears_what_step_reads(use_decoupled_grad, make):
    owned = parameters()
    hybrid = make(owned, use_decoupled_grad=use_decoupled_grad)
    names = ("grad", "decoupled_grad")
    for parameter in owned:
        for name in names:
            setattr(parameter, name, torch.ones_like(parameter))
    read, other = reversed(names) if use_decoupled_grad else names
    kept = [getattr(parameter, read) for parameter in owned]

    hybrid.zero_grad(set_to_none=False)
    assert all(getattr(p, read) is tensor for p, tensor in zip(owned, kept, strict=True))
    assert not any(tensor.any() for tensor in kept)
    hybrid.zero_grad()
    assert all(getattr(parameter, read) is None for parameter in owned)
    assert all(getattr(parameter, other).all() for parameter in owned)


def test_fused_adam_zeroes_gradients_where_set_grad_none_is_false():
    (owned, *_) = parameters()
    optimizer = FusedAdam([owned], set_grad_none=False)
    owned.grad = kept = torch.ones_like(owned)
    optimizer.zero_grad()
    assert owned.grad is kept
    assert not kept.any()
    optimizer.zero_grad(True)
    assert owned.grad is None


def test_optimizers_that_cannot_read_decoupled_gradients_reject_them():
    classes: list[tuple[Any, Any]] = [(torch.optim.SGD, None), (None, torch.optim.SGD)]
    for host, device in classes:
        with pytest.raises(NotImplementedError, match=r"on both sides .* SGD"):
            HybridDeviceOptimizer(
                parameters(), 0.5, host, device, lr=0.1, weight_decay=0.0, use_decoupled_grad=True
            )
    for optimizer in (
        FusedAdam(parameters(), use_decoupled_grad=True),
        HybridDeviceOptimizer(parameters(), 1.0, use_decoupled_grad=True),
    ):
        # Its norm would be zero, which disables clipping.
        with pytest.raises(
            NotImplementedError, match=r"Expected an optimizer of \.grad, got use_decoupled_grad"
        ):
            DistributedOptimizer(optimizer, clip_grad=1.0)
