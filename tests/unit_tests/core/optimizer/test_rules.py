from __future__ import annotations

import copy
import gc
import itertools
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.drivers import Driver
from megatron.core.optimizer import rule_optimizer, rules
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.kernels import device_adam, torch_adam, torch_flat
from megatron.core.optimizer.kernels.piece import Piece
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import SGD, Adam, Lion, UpdateRule

BF16, F32 = torch.bfloat16, torch.float32
LION = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
MOMENTUM = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
SHAPES = ((7, 5), (3,), (64, 64))


def parameters(dtype: torch.dtype = F32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def give_gradients(own: list[torch.nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for parameter in own:
        values = torch.randn(parameter.shape, generator=generator)
        values[values.abs() < 0.1] = 0.0
        parameter.grad = values.to(parameter.dtype)


def lion(p: torch.Tensor, m: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of `LION` as its paper writes it."""
    update = torch.sign(0.8 * m + (1 - 0.8) * g)
    return p * (1 - 0.01 * 0.1) - 0.01 * update, 0.95 * m + (1 - 0.95) * g


def momentum(
    p: torch.Tensor, b: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of `MOMENTUM` as torch documents it."""
    b = 0.9 * b + (g + 0.1 * p)
    return p - 0.05 * b, b


@pytest.mark.parametrize(
    ("rule", "options", "state", "reference"),
    [(Lion(), LION, "exp_avg", lion), (SGD(), MOMENTUM, "momentum_buffer", momentum)],
    ids=["lion", "sgd"],
)
@pytest.mark.parametrize("grad_scale", [1.0, 0.3])
def test_steps_are_bit_equal_to_a_loop_in_fp32(rule, options, state, reference, grad_scale):
    own, expected = parameters(), [p.detach().clone() for p in parameters()]
    states = [torch.zeros_like(p) for p in expected]
    optimizer = RuleOptimizer(own, rule, **options)
    for number in range(20):
        give_gradients(own, number)
        for index, parameter in enumerate(own):
            gradient = parameter.grad * grad_scale
            expected[index], states[index] = reference(expected[index], states[index], gradient)
        optimizer.step(grad_scale=grad_scale)
    for parameter, value, kept in zip(own, expected, states, strict=True):
        assert torch.equal(parameter, value)
        assert torch.equal(optimizer.state[parameter][state], kept)
        assert optimizer.state[parameter]["step"] == 20


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("factor", [0.0, 0.9])
def test_sgd_agrees_with_that_of_torch(factor, nesterov):
    options = {"lr": 0.05, "momentum": factor, "weight_decay": 0.1}
    options |= {"nesterov": nesterov and factor > 0}
    own, other = parameters(), parameters()
    ours = RuleOptimizer(own, SGD(has_momentum=factor > 0), **options)
    theirs = torch.optim.SGD(other, **options)
    for number in range(20):
        give_gradients(own, number)
        give_gradients(other, number)
        ours.step()
        theirs.step()
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    if factor:
        fresh = RuleOptimizer(other, SGD(), **options)
        offloaded = HybridDeviceOptimizer(other, rule=SGD(), **options)
        for loading in (fresh, offloaded):
            loading.load_state_dict(copy.deepcopy(theirs.state_dict()))
            buffer = loading.state[other[0]]["momentum_buffer"]
            assert torch.equal(buffer, theirs.state[other[0]]["momentum_buffer"])


@pytest.mark.parametrize("rule", [Lion(), SGD(), Lion(BF16), Adam()], ids=repr)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_offloaded_steps_of_plain_tensors_are_bit_equal(rule, dtype, fraction):
    runs = []
    for is_offloaded in (False, True):
        own = parameters(dtype)
        optimizer: torch.optim.Optimizer
        if is_offloaded:
            optimizer = HybridDeviceOptimizer(
                own, fraction, param_update_in_fp32=True, rule=rule, lr=0.01, weight_decay=0.1
            )
        else:
            optimizer = RuleOptimizer(own, rule, master_weights=True, lr=0.01, weight_decay=0.1)
        for number in range(5):
            give_gradients(own, number)
            optimizer.step()
        states = [optimizer.state[parameter] for parameter in own]
        runs.append((own, states))
    (first, states), (second, others) = runs
    assert all(map(torch.equal, first, second))
    for mine, theirs in zip(states, others, strict=True):
        assert mine.keys() == theirs.keys() > {"step"}
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_momentum_in_a_narrow_dtype_stays_close_to_fp32(dtype):
    own, other = parameters(), parameters()
    narrow = RuleOptimizer(own, SGD(dtype), **MOMENTUM)
    wide = RuleOptimizer(other, SGD(), **MOMENTUM)
    for number in range(10):
        give_gradients(own, number)
        give_gradients(other, number)
        narrow.step()
        wide.step()
    assert narrow.state[own[0]]["momentum_buffer"].dtype == dtype
    torch.testing.assert_close(own, other, rtol=0.2, atol=0.2)
    assert not torch.equal(own[2], other[2])


def pieces_of(rule: UpdateRule, numel: int) -> Piece:
    generator = torch.Generator().manual_seed(numel)

    def values(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(numel, generator=generator).to(dtype)

    states = {name: values(F32) for name in rule.state_dtypes}
    step = rule.scalars({**rule.defaults, "lr": 0.01, "weight_decay": 0.1}, 1)
    return Piece(step, values(BF16), values(F32), states, out=torch.zeros(numel, dtype=BF16))


@settings(deadline=None, max_examples=20)
@given(
    rule=st.sampled_from([Lion(), SGD()]),
    numel=st.integers(1, 100_000),
    cuts=st.lists(st.integers(0, 100_000), max_size=4),
    num_threads=st.integers(1, 3),
)
def test_neither_cuts_nor_threads_nor_the_side_change_a_bit(rule, numel, cuts, num_threads):
    whole = pieces_of(rule, numel)
    cut = whole.mapped(torch.clone)
    rule.device_kernel(torch.device("cpu"))([whole], 0.5)
    edges = [0, *sorted(min(edge, numel) for edge in cuts), numel]
    parts = [cut.part(start, stop - start) for start, stop in itertools.pairwise(edges)]
    rule.host_kernel(num_threads)(parts, 0.5)
    for name, array in whole.arrays().items():
        assert torch.equal(array, cut.arrays()[name]), name
    assert whole.out.any()


def test_what_a_thread_raises_is_raised_by_the_pass_and_keeps_no_memory():
    class BrokenError(Exception):
        pass

    def update(*_: Any) -> None:
        raise BrokenError

    kernel = torch_flat.pooled(update, 2)
    gc.disable()
    try:
        with pytest.raises(BrokenError) as caught:
            kernel([pieces_of(SGD(), 100_000)], 1.0)
        error = weakref.ref(caught.value)
        del caught
        deadline = time.monotonic() + 60
        while error() is not None and time.monotonic() < deadline:
            time.sleep(0.001)  # the thread's own frames end after the pass
        assert error() is None
    finally:
        gc.enable()


def test_a_pass_that_fails_ends_once_no_thread_writes_any_more():
    is_other_at_work, has_returned = threading.Event(), threading.Event()
    seen = []

    def update(*_: Any) -> None:
        if threading.current_thread().name.endswith("_0"):
            is_other_at_work.wait(60)
            raise OverflowError("the update broke")
        is_other_at_work.set()
        seen.append(has_returned.wait(0.5))

    kernel = torch_flat.pooled(update, 2)
    with pytest.raises(OverflowError):
        kernel([pieces_of(SGD(), 60_000)], 1.0)
    has_returned.set()
    assert seen == [False]


def test_a_forked_child_is_rejected_instead_of_waiting_for_threads_that_it_does_not_have():
    kernel = torch_flat.pooled(SGD.update, 1)
    kernel([pieces_of(SGD(), 100)], 1.0)
    child = os.fork()
    if child == 0:
        try:
            kernel([pieces_of(SGD(), 100)], 1.0)
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("rule", [SGD(), Adam()], ids=repr)
def test_the_default_dtype_of_a_program_changes_no_bit(rule):
    runs = []
    for dtype in (F32, BF16):
        own = parameters()
        give_gradients(own, 0)
        torch.set_default_dtype(dtype)
        try:
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            RuleOptimizer(own, rule, lr=0.01).step(grad_scaler=scaler)
            scaler.update()
        finally:
            torch.set_default_dtype(F32)
        runs.append(own)
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_shows_in_the_weight(value):
    for rule in (Lion(), SGD(), Adam()):
        (parameter, *_) = parameters()
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[0, 0] = value
        optimizer = RuleOptimizer([parameter], rule, lr=0.1)
        optimizer.step()
        assert not parameter[0, 0].isfinite()
        assert parameter[1:].isfinite().all()


def test_groups_have_separate_options_and_parameters_without_a_gradient_rest():
    first, second, third = parameters()
    groups = [{"params": [first, third]}, {"params": [second], "lr": 0.0}]
    optimizer = RuleOptimizer(groups, Lion(), lr=0.1)
    before = [parameter.detach().clone() for parameter in (first, second, third)]
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    optimizer.step()
    assert torch.equal(first, before[0] - 0.1)
    assert torch.equal(second, before[1])
    assert torch.equal(third, before[2])
    assert [float(optimizer.state[each]["step"]) for each in (first, second, third)] == [1, 1, 0]


@pytest.mark.parametrize(
    ("rule", "options", "error", "message"),
    [
        (Lion(), {"eps": 1e-8}, TypeError, "eps"),
        (Lion(), {"betas": (0.9, 1.0)}, ValueError, "beta2"),
        (SGD(), {"lr": -1.0}, ValueError, "lr"),
        (SGD(), {"dampening": 0.5}, ValueError, "dampening"),
        (SGD(has_momentum=False), {"momentum": 0.9}, ValueError, "momentum"),
        (Adam(), {"amsgrad": True}, ValueError, "amsgrad"),
    ],
    ids=str,
)
def test_options_that_a_rule_cannot_honour_are_rejected(rule, options, error, message):
    with pytest.raises(error, match=message):
        RuleOptimizer(parameters(), rule, **options)
    with pytest.raises(error, match=message):
        HybridDeviceOptimizer(parameters(), 1.0, rule=rule, **options)


def test_dtypes_of_states_are_checked_where_they_are_kept():
    with pytest.raises(NotImplementedError, match="float64"):
        Lion(torch.float64)
    with pytest.raises(ValueError, match="float16"):
        HybridDeviceOptimizer(parameters(), rule=Lion(torch.float16))
    with pytest.raises(ValueError, match="bfloat16"):
        HybridDeviceOptimizer(parameters(), rule=Adam(exp_avg_dtype=BF16))


def test_a_rule_is_not_combined_with_what_it_replaces():
    for others in ({"cpu_optimizer_cls": FusedAdam}, {"exp_avg_dtype": BF16}):
        with pytest.raises(ValueError, match=next(iter(others))):
            HybridDeviceOptimizer(parameters(), rule=Lion(), **others)
    with pytest.raises(TypeError, match="eps"):
        HybridDeviceOptimizer(parameters(), rule=Lion(), eps=1e-8)


class TritonDriver(Driver):
    """Of a kind of device that Triton compiles for."""

    has_triton = True


@pytest.mark.parametrize("works", [False, True])
def test_adam_tries_its_kernel_while_the_optimizer_is_built(works, monkeypatch):
    """As if the CPU were such a device; without a working Triton, torch's kernel steps."""
    tried = []

    def works_on(device: torch.device) -> bool:
        tried.append(device.type)
        return works

    monkeypatch.setattr(rules, "driver_of", TritonDriver)
    monkeypatch.setattr(device_adam, "works_on", works_on)
    monkeypatch.setattr(rule_optimizer, "kinds_of_accelerators", lambda: ["meta"])
    optimizer = RuleOptimizer([torch.zeros(3, device="meta")], Adam(), lr=0.1)
    assert tried == ["meta"]
    kernel = optimizer._kernel(Adam(), torch.device("meta"))
    assert kernel is (device_adam.run if works else torch_adam.run)
    assert tried == ["meta"], "once"
