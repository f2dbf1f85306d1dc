"""Whichever executor updates a bucket, and whatever the norm turns out to be: the bits of a run
without offload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch

from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.clip_grads import clip_coefficient, global_grad_norm
from megatron.core.optimizer.cpu_offloading import streamed_pass
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import random_delays, rank_device, run_ranks
from tests.unit_tests.core.optimizer.cpu_offloading.helpers.nets import EXECUTORS
from tests.unit_tests.core.optimizer.cpu_offloading.test_bits import (
    ALL,
    OPTIONS,
    Model,
    Setting,
    backward,
    shard,
)

SETTING = Setting(dtype=torch.bfloat16, num_microbatches=2, steps=11)
SLOT = 320  # elements: less than any bucket has
BF16_MOMENTS = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
ALL_EXECUTORS: dict[str, dict[str, Any]] = {
    "host": {},
    **EXECUTORS,
    "auto": {"update_on_device": None},
}


class Clipping(NamedTuple):
    """How norms compare with their limit.

    Attributes:
        limit: of the norm.
        factors: of the model's output, which the steps have in turn; gradients grow with them.
    """

    limit: float
    factors: Sequence[float] = (1.0,)


CLIPPINGS = {
    "active": Clipping(1e-2),
    "inactive": Clipping(1e6),
    "mixed": Clipping(100.0, (1.0, 1.0, 50.0)),
    "non-finite": Clipping(100.0, (1.0, math.inf, 50.0, 1.0)),
}


class Run(NamedTuple):
    losses: list[float]
    coefficients: list[float]
    values: list[torch.Tensor]  # weights and states


def _train(executor: str | None, clipping: Clipping, moments: dict[str, Any], seed: int) -> Run:
    """With an executor, under delays on every lane; without one, everything is on the device."""
    model = Model(SETTING.dtype).to(rank_device())
    context = shard(model, SETTING)
    if executor is None:
        optimizer: torch.optim.Optimizer = FusedAdam(model.parameters(), **moments, **OPTIONS)
    else:
        optimizer = HybridDeviceOptimizer(
            model.parameters(), 1.0, **ALL, **ALL_EXECUTORS[executor], **moments, **OPTIONS
        )

    factor = 1.0
    model.behind.register_forward_hook(lambda _, __, output: output * factor)
    losses, coefficients = [], []
    with nullcontext() if executor is None else random_delays(seed):
        for number in range(SETTING.steps):
            factor = clipping.factors[number % len(clipping.factors)]
            losses.append(backward(model, context, SETTING, number))
            norm = global_grad_norm(model.parameters())
            coefficients.append(float(clip_coefficient(norm, clipping.limit)))
            if math.isfinite(coefficients[-1]):
                optimizer.step(grad_scale=coefficients[-1])
            optimizer.zero_grad()
        weights = model.state_dict().values()
    states = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return Run(losses, coefficients, [local_tensor(v).clone() for v in (*weights, *states)])


def _all_executors(executors: Sequence[str], clipping: str, moments: dict[str, Any]) -> list[float]:
    """Returns the coefficients."""
    streamed_pass.SLOT_NUMEL = SLOT
    expected = _train(None, CLIPPINGS[clipping], moments, 0)
    assert len(set(expected.losses)) > SETTING.steps / 2
    for seed, executor in enumerate(executors):
        run = _train(executor, CLIPPINGS[clipping], moments, seed)
        # As text: a coefficient may not be a number.
        assert repr(run[:2]) == repr(expected[:2]), executor
        assert len(run.values) == len(expected.values)
        assert all(map(torch.equal, run.values, expected.values)), executor
    return expected.coefficients


def _check(clipping: str, coefficients: Sequence[float]) -> None:
    kinds = {
        "skipped" if math.isnan(one) else "clipped" if one < 1 else "whole" for one in coefficients
    }
    assert (
        kinds
        == {
            "active": {"clipped"},
            "inactive": {"whole"},
            "mixed": {"clipped", "whole"},
            "non-finite": {"clipped", "whole", "skipped"},
        }[clipping]
    )


@pytest.mark.parametrize(
    ("clipping", "executors", "moments"),
    [("mixed", ["streamed", "early"], {}), ("non-finite", ["auto", "half streamed"], BF16_MOMENTS)],
)
def test_clipped_and_skipped_steps_have_the_bits_of_a_run_without_offload(
    clipping, executors, moments
):
    for coefficients in run_ranks(2, _all_executors, executors, clipping, moments):
        _check(clipping, coefficients)


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("moments", [{}, BF16_MOMENTS], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_every_executor_has_the_bits_of_a_run_without_offload(clipping, moments, world_size):
    for coefficients in run_ranks(
        world_size, _all_executors, list(ALL_EXECUTORS), clipping, moments
    ):
        _check(clipping, coefficients)


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_every_executor_has_these_bits_on_an_accelerator(accelerator, clipping, world_size):
    results = run_ranks(
        world_size, _all_executors, list(ALL_EXECUTORS), clipping, {}, device=accelerator
    )
    for coefficients in results:
        _check(clipping, coefficients)
