from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Iterator
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
from megatron.core.optimizer.state_tensors import like
from tests.helpers.ranks import on_ranks, run_ranks

F32, BF16, F16, F8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
DIM = 6


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(
        sum(1000**place * number for place, number in enumerate(seed, 1))
    )


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = F32) -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.randn(shape, generator=generator(index)).to(dtype))
        for index, shape in enumerate(shapes)
    ]


def gradient(index: int, number: int, like: torch.Tensor, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator(index, number)).to(dtype)


def train(
    optimizer: torch.optim.Optimizer,
    owned: list[nn.Parameter],
    first: int,
    last: int,
    **options: Any,
) -> None:
    """Steps number `first` up to, not including, `last`, with gradients of the parameters'
    dtype.
    """
    for number in range(first, last):
        for index, parameter in enumerate(owned):
            parameter.grad = gradient(index, number, parameter, parameter.dtype)
        optimizer.step(**options)


def plain(value: Any) -> Any:
    """A copy of nested states, with local tensors as bytes: equal values are equal bits."""
    if isinstance(value, torch.Tensor):
        local = local_tensor(value).detach().contiguous().clone()
        return (str(value.dtype), tuple(value.shape), local.reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def snapshot(optimizer: torch.optim.Optimizer) -> Any:
    """Everything an optimizer has, parameters included."""
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return plain(
        [[parameter, dict(optimizer.state.get(parameter, {}))] for parameter in owned]
    ), plain(options)


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


def test_gradients_are_scaled_as_they_are_read():
    ours, theirs = (parameters((64,)) for _ in range(2))
    train(FusedAdam(ours), ours, 0, 3, grad_scale=0.25)
    optimizer = FusedAdam(theirs)
    for number in range(3):
        theirs[0].grad = gradient(0, number, theirs[0]) * 0.25
        optimizer.step()
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[0].grad, gradient(0, 2, ours[0]))


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


def test_autograd_notices_that_a_step_has_changed_a_saved_weight():
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


def test_frozen_parameters_have_no_states_until_they_are_thawed():
    owned = parameters((4,), (4,))
    owned[1].requires_grad_(False)
    optimizer = FusedAdam(owned)
    optimizer.init_state()
    assert owned[1] not in optimizer.state
    owned[1].requires_grad_(True)
    train(optimizer, owned, 0, 1)
    assert optimizer.state[owned[1]]["step"] == 1


@pytest.mark.parametrize("decoupled", [True, False])
def test_zero_grad_clears_what_step_reads(decoupled):
    name = "decoupled_grad" if decoupled else "grad"
    (own,) = parameters((4,))
    for set_grad_none, argument in ((True, None), (None, None), (False, True)):
        optimizer = FusedAdam([own], use_decoupled_grad=decoupled, set_grad_none=set_grad_none)
        setattr(own, name, torch.ones_like(own))
        optimizer.zero_grad() if argument is None else optimizer.zero_grad(argument)
        assert getattr(own, name) is None
    kept = torch.ones_like(own)
    setattr(own, name, kept)
    optimizer.zero_grad()
    assert getattr(own, name) is kept
    assert (kept == 0).all()


@pytest.mark.parametrize(
    ("use_decoupled_grad", "attribute"),
    [(False, "decoupled_grad"), (False, "main_grad"), (True, "grad"), (True, "main_grad")],
)
def test_a_gradient_that_is_not_read_is_refused_before_anything_is_stepped(
    use_decoupled_grad, attribute
):
    owned = parameters((4,), (5,))
    optimizer = FusedAdam(owned, use_decoupled_grad=use_decoupled_grad)
    read = "decoupled_grad" if use_decoupled_grad else "grad"
    setattr(owned[0], read, torch.ones_like(owned[0]))
    setattr(owned[1], attribute, torch.ones_like(owned[1]))
    before = snapshot(optimizer)[0][0][0]
    with pytest.raises(
        ValueError, match=rf"parameter 1 of group 0 in \.{read}, .* got one in \.{attribute} alone"
    ):
        optimizer.step()
    assert snapshot(optimizer)[0][0][0] == before
    setattr(owned[1], attribute, None)
    optimizer.step()
    assert snapshot(optimizer)[0][0][0] != before


