"""Writes to the parameters of `HybridDeviceOptimizer` and `FusedAdam` count, however they are
made.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing.fsdp_checkpoint import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp import (
    fully_shard_optimizer,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.dtensors import local_tensor
from megatron.core.lanes import delays
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import on_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import (
    ALL,
    BF16,
    OVERLAPS,
    SGD,
    SHARDINGS,
    Net,
    backward,
    fsdp,
    plain,
    same,
    same_states,
    states,
    torch_fsdp2,
    train,
    trains_as_reference,
    weights,
)


@on_ranks(1)
def test_a_race_between_the_update_and_the_next_forward_is_not_taken_for_a_write_of_the_user() -> (
    None
):
    """The host lane writes main weights between a group's forward and its backward, which look
    whether somebody has.
    """
    may_write = threading.Event()

    class Slow(SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread() is not threading.main_thread():
                assert may_write.wait(600)
            return super().step(closure)

    original = FsdpParameterGroup.wait_unsharded

    def looked(group: FsdpParameterGroup) -> None:
        may_write.set()
        original(group)

    model = Net()
    fsdp(model)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, Slow, Slow, lr=0.1, **ALL)
    FsdpParameterGroup.wait_unsharded = looked
    try:
        for number in range(3):
            backward(model, number)
            may_write.clear()
            optimizer.step()
            optimizer.zero_grad()
        assert not may_write.is_set(), "the forward releases the update"
        may_write.set()
        result = weights(model)
    finally:
        may_write.set()
        FsdpParameterGroup.wait_unsharded = original
    expected = Net()
    fsdp(expected)
    other = SGD(expected.parameters(), lr=0.1)
    fully_shard_optimizer(other)
    train(expected, other, range(3))
    assert same(result, weights(expected))


@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_writing_to_parameters_between_steps_counts(sharding: str) -> None:
    def write(model: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.synchronize()
        with torch.no_grad():
            for parameter in list(model.parameters())[number % 2 :: 2]:
                parameter.mul_(0.5)

    def script(model: Net, optimizer: torch.optim.Optimizer) -> None:
        write(model, optimizer, 0)
        for number in range(4):
            train(model, optimizer, [number])
            write(model, optimizer, number)

    trains_as_reference(script, sharding, settings=OVERLAPS)


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
@on_ranks(2)
def test_writes_by_list_operators_count_after_reload_parameters(sharding: str) -> None:
    """PyTorch's version counters do not show list operators on DTensors."""

    def script(model: Net, optimizer: torch.optim.Optimizer) -> None:
        train(model, optimizer, range(2))
        is_hybrid = isinstance(optimizer, HybridDeviceOptimizer)
        if is_hybrid:
            optimizer.synchronize()
        with torch.no_grad():
            for parameter in model.parameters():
                if is_hybrid:
                    torch._foreach_mul_([parameter], 0.5)
                else:
                    parameter.mul_(0.5)
        if is_hybrid:
            optimizer.reload_parameters()
        train(model, optimizer, [9])

    trains_as_reference(script, sharding)


@pytest.mark.parametrize("sharding", ["fsdp2", "groups"])
@on_ranks(2)
def test_weights_that_a_module_loads_count(sharding: str) -> None:
    source = Net(seed=1)
    SHARDINGS[sharding](source)

    def script(model: Net, optimizer: torch.optim.Optimizer) -> None:
        with delays(3):
            train(model, optimizer, range(2))
            model.load_state_dict(source.state_dict())
            train(model, optimizer, range(2, 4))

    trains_as_reference(script, sharding)


# 16-bit parameters that have fp32 main weights besides them

FRACTIONS = [0.0, 0.5, 1.0]
MASTERS = {"lr": 1e-3, "param_update_in_fp32": True}


def _copies(model: Net) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.full_like(parameter, 3.0))


def _loads(model: Net) -> None:
    model.load_state_dict({n: torch.full_like(v, 3.0) for n, v in model.state_dict().items()})


def _assigns(model: Net) -> None:
    vector = torch.full((sum(p.numel() for p in model.parameters()),), 3.0, dtype=BF16)
    torch.nn.utils.vector_to_parameters(vector, model.parameters())


def _optimizers(
    parameters: list[nn.Parameter], fraction: float | None, **options: Any
) -> torch.optim.Optimizer:
    """FusedAdam where there is no fraction."""
    if fraction is None:
        return FusedAdam(parameters, lr=1e-3, master_weights=True, **options)
    return HybridDeviceOptimizer(parameters, fraction, **MASTERS)


@pytest.mark.parametrize("write", [_copies, _loads, _assigns])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("fraction", "options"),
    [
        *((fraction, {}) for fraction in FRACTIONS),
        (None, {}),
        (None, {"store_param_remainders": True}),
        (None, {"master_weight_dtype": torch.float16}),
    ],
    ids=str,
)
def test_written_16_bit_parameters_become_the_main_weights(
    fraction: float | None, options: dict[str, Any], steps: int, write: Callable[[Net], None]
) -> None:
    model = Net(dtype=BF16)
    optimizer = _optimizers(list(model.parameters()), fraction, **options)
    train(model, optimizer, range(steps), dtype=BF16)
    write(model)
    train(model, optimizer, range(steps, steps + 1), dtype=BF16)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        master = state["master_param"]
        if master.dtype == torch.int16:
            master = ((parameter.view(torch.int16).int() << 16) + master.int()).view(torch.float32)
        elif fraction is None:
            master = optimizer.get_unscaled_state(parameter, "master_param")
        # One step of 1e-3 from 3.0, which bf16 rounds to 3.0 again.
        assert (master - 3).abs().max() < 3e-3
        assert torch.equal(parameter, torch.full_like(parameter, 3.0))


