"""The optimizers as users of PyTorch's `AdamW`, TransformerEngine's `FusedAdam` and megatron-core's
`HybridDeviceOptimizer` call them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import fully_shard
from megatron.core.optimizer import FusedAdam
from megatron.core.optimizer.clip_grads import clip_coefficient, global_grad_norm
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.kernels import host_adam
from tests.helpers.ranks import on_ranks


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
    scaler.scale(torch.zeros(()))  # a scaler starts with the first loss
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


@pytest.mark.parametrize("gradient", [2.0**12, float("inf")])
@pytest.mark.parametrize("is_unscaled", [False, True])
def test_a_scaler_takes_one_step_for_each_update(gradient: float, is_unscaled: bool) -> None:
    """Otherwise scaled gradients would be taken for unscaled ones."""
    own = parameters((5, 3))
    optimizer, scaler = FusedAdam(own), scaler_at(2.0**12)
    give_gradients(own, gradient)
    if is_unscaled:
        scaler.unscale_(optimizer)
    optimizer.step(grad_scaler=scaler)
    for call in (
        lambda: optimizer.step(grad_scaler=scaler),
        lambda: scaler.step(optimizer),
        lambda: scaler.unscale_(optimizer),
    ):
        with pytest.raises(RuntimeError, match=r"update|after step"):
            call()

    scaler.update()
    give_gradients(own)
    optimizer.step(grad_scaler=scaler)
    assert int(optimizer.state[own[0]]["step"]) == 1 + (gradient == 2.0**12)


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

    # States after a step are reset.
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


# megatron-core's HybridDeviceOptimizer

Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(4, 4, bias=False).to(dtype)
        self.out = nn.Linear(4, 3).to(dtype)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.proj(x)) * self.scale


def train(model: Net, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    dtype = model.out.bias.dtype
    for seed in range(steps):
        torch.manual_seed(seed)
        model(torch.randn(2, 4).to(dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("cls", [AdamW, Adam, SGD], ids=lambda cls: cls.__name__)
def test_sub_optimizers_are_the_sides_and_show_their_states(
    cls: type[torch.optim.Optimizer], fraction: float, overlap: bool
) -> None:
    """As megatron-core's tests make one: with groups that hold further options."""
    model = Net()
    own = list(model.parameters())
    groups = [
        {"params": own[:2], "wd_mult": 1.0, "lr_mult": 1e-4},
        {"params": own[2:], "wd_mult": 0.0, "lr_mult": 2e-4},
    ]
    optimizer = HybridDeviceOptimizer(
        groups,
        offload_fraction=fraction,
        cpu_optimizer_cls=cls,
        gpu_optimizer_cls=cls,
        lr=0.1,
        overlap_cpu_optimizer_d2h_h2d=overlap,
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    train(model, optimizer, 2)

    assert (optimizer.gpu_optimizer is None) == (fraction == 1)
    assert (optimizer.cpu_optimizers == []) == (fraction == 0)
    subs = optimizer.sub_optimizers
    assert len(subs) == len(optimizer.cpu_optimizers) + (optimizer.gpu_optimizer is not None)
    assert subs == optimizer.sub_optimizers
    # Options are current on either side, also after a change since the last step.
    for group in optimizer.param_groups:
        group["lr"] = 0.025
    subs = optimizer.sub_optimizers
    shown = [
        (parameter, sub, group)
        for sub in subs
        for group in sub.param_groups
        for parameter in group["params"]
    ]
    # Every parameter once, with its values, its group's options and its states.
    for parameter in own:
        (found,) = [each for each in shown if torch.equal(each[0], parameter)]
        assert found[2]["lr"] == 0.025
        for name, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found[1].state[found[0]][name], value)
    assert len(shown) == len(own)