def test_a_decoupled_gradient_is_read_and_the_usual_one_is_not():
    own, other = (parameters((8,))[0] for _ in range(2))
    own.grad, own.decoupled_grad = torch.full_like(own, 1e6), gradient(0, 0, own)
    other.grad = gradient(0, 0, own)
    FusedAdam([own], use_decoupled_grad=True).step()
    FusedAdam([other]).step()
    assert torch.equal(own, other)


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
    # Those of fp16 parameters do not exist: their masters are whole.
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
    # Stored again, the values lose nothing more.
    optimizer.set_scaled_state(own, "exp_avg", stored)
    assert torch.equal(optimizer.get_unscaled_state(own, "exp_avg"), stored)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_in_a_scaled_state_stays_so(value):
    (own,) = parameters((4,))
    optimizer = FusedAdam([own], exp_avg_dtype=F8, exp_avg_sq_dtype=F16)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.set_scaled_state(own, name, torch.tensor([1.0, value, 0.0, 2.0]))
        assert optimizer.get_unscaled_state(own, name).isfinite().tolist() == [
            True,
            False,
            True,
            True,
        ]


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


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"amsgrad": True}, NotImplementedError, "Expected amsgrad=False, got True"),
        ({"capturable": True}, NotImplementedError, "Expected capturable=False, got True"),
        (
            {"store_param_remainders": True},
            ValueError,
            "with master_weights=True in torch.float32, got master_weights=",
        ),
        (
            {"exp_avg_dtype": torch.float64},
            ValueError,
            "Expected exp_avg_dtype to be one of .* got torch.float64",
        ),
        (
            {"master_weight_dtype": BF16},
            ValueError,
            "Expected master_weight_dtype to be one of .* got torch.bfloat16",
        ),
        ({"lr": -1.0}, ValueError, "Expected lr of at least 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, r"Expected betas in \[0, 1\), got \(0.9, 1.0\)"),
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        FusedAdam(parameters((4,)), **options)


def test_a_parameter_of_another_dtype_is_refused_and_not_kept():
    optimizer = FusedAdam(parameters((4,)))
    with pytest.raises(ValueError, match=r"Expected parameters of .*, got torch.float64 at 0"):
        optimizer.add_param_group({"params": parameters((4,), dtype=torch.float64)})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda p, _: setattr(p, "decoupled_grad", torch.zeros(3)),
            r"gradient of parameter 1 of group 0 with shape",
        ),
        (
            lambda p, _: setattr(p, "decoupled_grad", torch.zeros(4).to_sparse()),
            "Expected a dense floating-point gradient of parameter 1 of group 0, got "
            "torch.sparse_coo",
        ),
        (
            lambda p, _: setattr(p, "decoupled_grad", torch.zeros(4, dtype=torch.int32)),
            "got torch.strided torch.int32",
        ),
        (
            lambda p, _: setattr(p, "decoupled_grad", torch.zeros(4, device="meta")),
            "on cpu, got meta",
        ),
        (
            lambda _, state: state.update(exp_avg=torch.zeros(5)),
            r"exp_avg of parameter 1 .* shape \(4,\) .* got \(5,\)",
        ),
        (
            lambda _, state: state.update(exp_avg_sq=torch.zeros(4, dtype=BF16)),
            "in torch.float32, got torch.bfloat16",
        ),
    ],
)
def test_no_parameter_is_stepped_when_one_cannot_be(spoil, message):
    owned = parameters((4,), (4,))
    optimizer = FusedAdam(owned, use_decoupled_grad=True)
    for parameter in owned:
        parameter.decoupled_grad = torch.ones(4)
    optimizer.step()
    spoil(owned[1], optimizer.state[owned[1]])
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert snapshot(optimizer) == before


# State dicts


