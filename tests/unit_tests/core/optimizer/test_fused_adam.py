"""FusedAdam on plain parameters: arithmetic, gradients that come and go, masters, narrow states."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from megatron.core.optimizer.fused_adam import FusedAdam
from tests.unit_tests.core.optimizer.helpers.adam_runs import (
    BF16,
    F8,
    F16,
    F32,
    generator,
    gradient,
    parameters,
    train,
)

# Arithmetic


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fifty_steps_are_bit_equal_to_the_fused_step_of_torch(adam_w_mode, weight_decay):
    # Multiples of 16 elements: torch rounds a tensor's scalar tail differently.
    ours, theirs = (parameters((64, 48), (16,), (3, 32)) for _ in range(2))
    start = copy.deepcopy(ours)
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": weight_decay}
    optimizer = FusedAdam(ours, adam_w_mode=adam_w_mode, **options)
    torch_class = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    reference = torch_class(theirs, fused=True, **options)
    train(optimizer, ours, 0, 50)
    train(reference, theirs, 0, 50)
    for own, their, before in zip(ours, theirs, start, strict=True):
        assert torch.equal(own, their)
        assert not torch.equal(own, before)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[own][name], reference.state[their][name])


def test_of_other_lengths_only_the_end_may_differ_from_the_fused_step_of_torch():
    ours, theirs = (parameters((64 * 5 + 7,), (64 + 3,), (5,)) for _ in range(2))
    train(FusedAdam(ours, lr=1e-2), ours, 0, 50)
    train(torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.0, fused=True), theirs, 0, 50)
    for own, their in zip(ours, theirs, strict=True):
        whole = own.numel() // 64 * 64
        assert torch.equal(own[:whole], their[:whole])
        torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-6)


def test_without_bias_correction_the_first_step_is_not_corrected():
    (own,) = parameters((1, 64))
    before = own.detach().clone()
    own.grad = torch.ones_like(own)
    FusedAdam([own], lr=0.1, betas=(0.9, 0.99), bias_correction=False).step()
    torch.testing.assert_close(own.detach(), before - 0.1 * 0.1 / (math.sqrt(0.01) + 1e-8))


def test_groups_have_constants_of_their_own_and_lr_may_be_a_tensor():
    ours, theirs = (parameters((64,), (64,), (64,)) for _ in range(2))
    groups = [{"lr": torch.tensor(0.5)}, {"betas": (0.5, 0.9), "eps": 1e-3}, {"weight_decay": 0.3}]
    optimizers = [
        FusedAdam(
            [{"params": [p], **group} for p, group in zip(ours, groups, strict=True)], lr=0.1
        ),
        torch.optim.AdamW(
            [
                {"params": [p], "weight_decay": 0.0, **group}
                for p, group in zip(theirs, groups, strict=True)
            ],
            lr=0.1,
            fused=True,
        ),
    ]
    for optimizer, owned in zip(optimizers, (ours, theirs), strict=True):
        train(optimizer, owned, 0, 3)
    assert all(torch.equal(own, their) for own, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [BF16, F16, torch.float64])
@pytest.mark.parametrize("has_masters", [True, False])
def test_gradients_may_have_any_floating_dtype(dtype, has_masters):
    weight_dtype = BF16 if has_masters else F32
    own, other = (parameters((5, 7), dtype=weight_dtype)[0] for _ in range(2))
    optimizers = [
        FusedAdam([p], master_weights=has_masters, use_decoupled_grad=True) for p in (own, other)
    ]
    own.decoupled_grad = gradient(0, 0, own, dtype)
    other.decoupled_grad = own.decoupled_grad.float()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(own, other)
    assert not torch.equal(own, parameters((5, 7), dtype=weight_dtype)[0])


@pytest.mark.parametrize("view", ["transposed", "strided"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_parameters_that_are_not_contiguous_step_as_contiguous_ones(view, dtype):
    values = torch.randn(8, 6, generator=generator(0)).to(dtype)
    big = torch.zeros(8, 9, dtype=dtype)
    odd = nn.Parameter(values.t().contiguous().t() if view == "transposed" else big[:, 1:7])
    with torch.no_grad():
        odd.copy_(values)
    even = nn.Parameter(values.clone())
    assert not odd.is_contiguous()
    for parameter in (odd, even):
        train(FusedAdam([parameter], weight_decay=0.1, master_weights=True), [parameter], 0, 3)
    assert torch.equal(odd, even)
    assert not torch.equal(odd, values)
    assert (big[:, 0] == 0).all()
    assert (big[:, 7:] == 0).all()


def test_a_closure_is_run_with_gradients_and_its_result_returned():
    (own,) = parameters((4,))
    before = own.detach().clone()
    optimizer = FusedAdam([own])

    def closure() -> float:
        optimizer.zero_grad()
        loss = own.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == pytest.approx(float(before.square().sum()))
    assert not torch.equal(own, before)


def test_autograd_detects_that_a_step_changed_a_saved_weight():
    (own,) = parameters((4,))
    optimizer = FusedAdam([own])
    loss = own.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Gradients that come and go


def test_a_parameter_without_a_gradient_is_not_stepped_and_does_not_count():
    ours, theirs = (parameters((64,), (64,)) for _ in range(2))
    optimizers = [
        FusedAdam(ours, lr=0.1),
        torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.0, fused=True),
    ]
    present = [(0, 1), (0,), (1,), (), (0, 1)]
    for optimizer, owned in zip(optimizers, (ours, theirs), strict=True):
        for number, having in enumerate(present):
            for index, parameter in enumerate(owned):
                parameter.grad = gradient(index, number, parameter) if index in having else None
            before = copy.deepcopy(owned)
            optimizer.step()
            assert [torch.equal(old, new) for old, new in zip(before, owned, strict=True)] == [
                index not in having for index in range(2)
            ]
    assert [optimizers[0].state[parameter]["step"].item() for parameter in ours] == [3, 3]
    assert all(torch.equal(own, their) for own, their in zip(ours, theirs, strict=True))


def test_steps_allocate_no_states_of_frozen_parameters_until_they_are_thawed():
    owned = parameters((4,), (4,))
    owned[1].requires_grad_(False)
    optimizer = FusedAdam(owned)
    owned[0].grad = torch.ones(4)
    optimizer.step()
    assert owned[1] not in optimizer.state
    owned[1].requires_grad_(True)
    train(optimizer, owned, 0, 1)
    assert optimizer.state[owned[1]]["step"] == 1


# Masters and remainders


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_master_weights_take_the_steps_of_an_fp32_parameter_and_the_parameter_their_rounding(dtype):
    (own,) = parameters((5, 13), dtype=dtype)
    other = nn.Parameter(own.detach().float())
    optimizer = FusedAdam([own], lr=1e-4, master_weights=True, use_decoupled_grad=True)
    reference = FusedAdam([other], lr=1e-4)
    for number in range(20):
        own.decoupled_grad = other.grad = gradient(0, number, other)
        optimizer.step()
        reference.step()
    assert torch.equal(optimizer.state[own]["master_param"], other)
    assert torch.equal(own, other.to(dtype))
    assert not torch.equal(own.float(), other)


def test_fp32_parameters_have_no_masters():
    (own,) = parameters((4,))
    optimizer = FusedAdam([own], master_weights=True)
    optimizer.init_state()
    assert list(optimizer.state[own]) == ["step", "exp_avg", "exp_avg_sq"]


def test_remainders_keep_the_fp32_weights_exactly():
    own, full = (parameters((7, 11), dtype=BF16)[0] for _ in range(2))
    optimizers = [
        FusedAdam([p], lr=1e-3, master_weights=True, store_param_remainders=p is own)
        for p in (own, full)
    ]
    for number in range(20):
        for optimizer, parameter in zip(optimizers, (own, full), strict=True):
            train(optimizer, [parameter], number, number + 1)
        remainder, master = (
            o.state[p]["master_param"] for o, p in zip(optimizers, (own, full), strict=True)
        )
        assert remainder.dtype == torch.int16
        high = own.detach().view(torch.int16).to(torch.int32) << 16
        assert torch.equal((high + remainder).view(F32), master)
    assert (remainder != 0).any()
    # fp16 parameters have whole masters instead of remainders.
    (half,) = parameters((4,), dtype=F16)
    optimizer = FusedAdam([half], master_weights=True, store_param_remainders=True)
    optimizer.init_state()
    assert optimizer.state[half]["master_param"].dtype == F32


# Narrow states


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}, 0.02),
        ({"exp_avg_dtype": F16, "exp_avg_sq_dtype": F16}, 0.01),
        ({"exp_avg_dtype": BF16}, 0.02),
        ({"exp_avg_dtype": F8, "exp_avg_sq_dtype": F16}, 0.1),
        ({"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}, 0.2),
    ],
    ids=str,
)
def test_steps_with_narrow_moments_stay_close_to_those_in_fp32(options, tolerance):
    ours, theirs = (parameters((32, 33), (5,)) for _ in range(2))
    start = copy.deepcopy(ours)
    optimizer = FusedAdam(ours, **options)
    train(optimizer, ours, 0, 30)
    train(FusedAdam(theirs), theirs, 0, 30)
    for own, their, before in zip(ours, theirs, start, strict=True):
        error = (own - their).norm() / (their - before).norm()
        assert 0 < error < tolerance
        wanted = {torch.uint8: F8}
        for name in ("exp_avg", "exp_avg_sq"):
            dtype = options.get(f"{name}_dtype", F32)
            assert optimizer.state[own][name].dtype == wanted.get(dtype, dtype)


def test_masters_in_fp16_have_a_scale():
    (own,) = parameters((64,), dtype=BF16)
    with torch.no_grad():
        own.mul_(1e6)  # beyond the range of fp16
    before = own.detach().float()
    optimizer = FusedAdam([own], lr=1e3, master_weights=True, master_weight_dtype=F16)
    train(optimizer, [own], 0, 2)
    assert optimizer.state[own]["master_param"].dtype == F16
    master = optimizer.get_unscaled_state(own, "master_param")
    torch.testing.assert_close(master, own.detach().float(), rtol=2**-8, atol=0)
    assert not torch.equal(master, before)


@pytest.mark.parametrize("dtype", [F16, F8])
@pytest.mark.parametrize("factor", [1e-38, 1.0, 1e38])
def test_a_scaled_state_is_as_precise_as_its_format_whatever_its_range(dtype, factor):
    (own,) = parameters((1000,))
    optimizer = FusedAdam([own], exp_avg_dtype=dtype)
    values = torch.rand(1000, generator=generator(5)).add(0.5) * factor
    kept = values.clone()
    optimizer.set_scaled_state(own, "exp_avg", values)
    assert torch.equal(values, kept)
    stored = optimizer.get_unscaled_state(own, "exp_avg")
    torch.testing.assert_close(stored, values, rtol=2.0 ** (-11 if dtype == F16 else -4), atol=0)
    # Storing the values again is lossless.
    optimizer.set_scaled_state(own, "exp_avg", stored)
    assert torch.equal(optimizer.get_unscaled_state(own, "exp_avg"), stored)


def test_scaled_states_refuse_what_they_cannot_hold():
    (own,) = parameters((4,))
    optimizer = FusedAdam([own], exp_avg_dtype=F8)
    with pytest.raises(
        ValueError, match=r"Expected one of \['exp_avg', 'exp_avg_sq'\], got 'master_param'"
    ):
        optimizer.set_scaled_state(own, "master_param", torch.zeros(4))
    with pytest.raises(ValueError, match=r"Expected exp_avg in torch.float32, got torch.bfloat16"):
        optimizer.set_scaled_state(own, "exp_avg", torch.zeros(4, dtype=BF16))
    with pytest.raises(
        ValueError, match=r"Expected exp_avg with shape \(4,\) as its parameter has, got \(3,\)"
    ):
        optimizer.set_scaled_state(own, "exp_avg", torch.zeros(3))
    assert not optimizer.state


MASTERS_AS_REMAINDERS = {"master_weights": True, "store_param_remainders": True}


@pytest.mark.parametrize(("before", "after"), [(F32, BF16), (BF16, F32)])
def test_a_model_that_is_cast_after_a_step_continues_or_raises_what_to_do(before, after):
    """As precision plugins do that convert the module, with `.to(dtype)`, after the optimizer was
    made.
    """
    torch.manual_seed(0)
    for options in ({}, {"master_weights": True}, MASTERS_AS_REMAINDERS):
        model = torch.nn.Linear(5, 3).to(before)
        expected = copy.deepcopy(model)
        optimizer = FusedAdam(model.parameters(), lr=0.1, **options)
        model.to(after)
        _steps(model, optimizer)  # a cast without states is free
        expected.to(after)
        _steps(expected, FusedAdam(expected.parameters(), lr=0.1, **options))
        assert torch.equal(model.weight, expected.weight)

        model.to(before)
        if options == {} or (options == {"master_weights": True} and before == F32):
            _steps(model, optimizer)
            continue
        old = model.weight.detach().clone()
        with pytest.raises(RuntimeError, match=f"{before}.*Cast the model before"):
            _steps(model, optimizer)
        assert torch.equal(model.weight, old)


def _steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 5, dtype=model.weight.dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