def test_a_part_of_the_host_side_is_for_looking_only() -> None:
    model = Net()
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, lr=0.1)
    (part,) = optimizer.cpu_optimizers
    for call in (
        part.step,
        lambda: part.load_state_dict(part.state_dict()),
        lambda: part.register_step_pre_hook(print),
        lambda: part.register_step_post_hook(print),
    ):
        with pytest.raises(RuntimeError, match=r"Call .* on the HybridDeviceOptimizer;"):
            call()

    # It shows current values, and does not disturb steps of the whole.
    other = Net()
    train(model, optimizer, 3)
    train(other, HybridDeviceOptimizer(other.parameters(), 1.0, lr=0.1), 3)
    for group, parameter in zip(part.param_groups, other.parameters(), strict=True):
        assert torch.equal(group["params"][0], parameter)
        assert int(part.state[group["params"][0]]["step"]) == 3


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_fp32_main_weights_are_found_by_their_parameters(fraction: float) -> None:
    model = Net(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), fraction, param_update_in_fp32=True, lr=1e-4
    )
    train(model, optimizer)
    found = optimizer.param_to_fp32_param
    # As there: a parameter in fp32 needs no other.
    assert set(found) == {p for p in model.parameters() if p.dtype == torch.bfloat16}
    for parameter, master in found.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.to(torch.bfloat16), parameter)
        assert not torch.equal(master, parameter.float()), "it has bits that the parameter lacks"
        assert torch.equal(master, optimizer.state[parameter]["master_param"])


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_new_parameters_become_the_main_weights(fraction: float) -> None:
    """After weights were loaded into the model, on either side of the optimizer."""
    model = Net(torch.bfloat16)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), fraction, param_update_in_fp32=True, lr=1e-4
    )
    train(model, optimizer, 2)
    for parameter in model.parameters():
        parameter.data.copy_(torch.full_like(parameter, 0.3))
    optimizer.update_fp32_param_by_new_param()
    for parameter, master in optimizer.param_to_fp32_param.items():
        assert torch.equal(master, parameter.float())

    train(model, optimizer)
    assert all((parameter - 0.3).abs().max() < 0.01 for parameter in model.parameters())


@on_ranks(2)
def test_sub_optimizers_of_sharded_parameters() -> None:
    """Of a sharded model the host's parameters are this rank's rows, and main weights already."""
    model = Net()
    fully_shard(model.proj)
    fully_shard(model)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), 1.0, lr=0.1, overlap_step_with_forward=True
    )
    train(model, optimizer, 2)
    optimizer.step()
    assert optimizer.param_to_fp32_param == {}
    shown = [group["params"][0] for sub in optimizer.sub_optimizers for group in sub.param_groups]
    own = [parameter.to_local() for parameter in model.parameters()]
    assert sorted(each.numel() for each in shown) == sorted(each.numel() for each in own)
    assert all(any(torch.equal(each, other) for other in own) for each in shown)
    optimizer.update_fp32_param_by_new_param()


# PyTorch's AdamW


@pytest.mark.parametrize("fraction", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("cls", [AdamW, FusedAdam], ids=lambda cls: cls.__name__)
def test_adamws_defaults_may_be_given_in_full(
    cls: type[torch.optim.Optimizer], fraction: float | None
) -> None:
    defaults = torch.optim.AdamW(parameters((2,))).defaults
    options = {
        name: defaults[name] for name in inspect.signature(AdamW).parameters if name != "params"
    }
    assert {"amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"} <= set(
        options
    )
    model, expected = Net(), Net()
    optimizer: torch.optim.Optimizer
    if fraction is None:
        optimizer = FusedAdam(model.parameters(), **options)
    else:
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, cls, cls, **options)
    train(model, optimizer, 3)
    train(expected, AdamW(expected.parameters()), 3)
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_weight_decay_has_the_default_of_the_class_that_is_named(fraction: float) -> None:
    for cls, weight_decay in ((None, 0.0), (FusedAdam, 0.0), (AdamW, 0.01), (Adam, 0.0)):
        model, expected = Net(), Net()
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, cls, cls, lr=0.1)
        assert optimizer.param_groups[0]["weight_decay"] == weight_decay
        train(model, optimizer, 3)
        train(expected, AdamW(expected.parameters(), lr=0.1, weight_decay=weight_decay), 3)
        for own, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(own, other)


# A user's loop whose loss is not finite


OPTIMIZERS = {
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=0.1),
    "on the host": lambda parameters: HybridDeviceOptimizer(parameters, 1.0, lr=0.1),
    "half on the host": lambda parameters: HybridDeviceOptimizer(
        parameters, 0.5, lr=0.1, overlap_cpu_optimizer_d2h_h2d=True
    ),
}


def with_gradients(value: float) -> nn.Module:
    """A model of two layers whose gradients are multiples of `value`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    (model(torch.ones(1, 4)).sum() * value).backward()
    return model


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_whose_norm_is_not_finite_are_rejected_and_change_nothing(
    name: str, value: float
) -> None:
    model = with_gradients(value)
    optimizer = OPTIMIZERS[name](model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scale = float(clip_coefficient(global_grad_norm(model.parameters()), 1.0))
    with pytest.raises(ValueError, match="a gradient is not finite"):
        optimizer.step(grad_scale=scale)
    optimizer.state_dict()  # waits for pending updates
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_gradients_that_are_not_finite_warns_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    host_adam._warn_of_non_finite.cache_clear()
    for value in (1.0, math.nan, math.nan):
        model = with_gradients(value)
        optimizer = OPTIMIZERS[name](model.parameters())
        optimizer.step()
        optimizer.state_dict()  # waits for pending updates
        warnings = [one for one in caplog.messages if "not finite" in one]
        assert len(warnings) == (0 if value == 1.0 else 1)
