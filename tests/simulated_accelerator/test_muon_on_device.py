"""Muon over the rows of two ranks has the CPU's bits on an accelerator, where copies, exchanges and
kernels are asynchronous.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core import products
from megatron.core.optimizer import matrix_pass
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import Muon
from tests.helpers.ranks import random_delays, run_ranks
from tests.simulated_accelerator.helpers.matrices import groups_of, layers_of, step, values_of

pytestmark = pytest.mark.sim


def _trained(
    seed: int, fraction: float | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Tensor]:
    """`fraction` and `options`: of an offloaded optimizer."""
    layers = layers_of("optim_grads_params", dtype)
    optimizer: RuleOptimizer | HybridDeviceOptimizer
    if fraction is None:
        optimizer = RuleOptimizer(groups_of(layers), Muon(), lr=0.02)
    else:
        optimizer = HybridDeviceOptimizer(
            groups_of(layers), fraction, rule=Muon(), lr=0.02, **options
        )
    # A CPU that is slow in bf16 would have other products than the accelerator.
    fast = mock.patch.object(products, "_SLOW_DTYPES", frozenset())
    with fast, random_delays(seed):
        for number in range(4):
            step(layers, optimizer, number)
        return values_of(layers, optimizer)


@pytest.mark.parametrize("seed", [1, 2])
def test_an_accelerator_has_the_bits_of_the_cpu(seed: int) -> None:
    expected = run_ranks(2, _trained, seed)[0]
    for found in run_ranks(2, _trained, seed, device="sim"):
        assert all(map(torch.equal, found, expected))


OVERLAPS: tuple[dict[str, bool], ...] = (
    {"fetch_during_backward": True, "overlap_step_with_forward": True},
    {"overlap_cpu_optimizer_d2h_h2d": False},
    {"pin_cpu_grads": False, "pin_cpu_params": False},
)


@pytest.mark.parametrize(
    ("num_ranks", "fraction", "dtype"),
    [
        (1, 0.4, torch.bfloat16),
        (2, 1.0, torch.bfloat16),
        pytest.param(2, 0.4, torch.float32, marks=pytest.mark.wide),
        pytest.param(1, 1.0, torch.float32, marks=pytest.mark.wide),
    ],
)
def test_matrices_in_host_memory_have_the_bits_of_the_cpu(num_ranks, fraction, dtype) -> None:
    expected = run_ranks(num_ranks, _trained, 0, None, dtype)[0]
    for seed, options in enumerate(OVERLAPS):
        run = partial(_trained, **options)
        for found in run_ranks(num_ranks, run, seed, fraction, dtype, device="sim"):
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected)), options


def _devices() -> set[str]:
    """Where an offloaded optimizer orthogonalizes."""
    layers, found = layers_of("optim_grads_params", torch.bfloat16), set[str]()
    optimizer = HybridDeviceOptimizer(groups_of(layers), 1.0, rule=Muon(), lr=0.02)

    def orthogonalize(matrix: Tensor, _step: object) -> Tensor:
        found.add(matrix.device.type)
        return matrix

    with mock.patch.object(matrix_pass, "orthogonalize", orthogonalize):
        step(layers, optimizer, 0)
        optimizer.synchronize()
    return found


def test_matrices_in_host_memory_are_orthogonalized_on_the_device() -> None:
    assert run_ranks(2, _devices, device="sim") == [{"sim"}, {"sim"}]
