"""The optimizers as users of TransformerEngine's `FusedAdam` and of megatron-core's
`HybridDeviceOptimizer` call them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import fully_shard
from megatron.core.optimizer import FusedAdam
from tests.ranks import on_ranks


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]


def give_gradients(own: Iterable[nn.Parameter], factor: float = 1.0, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for parameter in own:
        parameter.grad = (factor * torch.randn(parameter.shape)).to(parameter.dtype)


# TransformerEngine's FusedAdam


def scaler_at(scale: float) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
    scaler.scale(torch.zeros(()))  # a scaler begins with the first loss
    return scaler


def test_a_grad_scalers_scale_is_divided_out_as_gradients_are_read() -> None:
    scaled, plain = parameters((5, 3), (7,)), parameters((5, 3), (7,))
    optimizer, expected = FusedAdam(scaled), FusedAdam(plain)
    scaler = scaler_at(2.0**12)
    for seed in range(3):
        give_gradients(scaled, 2.0**12 * 2**seed, seed)
        give_gradients(plain, 1.0, seed)
        before = [parameter.grad.clone() for parameter in scaled]
        optimizer.step(None, scaler)
        scaler.update()  # doubles the scale after every good step
        expected.step()
        for own, other, gradient in zip(scaled, plain, before, strict=True):
            assert torch.equal(own, other)
            assert torch.equal(own.grad, gradient), "gradients stay as they were"
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_skips_the_step_and_lowers_the_scale(wrong: float) -> None:
    own = parameters((5, 3), (7,))
    optimizer, scaler = FusedAdam(own), scaler_at(2.0**12)
    before = [parameter.detach().clone() for parameter in own]
    give_gradients(own)
    own[1].grad[3] = wrong
    assert optimizer.step(lambda: 3.0, grad_scaler=scaler) == 3.0
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
    assert not optimizer.state

    give_gradients(own, 2.0**11)
    optimizer.step(grad_scaler=scaler)
    assert all(int(optimizer.state[parameter]["step"]) == 1 for parameter in own)


def test_gradients_that_were_unscaled_to_be_clipped_are_not_unscaled_twice() -> None:
    own, other = parameters((5, 3)), parameters((5, 3))
    optimizer, expected, scaler = FusedAdam(own), FusedAdam(other), scaler_at(2.0**12)
    give_gradients(own, 2.0**12)
    give_gradients(other)
    scaler.unscale_(optimizer)
    for each in (own, other):
        nn.utils.clip_grad_norm_(each, 0.5)
    optimizer.step(grad_scaler=scaler)
    expected.step()
    assert torch.equal(own[0], other[0])

    scaler.update()
    give_gradients(own, float("inf"))
    scaler.unscale_(optimizer)
    optimizer.step(grad_scaler=scaler)
    assert torch.equal(own[0], other[0])


def test_a_scaler_that_is_switched_off_or_cannot_see_gradients() -> None:
    own, other = parameters((5, 3)), parameters((5, 3))
    give_gradients(own)
    give_gradients(other)
    FusedAdam(own).step(grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    FusedAdam(other).step()
    assert torch.equal(own[0], other[0])

    optimizer = FusedAdam(own, use_decoupled_grad=True)
    with pytest.raises(NotImplementedError, match=r"Expected gradients in \.grad with a grad_sca"):
        optimizer.step(grad_scaler=scaler_at(2.0))


@on_ranks(2)
def test_an_infinity_on_one_rank_skips_the_step_on_all() -> None:
    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(4, 6))
    optimizer, scaler = FusedAdam(layer.parameters()), scaler_at(2.0**12)
    before = [parameter.full_tensor().clone() for parameter in layer.parameters()]
    scaler.scale(layer(torch.ones(2, 4)).sum()).backward()
    if dist.get_rank() == 1:
        layer.weight.grad.to_local()[-1] = float("inf")
    optimizer.step(grad_scaler=scaler)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    for parameter, old in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), old)

    optimizer.zero_grad()
    scaler.scale(layer(torch.ones(2, 4)).sum()).backward()
    optimizer.step(grad_scaler=scaler)
    assert not torch.equal(layer.weight.full_tensor(), before[0])


@pytest.mark.parametrize("remainders", [False, True])
def test_one_parameters_states_are_initialized(remainders: bool) -> None:
    own = parameters((5, 3), (7,), dtype=torch.bfloat16)
    optimizer = FusedAdam(own, master_weights=True, store_param_remainders=remainders)
    optimizer.initialize_state(own[0], remainders)
    assert set(optimizer.state) == {own[0]}
    states = optimizer.state[own[0]]
    assert set(states) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
    assert states["master_param"].dtype == (torch.int16 if remainders else torch.float32)
    if not remainders:
        assert torch.equal(states["master_param"], own[0].float())

    # What was stepped begins anew.
    give_gradients(own)
    optimizer.step()
    optimizer.initialize_state(own[0])
    assert not states["exp_avg"].any()
    assert int(states["step"]) == 0
    assert int(optimizer.state[own[1]]["step"]) == 1

    message = f"Expected store_param_remainders={remainders}, as this optimizer .*bfloat16 para"
    with pytest.raises(ValueError, match=message):
        optimizer.initialize_state(own[0], not remainders)
    with pytest.raises(ValueError, match=r"Expected a parameter of this optimizer, got another"):
        optimizer.initialize_state(parameters((5, 3))[0], remainders)


@on_ranks(2)
def test_a_sharded_parameters_states_are_initialized() -> None:
    layer = fully_shard(nn.Linear(4, 6))
    optimizer = FusedAdam(layer.parameters())
    for parameter in layer.parameters():
        optimizer.initialize_state(parameter, False)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state[layer.weight]["exp_avg"].full_tensor().any()
    optimizer.initialize_state(layer.weight, False)
    assert not optimizer.state[layer.weight]["exp_avg"].full_tensor().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_skip_unscale_gives_bf16_states_as_they_are(dtype: torch.dtype) -> None:
    own = parameters((5, 3))
    optimizer = FusedAdam(own, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    give_gradients(own)
    optimizer.step()
    stored = optimizer.state[own[0]]["exp_avg"]
    found = optimizer.get_unscaled_state(own[0], "exp_avg", skip_unscale=True)
    values = optimizer.get_unscaled_state(own[0], "exp_avg")
    assert values.dtype == torch.float32
    assert torch.equal(found.float(), values)
    assert (found is stored) == (dtype != torch.float16)


@pytest.mark.parametrize(
    "options",
    [{"exp_avg_dtype": torch.float64}, {"amsgrad": True}, {"master_weight_dtype": torch.bfloat16}],
    ids=str,
)
def test_what_transformer_engine_refuses_by_a_runtime_error_is_one(options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="Expected"):
        FusedAdam(parameters((2,)), **options)