ALL_OPTIONS = [
    {},
    {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    {"exp_avg_dtype": F8, "exp_avg_sq_dtype": F16},
    {"master_weights": True},
    {"master_weights": True, "store_param_remainders": True},
    {"master_weights": True, "master_weight_dtype": F16, "exp_avg_dtype": F16},
]


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_a_loaded_state_dict_gives_the_bits_back_and_goes_on_alike(options):
    ours, theirs = (parameters((16, 5), (3,), dtype=BF16) for _ in range(2))
    optimizer, fresh = (
        FusedAdam(ours, lr=0.1, **options),
        FusedAdam(theirs, lr=0.2, weight_decay=0.3, **options),
    )
    train(optimizer, ours, 0, 3)
    for own, their in zip(ours, theirs, strict=True):
        their.data.copy_(own.data)
    fresh.init_state()
    storages = [tensor.data_ptr() for state in fresh.state.values() for tensor in state.values()]
    saved = copy.deepcopy(optimizer.state_dict())
    before = plain(saved)
    fresh.load_state_dict(saved)
    assert plain(saved) == before
    assert [
        tensor.data_ptr() for state in fresh.state.values() for tensor in state.values()
    ] == storages
    values = [
        plain(
            [o.get_unscaled_state(p, name) for p in owned for name in o.state[p] if name != "step"]
        )
        for o, owned in ((optimizer, ours), (fresh, theirs))
    ]
    assert values[0] == values[1]
    assert fresh.param_groups[0]["lr"] == 0.1
    assert fresh.param_groups[0]["weight_decay"] == 0.0
    train(optimizer, ours, 3, 6)
    train(fresh, theirs, 3, 6)
    assert all(torch.equal(own, their) for own, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_a_state_dict_holds_fp32_values_of_scaled_states_and_leaves_the_states_as_they_are(options):
    owned = parameters((16, 5), dtype=BF16)
    optimizer = FusedAdam(owned, **options)
    train(optimizer, owned, 0, 2)
    before = snapshot(optimizer)
    tensors = dict(optimizer.state[owned[0]])
    state = optimizer.state_dict()["state"][0]
    assert snapshot(optimizer) == before
    assert all(optimizer.state[owned[0]][name] is tensor for name, tensor in tensors.items())
    for name, own in tensors.items():
        if own.dtype in (F16, F8):
            assert state[name].dtype == F32
            state[name].zero_()
        else:
            assert state[name] is own
    state.clear()
    assert snapshot(optimizer) == before


def _rename(state: dict[str, Any]) -> None:
    state["exp_average"] = state.pop("exp_avg")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: d["state"][1].update(exp_avg=torch.zeros(3, dtype=BF16)),
            "exp_avg of parameter 1 in torch.float32",
        ),
        (
            lambda d: d["state"][1].update(exp_avg=torch.zeros(4)),
            r"with shape \(3,\) as its parameter has, got \(4,\)",
        ),
        (
            lambda d: d["state"][1].pop("exp_avg_sq"),
            r"Expected states \['exp_avg', .* got \['exp_avg', 'step'\]",
        ),
        (lambda d: _rename(d["state"][1]), r"got \['exp_average', 'exp_avg_sq', 'step'\]"),
        (
            lambda d: d["state"][1].update(step=0.5),
            "Expected a number of steps of parameter 1, got 0.5",
        ),
        (
            lambda d: d["state"][1].update(exp_avg=[0.0] * 3),
            "exp_avg of parameter 1 to be a tensor, got list",
        ),
        (
            lambda d: d["state"].update({2: {}}),
            r"states of parameters that are in a group, got some of \[2\]",
        ),
        (
            lambda d: d["param_groups"][0]["params"].pop(),
            r"Expected groups of \[2\] parameters, got \[1\]",
        ),
        (
            lambda d: d["param_groups"].append({"params": []}),
            r"Expected groups of \[2\] parameters, got \[2, 0\]",
        ),
    ],
)
@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_state_dict_that_does_not_fit_is_refused_and_nothing_is_changed(spoil, message, is_fresh):
    ours, theirs = (parameters((16, 5), (3,)) for _ in range(2))
    optimizer, other = FusedAdam(ours, lr=0.1), FusedAdam(theirs, lr=0.2)
    train(optimizer, ours, 0, 2)
    if not is_fresh:
        train(other, theirs, 0, 1)
    before = snapshot(other)
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)
    assert snapshot(other) == before
    assert len(other.state) == (0 if is_fresh else 2)