def test_a_small_write_counts_where_main_weights_are_fp16() -> None:
    """A change to the next bf16 number is a write, although fp16 main weights are rounded too."""
    model = Net(dtype=BF16)
    optimizer = FusedAdam(
        model.parameters(), lr=0.0, master_weights=True, master_weight_dtype=torch.float16
    )
    train(model, optimizer, range(1), dtype=BF16)
    before = weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0045)
    written = weights(model)
    assert not any(torch.equal(*pair) for pair in zip(written, before, strict=True))
    train(model, optimizer, range(1, 2), dtype=BF16)
    assert same(weights(model), written)


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("fraction", [*FRACTIONS, None, "remainders", "fp16"])
def test_a_loaded_main_weight_wins_over_the_parameter_that_was_loaded_with_it(
    fraction: Any, first: str
) -> None:
    options = {
        "remainders": {"store_param_remainders": True},
        "fp16": {"master_weight_dtype": torch.float16},
    }.get(fraction, {})
    fraction = None if options else fraction

    def build(seed: int) -> tuple[Net, torch.optim.Optimizer]:
        model = Net(seed, dtype=BF16)
        return model, _optimizers(list(model.parameters()), fraction, **options)

    model, optimizer = build(0)
    train(model, optimizer, range(3), dtype=BF16)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, fresh = build(1)
    train(other, fresh, range(5, 6), dtype=BF16)
    loads = [
        lambda: other.load_state_dict(saved[0]),
        lambda: fresh.load_state_dict(saved[1]),
    ]
    for load in loads if first == "model" else loads[::-1]:
        load()
    for each in ((model, optimizer), (other, fresh)):
        train(*each, range(3, 8), dtype=BF16)
    assert same(weights(other), weights(model))
    assert same_states(states(fresh), states(optimizer))


@pytest.mark.parametrize("fraction", [*FRACTIONS, None])
def test_a_main_weight_that_is_loaded_alone_wins_over_a_write_before(
    fraction: float | None,
) -> None:
    model = Net(dtype=BF16)
    optimizer = _optimizers(list(model.parameters()), fraction)
    train(model, optimizer, range(2), dtype=BF16)
    saved, before = copy.deepcopy(optimizer.state_dict()), weights(model)
    _copies(model)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(2, 3), dtype=BF16)
    for parameter, old in zip(weights(model), before, strict=True):
        assert (parameter.float() - old.float()).abs().max() < 0.01


@pytest.mark.parametrize("options", [{}, {"store_param_remainders": True}], ids=str)
@on_ranks(2)
def test_main_weights_of_fsdp2s_16_bit_parameters_keep_their_low_bits(
    options: dict[str, Any],
) -> None:
    """Changes of parameters by FSDP2 between steps must not count as writes."""
    results = []
    for shard in (torch_fsdp2, plain):
        model = Net(dtype=BF16)
        shard(model)
        optimizer = FusedAdam(model.parameters(), lr=1e-4, master_weights=True, **options)
        for number in range(20):
            generator = torch.Generator().manual_seed(number)
            (model(torch.randn(4, 6, generator=generator).to(BF16)).float() - 1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([full(value) for value in model.state_dict().values()])
    assert same(*results)


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("options", [{}, {"store_param_remainders": True}], ids=str)
@on_ranks(1)
def test_checkpoints_restore_the_low_bits_of_main_weights(
    options: dict[str, Any], tmp_path: Path
) -> None:
    def build(seed: int) -> tuple[Net, FusedAdam]:
        model = Net(seed, dtype=BF16)
        return model, FusedAdam(model.parameters(), lr=1e-4, master_weights=True, **options)

    model, optimizer = build(0)
    train(model, optimizer, range(3), dtype=BF16)
    save_checkpoint(model, optimizer, tmp_path / "saved")
    other, fresh = build(1)
    train(other, fresh, range(5, 6), dtype=BF16)
    load_checkpoint(other, fresh, tmp_path / "saved")
    for each in ((model, optimizer), (other, fresh)):
        train(*each, range(3, 8), dtype=BF16)
    assert same(weights(other), weights(model))
    assert same_states(states(fresh), states(optimizer))


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("sharding", ["plain", "fsdp2"])
@on_ranks(2)
def test_writes_into_data_count_after_reload_parameters(sharding: str, fraction: float) -> None:
    for dtype in (BF16, torch.float32):
        model = Net(dtype=dtype)
        SHARDINGS[sharding](model)
        optimizer = HybridDeviceOptimizer(model.parameters(), fraction, **MASTERS)
        train(model, optimizer, range(2), dtype=dtype)
        for parameter in model.parameters():
            local_tensor(parameter).data.fill_(3.0)
        optimizer.reload_parameters()
        train(model, optimizer, range(2, 3), dtype=dtype)
        assert all((value - 3).abs().max() < 0.02 for value in weights(model) if value.numel())