def test_state_dicts_of_torch_adamw_and_of_transformer_engine_are_understood():
    ours, theirs = (parameters((16, 4), (16,)) for _ in range(2))
    reference = torch.optim.AdamW(theirs, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, fused=True)
    train(reference, theirs, 0, 3)
    per_parameter = copy.deepcopy(reference.state_dict())
    per_group = copy.deepcopy(per_parameter)
    per_group["param_groups"][0]["step"] = 3
    for state in per_group["state"].values():
        del state["step"]
    train(reference, theirs, 3, 5)
    weights = parameters((16, 4), (16,))
    twin = torch.optim.AdamW(weights, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, fused=True)
    train(twin, weights, 0, 3)
    for saved in (per_parameter, per_group):
        for own, weight in zip(ours, weights, strict=True):
            own.data.copy_(weight.data)
        optimizer = FusedAdam(ours)
        optimizer.load_state_dict(saved)
        assert "step" not in optimizer.param_groups[0]
        train(optimizer, ours, 3, 5)
        assert all(torch.equal(own, their) for own, their in zip(ours, theirs, strict=True))


def test_a_state_dict_from_before_the_first_step_begins_anew():
    owned, others = (parameters((4,), dtype=BF16) for _ in range(2))
    optimizer = FusedAdam(owned, master_weights=True, exp_avg_dtype=F8)
    train(optimizer, owned, 0, 2)
    optimizer.load_state_dict(FusedAdam(others, master_weights=True, exp_avg_dtype=F8).state_dict())
    state = optimizer.state[owned[0]]
    assert state["step"] == 0
    assert (state["exp_avg"].float() == 0).all()
    assert torch.equal(state["master_param"], owned[0].detach().float())


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": lambda pair: _saved_and_loaded(pair),
}


def _saved_and_loaded(pair: Any) -> Any:
    stream = io.BytesIO()
    torch.save(pair, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_goes_on_as_the_original_does_and_leaves_it_alone(how, options):
    if how == "pickle" and F8 in options.values():
        options = options | {
            "exp_avg_dtype": F16
        }  # torch cannot unpickle fp8 tensors; torch.save can
    owned = parameters((5, 7), (9,), dtype=BF16)
    optimizer = FusedAdam([{"params": owned[:1], "lr": 0.1}, {"params": owned[1:]}], **options)
    train(optimizer, owned, 0, 2)
    before = snapshot(optimizer)
    copied_owned, copied = COPIES[how]((owned, optimizer))
    assert copied.param_groups[0]["params"][0] is copied_owned[0], "they stay a pair"
    assert snapshot(copied) == before

    train(copied, list(copied_owned), 2, 4)
    assert snapshot(optimizer) == before
    train(optimizer, owned, 2, 4)
    assert snapshot(copied)[0] == snapshot(optimizer)[0]
    assert plain(copied.state_dict()["state"]) == plain(optimizer.state_dict()["state"])
    assert snapshot(optimizer) != before


def test_a_copy_from_before_the_first_step_has_all_settings_of_its_own():
    (own,) = parameters((4,))
    optimizer = copy.deepcopy(
        FusedAdam([own], adam_w_mode=False, set_grad_none=False, use_decoupled_grad=True)
    )
    (copied,) = optimizer.param_groups[0]["params"]
    copied.decoupled_grad = torch.ones(4)
    optimizer.step()
    assert not torch.equal(copied, own)
    optimizer.zero_grad()
    assert torch.equal(copied.decoupled_grad, torch.zeros(4))
    assert not optimizer.adam_w_mode


@on_ranks(1)
def test_an_optimizer_over_fully_sharded_parameters_refuses_to_be_copied() -> None:
    model, _ = sharded()
    optimizer = FusedAdam(model.parameters())
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"Expected state_dict\(\) to be used, got an attempt to copy or pickle"
        ):
            copying(optimizer)


def test_hooks_of_state_dicts_see_values_and_may_change_them():
    owned = parameters((4,))
    optimizer = FusedAdam(owned, exp_avg_dtype=F8)
    train(optimizer, owned, 0, 1)
    seen: list[str] = []

    def after_saving(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(str(state_dict["state"][0]["exp_avg"].dtype))
        return {**state_dict, "extra": 1}

    def before_loading(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(str(state_dict.pop("extra")))
        return {**state_dict, "state": {}}

    optimizer.register_state_dict_post_hook(after_saving)
    optimizer.register_load_state_dict_pre_hook(before_loading)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert seen == ["torch.float32", "1", "loaded"]
    assert saved["extra"] == 1
    assert optimizer.state[owned[0]]["step"] == 0


def test_init_state_allocates_and_does_not_step():
    owned = parameters((16, 4), (16,))
    optimizer = FusedAdam(owned)
    optimizer.init_state()
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert len(tensors) == 6
    assert all((tensor == 0).all() for tensor in tensors)
    others = parameters((16, 4), (16,))
    train(optimizer, owned, 0, 2)
    train(FusedAdam(others), others, 0, 2)
    assert all(torch.equal(own, other) for own, other in zip(owned, others, strict=True))
    assert tensors == [tensor for state in optimizer.state.values() for tensor in state.values()]


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


def _empty_shards() -> list[int]:
    owned, _ = dtensor_parameters("Shard")
    return [local_tensor(parameter).numel() for parameter in owned]


def test_those_parameters_include_uneven_and_empty_shards():
    sizes = run_ranks(2, _empty_shards)
    assert sizes[0][1] != sizes[1][1]
    assert [numels[2] for numels in sizes] == [4, 0]


@on_ranks(2)
def test_a_group_whose_last_shard_is_empty_advances_every_step() -> None:
    torch.manual_seed(0)
    owned = [
        nn.Parameter(distribute_tensor(torch.randn(rows, 3), line(), [Shard(0)])) for rows in (4, 1)
    ]
    before = [local_tensor(parameter).clone() for parameter in owned]
    optimizer = FusedAdam(owned)
    for _ in range(2):
        for parameter in owned:
            parameter.grad = distribute_tensor(torch.ones(parameter.shape), line(), [Shard(0)])
        optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [2, 2]
    for parameter, old in zip(owned, before, strict=True):
        assert local_tensor(parameter).numel() == 0 or not torch.equal(local_tensor(parameter), old)


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
def test_gradients_and_states_that_are_distributed_otherwise_are_refused() -> None:
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
    """Uneven rows: on 2 and on 4 ranks, some hold none of a small parameter."""

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
@pytest.mark.parametrize("world_size", [2, 4])
def test_states_of_fully_sharded_parameters_are_like_them_and_steps_are_those_of_one_rank(
    world_size, strategy, options
):
    run_ranks(world_size, _fully_sharded, strategy, options)


class Many(nn.Module):
    """Parameters of one shape, half of which lie on either of 2 ranks."""

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

    def counted(pieces: Any) -> None:
        seen.append(len(pieces))
        run(pieces)

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
def test_partial_gradients_are_refused() -> None:
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


def _before_first_step(path: str) -> None:
    model, _ = sharded()
    optimizer = FusedAdam(model.parameters())
    saved = DCPState(model, optimizer).state_dict()["optim"]["state"]
    assert {name: state["step"].item() for name, state in saved.items()} == dict.fromkeys(
        dict(model.named_parameters()), 0
    )
    dcp.save({"app": DCPState(model, optimizer)}, checkpoint_id=path)
    other, _ = sharded()
    fresh = FusedAdam(other.parameters())
    dcp.load({"app": DCPState(other, fresh)}, checkpoint_id=path)
    for each, its in ((model, optimizer), (other, fresh)):
        for number in range(2):
            backward(each, number)
            its.step()
            its.zero_grad()
    assert snapshot(optimizer) == snapshot(fresh)
    assert {state["step"].item() for state in fresh.state.values()} == {2}


def test_a_checkpoint_from_before_the_first_step_has_no_step_in_it(tmp_path):
    run_ranks(2, _before_first_step, str(tmp_path / "checkpoint"))


@on_ranks(2)
def test_states_are_there_to_be_saved_between_the_first_backward_and_the_first_step() -> None:
    model, _ = sharded()
    optimizer = FusedAdam(model.parameters())
    backward(model, 0)
    grads = [parameter.grad for parameter in model.parameters()]
    saved = DCPState(model, optimizer).state_dict()["optim"]["state"]
    assert [list(state) for state in saved.values()] == [["step", "exp_avg", "exp_avg_sq"]] * len(
        grads
    )
    assert all(
        parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True)
    )
    assert {state["step"].item() for state in saved.values()} == {0}


@pytest.mark.parametrize("options", [{}, {"exp_avg_dtype": F8, "exp_avg_sq_dtype": BF16}], ids=str)
@on_ranks(2)
def test_the_state_dict_helpers_of_torch_work(options: dict[str, Any]) -> None:
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


# A plan that has gone stale.


def _planned(num_parameters: int = 2) -> tuple[list[nn.Parameter], FusedAdam]:
    parameters = [nn.Parameter(torch.full((4,), 1.0 + number)) for number in range(num_parameters)]
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    return parameters, FusedAdam(parameters, lr=0.1)


def test_a_plan_is_used_for_one_step_only():
    parameters, optimizer = _planned()
    expected, reference = _planned()
    planned = optimizer.plan_step()
    for _ in range(2):
        optimizer.step(planned=planned)
        reference.step()
    assert float(optimizer.state[parameters[0]]["step"]) == 2.0
    assert torch.equal(parameters[0], expected[0])


def test_a_plan_made_before_states_were_loaded_is_made_anew():
    parameters, optimizer = _planned()
    optimizer.step()
    loaded = copy.deepcopy(optimizer.state_dict())
    for state in loaded["state"].values():
        state["step"].fill_(100.0)
    planned = optimizer.plan_step()
    optimizer.load_state_dict(loaded)
    optimizer.step(planned=planned)
    assert float(optimizer.state[parameters[0]]["step"]) == 101.0


@pytest.mark.parametrize(
    "change", [lambda group: group["lr"].fill_(0.5), lambda group: group.update(lr=0.5)]
)
def test_a_plan_made_before_an_option_changed_is_made_anew_be_it_changed_in_place(change):
    parameters, optimizer = _planned()
    expected, reference = _planned()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.1)
    planned = optimizer.plan_step()
    change(optimizer.param_groups[0])
    reference.param_groups[0]["lr"] = 0.5
    optimizer.step(planned=planned)
    reference.step()
    assert torch.equal(parameters[0], expected[0])


class _Reader:
    """An event of somebody who reads; it is told to end, and says whether it was waited for."""

    def __init__(self) -> None:
        self.was_awaited = False

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        self.was_awaited = True

    def is_done(self) -> bool:
        return self.was_awaited


def test_readers_that_come_after_the_plan_are_awaited_though_others_have_gone():
    _, optimizer = _planned()
    optimizer.init_state()
    first, second = _Reader(), _Reader()
    (unit,) = optimizer.state_units()
    unit.hold(first)
    planned = optimizer.plan_step()
    optimizer._holds.wait()
    unit.hold(second)
    optimizer.step(planned=planned)
    assert first.was_awaited
    assert second.was_awaited


def test_a_step_that_fails_forgets_no_reader(monkeypatch):
    _, optimizer = _planned()
    optimizer.init_state()
    reader = _Reader()
    (unit,) = optimizer.state_units()
    unit.hold(reader)
    planned = optimizer.plan_step()

    def fail(*_: Any) -> None:
        raise RuntimeError("of the kernel")

    monkeypatch.setattr(reader, "synchronize", fail)
    with pytest.raises(RuntimeError, match="of the kernel"):
        optimizer.step(planned=planned)
    monkeypatch.undo()
    optimizer.step()
    assert reader.was_awaited


def test_a_step_does_not_wait_for_who_reads_what_it_does_not_step():
    parameters, optimizer = _planned()
    optimizer.init_state()
    reader = _Reader()
    optimizer._unit(parameters[:1]).hold(reader)
    parameters[0].grad = None
    optimizer.step()
    assert not reader.was_awaited
    parameters[0].grad = torch.ones(4)
    optimizer.step()
    assert reader.was_awaited
